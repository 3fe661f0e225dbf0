#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "dcp/save_run.h"
#include "process/world.h"

// Note [Saves in the background]
// async_save copies what the state holds and hands the copies to a thread that does what save() does, over groups that
// nothing else uses: neither its collectives nor its errors can get between those of the training. What goes wrong on
// one rank before the thread starts is thrown inside of the thread's first step, so that every rank hears of it.

namespace fsdp2::dcp {

struct SaveFuture::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, observed = false;
  std::exception_ptr error;
  Metadata metadata;
  std::string path;
  detail::WriteProgress progress;

  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
  /// After the end; throws the save's error and remembers that somebody has seen it.
  void rethrow() {
    const std::lock_guard guard(mutex);
    observed = true;
    if (error) std::rethrow_exception(error);
  }
};

namespace {

using detail::Exchange;
using detail::SaveItem;

/// Copies of tensors, in memory that the next save of the same layout uses again.
class Staging {
 public:
  void copy(std::vector<SaveItem>& items) {
    std::vector<at::Tensor*> tensors;
    for (SaveItem& item : items) {
      for (at::Tensor& tensor : item.data) tensors.push_back(&tensor);
      for (at::Tensor& tensor : item.value.tensors) tensors.push_back(&tensor);
    }
    if (!fits(tensors)) allocate(tensors);
    std::set<c10::Device, bool (*)(const c10::Device&, const c10::Device&)> busy(
        [](const c10::Device& a, const c10::Device& b) { return a.index() < b.index(); });
    for (size_t i = 0; i < tensors.size(); ++i) {
      at::Tensor& tensor = *tensors[i];
      if (tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
        if (tensor.nbytes() > 0) std::memcpy(buffers_[i].mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
      } else {
        buffers_[i].copy_(tensor, /*non_blocking=*/true);
        if (!tensor.device().is_cpu()) busy.insert(tensor.device());
      }
      tensor = buffers_[i];
    }
    for (const c10::Device device : busy) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
  void release() {
    buffers_.clear();
    slab_ = at::Tensor();
  }

 private:
  static constexpr size_t kAlignment = 64;

  bool fits(const std::vector<at::Tensor*>& tensors) const {
    if (buffers_.size() != tensors.size()) return false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (buffers_[i].scalar_type() != tensors[i]->scalar_type() || buffers_[i].sizes() != tensors[i]->sizes())
        return false;
    }
    return true;
  }

  void allocate(const std::vector<at::Tensor*>& tensors) {
    release();  // never both
    size_t bytes = 0;
    bool pinned = false;
    std::vector<size_t> offsets;
    for (const at::Tensor* tensor : tensors) {
      offsets.push_back(bytes);
      bytes += (tensor->nbytes() + kAlignment - 1) / kAlignment * kAlignment;
      pinned |= tensor->is_cuda();
    }
    slab_ = pinned ? at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true))
                   : huge_pages(bytes);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor buffer = at::empty({0}, at::TensorOptions().dtype(tensors[i]->scalar_type()));
      const auto element = static_cast<int64_t>(tensors[i]->element_size());
      std::vector<int64_t> strides(tensors[i]->sizes().size(), 1);
      for (size_t d = strides.size(); d-- > 1;)
        strides[d - 1] = strides[d] * std::max<int64_t>(tensors[i]->size(static_cast<int64_t>(d)), 1);
      buffer.set_(slab_.storage(), static_cast<int64_t>(offsets[i]) / element, tensors[i]->sizes(), strides);
      buffers_.push_back(buffer);
    }
  }

  /// Memory for which the kernel needs few page faults and the processor few address translations.
  static at::Tensor huge_pages(size_t bytes) {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = rounded > 0 ? std::aligned_alloc(kHugePage, rounded) : nullptr;
    FSDP2_CHECK(memory != nullptr || rounded == 0, kIo, "[dcp] no memory for the ", rounded,
                " bytes that async_save needs to copy the state; use save(), which needs none");
    if (memory != nullptr) ::madvise(memory, rounded, MADV_HUGEPAGE);  // helps where it works
    return at::from_blob(
        memory, {static_cast<int64_t>(bytes)}, [](void* address) { std::free(address); },
        at::TensorOptions().dtype(at::kByte));
  }

  at::Tensor slab_;
  std::vector<at::Tensor> buffers_;  // views of it
};

/// The one save that may run in the background of a process.
class Background {
 public:
  static Background& of_process() {
    static Background& background =
        *new Background;  // never destroyed: its memory may be pinned by a driver that is gone
    return background;
  }

