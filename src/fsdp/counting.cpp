#include "fsdp/counting.h"

#include <array>
#include <atomic>

#include <fsdp2/fully_shard.h>

#include "fsdp/unsharded_memory.h"

namespace fsdp2 {

namespace {

std::array<std::atomic<int64_t>, 5> operations{};
std::atomic<int64_t> bytes{0};

int64_t count_of(detail::CollectiveOp op) {
  return operations[static_cast<size_t>(op)].load(std::memory_order_relaxed);
}

}  // namespace

void detail::count_collective(CollectiveOp op, int64_t moved) noexcept {
  operations[static_cast<size_t>(op)].fetch_add(1, std::memory_order_relaxed);
  bytes.fetch_add(moved, std::memory_order_relaxed);
}

Counters counters() {
  using detail::CollectiveOp;
  return {.all_gathers = count_of(CollectiveOp::kAllGather),
          .reduce_scatters = count_of(CollectiveOp::kReduceScatter),
          .all_reduces = count_of(CollectiveOp::kAllReduce),
          .broadcasts = count_of(CollectiveOp::kBroadcast),
          .bytes = bytes.load(std::memory_order_relaxed),
          .unsharded_bytes = detail::unsharded_bytes(),
          .unsharded_bytes_peak = detail::unsharded_bytes_peak()};
}

void reset_counters() {
  for (auto& operation : operations) {
    operation.store(0, std::memory_order_relaxed);
  }
  bytes.store(0, std::memory_order_relaxed);
  detail::reset_unsharded_peak();
}

}  // namespace fsdp2
