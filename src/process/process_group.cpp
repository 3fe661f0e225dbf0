#include <fsdp2/process_group.h>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include "backend/backend.h"
#include "backend/fake.h"
#include "process/collectives.h"
#include "process/cpu_allocator.h"
#include "process/world.h"
#include "tensor/dtensor_spec.h"
#include "torch_compat.h"

namespace fsdp2 {

namespace detail {

namespace {

// Leaked on purpose: static destructors of libtorch must not run under a live process group; the atexit handler
// that init_process_group registers leaves the job before them.
std::unique_ptr<World>& world_slot() {
  static auto* slot = new std::unique_ptr<World>();
  return *slot;
}

struct BackendChoice {
  c10::DeviceType device;
  std::string name;
};

std::vector<BackendChoice> parse_backend(const std::string& text) {
  if (text == "shm") return {{c10::DeviceType::CPU, "shm"}};
  if (text == "nccl") return {{c10::DeviceType::CUDA, "nccl"}};
  if (text == "fake") return {{c10::DeviceType::CPU, "fake"}};  // make_group() asks for it first
  std::vector<BackendChoice> choices;
  if (text.empty()) {
    choices.push_back({c10::DeviceType::CPU, "best"});  // see connect_best()
    if (at::hasCUDA() && nccl_backend::is_available()) choices.push_back({c10::DeviceType::CUDA, "nccl"});
    return choices;
  }
  if (text == "gloo") {
    choices.push_back({c10::DeviceType::CPU, "gloo"});
    if (at::hasCUDA()) choices.push_back({c10::DeviceType::CUDA, "gloo"});
    return choices;
  }
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    if (part == "cpu:shm") {
      choices.push_back({c10::DeviceType::CPU, "shm"});
    } else if (part == "cpu:gloo") {
      choices.push_back({c10::DeviceType::CPU, "gloo"});
    } else if (part == "cuda:gloo") {
      choices.push_back({c10::DeviceType::CUDA, "gloo"});
    } else if (part == "cuda:nccl") {
      choices.push_back({c10::DeviceType::CUDA, "nccl"});
    } else {
      FSDP2_THROW(kInvalidArgument, "[process_group] backend \"", text,
                  "\" is unknown; expected \"\", \"shm\", \"gloo\", \"nccl\", \"fake\" or a list such as "
                  "\"cpu:shm,cuda:nccl\"");
    }
  }
  return choices;
}

c10d::ProcessGroup::BackendType type_of(const std::string& backend) {
  if (backend == "nccl") return c10d::ProcessGroup::NCCL;
  return backend == "gloo" ? c10d::ProcessGroup::GLOO : c10d::ProcessGroup::CUSTOM;
}

/// A rank that is done early must not close its connections while another one still connects.
void wait_until_connected(c10d::Store& store, int size, std::chrono::milliseconds timeout) {
  try {
    if (store.add("connected", 1) == size) {
      store.set("all_connected", "1");
    }
    store.wait({"all_connected"}, timeout);
  } catch (...) {
    rethrow_c10d_error("waiting for all ranks to connect");
  }
}

c10::intrusive_ptr<c10d::Backend> connect(const std::string& backend, const BackendRequest& request) {
  if (backend == "nccl") return nccl_backend::create(request);
  return backend == "shm" ? shm_backend::create(request) : gloo_backend::create(request);
}

/// Shared memory where the ranks of the group are on one host and its system allows it, shared memory and Gloo where
/// they are on several, else Gloo: the same on all of them, since each fails on all together.
c10::intrusive_ptr<c10d::Backend> connect_best(std::string& backend, BackendRequest request) {
  const auto store = request.store;
  // The ranks of the job are known not to be on one host; those of another group may be.
  if (request.single_host || request.world_size < request.job_size) {
    request.store = c10::make_intrusive<c10d::PrefixStore>("shm", store);
    try {
      backend = "shm";
      return shm_backend::create(request);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument && error.code() != ErrorCode::kIo) throw;
      if (error.code() == ErrorCode::kIo) {
        FSDP2_LOG_WARN_ONCE("[process_group] using Gloo, which is slower, since shared memory does not work here: ",
                            error.what_without_backtrace());
      }
    }
  }
  backend = "gloo";
  request.store = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
  auto gloo = gloo_backend::create(request);
  if (request.single_host) return gloo;  // where shared memory was refused
  if (auto two_levels = two_level_backend::create_if_useful(request, gloo)) {
    backend = "shm+gloo";
    return two_levels;
  }
  return gloo;
}

/// `ranks`: the global ranks of the group. An empty `backends` means those of the job.
ProcessGroup make_group(const World& world, const std::string& name, int rank, const std::vector<int>& ranks,
                        const std::string& backends = "") {
  const int size = static_cast<int>(ranks.size());
  auto store = c10::make_intrusive<c10d::PrefixStore>(name, world.store);
  if (world.backend == "fake") return fake_backend::make_group(store, name, rank, size);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  const std::string& wanted = backends.empty() ? world.backend : backends;
  std::vector<BackendChoice> choices = parse_backend(wanted);
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> made;
  for (auto& [device, backend] : choices) {
    auto& connected = made[backend];
    if (!connected) {
      const bool best = backend == "best";
      const BackendRequest request{best ? store : c10::make_intrusive<c10d::PrefixStore>(backend, store),
                                   rank,
                                   size,
                                   world.timeout,
                                   world.single_host,
                                   ranks,
                                   world.world_size};
      try {
        connected = best ? connect_best(backend, request) : connect(backend, request);
      } catch (...) {
        rethrow_c10d_error(c10::str("connecting group ", name, " over ", backend));
      }
    }
    group->setBackend(device, type_of(backend), connected);
  }
  group->setDefaultBackend(type_of(choices.front().name));
  group->setGroupName(name);
  wait_until_connected(*store, size, world.timeout);
  return group;
}

}  // namespace

