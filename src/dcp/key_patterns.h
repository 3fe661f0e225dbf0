#pragma once

// Options that choose keys by patterns, and rules that rename them.

#include <fsdp2/dcp/convert.h>

#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::dcp::detail {

/// The patterns of an option. Remembers which of them were of use.
class KeyPatterns {
 public:
  explicit KeyPatterns(std::vector<std::string> patterns)
      : patterns_(std::move(patterns)), used_(patterns_.size(), false) {}
  bool empty() const { return patterns_.empty(); }
  bool match(std::string_view key);
  /// kInvalidArgument naming a pattern that matched nothing; `option` is how the user calls it.
  void check_used(std::string_view option) const;

 private:
  std::vector<std::string> patterns_;
  std::vector<bool> used_;
};

class KeyRenamer {
 public:
  /// kInvalidArgument for a rule that makes no sense.
  explicit KeyRenamer(const std::vector<RenameRule>& rules);
  /// The new name, or nothing where no rule matches.
  std::optional<std::string> rename(const std::string& key);
  /// kInvalidArgument naming a rule that matched no key.
  void check_used() const;

 private:
  struct Rule {
    RenameRule text;
    std::optional<std::regex> expression;
    bool used = false;
  };
  std::vector<Rule> rules_;
};

}  // namespace fsdp2::dcp::detail
