#include "dcp/key_patterns.h"

#include <fsdp2/error.h>

#include <algorithm>

#include "dcp/patterns.h"

namespace fsdp2::dcp::detail {
namespace {

constexpr size_t kMaxExpressionKey = 4096;  // std::regex recurses for every character

size_t count_stars(std::string_view text) { return static_cast<size_t>(std::count(text.begin(), text.end(), '*')); }

}  // namespace

bool KeyPatterns::match(std::string_view key) {
  bool any = false;
  for (size_t i = 0; i < patterns_.size(); ++i) {
    if (!matches(patterns_[i], key)) continue;
    used_[i] = any = true;
  }
  return any;
}

void KeyPatterns::check_used(std::string_view option) const {
  for (size_t i = 0; i < patterns_.size(); ++i) {
    FSDP2_CHECK(used_[i], kInvalidArgument, "[dcp] ", option, " '", patterns_[i],
                "' matches no key; a pattern is for the whole key, * stands for any text");
  }
}

KeyRenamer::KeyRenamer(const std::vector<RenameRule>& rules) {
  for (const RenameRule& rule : rules) {
    FSDP2_CHECK(!rule.from.empty(), kInvalidArgument, "[dcp] a rule for new names without a pattern (to '", rule.to,
                "')");
    rules_.push_back({rule, {}, false});
    if (rule.from.size() >= 2 && rule.from.front() == '/' && rule.from.back() == '/') {
      try {
        rules_.back().expression.emplace(rule.from.substr(1, rule.from.size() - 2));
      } catch (const std::regex_error& error) {
        FSDP2_THROW(kInvalidArgument, "[dcp] ", rule.from, " is not a regular expression: ", error.what());
      }
    } else {
      FSDP2_CHECK(count_stars(rule.to) <= count_stars(rule.from), kInvalidArgument, "[dcp] the new name '", rule.to,
                  "' has more stars than the pattern '", rule.from, "' gives texts for");
    }
  }
}

std::optional<std::string> KeyRenamer::rename(const std::string& key) {
  for (Rule& rule : rules_) {
    if (rule.expression) {
      FSDP2_CHECK(key.size() <= kMaxExpressionKey, kUnsupported, "[dcp] the key ", key.substr(0, 100), "... has ",
                  key.size(), " characters; regular expressions are for keys of at most ", kMaxExpressionKey);
      if (!std::regex_search(key, *rule.expression)) continue;
      rule.used = true;
      return std::regex_replace(key, *rule.expression, rule.text.to, std::regex_constants::format_first_only);
    }
    const auto texts = match_texts(rule.text.from, key);
    if (!texts) continue;
    rule.used = true;
    std::string result;
    size_t next = 0;
    for (const char c : rule.text.to) {
      if (c == '*') {
        result += (*texts)[next++];
      } else {
        result += c;
      }
    }
    return result;
  }
  return std::nullopt;
}

void KeyRenamer::check_used() const {
  for (const Rule& rule : rules_) {
    FSDP2_CHECK(rule.used, kInvalidArgument, "[dcp] the rule '", rule.text.from, "' to '", rule.text.to,
                "' matches no key (or only keys that a rule before it took); look at the keys with inspect");
  }
}

}  // namespace fsdp2::dcp::detail