World* world() { return world_slot().get(); }

std::vector<void (*)()>& destroy_callbacks() {
  static auto& callbacks = *new std::vector<void (*)()>;
  return callbacks;
}

void before_destroy(void (*callback)()) {
  auto& callbacks = destroy_callbacks();
  if (std::find(callbacks.begin(), callbacks.end(), callback) == callbacks.end()) callbacks.push_back(callback);
}

World& require_world(const char* what) {
  World* current = world();
  FSDP2_CHECK(current != nullptr, kUsage, "[process_group] ", what,
              " needs a process group: call fsdp2::init_process_group() first");
  return *current;
}

ProcessGroup shared_group(const std::vector<int>& ranks, const std::string& purpose, const std::string& backend) {
  World& current = require_world("making a mesh");
  const auto found = current.shared.find({ranks, purpose});
  if (found != current.shared.end()) {
    return found->second;
  }
  bool is_world = purpose.empty() && static_cast<int>(ranks.size()) == current.world_size;
  for (size_t i = 0; is_world && i < ranks.size(); ++i) {
    is_world = ranks[i] == static_cast<int>(i);
  }
  ProcessGroup group = current.default_group;
  if (!is_world) {
    // The name follows from the members, who alone make the group; it is made once in the life of a job.
    const std::string name = c10::str("mesh/", purpose, "/", c10::Join(",", ranks));
    const auto position = std::find(ranks.begin(), ranks.end(), current.rank) - ranks.begin();
    group = make_group(current, name, static_cast<int>(position), ranks, backend);
    current.ranks_of.insert_or_assign(group.get(), ranks);
  }
  current.shared.emplace(std::make_pair(ranks, purpose), group);
  return group;
}

}  // namespace detail

using detail::require_world;
using detail::world;

