// Ranks of several hosts, equally many on each: shared memory inside of a host, Gloo between hosts.

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include "backend/backend.h"
#include "backend/shm/host.h"
#include "backend/shm/shm_backend.h"
#include "backend/shm/sum.h"
#include "torch_compat.h"

namespace fsdp2::detail {

namespace {

// Note [Two levels]
// The ranks of a group are a table: a row for each host, a column for each place on a host. A row is a group in shared
// memory, a column a Gloo group. What has to go to other hosts goes through the columns, each of which carries its part
// of it, so a byte crosses the network as often as in one Gloo group of all ranks, or less often, and in as many steps
// as there are hosts instead of ranks:
//
//   all-gather:      in the column, then every host's blocks in the row;
//   reduce-scatter:  in the row, for each host the part of every column; then the column exchanges these and adds
//                    them up in the order of the hosts;
//   all-reduce:      as a reduce-scatter in the row, an all-reduce in the column, an all-gather in the row;
//   broadcast:       in the column of the root, then in the rows.
//
// Everything else goes through the Gloo group of all ranks. Sums of bf16 and fp16 are rounded once per level.

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Op = c10d::ReduceOp;

/// Fewer bytes are sent whole by every column: less to wait for.
constexpr int64_t kSmallBytes = 16384;

struct Levels {
  c10::intrusive_ptr<shm::ShmBackend> row;
  c10::intrusive_ptr<c10d::Backend> column, all;
  std::vector<std::vector<int>> ranks;  // [host][place]
  int64_t host = 0, place = 0;

  int64_t hosts() const { return static_cast<int64_t>(ranks.size()); }
  int64_t places() const { return static_cast<int64_t>(ranks.front().size()); }
};

bool adds_up(const Op& op) { return op == Op::SUM || op == Op::AVG; }

/// Of what can be reduced in two levels.
bool is_offered(const Op& op, const at::Tensor& tensor) {
  const bool floating = at::isFloatingType(tensor.scalar_type());
  return op == Op::SUM || (op == Op::AVG && floating) || op == Op::MIN || op == Op::MAX || op == Op::PRODUCT;
}

/// parts[i] of [parts, numel], in order, into `out`.
void reduce_parts(at::Tensor& out, const at::Tensor& parts, const Op& op, double divisor) {
  const at::ScalarType dtype = out.scalar_type();
  if (adds_up(op) && (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf)) {
    std::vector<const void*> from;
    for (int64_t i = 0; i < parts.size(0); ++i) from.push_back(parts[i].const_data_ptr());
    shm::sum_in_order(out.data_ptr(), dtype, from, dtype, out.numel(), divisor);
    return;
  }
  out.copy_(parts[0]);
  for (int64_t i = 1; i < parts.size(0); ++i) {
    switch (op.op_) {
      case Op::MIN:
        at::minimum_out(out, out, parts[i]);
        break;
      case Op::MAX:
        at::maximum_out(out, out, parts[i]);
        break;
      case Op::PRODUCT:
        out.mul_(parts[i]);
        break;
      default:
        out.add_(parts[i]);
    }
  }
}

/// One operation, each step of which may take as long as the caller gave the whole of it.
struct Call {
  const Levels& levels;
  std::chrono::milliseconds timeout;  // as in the options of c10d

