#pragma once

// Processes, groups and blocking collectives. Python twin: torch.distributed.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <fsdp2/export.h>

namespace fsdp2 {

using at::Tensor;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using ReduceOp = c10d::ReduceOp;

struct ProcessGroupOptions {
  /// "" picks the best for this machine: for CPU tensors shared memory ("shm") in groups whose ranks are on one host,
  /// shared memory inside of hosts and Gloo between them ("shm+gloo") where there are equally many, two or more, on
  /// each of several hosts, else Gloo; and NCCL for GPUs. Or "shm", "gloo", "nccl", or a list such as
  /// "cpu:shm,cuda:nccl"; "fake" runs one rank of any world size without the others (fsdp2/fake_backend.h).
  std::string backend = "";
  /// "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" (rank 0 listens there), "file:///path".
  std::string init_method = "env://";
  /// A collective, or the rendezvous, that waits longer fails with kTimeout naming rank and operation. More than
  /// 24 days count as 24 days.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Default: RANK, WORLD_SIZE, LOCAL_RANK, else OMPI_COMM_WORLD_*, PMI_*, SLURM_*.
  std::optional<int> rank = {}, world_size = {}, local_rank = {};
};

/// Joins the job. Every rank calls it once. Errors: kInvalidArgument (rank or world size missing or
/// contradictory between ranks), kTimeout (names the ranks that never came), kPeerFailed (master unreachable).
/// SIGPIPE is ignored from then on unless it has a handler: writing to a peer that died is an error instead.
FSDP2_API void init_process_group(const ProcessGroupOptions& options = {});
/// Leaves the job and forgets every group. Safe while meshes, tensors and modules still exist, and twice.
FSDP2_API void destroy_process_group();
FSDP2_API bool is_initialized();

/// {} means the default group throughout. -1 where this process is not in `group`.
FSDP2_API int get_rank(const ProcessGroup& group = {});
FSDP2_API int get_world_size(const ProcessGroup& group = {});
/// Index of this process among those on its host (LOCAL_RANK); 0 without a launcher.
FSDP2_API int get_local_rank();
/// Throws kUsage before init_process_group.
FSDP2_API ProcessGroup default_group();
/// `ranks` are global ranks, in the order of the new group's ranks. Every rank of the default group
/// calls it, with the same list; ranks outside get a group in which they have rank -1 and which operations refuse.
FSDP2_API ProcessGroup new_group(const std::vector<int>& ranks);
/// Global ranks of a group, in group order.
FSDP2_API std::vector<int> get_process_group_ranks(const ProcessGroup& group = {});
/// cuda:LOCAL_RANK where CUDA is there, else cpu. init_process_group makes it current.
FSDP2_API c10::Device local_device();

// Blocking, not differentiable; every rank of the group calls them in the same order.
FSDP2_API void barrier(const ProcessGroup& group = {});
FSDP2_API void all_reduce(Tensor& tensor, ReduceOp op = ReduceOp::SUM, const ProcessGroup& group = {});
FSDP2_API void broadcast(Tensor& tensor, int src /* global rank */, const ProcessGroup& group = {});
/// `out` has world-size times the elements of `in`, on dim 0, rank by rank.
FSDP2_API void all_gather_into_tensor(Tensor& out, const Tensor& in, const ProcessGroup& group = {});
/// `in` has world-size times the elements of `out`.
FSDP2_API void reduce_scatter_tensor(Tensor& out, const Tensor& in, ReduceOp op = ReduceOp::SUM,
                                     const ProcessGroup& group = {});
/// One string of any length per rank; the result is indexed by group rank.
FSDP2_API std::vector<std::string> all_gather_strings(const std::string& mine, const ProcessGroup& group = {});

}  // namespace fsdp2