void init_process_group(const ProcessGroupOptions& options) {
  FSDP2_CHECK(!is_initialized(), kUsage,
              "[process_group] init_process_group was called twice; call "
              "destroy_process_group() before joining another job");
  detail::install_cpu_allocator();
  auto fresh = std::make_unique<detail::World>();
  fresh->backend = options.backend;
  detail::parse_backend(options.backend);  // a wrong name is said before any rank waits
  detail::rendezvous(options, *fresh);
  detail::set_error_rank(fresh->rank);
  std::vector<int> everyone(static_cast<size_t>(fresh->world_size));
  std::iota(everyone.begin(), everyone.end(), 0);
  try {
    if (at::hasCUDA()) {
      const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      FSDP2_CHECK(fresh->local_rank < guard.deviceCount(), kInvalidArgument, "[process_group] local rank ",
                  fresh->local_rank, " has no GPU: this host has ", static_cast<int>(guard.deviceCount()),
                  "; start at most that many processes here");
      guard.setDevice(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(fresh->local_rank)));
    }
    fresh->default_group = detail::make_group(*fresh, "default", fresh->rank, everyone);
  } catch (...) {
    detail::set_error_rank(-1);
    throw;
  }
  fresh->ranks_of.emplace(fresh->default_group.get(), std::move(everyone));
  // Gloo writes to sockets that a dead peer has closed: that has to be an error, not the end of this process.
  struct sigaction present {};
  if (::sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
  detail::world_slot() = std::move(fresh);
  static const int registered = std::atexit([] {
    if (world() != nullptr) world()->exiting = true;
    destroy_process_group();
  });
  (void)registered;
}

void destroy_process_group() {
  if (!is_initialized()) return;
  for (void (*callback)() : detail::destroy_callbacks()) callback();
  // Whoever still holds a group (a mesh, a user) keeps it alive; only our references go.
  const std::unique_ptr<detail::World> last = std::move(detail::world_slot());
  detail::set_error_rank(-1);
}

bool is_initialized() { return world() != nullptr; }

int get_rank(const ProcessGroup& group) {
  return group.defined() ? group->getRank() : require_world("get_rank()").rank;
}

int get_world_size(const ProcessGroup& group) {
  return group.defined() ? group->getSize() : require_world("get_world_size()").world_size;
}

int get_local_rank() { return world() != nullptr ? world()->local_rank : 0; }

ProcessGroup default_group() { return require_world("the default group").default_group; }

std::vector<int> get_process_group_ranks(const ProcessGroup& group) {
  const detail::World& current = require_world("get_process_group_ranks()");
  const c10d::ProcessGroup* key = group.defined() ? group.get() : current.default_group.get();
  const auto found = current.ranks_of.find(key);
  FSDP2_CHECK(found != current.ranks_of.end(), kInvalidArgument,
              "[process_group] this group was not made by "
              "fsdp2::new_group or a mesh, so its global ranks are unknown; make it with new_group(ranks)");
  return found->second;
}

ProcessGroup new_group(const std::vector<int>& ranks) {
  detail::World& current = require_world("new_group()");
  FSDP2_CHECK(!ranks.empty(), kInvalidArgument, "[process_group] new_group got no ranks; pass at least one");
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  FSDP2_CHECK(sorted.front() >= 0 && sorted.back() < current.world_size, kInvalidArgument,
              "[process_group] new_group got ranks ", c10::Join(", ", ranks), "; allowed are 0 to ",
              current.world_size - 1);
  FSDP2_CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), kInvalidArgument,
              "[process_group] new_group got ranks ", c10::Join(", ", ranks), "; each rank may occur once");
  const std::string name = c10::str("group", current.groups_made++);
  const auto position = std::find(ranks.begin(), ranks.end(), current.rank);
  // An outsider gets a group without a rank, which every operation refuses: an empty one would mean the default group.
  ProcessGroup group =
      position == ranks.end()
          ? c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::PrefixStore>(name, current.store), -1,
                                                    static_cast<int>(ranks.size()))
          : detail::make_group(current, name, static_cast<int>(position - ranks.begin()), ranks);
  current.ranks_of.insert_or_assign(group.get(), ranks);  // of a dead group at this address before
  return group;
}

