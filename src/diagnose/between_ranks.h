#pragma once

// What can only be seen by comparing ranks. Note [Comparing ranks that may differ] in between_ranks.cpp.

#include <cstdint>
#include <vector>

#include "diagnose/subject.h"

namespace fsdp2::detail::diagnose {

/// What every rank tells every other: one row of numbers, of one length whatever the models are.
struct RankRow {
  int64_t options = 0;     // hashes from here on
  int64_t structure = 0;   // names, shapes, dtypes, layouts, and the ranks of the meshes
  int64_t gradients = 0;   // which there are
  int64_t buffers = 0;     // values
  int64_t replicated = 0;  // values of what other ranks may hold too, with the place that it has in the whole
  int64_t findings = 0;    // of this rank alone
  int64_t host = 0;
  int64_t device = 0;      // one accelerator of the host; 0 for the CPU
  int64_t local_rank = 0;  // as the launcher says
  int64_t device_index = -1;
  int64_t visible_devices = 0;
};

/// Of the rows of all ranks, by rank.
void check_devices(const std::vector<RankRow>& rows, Findings& found);

/// `own`: what this rank found by itself. Returns what all ranks found, and what lies between them, the same on every
/// rank. Collective over the default group.
Findings compare_ranks(const Subject& subject, const Findings& own);

}  // namespace fsdp2::detail::diagnose
