#pragma once

// The processes of a group: who they are, whether they live, and what went wrong in them.

#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <fsdp2/error.h>

#include "backend/shm/shared_memory.h"

namespace fsdp2::detail::shm {

/// What a rank tells the others about itself, in shared memory.
struct alignas(128) MemberState {
  enum : uint32_t { kAbsent, kMember, kLeft, kFailed };
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
  std::atomic<int32_t> step_error;   // ErrorCode of the last common step, 0 where it went well
  std::atomic<uint32_t> step_order;  // of that error among those of all ranks
  std::atomic<uint32_t> num_errors;  // of rank 0: of all ranks
  std::atomic<uint64_t> argument;    // of the common step
  cpu_set_t cpus;
  char failure[512];     // why it is kFailed; written before `state`
  char step_text[1024];  // written before `step_error`
};

// Note [A dead rank]
// Each rank holds a lock on one byte of the group's file. The system lets it go when the process ends, however it ends,
// and other ranks can ask who holds it. Unlike process ids this works between containers, is not fooled by a number
// that is used again, and sees a killed process that its parent has not waited for.
class Members {
 public:
  Members(File file, std::shared_ptr<SharedMemory> memory, MemberState* states, int rank, std::vector<int> global_ranks,
          std::chrono::milliseconds timeout);
  ~Members();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(global_ranks_.size()); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  MemberState& state(int rank) const { return states_[rank]; }

  /// More ranks than processors: whoever waits should sleep. `host_ranks`: processes of the job on this host. To be
  /// called when all ranks are there.
  void count_processors(int host_ranks);
  bool crowded() const { return crowded_; }

  /// Throws kPeerFailed where `rank` is dead, has left or has failed.
  void check_alive(int rank, const std::string& what) const;
  /// Tells the others that this rank gave up; the first reason stays.
  void fail(const std::string& why) noexcept;
  /// Throws kPeerFailed where this rank gave up before.
  void check_usable() const;
  /// "rank 1" or "ranks 1, 3": numbers of the job, not of the group.
  std::string names(const std::vector<int>& ranks) const;
  std::string name(int rank) const { return names({rank}); }

 private:
  bool is_process_gone(int rank) const;

  File file_;
  std::shared_ptr<SharedMemory> memory_;
  MemberState* states_;
  int rank_;
  std::vector<int> global_ranks_;
  std::chrono::milliseconds timeout_;
  bool crowded_ = false;
};

}  // namespace fsdp2::detail::shm
