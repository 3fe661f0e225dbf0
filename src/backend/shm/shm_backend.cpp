#include "backend/shm/shm_backend.h"

#include <ATen/core/Tensor.h>

#include <fsdp2/error.h>

#include "backend/backend.h"
#include "backend/shm/messages.h"
#include "backend/shm/team.h"
#include "backend/shm/work.h"
#include "torch_compat.h"

namespace fsdp2::detail {

namespace shm {

namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = ShmBackend::Tensors;

std::byte* address(const Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

void check_tensor(const Tensor& tensor, const char* what) {
  FSDP2_CHECK(tensor.defined(), kInvalidArgument, "[shm] ", what, " got an undefined tensor");
  FSDP2_CHECK(tensor.layout() == at::kStrided, kUnsupported, "[shm] ", what, " of layout ", tensor.layout(),
              " is not offered; convert to a dense tensor first");
  FSDP2_CHECK(tensor.device().is_cpu(), kInvalidArgument, "[shm] ", what, " got a tensor on ", tensor.device(),
              "; this backend moves CPU tensors: use \"cuda:nccl\" for that device");
  FSDP2_CHECK(tensor.is_contiguous(), kInvalidArgument, "[shm] ", what, " got a tensor of sizes ", tensor.sizes(),
              " and strides ", tensor.strides(), "; call contiguous() first");
}

void check_pair(const Tensor& large, const Tensor& small, int64_t ratio, const char* what) {
  FSDP2_CHECK(large.scalar_type() == small.scalar_type() && large.numel() == small.numel() * ratio, kInvalidArgument,
              "[shm] ", what, " got ", large.numel(), " elements ", large.scalar_type(), " and ", small.numel(),
              " elements ", small.scalar_type(), "; expected ", small.numel() * ratio,
              " for the first, and equal dtypes");
}

/// The whole tensor as every rank's part.
Piece whole(const Tensor& tensor) { return {address(tensor), tensor.nbytes(), 0}; }

/// The tensor cut into equal parts, one per rank.
Piece slices(const Tensor& tensor, size_t part_bytes) {
  return {address(tensor), part_bytes, static_cast<ptrdiff_t>(part_bytes)};
}

/// One tensor per rank, equal in size and dtype to `like`.
Piece listed(const Tensors& tensors, const Tensor& like, int size, const char* what) {
  FSDP2_CHECK(tensors.size() == static_cast<size_t>(size), kInvalidArgument, "[shm] ", what, " got a list of ",
              tensors.size(), " tensors; expected one per rank, ", size);
  Piece piece{nullptr, like.nbytes(), 0};
  for (const Tensor& tensor : tensors) {
    check_tensor(tensor, what);
    check_pair(tensor, like, 1, what);
    piece.table.push_back(address(tensor));
  }
  return piece;
}

Call call_of(Kind kind, const Tensor& tensor, size_t bytes, int64_t root = -1) {
  return {kind, tensor.scalar_type(), c10d::ReduceOp::UNUSED, static_cast<int32_t>(root), bytes};
}

double premul_factor(const c10d::ReduceOp& op) {
  const auto* const factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  FSDP2_CHECK(factor != nullptr, kInvalidArgument, "[shm] ReduceOp::PREMUL_SUM needs its factor");
  return factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
}

Call reducing_call(Kind kind, const Tensor& tensor, size_t bytes, const c10d::ReduceOp& op, int64_t root = -1) {
  check_can_reduce(op.op_, tensor.scalar_type());
  Call call = call_of(kind, tensor, bytes, root);
  call.reduce_op = op.op_;
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) call.factor = premul_factor(op);
  return call;
}

bool same_dtype(const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    if (tensor.scalar_type() != tensors.front().scalar_type()) return false;
  }
  return true;
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<Team> team)
    : c10d::Backend(team->members().rank(), team->members().size()),
      team_(std::move(team)),
      collectives_(std::make_shared<CollectiveQueue>(team_)),
      messages_(std::make_shared<MessageQueue>(team_)) {}

ShmBackend::~ShmBackend() {
  collectives_->cancel();
  messages_->cancel();
}

std::shared_ptr<SharedMemory> ShmBackend::make_memory(size_t bytes, const char* what) {
  return team_->make_memory(bytes, what);
}

std::shared_ptr<Signals> ShmBackend::make_signals() { return team_->make_signals(); }

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  team_->members().set_timeout(bounded_timeout(timeout));
}

