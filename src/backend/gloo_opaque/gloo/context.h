#pragma once

// Declarations that ProcessGroupGloo.hpp needs of Gloo; libtorch carries the code but not the headers.
// Nothing here is constructed, derived from or cast to.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