  SaveFuture start(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
    const std::lock_guard guard(mutex_);
    wait_for_thread();
    register_exits();
    auto future = std::make_shared<SaveFuture::State>();
    future->path = path.string();
    SaveOptions own = options;
    std::exception_ptr early = unseen_error();
    std::vector<SaveItem> items;
    own.group = separate_group(options.group);
    const auto exchange = std::make_shared<const Exchange>(own.group);
    try {
      const at::NoGradGuard no_grad;
      const c10::InferenceMode normal_mode(false);
      if (!early) {
        StateDict copy = state;
        items = detail::make_save_items(copy, exchange->rank());
        staging_.copy(items);
      }
    } catch (...) {
      early = std::current_exception();
    }
    current_ = future;
    thread_ = std::thread([future, own, exchange, path, early, items = std::move(items)]() mutable {
      const auto make_items = [&] {
        if (early) std::rethrow_exception(early);
        return std::move(items);
      };
      std::exception_ptr error;
      try {
        future->metadata = detail::run_save(*exchange, make_items, path, own, &future->progress);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(future->mutex);
      future->error = error;
      future->done = true;
      future->changed.notify_all();
    });
    return SaveFuture(future);
  }

  /// Waits for the save that runs; throws the error that no future has thrown.
  void finish() {
    const std::lock_guard guard(mutex_);
    wait_for_thread();
    if (const std::exception_ptr error = unseen_error()) std::rethrow_exception(error);
  }

  void release() {
    const std::lock_guard guard(mutex_);
    wait_for_thread();
    staging_.release();
  }

  /// At the end of the process, or of its groups.
  void drain() noexcept {
    try {
      finish();
    } catch (const std::exception& error) {
      FSDP2_LOG_ERROR("[dcp] a checkpoint is lost: ", error.what());
    }
  }

 private:
  void wait_for_thread() {
    if (thread_.joinable()) thread_.join();
  }

  std::exception_ptr unseen_error() {
    if (!current_) return nullptr;
    const std::shared_ptr<SaveFuture::State> last = std::move(current_);
    current_ = nullptr;
    const std::lock_guard lock(last->mutex);
    if (!last->error || last->observed) return nullptr;
    last->observed = true;
    try {
      std::rethrow_exception(last->error);
    } catch (const Error& error) {
      return std::make_exception_ptr(Error(error.code(), c10::str("[dcp] the async save to ", last->path,
                                                                  " before this call had failed, and its future was "
                                                                  "not asked: ",
                                                                  error.what_without_backtrace())));
    } catch (...) {
      return std::current_exception();
    }
  }

  /// The ranks of `group` once more, for saves alone.
  static ProcessGroup separate_group(const ProcessGroup& group) {
    if (!is_initialized()) return group;
    const ProcessGroup own = fsdp2::detail::shared_group(get_process_group_ranks(group), "async save", "cpu:gloo");
    return own;
  }

  void register_exits() {
    if (!registered_exit_) {
      registered_exit_ = true;
      std::atexit([] { Background::of_process().drain(); });
    }
    fsdp2::detail::before_destroy([] { Background::of_process().drain(); });
  }

  std::mutex mutex_;
  std::thread thread_;
  std::shared_ptr<SaveFuture::State> current_;
  Staging staging_;
  bool registered_exit_ = false;
};

}  // namespace

bool SaveFuture::ready() const {
  FSDP2_CHECK(valid(), kUsage, "[dcp] this SaveFuture belongs to no save");
  const std::lock_guard guard(state_->mutex);
  return state_->done;
}

SaveProgress SaveFuture::progress() const {
  FSDP2_CHECK(valid(), kUsage, "[dcp] this SaveFuture belongs to no save");
  const uint64_t total = state_->progress.total.load();
  return {std::min(state_->progress.done.load(), total), total};  // what is written is a little more than the data
}

void SaveFuture::wait() const {
  FSDP2_CHECK(valid(), kUsage, "[dcp] this SaveFuture belongs to no save");
  state_->wait();
  state_->rethrow();
}

Metadata SaveFuture::get() const {
  wait();
  return state_->metadata;
}

SaveFuture async_save(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  return Background::of_process().start(state, path, options);
}

void release_async_buffers() { Background::of_process().release(); }

void detail::finish_async_save() { Background::of_process().finish(); }

}  // namespace fsdp2::dcp
