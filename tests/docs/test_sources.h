#pragma once

// Where a test that a document names stands.

#include <regex>
#include <string>

#include "support/ranks.h"

namespace fsdp2::testing {

/// tests/fsdp/managed_test.cpp of fsdp_managed_test.
inline std::string source_of(const std::string& executable) {
  const size_t area = executable.find('_');
  return test_file(executable.substr(0, area) + "/" + executable.substr(area + 1) + ".cpp");
}

/// Whether a TEST, a RANKS_TEST and the like has that name; a file's own macro may leave the suite out.
inline bool declares(const std::string& source, const std::string& suite, const std::string& name) {
  return std::regex_search(source, std::regex("TEST(_F)?\\(\\s*(" + suite + ",\\s*)?" + name + "\\b"));
}

}  // namespace fsdp2::testing
