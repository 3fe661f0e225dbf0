#pragma once

// One rank of a job of any size, in one process: init_process_group({.backend = "fake", .rank = 0, .world_size =
// 1024}). For counting what a step sends and for timing the host's part of it; the numbers that training gives are not
// those of the job. Rank and world size come from the options or the environment as always; no peer, store or address
// is needed, nothing is sent and nothing waits.
//
// Every collective returns done, with what it would give if all ranks held the same as this one:
//   all-gather      every slot is this rank's input
//   reduce-scatter  this rank's part of the input, all-reduce the input: times the number of ranks for SUM, to that
//                   power for PRODUCT, zero for BXOR of an even number of ranks, else unchanged (AVG, MIN, MAX, ...)
//   broadcast       the tensor as it is
//   reduce, gather  like all-reduce and all-gather on the root, nothing elsewhere
//   all-to-all      every slot is what this rank has for itself
//   scatter         this rank's part on the root, zeros elsewhere
//   recv            zeros
// Tensors may be on the meta device: a model that stays there takes no memory and does no arithmetic, but all of its
// hooks, collectives and allocations are made. Parameters on it need no to_empty() under this backend.
// Python twin: the backend "fake" of torch.distributed, which leaves most results undefined.

#include <cstdint>
#include <map>
#include <string>

#include <fsdp2/process_group.h>

namespace fsdp2 {

struct FakeCount {
  int64_t calls = 0;
  int64_t bytes = 0;  // of the larger side: what is gathered, what is to be reduced, what is sent; padding included
};

/// What a group of backend "fake" was asked for since it was made or reset, by operation: "all_gather",
/// "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send", "recv", "barrier".
/// All are listed. Unlike counters(), the library's own checks and user's calls count too. Local.
/// Throws kInvalidArgument where the group has another backend.
FSDP2_API std::map<std::string, FakeCount> fake_counts(const ProcessGroup& group = {});
/// Sets them to zero.
FSDP2_API void reset_fake_counts(const ProcessGroup& group = {});

}  // namespace fsdp2
