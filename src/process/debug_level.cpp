#include "process/debug_level.h"

#include <cstdlib>
#include <string_view>

#include <fsdp2/error.h>

namespace fsdp2::detail {

int debug_level() {
  static const int level = [] {
    const char* given = std::getenv("FSDP2_DEBUG");
    const std::string_view text = given == nullptr ? "" : given;
    FSDP2_CHECK(text.empty() || text == "0" || text == "1" || text == "2", kInvalidArgument,
                "[fsdp2] FSDP2_DEBUG is \"", text, "\"; expected 0, 1 or 2, or nothing");
    return text.empty() ? -1 : text[0] - '0';
  }();
  return level;
}

}  // namespace fsdp2::detail
