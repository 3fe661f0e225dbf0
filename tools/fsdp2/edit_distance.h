#pragma once

#include <cstddef>
#include <string>

namespace fsdp2::tool {

/// Number of single-letter edits between two names, for "did you mean".
size_t edit_distance(const std::string& a, const std::string& b);

}  // namespace fsdp2::tool