c10::Device local_device() {
  if (at::hasCUDA()) {
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(get_local_rank())};
  }
  return {c10::DeviceType::CPU};
}

namespace {

void check_plain(const Tensor& tensor, const char* operation) {
  FSDP2_CHECK(tensor.defined() && !detail::is_marked(tensor), kInvalidArgument, "[process_group] ", operation,
              " needs a plain, defined tensor; for a DTensor use redistribute(), full_tensor() or to_local()");
  FSDP2_CHECK(tensor.layout() == at::kStrided, kInvalidArgument, "[process_group] ", operation,
              " needs a dense tensor; got layout ", tensor.layout());
}

void check_can_average(bool average, const Tensor& tensor, const char* operation) {
  FSDP2_CHECK(!average || tensor.is_floating_point() || tensor.is_complex(), kInvalidArgument, "[process_group] ",
              operation, " with ReduceOp::AVG got ", tensor.scalar_type(),
              "; an average needs a floating-point dtype: use ReduceOp::SUM, or convert first");
}

/// Runs `body` on a contiguous tensor and copies the result back where `tensor` is not.
template <class Body>
void with_contiguous(Tensor& tensor, Body&& body) {
  const at::NoGradGuard no_grad;
  if (tensor.is_contiguous()) {
    Tensor alias = tensor.detach();
    body(alias);
    return;
  }
  Tensor dense = tensor.detach().contiguous();
  body(dense);
  tensor.copy_(dense);
}

void check_ratio(const Tensor& large, const Tensor& small, int64_t size, const char* operation) {
  FSDP2_CHECK(large.numel() == small.numel() * size && large.scalar_type() == small.scalar_type(), kInvalidArgument,
              "[process_group] ", operation, " over ", size, " ranks got a large tensor of ", large.numel(), " ",
              large.scalar_type(), " and a small one of ", small.numel(), " ", small.scalar_type(), "; expected ",
              small.numel() * size, " elements and equal dtypes");
}

}  // namespace

void barrier(const ProcessGroup& group) { detail::barrier_on(detail::group_or_default(group)); }

void all_reduce(Tensor& tensor, ReduceOp op, const ProcessGroup& group) {
  check_plain(tensor, "all_reduce");
  const ProcessGroup& over = detail::group_or_default(group);
  const bool average = op.op_ == ReduceOp::AVG;  // backends disagree on AVG: divide here
  check_can_average(average, tensor, "all_reduce");
  with_contiguous(tensor, [&](Tensor& dense) {
    detail::all_reduce(dense, average ? ReduceOp(ReduceOp::SUM) : op, over).wait();
    if (average) {
      dense.div_(over->getSize());
    }
  });
}

void broadcast(Tensor& tensor, int src, const ProcessGroup& group) {
  check_plain(tensor, "broadcast");
  const ProcessGroup& over = detail::group_or_default(group);
  const std::vector<int> ranks = get_process_group_ranks(over);
  const auto position = std::find(ranks.begin(), ranks.end(), src);
  FSDP2_CHECK(position != ranks.end(), kInvalidArgument, "[process_group] broadcast from global rank ", src,
              " over a group of ranks ", c10::Join(", ", ranks), "; src must be one of them");
  with_contiguous(tensor, [&](Tensor& dense) {
    detail::broadcast_from(dense, static_cast<int>(position - ranks.begin()), over).wait();
  });
}

void all_gather_into_tensor(Tensor& out, const Tensor& in, const ProcessGroup& group) {
  check_plain(out, "all_gather_into_tensor");
  check_plain(in, "all_gather_into_tensor");
  const ProcessGroup& over = detail::group_or_default(group);
  check_ratio(out, in, over->getSize(), "all_gather_into_tensor");
  const Tensor dense_in = in.detach().contiguous();
  with_contiguous(out, [&](Tensor& dense) { detail::all_gather(dense, dense_in, over).wait(); });
}

