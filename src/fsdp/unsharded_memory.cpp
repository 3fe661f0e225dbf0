#include "fsdp/unsharded_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include <fsdp2/error.h>

#include "torch_compat.h"

namespace fsdp2::detail {

namespace {

std::atomic<int64_t> alive{0};
std::atomic<int64_t> peak{0};

bool poison() {
  static const bool on = [] {
    const char* text = std::getenv("FSDP2_DEBUG_POISON");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return on;
}

void count(int64_t change) noexcept {
  const int64_t now = alive.fetch_add(change, std::memory_order_relaxed) + change;
  int64_t highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
}

/// The memory of a whole parameter; frees itself and is taken off the count with its last owner.
struct Block {
  c10::DataPtr data;
  int64_t bytes;
};

void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (poison() && block->data.device().is_cpu() && block->bytes > 0) {
    std::memset(block->data.get(), 0xff, static_cast<size_t>(block->bytes));
  }
  count(-block->bytes);
  delete block;
}

}  // namespace

Tensor make_released(at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& message) {
  const c10::InferenceMode normal_tensors(false);
  // Zero elements first: the real memory comes with acquire_unsharded.
  Tensor whole = at::empty({0}, options.requires_grad(false));
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    numel *= size;
  }
  whole.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  whole.storage().unsafeGetStorageImpl()->set_nbytes(static_cast<size_t>(numel) * whole.element_size());
  release_unsharded(whole, message);
  return whole;
}

void acquire_unsharded(const Tensor& whole) {
  c10::StorageImpl* storage = whole.storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<int64_t>(storage->nbytes());
  auto* block = new Block{storage->allocator()->allocate(static_cast<size_t>(bytes)), bytes};
  count(bytes);
  void* data = block->data.get();
  allow_data_access(*storage);
  storage->set_data_ptr_noswap(c10::DataPtr(data, block, &delete_block, whole.device()));
}

void borrow_unsharded(const Tensor& whole, void* data) {
  c10::StorageImpl* storage = whole.storage().unsafeGetStorageImpl();
  count(static_cast<int64_t>(storage->nbytes()));
  allow_data_access(*storage);
  storage->set_data_ptr_noswap(c10::DataPtr(data, whole.device()));
}

void release_borrowed(const Tensor& whole, const std::string& message) {
  count(-static_cast<int64_t>(whole.storage().nbytes()));
  release_unsharded(whole, message);
}

void release_unsharded(const Tensor& whole, const std::string& message) {
  c10::StorageImpl* storage = whole.storage().unsafeGetStorageImpl();
  const size_t bytes = storage->nbytes();
  allow_data_access(*storage);
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, whole.device()));
  storage->set_nbytes(bytes);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

int64_t unsharded_bytes() noexcept { return alive.load(std::memory_order_relaxed); }
int64_t unsharded_bytes_peak() noexcept { return peak.load(std::memory_order_relaxed); }
void reset_unsharded_peak() noexcept { peak.store(unsharded_bytes(), std::memory_order_relaxed); }

}  // namespace fsdp2::detail
