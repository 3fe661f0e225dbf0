#pragma once

// One file per communication library; each offers is_available() and create().

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <vector>

#include <fsdp2/error.h>

namespace fsdp2::detail {

/// What counts as no limit: 24 days, the longest that poll() takes. Of milliseconds::max() a deadline in nanoseconds
/// would lie in the past.
inline std::chrono::milliseconds bounded_timeout(std::chrono::milliseconds timeout) {
  return std::min(timeout, std::chrono::milliseconds(std::numeric_limits<int>::max()));
}

/// What another rank is told of an error: one that is not the library's (out of memory, no thread) as kIo.
inline Error as_error(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) return *ours;
  const auto* of_c10 = dynamic_cast<const c10::Error*>(&error);
  return Error(ErrorCode::kIo, of_c10 != nullptr ? of_c10->what_without_backtrace() : error.what());
}

struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{};
  bool single_host = false;            // every rank of the job is known to be on this host
  std::vector<int> global_ranks = {};  // of the group's ranks, for texts
  int job_size = 1;                    // ranks of the whole job
};

namespace gloo_backend {
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);
}  // namespace gloo_backend

namespace shm_backend {
/// Fails on all ranks together: kInvalidArgument (different hosts), kIo (the system refuses), kTimeout.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);
}  // namespace shm_backend

namespace two_level_backend {
/// Over `all`, a Gloo group of the same ranks: shared memory inside of hosts and Gloo between them, where the ranks
/// stand on several hosts, equally many, at least two, on each; else null. The same on every rank, all of which call.
c10::intrusive_ptr<c10d::Backend> create_if_useful(const BackendRequest& request,
                                                   const c10::intrusive_ptr<c10d::Backend>& all);
}  // namespace two_level_backend

namespace nccl_backend {
/// Whether this library was built with NCCL.
bool is_available();
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);
}  // namespace nccl_backend

}  // namespace fsdp2::detail