uint64_t ShmBackend::getSequenceNumberForGroup() { return collectives_->calls(); }

void ShmBackend::abort() {
  team_->members().fail("the group was aborted");
  shutdown();
}

void ShmBackend::shutdown() {
  collectives_->cancel();
  messages_->cancel();
}

template <class CallOptions>
c10::intrusive_ptr<c10d::Work> ShmBackend::submit(OpType type, std::vector<Collective> collectives, Tensors inputs,
                                                  Tensors outputs, const CallOptions& options) {
  team_->members().check_usable();
  if (options.timeout.count() > 0) {
    for (Collective& collective : collectives) collective.timeout = bounded_timeout(options.timeout);
  }
  auto work = c10::make_intrusive<CollectiveWork>(getRank(), type, std::move(outputs), std::move(inputs),
                                                  std::move(collectives), collectives_);
  collectives_->add(work, !options.asyncOp);
  if (!options.asyncOp) work->wait(std::chrono::milliseconds(0));
  return work;
}

void ShmBackend::check_root(int64_t root, const char* what) const {
  FSDP2_CHECK(root >= 0 && root < getSize(), kInvalidArgument, "[shm] ", what, " got root ", root,
              "; expected a rank of the group, 0 to ", getSize() - 1);
}

void ShmBackend::check_count(size_t count, size_t expected, const char* what) const {
  FSDP2_CHECK(count == expected, kInvalidArgument, "[shm] ", what, " got ", count, " tensors or lists; expected ",
              expected);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_count(tensors.size(), 1, "broadcast");
  check_tensor(tensors[0], "broadcast");
  check_root(options.rootRank, "broadcast");
  std::vector<Collective> collectives(1);
  collectives[0].call = call_of(Kind::kBroadcast, tensors[0], tensors[0].nbytes(), options.rootRank);
  collectives[0].out.add(whole(tensors[0]));
  return submit(OpType::BROADCAST, std::move(collectives), {}, tensors, options);
}