void reduce_scatter_tensor(Tensor& out, const Tensor& in, ReduceOp op, const ProcessGroup& group) {
  check_plain(out, "reduce_scatter_tensor");
  check_plain(in, "reduce_scatter_tensor");
  const ProcessGroup& over = detail::group_or_default(group);
  check_ratio(in, out, over->getSize(), "reduce_scatter_tensor");
  const Tensor dense_in = in.detach().contiguous();
  const bool average = op.op_ == ReduceOp::AVG;
  check_can_average(average, out, "reduce_scatter_tensor");
  with_contiguous(out, [&](Tensor& dense) {
    detail::reduce_scatter(dense, dense_in, average ? ReduceOp(ReduceOp::SUM) : op, over).wait();
    if (average) {
      dense.div_(over->getSize());
    }
  });
}

namespace {

/// Where bytes of the host travel.
c10::Device transport_device(const ProcessGroup& group) {
  return detail::has_backend(*group, c10::DeviceType::CPU) ? c10::Device(at::kCPU) : local_device();
}

}  // namespace

std::string detail::broadcast_string(const std::string& mine, int group_rank, const ProcessGroup& group) {
  const ProcessGroup& over = group_or_default(group);
  const at::NoGradGuard no_grad;
  const c10::Device device = transport_device(over);
  Tensor length = at::empty({1}, at::kLong).fill_(static_cast<int64_t>(mine.size())).to(device);
  broadcast_from(length, group_rank, over, {"a string's length"}).wait();
  std::string result = mine;
  result.resize(static_cast<size_t>(length.item<int64_t>()));
  if (result.empty()) return result;
  const Tensor bytes = at::from_blob(result.data(), {static_cast<int64_t>(result.size())}, at::kByte);
  Tensor moving = bytes.to(device);
  broadcast_from(moving, group_rank, over, {"a string"}).wait();
  if (!device.is_cpu()) bytes.copy_(moving);
  return result;
}

std::vector<std::string> all_gather_strings(const std::string& mine, const ProcessGroup& group) {
  if (!group.defined() && !is_initialized()) {
    return {mine};
  }
  const ProcessGroup& over = detail::group_or_default(group);
  const int64_t size = over->getSize();
  const at::NoGradGuard no_grad;
  const c10::Device device = transport_device(over);
  const auto to_device = [&](const Tensor& tensor) { return tensor.to(device); };
  Tensor lengths = at::zeros({size}, at::TensorOptions(at::kLong).device(device));
  Tensor length =
      to_device(at::empty({1}, at::TensorOptions(at::kLong).device(at::kCPU)).fill_(static_cast<int64_t>(mine.size())));
  detail::all_gather(lengths, length, over, {"string lengths"}).wait();
  lengths = lengths.cpu();
  const int64_t longest = lengths.max().item<int64_t>();
  std::vector<std::string> result(static_cast<size_t>(size));
  if (longest == 0) {
    return result;
  }
  Tensor padded = at::zeros({longest}, at::TensorOptions(at::kByte).device(at::kCPU));
  std::memcpy(padded.mutable_data_ptr(), mine.data(), mine.size());
  Tensor all = at::empty({size * longest}, at::TensorOptions(at::kByte).device(device));
  detail::all_gather(all, to_device(padded), over, {"strings"}).wait();
  all = all.cpu();
  const char* bytes = static_cast<const char*>(all.const_data_ptr());
  for (int64_t i = 0; i < size; ++i) {
    result[static_cast<size_t>(i)].assign(bytes + i * longest,
                                          static_cast<size_t>(lengths.const_data_ptr<int64_t>()[i]));
  }
  return result;
}

}  // namespace fsdp2
