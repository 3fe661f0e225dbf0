#include "backend/fake.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <atomic>
#include <vector>

#include <fsdp2/error.h>
#include <fsdp2/fake_backend.h>

#include "process/collectives.h"
#include "torch_compat.h"

namespace fsdp2 {

namespace detail::fake_backend {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

enum class Op {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier
};
constexpr std::array<const char*, 11> kNames = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                                "reduce",     "gather",         "scatter",    "all_to_all",
                                                "send",       "recv",           "barrier"};

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(int rank) : Work(rank) { finish(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

void check_count(size_t count, size_t expected, const char* what) {
  FSDP2_CHECK(count == expected, kInvalidArgument, "[fake] ", what, " got ", count, " tensors or lists; expected ",
              expected);
}

/// The rows of each rank: `sizes` rows of dim 0 each, or equal shares where it is empty.
Tensors split_rows(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int ranks) {
  FSDP2_CHECK(tensor.dim() > 0, kInvalidArgument, "[fake] all_to_all got a tensor without dims; expected rows");
  const int64_t rows = tensor.size(0);
  int64_t total = 0;
  for (const int64_t size : sizes) {
    FSDP2_CHECK(size >= 0, kInvalidArgument, "[fake] all_to_all got a split size of ", size);
    total += size;
  }
  if (!sizes.empty()) check_count(sizes.size(), static_cast<size_t>(ranks), "all_to_all (split sizes)");
  FSDP2_CHECK(sizes.empty() ? rows % ranks == 0 : total == rows, kInvalidArgument, "[fake] all_to_all got ", rows,
              " rows for ", ranks, " ranks and split sizes ", sizes,
              "; the sizes must add up to the rows, or the rows divide evenly where none are given");
  return sizes.empty() ? tensor.split_with_sizes(std::vector<int64_t>(static_cast<size_t>(ranks), rows / ranks))
                       : tensor.split_with_sizes(sizes);
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "fake"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return static_cast<uint64_t>(issued_.load()); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override { count(Op::kBarrier, 0); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return count(Op::kBroadcast, bytes_of(tensors));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    for (at::Tensor& tensor : tensors) reduce_equal(tensor, options.reduceOp);
    return count(Op::kAllReduce, bytes_of(tensors));
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (options.rootRank == rank_) {
      for (at::Tensor& tensor : tensors) reduce_equal(tensor, options.reduceOp);
    }
    return count(Op::kReduce, bytes_of(tensors));
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_count(outputs.size(), inputs.size(), "all_gather");
    int64_t bytes = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_count(outputs[i].size(), static_cast<size_t>(size_), "all_gather");
      for (at::Tensor& slot : outputs[i]) slot.copy_(inputs[i]);
      bytes += bytes_of(outputs[i]);
    }
    return count(Op::kAllGather, bytes);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_count(outputs.size(), static_cast<size_t>(size_), "all_gather_coalesced");
    int64_t bytes = 0;
    for (Tensors& of_rank : outputs) {
      check_count(of_rank.size(), inputs.size(), "all_gather_coalesced");
      for (size_t i = 0; i < inputs.size(); ++i) of_rank[i].copy_(inputs[i]);
      bytes += bytes_of(of_rank);
    }
    return count(Op::kAllGather, bytes);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    gather_into(output, input);
    return count(Op::kAllGather, static_cast<int64_t>(output.nbytes()));
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_count(outputs.size(), inputs.size(), "all_gather_into_tensor_coalesced");
    for (size_t i = 0; i < inputs.size(); ++i) gather_into(outputs[i], inputs[i]);
    return count(Op::kAllGather, bytes_of(outputs));
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    if (options.rootRank == rank_) {
      check_count(outputs.size(), inputs.size(), "gather (output lists)");
      for (size_t i = 0; i < inputs.size(); ++i) {
        check_count(outputs[i].size(), static_cast<size_t>(size_), "gather");
        for (at::Tensor& slot : outputs[i]) slot.copy_(inputs[i]);
      }
    }
    return count(Op::kGather, bytes_of(inputs) * size_);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    if (options.rootRank == rank_) check_count(inputs.size(), outputs.size(), "scatter (input lists)");
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (options.rootRank == rank_) {
        check_count(inputs[i].size(), static_cast<size_t>(size_), "scatter");
        outputs[i].copy_(inputs[i][static_cast<size_t>(rank_)]);
      } else {
        outputs[i].zero_();
      }
    }
    return count(Op::kScatter, bytes_of(outputs) * size_);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    check_count(inputs.size(), outputs.size(), "reduce_scatter");
    int64_t bytes = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      check_count(inputs[i].size(), static_cast<size_t>(size_), "reduce_scatter");
      outputs[i].copy_(inputs[i][static_cast<size_t>(rank_)]);
      reduce_equal(outputs[i], options.reduceOp);
      bytes += bytes_of(inputs[i]);
    }
    return count(Op::kReduceScatter, bytes);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    scatter_into(output, input, options.reduceOp);
    return count(Op::kReduceScatter, static_cast<int64_t>(input.nbytes()));
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    check_count(outputs.size(), inputs.size(), "reduce_scatter_tensor_coalesced");
    for (size_t i = 0; i < inputs.size(); ++i) scatter_into(outputs[i], inputs[i], options.reduceOp);
    return count(Op::kReduceScatter, bytes_of(inputs));
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    const at::Tensor own = split_rows(input, input_sizes, size_)[static_cast<size_t>(rank_)];
    for (at::Tensor& slot : split_rows(output, output_sizes, size_)) put(slot, own);
    return count(Op::kAllToAll, static_cast<int64_t>(std::max(input.nbytes(), output.nbytes())));
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    check_count(inputs.size(), static_cast<size_t>(size_), "all_to_all");
    check_count(outputs.size(), static_cast<size_t>(size_), "all_to_all");
    for (at::Tensor& slot : outputs) put(slot, inputs[static_cast<size_t>(rank_)]);
    return count(Op::kAllToAll, std::max(bytes_of(inputs), bytes_of(outputs)));
  }

