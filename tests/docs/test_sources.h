#pragma once

// Where a test that a document names stands.

#include "support/ranks.h"

namespace fsdp2::testing {

/// tests/fsdp/managed_test.cpp of fsdp_managed_test.
inline std::string source_of(const std::string& executable) {
  const size_t area = executable.find('_');
  return test_file(executable.substr(0, area) + "/" + executable.substr(area + 1) + ".cpp");
}

}  // namespace fsdp2::testing
