#pragma once

// Note [One funnel for collectives]
// Every collective of the library goes through here: the one place that knows group, parameter, operation, bytes
// and sequence number, counts, and turns c10d's exceptions into fsdp2::Error.

#include <fsdp2/process_group.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp2::detail {

enum class CollectiveOp { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };
const char* to_string(CollectiveOp op) noexcept;

/// Who asks. `what` names the module or parameter in error texts and must outlive the call's wait.
struct CallSite {
  const char* what = "";
};

/// An issued collective. wait() blocks the host (CPU) or the current stream (accelerators) and throws fsdp2::Error;
/// a second wait does nothing.
class PendingCollective {
 public:
  PendingCollective() = default;
  void wait();
  /// Waits and drops an error: another one is being reported.
  void abandon() noexcept;

 private:
  friend class CollectiveFunnel;
  c10::intrusive_ptr<c10d::Work> work_;
  CollectiveOp op_{};
  std::string what_;
  ProcessGroup group_;
  int64_t bytes_ = 0;
  uint64_t sequence_ = 0;
  std::vector<Tensor> keep_alive_;
};

// Tensors are plain and contiguous, without grad mode; `group` must be defined. A group of one rank copies locally.
PendingCollective all_gather(Tensor& out, const Tensor& in, const ProcessGroup& group, CallSite site = {});
PendingCollective reduce_scatter(Tensor& out, const Tensor& in, ReduceOp op, const ProcessGroup& group,
                                 CallSite site = {});
PendingCollective all_reduce(Tensor& tensor, ReduceOp op, const ProcessGroup& group, CallSite site = {});
PendingCollective broadcast_from(Tensor& tensor, int group_rank, const ProcessGroup& group, CallSite site = {});
/// An operation whose work somebody else issues (a user's own implementation); null work means done.
PendingCollective custom_collective(CollectiveOp op, const ProcessGroup& group, std::vector<Tensor> keep_alive,
                                    int64_t bytes, const std::function<c10::intrusive_ptr<c10d::Work>()>& issue,
                                    CallSite site = {});
void barrier_on(const ProcessGroup& group, CallSite site = {});

/// A string of any length, from one rank of the group (its rank there) to all.
std::string broadcast_string(const std::string& mine, int group_rank, const ProcessGroup& group);

/// The default group where `group` is empty.
const ProcessGroup& group_or_default(const ProcessGroup& group);

/// Throws the fsdp2::Error that stands for the exception being handled (call inside a catch block).
[[noreturn]] void rethrow_c10d_error(const std::string& context);

}  // namespace fsdp2::detail
