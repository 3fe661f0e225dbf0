#include "process/collectives.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <array>
#include <atomic>
#include <memory>

#include <fsdp2/error.h>

#include "process/debug_level.h"
#include "tensor/dtensor_spec.h"
#include "torch_compat.h"

namespace fsdp2::detail {

namespace {

/// One number per issued collective of this process; equal programs give equal numbers on all ranks.
uint64_t next_sequence() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

/// Dtypes that every backend moves; others travel as bytes.
bool moves_as_is(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return true;
    default:
      return false;
  }
}

/// The same memory as one row, seen as bytes where the dtype needs it.
Tensor transport_view(const Tensor& tensor) {
  const Tensor flat = tensor.view({-1});
  return moves_as_is(flat.scalar_type()) ? flat : flat.view(at::kByte);
}

std::string describe(CollectiveOp op, const std::string& what, const c10d::ProcessGroup* group, int64_t bytes,
                     uint64_t sequence) {
  return c10::str(to_string(op), what.empty() ? "" : " of ", what, " (", bytes, " bytes, collective number ", sequence,
                  " of this process, group of ", group->getSize(), " ranks, this is group rank ", group->getRank(),
                  ")");
}

}  // namespace

const char* to_string(CollectiveOp op) noexcept {
  static constexpr std::array<const char*, 5> kNames = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                                        "barrier"};
  return kNames[static_cast<size_t>(op)];
}

const ProcessGroup& group_or_default(const ProcessGroup& group) {
  if (group.defined()) {
    FSDP2_CHECK(group->getRank() >= 0, kUsage, "[process_group] this rank is not in the group of ", group->getSize(),
                " ranks that it was asked to take part in; only members call collectives on a group");
    return group;
  }
  static thread_local ProcessGroup held;
  held = default_group();
  return held;
}

void rethrow_c10d_error(const std::string& context) {
  try {
    throw;
  } catch (const Error& error) {
    // One of the shm backend lacks what is known here.
    const std::string cause = error.what_without_backtrace();
    const size_t begin = cause.find("[shm]");
    if (begin == std::string::npos) throw;
    throw Error(error.code(), c10::str("[collective] ", context, " failed: ", cause.substr(begin)));
  } catch (const std::exception& error) {
    const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
    const std::string cause = c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
    const auto says = [&](const char* text) { return cause.find(text) != std::string::npos; };
    const std::string text = c10::str("[collective] ", context, " failed: ", cause);
    if (says("imed out") || says("imeout")) {
      throw Error(ErrorCode::kTimeout,
                  text +
                      "; another rank did not take part in time: check that all ranks run the same steps, or "
                      "raise ProcessGroupOptions::timeout");
    }
    if (says("onnection") || says("closed") || says("reset") || says("refused") || says("Broken pipe")) {
      throw Error(ErrorCode::kPeerFailed, text + "; a peer has probably ended: its own error is the root cause");
    }
    throw Error(ErrorCode::kInvalidArgument, text);
  }
}

/// FSDP2_DEBUG=2: ranks that are about to make different calls say so, all of them, before one waits in vain or takes
/// another's data for its own.
void compare_calls(CollectiveOp op, const ProcessGroup& group, const CallSite& site, int64_t bytes,
                   const std::vector<Tensor>& tensors) {
  static thread_local bool comparing = false;  // its own exchanges are not compared
  if (comparing || debug_level() != 2) return;
  comparing = true;
  const auto done = std::unique_ptr<bool, void (*)(bool*)>(&comparing, [](bool* flag) { *flag = false; });
  const std::string mine = c10::str(to_string(op), *site.what == '\0' ? "" : " of ", site.what, ", ", bytes, " bytes",
                                    tensors.empty() ? std::string() : c10::str(" of ", tensors[0].scalar_type()));
  const std::vector<std::string> calls = all_gather_strings(mine, group);
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    FSDP2_CHECK(calls[rank] == calls[0], kUsage, "[collective] ranks make different calls on one group: rank 0 of it ",
                calls[0], "; rank ", rank, " ", calls[rank],
                ". Every rank must run the same steps in the same order (FSDP2_DEBUG=2 compared the calls)");
  }
}