  WorkPtr send(Tensors& tensors, int, int) override { return count(Op::kSend, bytes_of(tensors)); }

  WorkPtr recv(Tensors& tensors, int, int) override { return recvAnysource(tensors, 0); }

  WorkPtr recvAnysource(Tensors& tensors, int) override {
    for (at::Tensor& tensor : tensors) tensor.zero_();
    return count(Op::kRecv, bytes_of(tensors));
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override { return count(Op::kBarrier, 0); }

  std::map<std::string, FakeCount> counts() const {
    std::map<std::string, FakeCount> result;
    for (size_t i = 0; i < kNames.size(); ++i) result[kNames[i]] = {calls_[i].load(), bytes_[i].load()};
    return result;
  }

  void reset() {
    for (auto& value : calls_) value = 0;
    for (auto& value : bytes_) value = 0;
  }

 private:
  WorkPtr done() const { return c10::make_intrusive<DoneWork>(rank_); }

  WorkPtr count(Op op, int64_t bytes) {
    calls_[static_cast<size_t>(op)].fetch_add(1, std::memory_order_relaxed);
    bytes_[static_cast<size_t>(op)].fetch_add(bytes, std::memory_order_relaxed);
    issued_.fetch_add(1, std::memory_order_relaxed);
    return done();
  }

  /// `slot` where a peer's piece belongs, if that has the size of this rank's own.
  static void put(at::Tensor& slot, const at::Tensor& own) {
    if (slot.numel() == own.numel()) {
      slot.view({-1}).copy_(own.reshape({-1}));
    } else {
      slot.zero_();
    }
  }

  void gather_into(at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "all-gather over ", size_, " ranks from ", input.numel(),
                      " elements into ", output.numel());
    output.view({size_, -1}).copy_(input.reshape({1, -1}).expand({size_, -1}));
  }