template <class CallOptions>
c10::intrusive_ptr<c10d::Work> ShmBackend::all_reduce_each(OpType type, Tensors& tensors, const CallOptions& options) {
  FSDP2_CHECK(!tensors.empty(), kInvalidArgument, "[shm] all_reduce got no tensors");
  for (const Tensor& tensor : tensors) check_tensor(tensor, "all_reduce");
  std::vector<Collective> collectives(same_dtype(tensors) ? 1 : tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    Collective& collective = collectives[std::min(i, collectives.size() - 1)];
    collective.out.add(whole(tensors[i]));
    collective.call = reducing_call(Kind::kAllReduce, tensors[i], collective.out.bytes(), options.reduceOp);
  }
  return submit(type, std::move(collectives), {}, tensors, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_count(tensors.size(), 1, "all_reduce");
  return all_reduce_each(OpType::ALLREDUCE, tensors, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  FSDP2_THROW(kUnsupported, "[shm] all_reduce of sparse tensors is not offered; use backend \"cpu:gloo\"");
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                               const c10d::AllreduceCoalescedOptions& options) {
  return all_reduce_each(OpType::ALLREDUCE_COALESCED, tensors, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_count(tensors.size(), 1, "reduce");
  check_tensor(tensors[0], "reduce");
  check_root(options.rootRank, "reduce");
  std::vector<Collective> collectives(1);
  collectives[0].call =
      reducing_call(Kind::kReduce, tensors[0], tensors[0].nbytes(), options.reduceOp, options.rootRank);
  collectives[0].out.add(whole(tensors[0]));
  return submit(OpType::REDUCE, std::move(collectives), {}, tensors, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  check_count(inputs.size(), 1, "all_gather");
  check_count(outputs.size(), 1, "all_gather");
  check_tensor(inputs[0], "all_gather");
  std::vector<Collective> collectives(1);
  collectives[0].call = call_of(Kind::kAllGather, inputs[0], inputs[0].nbytes());
  collectives[0].in.add(whole(inputs[0]));
  collectives[0].out.add(listed(outputs[0], inputs[0], getSize(), "all_gather"));
  return submit(OpType::ALLGATHER, std::move(collectives), inputs, outputs[0], options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_allgather_base(Tensor& output, Tensor& input,
                                                           const c10d::AllgatherOptions& options) {
  check_tensor(output, "all_gather");
  check_tensor(input, "all_gather");
  check_pair(output, input, getSize(), "all_gather");
  std::vector<Collective> collectives(1);
  collectives[0].call = call_of(Kind::kAllGather, input, input.nbytes());
  collectives[0].in.add(whole(input));
  collectives[0].out.add(slices(output, input.nbytes()));
  return submit(OpType::_ALLGATHER_BASE, std::move(collectives), {input}, {output}, options);
}

// outputs[rank][i] is what inputs[i] is on that rank.
c10::intrusive_ptr<c10d::Work> ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                               const c10d::AllgatherOptions& options) {
  check_count(outputs.size(), static_cast<size_t>(getSize()), "all_gather_coalesced");
  Tensors all;
  for (const Tensors& list : outputs) {
    check_count(list.size(), inputs.size(), "all_gather_coalesced");
    all.insert(all.end(), list.begin(), list.end());
  }
  std::vector<Collective> collectives;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_coalesced");
    Tensors list;
    for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
    Collective& collective = collectives.emplace_back();
    collective.call = call_of(Kind::kAllGather, inputs[i], inputs[i].nbytes());
    collective.in.add(whole(inputs[i]));
    collective.out.add(listed(list, inputs[i], getSize(), "all_gather_coalesced"));
  }
  return submit(OpType::ALLGATHER_COALESCED, std::move(collectives), inputs, std::move(all), options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                           const c10d::AllgatherOptions& options) {
  check_count(outputs.size(), inputs.size(), "all_gather_into_tensor_coalesced");
  FSDP2_CHECK(!inputs.empty(), kInvalidArgument, "[shm] all_gather_into_tensor_coalesced got no tensors");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "all_gather_into_tensor_coalesced");
    check_tensor(outputs[i], "all_gather_into_tensor_coalesced");
    check_pair(outputs[i], inputs[i], getSize(), "all_gather_into_tensor_coalesced");
  }
  std::vector<Collective> collectives(same_dtype(inputs) ? 1 : inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Collective& collective = collectives[std::min(i, collectives.size() - 1)];
    collective.in.add(whole(inputs[i]));
    collective.out.add(slices(outputs[i], inputs[i].nbytes()));
    collective.call = call_of(Kind::kAllGather, inputs[i], collective.in.bytes());
  }
  return submit(OpType::ALLGATHER_COALESCED, std::move(collectives), inputs, outputs, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::GatherOptions& options) {
  check_count(inputs.size(), 1, "gather");
  check_tensor(inputs[0], "gather");
  check_root(options.rootRank, "gather");
  const bool is_root = options.rootRank == getRank();
  check_count(outputs.size(), is_root ? 1 : 0, "gather (output lists)");
  std::vector<Collective> collectives(1);
  collectives[0].call = call_of(Kind::kGather, inputs[0], inputs[0].nbytes(), options.rootRank);
  collectives[0].in.add(whole(inputs[0]));
  if (is_root) collectives[0].out.add(listed(outputs[0], inputs[0], getSize(), "gather"));
  return submit(OpType::GATHER, std::move(collectives), inputs, is_root ? outputs[0] : Tensors{}, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                   const c10d::ScatterOptions& options) {
  check_count(outputs.size(), 1, "scatter");
  check_tensor(outputs[0], "scatter");
  check_root(options.rootRank, "scatter");
  const bool is_root = options.rootRank == getRank();
  check_count(inputs.size(), is_root ? 1 : 0, "scatter (input lists)");
  std::vector<Collective> collectives(1);
  collectives[0].call = call_of(Kind::kScatter, outputs[0], outputs[0].nbytes(), options.rootRank);
  if (is_root) collectives[0].in.add(listed(inputs[0], outputs[0], getSize(), "scatter"));
  collectives[0].out.add(whole(outputs[0]));
  return submit(OpType::SCATTER, std::move(collectives), is_root ? inputs[0] : Tensors{}, outputs, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  check_count(outputs.size(), 1, "reduce_scatter");
  check_count(inputs.size(), 1, "reduce_scatter");
  check_tensor(outputs[0], "reduce_scatter");
  std::vector<Collective> collectives(1);
  collectives[0].call = reducing_call(Kind::kReduceScatter, outputs[0], outputs[0].nbytes(), options.reduceOp);
  collectives[0].in.add(listed(inputs[0], outputs[0], getSize(), "reduce_scatter"));
  collectives[0].out.add(whole(outputs[0]));
  return submit(OpType::REDUCE_SCATTER, std::move(collectives), inputs[0], outputs, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::_reduce_scatter_base(Tensor& output, Tensor& input,
                                                                const c10d::ReduceScatterOptions& options) {
  check_tensor(output, "reduce_scatter");
  check_tensor(input, "reduce_scatter");
  check_pair(input, output, getSize(), "reduce_scatter");
  std::vector<Collective> collectives(1);
  collectives[0].call = reducing_call(Kind::kReduceScatter, output, output.nbytes(), options.reduceOp);
  collectives[0].in.add(slices(input, output.nbytes()));
  collectives[0].out.add(whole(output));
  return submit(OpType::_REDUCE_SCATTER_BASE, std::move(collectives), {input}, {output}, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                           const c10d::ReduceScatterOptions& options) {
  check_count(outputs.size(), inputs.size(), "reduce_scatter_tensor_coalesced");
  FSDP2_CHECK(!inputs.empty(), kInvalidArgument, "[shm] reduce_scatter_tensor_coalesced got no tensors");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(inputs[i], "reduce_scatter_tensor_coalesced");
    check_tensor(outputs[i], "reduce_scatter_tensor_coalesced");
    check_pair(inputs[i], outputs[i], getSize(), "reduce_scatter_tensor_coalesced");
  }
  std::vector<Collective> collectives(same_dtype(inputs) ? 1 : inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Collective& collective = collectives[std::min(i, collectives.size() - 1)];
    collective.in.add(slices(inputs[i], outputs[i].nbytes()));
    collective.out.add(whole(outputs[i]));
    collective.call = reducing_call(Kind::kReduceScatter, outputs[i], collective.out.bytes(), options.reduceOp);
  }
  return submit(kReduceScatterCoalesced, std::move(collectives), inputs, outputs, options);
}

namespace {

/// Appends the rows of each rank: `splits` rows of dim 0 each, or equal shares where it is empty.
Piece split_rows(const Tensor& tensor, const std::vector<int64_t>& splits, int size, std::vector<uint64_t>& bytes) {
  FSDP2_CHECK(splits.empty() || splits.size() == static_cast<size_t>(size), kInvalidArgument, "[shm] all_to_all got ",
              splits.size(), " split sizes; expected one per rank, ", size);
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  int64_t total = 0;
  for (const int64_t split : splits) {
    FSDP2_CHECK(split >= 0, kInvalidArgument, "[shm] all_to_all got a split size of ", split);
    total += split;
  }
  FSDP2_CHECK(splits.empty() ? rows % size == 0 : total == rows, kInvalidArgument, "[shm] all_to_all got ", rows,
              " rows for ", size, " ranks and split sizes ", splits,
              "; the sizes must add up to the rows, or the rows ", "divide evenly where none are given");
  const uint64_t row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<uint64_t>(rows);
  Piece piece;
  std::byte* at = address(tensor);
  for (int rank = 0; rank < size; ++rank) {
    const int64_t count = splits.empty() ? rows / size : splits[static_cast<size_t>(rank)];
    bytes.push_back(static_cast<uint64_t>(count) * row_bytes);
    piece.table.push_back(at);
    at += bytes.back();
  }
  return piece;
}

Piece listed_of_any_size(const Tensors& tensors, at::ScalarType dtype, std::vector<uint64_t>& bytes) {
  Piece piece;
  for (const Tensor& tensor : tensors) {
    check_tensor(tensor, "all_to_all");
    FSDP2_CHECK(tensor.scalar_type() == dtype, kInvalidArgument, "[shm] all_to_all got tensors of ", dtype, " and ",
                tensor.scalar_type(), "; expected one dtype");
    bytes.push_back(tensor.nbytes());
    piece.table.push_back(address(tensor));
  }
  return piece;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ShmBackend::alltoall_base(Tensor& output, Tensor& input,
                                                         std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits,
                                                         const c10d::AllToAllOptions& options) {
  check_tensor(output, "all_to_all");
  check_tensor(input, "all_to_all");
  FSDP2_CHECK(output.scalar_type() == input.scalar_type(), kInvalidArgument, "[shm] all_to_all got an input of ",
              input.scalar_type(), " and an output of ", output.scalar_type(), "; expected one dtype");
  std::vector<Collective> collectives(1);
  Collective& collective = collectives[0];
  collective.call = call_of(Kind::kAllToAll, input, 0);
  collective.in.add(split_rows(input, input_splits, getSize(), collective.send_bytes));
  collective.out.add(split_rows(output, output_splits, getSize(), collective.receive_bytes));
  return submit(OpType::ALLTOALL_BASE, std::move(collectives), {input}, {output}, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllToAllOptions& options) {
  check_count(inputs.size(), static_cast<size_t>(getSize()), "all_to_all");
  check_count(outputs.size(), static_cast<size_t>(getSize()), "all_to_all");
  FSDP2_CHECK(inputs[0].defined(), kInvalidArgument, "[shm] all_to_all got an undefined tensor");
  std::vector<Collective> collectives(1);
  Collective& collective = collectives[0];
  collective.call = call_of(Kind::kAllToAll, inputs[0], 0);
  collective.in.add(listed_of_any_size(inputs, inputs[0].scalar_type(), collective.send_bytes));
  collective.out.add(listed_of_any_size(outputs, inputs[0].scalar_type(), collective.receive_bytes));
  return submit(OpType::ALLTOALL, std::move(collectives), inputs, outputs, options);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::message(OpType type, Tensors& tensors, int peer, int tag) {
  const char* const what = type == OpType::SEND ? "send" : "recv";
  check_count(tensors.size(), 1, what);
  check_tensor(tensors[0], what);
  FSDP2_CHECK(type == OpType::RECVANYSOURCE || (peer >= 0 && peer < getSize()), kInvalidArgument, "[shm] ", what,
              " got rank ", peer, "; expected a rank of the group, 0 to ", getSize() - 1);
  auto work = c10::make_intrusive<MessageWork>(getRank(), type, peer, tag, tensors[0], messages_);
  messages_->add(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> ShmBackend::send(Tensors& tensors, int destination, int tag) {
  return message(OpType::SEND, tensors, destination, tag);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::recv(Tensors& tensors, int source, int tag) {
  return message(OpType::RECV, tensors, source, tag);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(OpType::RECVANYSOURCE, tensors, MessageWork::kAnyRank, tag);
}

c10::intrusive_ptr<c10d::Work> ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(OpType::BARRIER, std::vector<Collective>(1), {}, {}, options);
}

// Every barrier here names all ranks that are missing.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_for_all_ranks*/) {
  submit(OpType::BARRIER, std::vector<Collective>(1), {}, {}, options)->wait();
}

ShmBackend* shm_backend_of(const ProcessGroup& group) {
  if (!group.defined() || !has_backend(*group, c10::DeviceType::CPU)) return nullptr;
  return dynamic_cast<ShmBackend*>(group->getBackend(c10::DeviceType::CPU).get());
}

}  // namespace shm

namespace shm_backend {

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  return c10::make_intrusive<shm::ShmBackend>(shm::Team::join(request));
}

}  // namespace shm_backend

}  // namespace fsdp2::detail
