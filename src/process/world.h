#pragma once

// What init_process_group set up. One per process.

#include <fsdp2/process_group.h>

#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp2::detail {

struct World {
  int rank = 0, world_size = 1, local_rank = 0;
  bool single_host = false;
  bool diagnose = false;  // FSDP2_DIAGNOSE=1 on rank 0: the same on all ranks
  bool exiting = false;   // the process ends without destroy_process_group()
  std::chrono::milliseconds timeout{};
  std::string backend;                    // resolved, e.g. "cpu:gloo"
  c10::intrusive_ptr<c10d::Store> store;  // already prefixed for this job
  ProcessGroup default_group;
  int64_t groups_made = 0;  // equal on all ranks: groups are made collectively
  std::unordered_map<const c10d::ProcessGroup*, std::vector<int>> ranks_of;
  // Meshes reuse groups of equal ranks and purpose.
  std::map<std::pair<std::vector<int>, std::string>, ProcessGroup> shared;
};

/// Null before init_process_group and after destroy_process_group.
World* world();
/// Throws kUsage without a process group; `what` names the caller.
World& require_world(const char* what);
/// The group of these global ranks (in this order), of which this one is one, made at its first use by all of them
/// together. Groups of different `purpose` have connections of their own; `backend` is that of the default group unless
/// the purpose needs another.
ProcessGroup shared_group(const std::vector<int>& ranks, const std::string& purpose = "",
                          const std::string& backend = "");

/// `callback` runs when destroy_process_group() begins, while groups still work. The same one counts once.
void before_destroy(void (*callback)());

/// Store shared by all ranks where they agree on `options`; fills rank, world_size, local_rank of `world`.
void rendezvous(const ProcessGroupOptions& options, World& world);

}  // namespace fsdp2::detail
