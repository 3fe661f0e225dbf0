#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::dcp::detail {

/// What the stars of a pattern stand for where it matches all of `key`, each as short as possible.
std::optional<std::vector<std::string_view>> match_texts(std::string_view pattern, std::string_view key);

/// Whether `text` is `pattern`, in which each * stands for any text, also none.
bool matches(std::string_view pattern, std::string_view text);
bool matches_any(const std::vector<std::string>& patterns, std::string_view text);

}  // namespace fsdp2::dcp::detail