class CollectiveFunnel {
 public:
  template <class Issue>
  static PendingCollective run(CollectiveOp op, const ProcessGroup& group, CallSite site, int64_t bytes,
                               std::vector<Tensor> keep_alive, Issue&& issue) {
    compare_calls(op, group, site, bytes, keep_alive);
    PendingCollective pending;
    pending.op_ = op;
    pending.what_ = site.what;
    pending.group_ = group;
    pending.bytes_ = bytes;
    pending.sequence_ = next_sequence();
    pending.keep_alive_ = std::move(keep_alive);
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    try {
      pending.work_ = issue();
    } catch (...) {
      rethrow_c10d_error(describe(op, pending.what_, group.get(), bytes, pending.sequence_));
    }
    return pending;
  }
};

void PendingCollective::wait() {
  if (!work_.defined()) {
    return;
  }
  const auto work = std::move(work_);
  work_.reset();
  try {
    work->wait();
  } catch (...) {
    keep_alive_.clear();
    rethrow_c10d_error(describe(op_, what_, group_.get(), bytes_, sequence_));
  }
  keep_alive_.clear();
}

void PendingCollective::abandon() noexcept {
  try {
    wait();
  } catch (const std::exception&) {
    // As the header says.
  }
}

PendingCollective all_gather(Tensor& out, const Tensor& in, const ProcessGroup& group, CallSite site) {
  if (group->getSize() == 1) {
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    out.view({-1}).copy_(in.view({-1}));
    return {};
  }
  return CollectiveFunnel::run(CollectiveOp::kAllGather, group, site, static_cast<int64_t>(out.nbytes()), {out, in},
                               [&]() -> c10::intrusive_ptr<c10d::Work> {
                                 if (out.numel() == 0) return nullptr;
                                 Tensor to = transport_view(out), from = transport_view(in);
                                 return c10d_all_gather(*group, to, from);
                               });
}

PendingCollective reduce_scatter(Tensor& out, const Tensor& in, ReduceOp op, const ProcessGroup& group, CallSite site) {
  if (group->getSize() == 1) {
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    out.view({-1}).copy_(in.view({-1}));
    return {};
  }
  return CollectiveFunnel::run(CollectiveOp::kReduceScatter, group, site, static_cast<int64_t>(in.nbytes()), {out, in},
                               [&]() -> c10::intrusive_ptr<c10d::Work> {
                                 if (in.numel() == 0) return nullptr;
                                 c10d::ReduceScatterOptions options;
                                 options.reduceOp = op;
                                 Tensor to = out.view({-1}), from = in.view({-1});
                                 return c10d_reduce_scatter(*group, to, from, options);
                               });
}

PendingCollective all_reduce(Tensor& tensor, ReduceOp op, const ProcessGroup& group, CallSite site) {
  if (group->getSize() == 1) {
    return {};
  }
  return CollectiveFunnel::run(CollectiveOp::kAllReduce, group, site, static_cast<int64_t>(tensor.nbytes()), {tensor},
                               [&]() -> c10::intrusive_ptr<c10d::Work> {
                                 if (tensor.numel() == 0) return nullptr;
                                 c10d::AllreduceOptions options;
                                 options.reduceOp = op;
                                 std::vector<Tensor> tensors{tensor};
                                 return group->allreduce(tensors, options);
                               });
}

PendingCollective broadcast_from(Tensor& tensor, int group_rank, const ProcessGroup& group, CallSite site) {
  if (group->getSize() == 1) {
    return {};
  }
  return CollectiveFunnel::run(CollectiveOp::kBroadcast, group, site, static_cast<int64_t>(tensor.nbytes()), {tensor},
                               [&]() -> c10::intrusive_ptr<c10d::Work> {
                                 if (tensor.numel() == 0) return nullptr;
                                 c10d::BroadcastOptions options;
                                 options.rootRank = group_rank;
                                 std::vector<Tensor> tensors{transport_view(tensor)};
                                 return group->broadcast(tensors, options);
                               });
}

PendingCollective custom_collective(CollectiveOp op, const ProcessGroup& group, std::vector<Tensor> keep_alive,
                                    int64_t bytes, const std::function<c10::intrusive_ptr<c10d::Work>()>& issue,
                                    CallSite site) {
  return CollectiveFunnel::run(op, group, site, bytes, std::move(keep_alive), issue);
}

void barrier_on(const ProcessGroup& group, CallSite site) {
  if (group->getSize() == 1) {
    return;
  }
  CollectiveFunnel::run(CollectiveOp::kBarrier, group, site, 0, {}, [&] { return group->barrier(); }).wait();
}

}  // namespace fsdp2::detail
