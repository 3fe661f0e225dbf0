#include "fsdp/debug_level.h"

#include <cstdlib>

namespace fsdp2::detail {

int debug_level() {
  static const int level = [] {
    const char* text = std::getenv("FSDP2_DEBUG");
    return text == nullptr || text[0] == '\0' ? -1 : std::atoi(text);
  }();
  return level;
}

}  // namespace fsdp2::detail
