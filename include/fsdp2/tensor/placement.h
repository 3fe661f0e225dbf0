#pragma once

// How a tensor lies on one mesh axis. Python twin: torch.distributed.tensor.placement_types.

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <fsdp2/export.h>

namespace fsdp2 {

/// The whole tensor on every rank of the axis.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};
/// Cut along tensor dimension `dim` like torch.chunk: the last ranks may have less, or nothing.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};
/// Every rank holds a term; the value is their reduction.
struct Partial {
  c10d::ReduceOp op = c10d::ReduceOp::SUM;
  bool operator==(const Partial& other) const { return op.op_ == other.op.op_; }
};
/// A shard of `dim` inside `split_factor` blocks made by a later mesh axis (FSDP over TP on one dim).
struct StridedShard {
  int64_t dim = 0, split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};
using Placement = std::variant<Replicate, Shard, Partial, StridedShard>;

/// "Shard(0)", "Replicate", "Partial(sum)", "StridedShard(0, 2)"; lists in brackets.
FSDP2_API std::string to_string(const Placement& placement);
FSDP2_API std::string to_string(const std::vector<Placement>& placements);

}  // namespace fsdp2