  template <class Options>
  Options options() const {
    Options options;
    options.timeout = timeout;
    return options;
  }
  template <class Options>
  Options reducing(const Op& op) const {
    auto options = this->options<Options>();
    options.reduceOp = op == Op::AVG ? Op(Op::SUM) : op;
    return options;
  }
};

void all_gather(const Call& call, const at::Tensor& out, at::Tensor in) {
  const Levels& levels = call.levels;
  const int64_t hosts = levels.hosts(), places = levels.places();
  at::Tensor blocks = at::empty({hosts, in.numel()}, in.options());
  at::Tensor flat = blocks.view({-1});
  levels.column->_allgather_base(flat, in, call.options<c10d::AllgatherOptions>())->wait();
  const at::Tensor rows = out.view({hosts * places, in.numel()});
  Tensors mine = blocks.unbind();
  TensorLists theirs(static_cast<size_t>(places));
  for (size_t place = 0; place < theirs.size(); ++place) {
    for (const std::vector<int>& of_host : levels.ranks) theirs[place].push_back(rows[of_host[place]]);
  }
  levels.row->allgather_coalesced(theirs, mine, call.options<c10d::AllgatherOptions>())->wait();
}

void reduce_scatter(const Call& call, at::Tensor out, const at::Tensor& in, const Op& op) {
  const Levels& levels = call.levels;
  const int64_t hosts = levels.hosts(), places = levels.places();
  const at::Tensor rows = in.view({hosts * places, out.numel()});
  at::Tensor sums = at::empty({2, hosts, out.numel()}, out.options());
  const auto options = call.reducing<c10d::ReduceScatterOptions>(op);
  for (int64_t host = 0; host < hosts; ++host) {
    TensorLists parts(1);
    for (const int rank : levels.ranks[static_cast<size_t>(host)]) parts[0].push_back(rows[rank]);
    Tensors sum{sums[0][host]};
    levels.row->reduce_scatter(sum, parts, options)->wait();
  }
  at::Tensor mine = sums[0], received = sums[1];
  std::vector<int64_t> equal;
  levels.column->alltoall_base(received, mine, equal, equal, call.options<c10d::AllToAllOptions>())->wait();
  at::Tensor flat = out.view({-1});
  reduce_parts(flat, received, op, op == Op::AVG ? static_cast<double>(hosts * places) : 1.0);
}

void all_reduce(const Call& call, const at::Tensor& tensor, const Op& op) {
  const Levels& levels = call.levels;
  const auto options = call.reducing<c10d::AllreduceOptions>(op);
  const int64_t places = levels.places();
  const int64_t part = static_cast<int64_t>(tensor.nbytes()) <= kSmallBytes ? 0 : tensor.numel() / places;
  const at::Tensor flat = tensor.view({-1});
  if (part > 0) {
    TensorLists parts(1);
    for (int64_t place = 0; place < places; ++place) parts[0].push_back(flat.narrow(0, place * part, part));
    Tensors sum{at::empty({part}, tensor.options())};
    levels.row->reduce_scatter(sum, parts, call.reducing<c10d::ReduceScatterOptions>(op))->wait();
    levels.column->allreduce(sum, options)->wait();
    levels.row->allgather(parts, sum, call.options<c10d::AllgatherOptions>())->wait();
  }
  if (part * places < flat.numel()) {
    Tensors rest{flat.narrow(0, part * places, flat.numel() - part * places)};
    levels.row->allreduce(rest, options)->wait();
    levels.column->allreduce(rest, options)->wait();
  }
  if (op == Op::AVG) flat.div_(static_cast<double>(levels.hosts() * places));
}

void broadcast(const Call& call, const at::Tensor& tensor, int64_t root) {
  const Levels& levels = call.levels;
  Tensors tensors{tensor};
  auto in_column = call.options<c10d::BroadcastOptions>(), in_row = in_column;
  for (size_t host = 0; host < levels.ranks.size(); ++host) {
    const std::vector<int>& of_host = levels.ranks[host];
    const auto found = std::find(of_host.begin(), of_host.end(), root);
    if (found == of_host.end()) continue;
    in_column.rootRank = static_cast<int64_t>(host);
    in_row.rootRank = found - of_host.begin();
  }
  if (levels.place == in_row.rootRank) levels.column->broadcast(tensors, in_column)->wait();
  levels.row->broadcast(tensors, in_row)->wait();
}

void barrier(const Call& call) {
  const auto options = call.options<c10d::BarrierOptions>();
  call.levels.row->barrier(options)->wait();
  call.levels.column->barrier(options)->wait();
  call.levels.row->barrier(options)->wait();
}

/// An operation of several steps, done by the group's thread.
class Task : public c10d::Work {
 public:
  Task(int rank, c10d::OpType type, Tensors outputs, std::function<void()> steps)
      : c10d::Work(rank, type), outputs_(std::move(outputs)), steps_(std::move(steps)) {}

  void run() noexcept {
    std::exception_ptr error;
    try {
      const at::NoGradGuard no_grad;
      steps_();
    } catch (...) {
      error = std::current_exception();
    }
    end(error);
  }
  void end(const std::exception_ptr& error) noexcept {
    steps_ = nullptr;
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  std::function<void()> steps_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

/// Does tasks in the order in which they were given. Outlives the backend by the task that it is at.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  void add(c10::intrusive_ptr<Task> task) {
    const std::lock_guard lock(mutex_);
    FSDP2_CHECK(!ended_, kCancelled, "[process_group] the group was shut down");
    tasks_.push_back(std::move(task));
    wake_.notify_one();
    if (started_) return;
    started_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }

