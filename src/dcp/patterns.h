#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fsdp2::dcp::detail {

/// Whether `text` is `pattern`, in which each * stands for any text, also none.
bool matches(std::string_view pattern, std::string_view text);
bool matches_any(const std::vector<std::string>& patterns, std::string_view text);

}  // namespace fsdp2::dcp::detail