  void scatter_into(at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const {
    TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, "reduce-scatter over ", size_, " ranks from ",
                      input.numel(), " elements into ", output.numel());
    output.view({-1}).copy_(input.view({size_, -1})[rank_]);
    reduce_equal(output, op);
  }

  /// `tensor` reduced over `size_` ranks that all have it.
  void reduce_equal(at::Tensor& tensor, const c10d::ReduceOp& op) const {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        if (tensor.scalar_type() != at::kBool) tensor.mul_(size_);
        return;
      case c10d::ReduceOp::PRODUCT:
        if (tensor.scalar_type() != at::kBool) tensor.pow_(size_);
        return;
      case c10d::ReduceOp::BXOR:
        if (size_ % 2 == 0) tensor.zero_();
        return;
      case c10d::ReduceOp::PREMUL_SUM:
        TORCH_CHECK(false, "backend fake offers no PREMUL_SUM: scale the tensor, and use SUM");
      default:
        return;  // AVG, MIN, MAX, BAND, BOR of equal values
    }
  }

  std::array<std::atomic<int64_t>, kNames.size()> calls_{}, bytes_{};
  std::atomic<int64_t> issued_{0};
};

/// Null where it is another one.
FakeBackend* backend_of(c10d::ProcessGroup& group) {
  const c10::DeviceType cpu = c10::DeviceType::CPU;
  return has_backend(group, cpu) ? dynamic_cast<FakeBackend*>(group.getBackend(cpu).get()) : nullptr;
}

FakeBackend& require_backend(const ProcessGroup& group) {
  FakeBackend* backend = backend_of(*group_or_default(group));
  FSDP2_CHECK(backend != nullptr, kInvalidArgument,
              "[process_group] counts were asked of a group that is not of "
              "backend \"fake\"; give that backend to init_process_group");
  return *backend;
}

/// c10d has no kernels for meta tensors. A fake group takes them as it takes those of the CPU; of any other they have
/// no memory to send.
void run_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  bool fake = false;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const c10::IValue& argument = (*stack)[i];
    if (argument.isObject() || argument.isCustomClass()) {
      try {
        fake |= backend_of(*argument.toCustomClass<c10d::ProcessGroup>()) != nullptr;
      } catch (const c10::Error&) {
        // Another class of c10d, e.g. the reduction.
      }
    }
  }
  FSDP2_CHECK(fake, kInvalidArgument, "[collective] ", op.schema().name(),
              " got tensors on the meta device, which have no values; only backend \"fake\" takes them");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void accept_meta_tensors() {
  static auto* const library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::Meta, __FILE__, __LINE__);
    for (const char* name : {"broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_",
                             "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_",
                             "scatter_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
                             "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"}) {
      made->impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_meta>());
    }
    return made;
  }();
  (void)library;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> make_store() { return c10::make_intrusive<c10d::HashStore>(); }

ProcessGroup make_group(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size) {
  accept_meta_tensors();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  const auto backend = c10::make_intrusive<FakeBackend>(rank, size);
  for (const c10::DeviceType device : {c10::DeviceType::CPU, c10::DeviceType::CUDA, c10::DeviceType::Meta}) {
    group->setBackend(device, c10d::ProcessGroup::CUSTOM, backend);
  }
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  group->setGroupName(name);
  return group;
}

bool is_fake(const ProcessGroup& group) { return group.defined() && backend_of(*group) != nullptr; }

}  // namespace detail::fake_backend

std::map<std::string, FakeCount> fake_counts(const ProcessGroup& group) {
  return detail::fake_backend::require_backend(group).counts();
}

void reset_fake_counts(const ProcessGroup& group) { detail::fake_backend::require_backend(group).reset(); }

}  // namespace fsdp2