  void end() {
    std::deque<c10::intrusive_ptr<Task>> left;
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
      left.swap(tasks_);
      wake_.notify_one();
    }
    for (const auto& task : left) {
      task->end(std::make_exception_ptr(
          Error(ErrorCode::kCancelled, "[process_group] the group was shut down before this operation began")));
    }
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const c10::intrusive_ptr<Task> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task->run();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<c10::intrusive_ptr<Task>> tasks_;
  bool started_ = false, ended_ = false;
};

class TwoLevelBackend : public c10d::Backend {
 public:
  explicit TwoLevelBackend(std::shared_ptr<const Levels> levels)
      : c10d::Backend(levels->all->getRank(), levels->all->getSize()), levels_(std::move(levels)) {}
  ~TwoLevelBackend() override { worker_->end(); }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "shm+gloo"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    for (c10d::Backend* each : everyone()) each->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override { levels_->all->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return levels_->all->getSequenceNumberForGroup(); }
  void abort() override {
    for (c10d::Backend* each : everyone()) each->abort();
    worker_->end();
  }
  void shutdown() override {
    for (c10d::Backend* each : everyone()) each->shutdown();
    worker_->end();
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    FSDP2_CHECK(output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
                kInvalidArgument, "[process_group] all_gather got an output of ", output.numel(), " ",
                output.scalar_type(), " and an input of ", input.numel(), " ", input.scalar_type(), " over ", getSize(),
                " ranks");
    return submit(c10d::OpType::_ALLGATHER_BASE, {output}, options,
                  [output, input](const Call& call) { detail::all_gather(call, output, input.view({-1})); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return submit(c10d::OpType::ALLGATHER_COALESCED, outputs, options, [outputs, inputs](const Call& call) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        detail::all_gather(call, outputs[i], inputs[i].view({-1}));
      }
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    FSDP2_CHECK(input.numel() == output.numel() * getSize() && output.scalar_type() == input.scalar_type(),
                kInvalidArgument, "[process_group] reduce_scatter got an input of ", input.numel(), " ",
                input.scalar_type(), " and an output of ", output.numel(), " ", output.scalar_type(), " over ",
                getSize(), " ranks");
    if (!is_offered(options.reduceOp, input)) return levels_->all->_reduce_scatter_base(output, input, options);
    return submit(
        c10d::OpType::_REDUCE_SCATTER_BASE, {output}, options,
        [output, input, op = options.reduceOp](const Call& call) { detail::reduce_scatter(call, output, input, op); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (const at::Tensor& input : inputs) {
      if (!is_offered(options.reduceOp, input)) {
        return levels_->all->reduce_scatter_tensor_coalesced(outputs, inputs, options);
      }
    }
    return submit(kReduceScatterCoalesced, outputs, options,
                  [outputs, inputs, op = options.reduceOp](const Call& call) {
                    for (size_t i = 0; i < inputs.size(); ++i) {
                      detail::reduce_scatter(call, outputs[i], inputs[i], op);
                    }
                  });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() != 1 || !is_offered(options.reduceOp, tensors[0]) || !tensors[0].is_contiguous()) {
      return levels_->all->allreduce(tensors, options);
    }
    return submit(
        c10d::OpType::ALLREDUCE, tensors, options,
        [tensor = tensors[0], op = options.reduceOp](const Call& call) { detail::all_reduce(call, tensor, op); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (tensors.size() != 1 || !tensors[0].is_contiguous()) return levels_->all->broadcast(tensors, options);
    FSDP2_CHECK(options.rootRank >= 0 && options.rootRank < getSize(), kInvalidArgument,
                "[process_group] broadcast got root ", options.rootRank, "; expected a rank of the group, 0 to ",
                getSize() - 1);
    return submit(
        c10d::OpType::BROADCAST, tensors, options,
        [tensor = tensors[0], root = options.rootRank](const Call& call) { detail::broadcast(call, tensor, root); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return submit(c10d::OpType::BARRIER, {}, options, [](const Call& call) { detail::barrier(call); });
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return levels_->all->allreduce_sparse(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return levels_->all->allreduce_coalesced(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return levels_->all->reduce(tensors, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return levels_->all->allgather(outputs, inputs, options);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return levels_->all->allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return levels_->all->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return levels_->all->scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return levels_->all->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return levels_->all->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return levels_->all->alltoall(outputs, inputs, options);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return levels_->all->send(tensors, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override { return levels_->all->recv(tensors, source, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return levels_->all->recvAnysource(tensors, tag); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all_ranks) override {
    levels_->all->monitoredBarrier(options, wait_for_all_ranks);
  }

 private:
  std::vector<c10d::Backend*> everyone() const {
    return {levels_->row.get(), levels_->column.get(), levels_->all.get()};
  }

  template <class Options, class Steps>
  WorkPtr submit(c10d::OpType type, Tensors outputs, const Options& options, Steps steps) {
    auto task = c10::make_intrusive<Task>(
        getRank(), type, std::move(outputs),
        [levels = levels_, timeout = bounded_timeout(options.timeout), steps = std::move(steps)] {
          steps(Call{*levels, timeout});
        });
    worker_->add(task);
    if (!options.asyncOp) task->wait();
    return task;
  }

  std::shared_ptr<const Levels> levels_;
  std::shared_ptr<Worker> worker_ = std::make_shared<Worker>();
};

/// Every rank's value, through the group of all.
std::vector<int64_t> exchange(c10d::Backend& all, int64_t mine) {
  at::Tensor in = at::empty({1}, at::kLong).fill_(mine), out = at::empty({all.getSize()}, at::kLong);
  all._allgather_base(out, in, {})->wait();
  return {out.const_data_ptr<int64_t>(), out.const_data_ptr<int64_t>() + out.numel()};
}

BackendRequest request_of(const BackendRequest& whole, const std::string& name, int rank, std::vector<int> ranks) {
  BackendRequest part = whole;
  part.store = c10::make_intrusive<c10d::PrefixStore>(name, whole.store);
  part.rank = rank;
  part.world_size = static_cast<int>(ranks.size());
  part.global_ranks.clear();
  for (const int each : ranks) part.global_ranks.push_back(whole.global_ranks[static_cast<size_t>(each)]);
  return part;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> two_level_backend::create_if_useful(const BackendRequest& request,
                                                                      const c10::intrusive_ptr<c10d::Backend>& all) {
  auto levels = std::make_shared<Levels>();
  levels->all = all;
  const std::string identity = shm::host_identity();
  std::map<int64_t, size_t> row_of;
  const std::vector<int64_t> hosts = exchange(*all, static_cast<int64_t>(std::hash<std::string>()(identity)));
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [row, is_new] = row_of.try_emplace(hosts[rank], levels->ranks.size());
    if (is_new) levels->ranks.emplace_back();
    std::vector<int>& ranks = levels->ranks[row->second];
    if (static_cast<int>(rank) == request.rank) {
      levels->host = static_cast<int64_t>(row->second);
      levels->place = static_cast<int64_t>(ranks.size());
    }
    ranks.push_back(static_cast<int>(rank));
  }
  if (levels->hosts() == 1 || levels->places() == 1) return nullptr;
  for (const std::vector<int>& ranks : levels->ranks) {
    if (ranks.size() != levels->ranks.front().size()) return nullptr;
  }

  std::string failure;
  try {
    const auto place = static_cast<int>(levels->place);
    const auto row = shm_backend::create(
        request_of(request, c10::str("row", levels->host), place, levels->ranks[static_cast<size_t>(levels->host)]));
    levels->row = c10::dynamic_intrusive_pointer_cast<shm::ShmBackend>(row);
  } catch (const std::exception& error) {
    failure = as_error(error).what_without_backtrace();
  }
  // One way on all hosts.
  for (const int64_t ok : exchange(*all, failure.empty() ? 1 : 0)) {
    if (ok == 1) continue;
    FSDP2_LOG_WARN_ONCE("[process_group] using Gloo alone, which is slower, since shared memory does not work ",
                        failure.empty() ? "on another host" : "here: " + failure);
    return nullptr;
  }
  std::vector<int> column;
  for (const std::vector<int>& ranks : levels->ranks) column.push_back(ranks[static_cast<size_t>(levels->place)]);
  levels->column = gloo_backend::create(
      request_of(request, c10::str("column", levels->place), static_cast<int>(levels->host), std::move(column)));
  return c10::make_intrusive<TwoLevelBackend>(std::move(levels));
}

}  // namespace fsdp2::detail
