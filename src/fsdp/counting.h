#pragma once

// What fsdp2::counters() shows: one operation per group, dtype and phase.

#include <cstdint>

#include "process/collectives.h"

namespace fsdp2::detail {

void count_collective(CollectiveOp op, int64_t bytes) noexcept;

}  // namespace fsdp2::detail
