#pragma once

// A c10d backend for ranks of one host: everything goes through memory that they share.

#include <fsdp2/process_group.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "backend/shm/shared_memory.h"
#include "backend/shm/signals.h"

namespace fsdp2::detail::shm {

class CollectiveQueue;
class MessageQueue;
class Team;
struct Collective;

/// Tensors are on the CPU, dense and contiguous. Sums of bf16 and fp16 are computed in fp32 in the order of the ranks
/// and rounded once: equal bits on every rank and in every run. Operations of which all ranks of a group make the same
/// calls in the same order complete in any order of waiting; see Note [Who carries operations out]. Errors are
/// fsdp2::Error: kInvalidArgument where the ranks' calls differ, kTimeout naming the missing ranks, kPeerFailed for a
/// rank that died, left or gave up (after these two the group cannot be used any more), kUnsupported.
class ShmBackend : public c10d::Backend {
 public:
  explicit ShmBackend(std::shared_ptr<Team> team);
  ~ShmBackend() override;

  /// Zeroed, page-aligned memory that every rank of the group maps, and that lives as long as one of them keeps it.
  /// Collective: every rank calls, in the same order, with the same size. `what` names it in errors. kIo, on every
  /// rank, where this host has too little memory left or a limit forbids it.
  std::shared_ptr<SharedMemory> make_memory(size_t bytes, const char* what);
  /// Collective: counters of the group's ranks, all zero.
  std::shared_ptr<Signals> make_signals();

  /// Of the library's, kept as long as the group.
  std::shared_ptr<void> attachment;

  const std::string getBackendName() const override { return "shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void abort() override;
  void shutdown() override;

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all_ranks) override;

 private:
  template <class CallOptions>
  WorkPtr submit(c10d::OpType type, std::vector<Collective> collectives, Tensors inputs, Tensors outputs,
                 const CallOptions& options);
  template <class CallOptions>
  WorkPtr all_reduce_each(c10d::OpType type, Tensors& tensors, const CallOptions& options);
  void check_root(int64_t root, const char* what) const;
  void check_count(size_t count, size_t expected, const char* what) const;
  WorkPtr message(c10d::OpType type, Tensors& tensors, int peer, int tag);

  std::shared_ptr<Team> team_;
  std::shared_ptr<CollectiveQueue> collectives_;
  std::shared_ptr<MessageQueue> messages_;
};

/// The backend of a group's CPU tensors; null where that is another one, or where `group` is null.
ShmBackend* shm_backend_of(const ProcessGroup& group);

}  // namespace fsdp2::detail::shm
