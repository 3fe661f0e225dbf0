#include "dcp/patterns.h"

#include <algorithm>

namespace fsdp2::dcp::detail {

std::optional<std::vector<std::string_view>> match_texts(std::string_view pattern, std::string_view key) {
  constexpr size_t kNone = std::string_view::npos;
  std::vector<std::string_view> found;
  size_t p = 0, k = 0, star = kNone, from = 0;  // the last star, and where its text begins
  size_t end = 0;                               // of that text so far
  while (true) {
    if (p < pattern.size() && pattern[p] == '*') {
      if (star != kNone) found.push_back(key.substr(from, end - from));
      star = p++;
      from = end = k;
    } else if (p < pattern.size() && k < key.size() && pattern[p] == key[k]) {
      ++p;
      ++k;
    } else if (p == pattern.size() && k == key.size()) {
      break;
    } else if (star != kNone && end < key.size()) {
      p = star + 1;  // the star takes one character more
      k = ++end;
    } else {
      return std::nullopt;
    }
  }
  if (star != kNone) found.push_back(key.substr(from, end - from));
  return found;
}

bool matches(std::string_view pattern, std::string_view text) { return match_texts(pattern, text).has_value(); }

bool matches_any(const std::vector<std::string>& patterns, std::string_view text) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return matches(pattern, text); });
}

}  // namespace fsdp2::dcp::detail
