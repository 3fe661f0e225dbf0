#pragma once

namespace fsdp2::detail {

/// FSDP2_DEBUG: 0, 1 or 2; -1 where it is not set.
int debug_level();

}  // namespace fsdp2::detail
