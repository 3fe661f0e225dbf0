#include "process/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

namespace fsdp2::detail {

// Note [Memory of large tensors]
// A training step makes and frees activations and gradients of a few megabytes, between optimizer states and gradient
// shards that stay. malloc serves them from one heap, where an aligned block does not even fit into its own hole: half
// of the heap is holes, and what it gives back to the system has to be faulted in again, page by page. So large
// tensors get blocks of a few sizes in an address range of their own, each size with its free blocks, in huge pages
// where the system lends them. A block's neighbours do not matter, so nothing fragments. Free blocks keep their memory
// for the next step as long as all of it, in use or not, is not more than lately was in use at once: so the peak is
// that of the tensors, and a step whose tensors come and go like those of the last one faults nothing in. Beyond that
// the oldest free blocks lose their memory and keep their addresses.

namespace {

constexpr size_t kLeast = size_t{32} << 10;  // below, malloc
constexpr size_t kUnit = kLeast;             // blocks begin at multiples of it
constexpr size_t kRange = size_t{1} << 40;   // of addresses, not of memory
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kColours = 64;  // tensors that begin at equal distances from a page's beginning evict each other
constexpr size_t kColourBytes = 64;
constexpr size_t kSlack = size_t{18} << 20;
constexpr uint64_t kWindow = 16384;  // blocks taken; "lately" is one to two windows, more than a step takes
constexpr size_t kStepsPerDoubling = 8;
constexpr size_t kNumClasses = (kStepsPerDoubling + 1) * 27;  // from kLeast to kRange

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

struct SizeClass {
  size_t index, bytes;
};

/// The smallest block that holds `bytes`: at most an eighth larger.
SizeClass class_of(size_t bytes) {
  const size_t doubling = std::bit_width(bytes - 1) - std::bit_width(kLeast - 1);  // of kLeast, rounded up
  const size_t base = doubling == 0 ? kLeast / 2 : kLeast << (doubling - 1);
  const size_t step = round_up(base / kStepsPerDoubling, 4096);
  const size_t steps = bytes <= base ? 0 : (bytes - base + step - 1) / step;
  return {doubling * (kStepsPerDoubling + 1) + steps, base + steps * step};
}

class Blocks {
 public:
  /// Null where the system does not lend the addresses.
  static Blocks* instance() {
    static Blocks* const blocks = [] {
      // With room to begin at a huge page: not every kernel gives addresses that do.
      void* range = ::mmap(nullptr, kRange + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      void* sizes = ::mmap(nullptr, kRange / kUnit * sizeof(size_t), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      return range == MAP_FAILED || sizes == MAP_FAILED ? nullptr : new Blocks(range, sizes);
    }();
    return blocks;
  }

  bool holds(const void* data) const { return reinterpret_cast<uintptr_t>(data) - begin_ < kRange; }

  /// Null where there is no memory.
  void* take(size_t bytes) {
    if (bytes >= kRange) return nullptr;
    const SizeClass wanted = class_of(bytes + kColours * kColourBytes);
    const std::lock_guard lock(mutex_);
    std::vector<Free>& free = free_[wanted.index];
    if (!free.empty()) {
      const Free block = free.back();
      free.pop_back();
      if (block.kept) {
        kept_bytes_ -= wanted.bytes;
        kept_.erase(block.position);
      }
      count_taken(wanted.bytes);
      drop_beyond_peak();
      return coloured(block.data);
    }
    const size_t alignment = wanted.bytes >= kHugePage ? kHugePage : kUnit;
    const size_t at = round_up(end_, alignment);
    if (at + wanted.bytes > begin_ + kRange) return nullptr;
    void* data = reinterpret_cast<void*>(at);
    if (::mprotect(data, wanted.bytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
    // Not for the rest behind the last whole one: it would count in full.
    if (const size_t whole = wanted.bytes / kHugePage * kHugePage; whole > 0) ::madvise(data, whole, MADV_HUGEPAGE);
    end_ = at + wanted.bytes;
    sizes_[(at - begin_) / kUnit] = wanted.bytes;
    count_taken(wanted.bytes);
    drop_beyond_peak();
    return coloured(data);
  }

  void give_back(void* coloured) {
    const size_t unit = (reinterpret_cast<uintptr_t>(coloured) - begin_) / kUnit;
    void* data = reinterpret_cast<void*>(begin_ + unit * kUnit);
    const size_t bytes = sizes_[unit];
    const std::lock_guard lock(mutex_);
    const size_t index = class_of(bytes).index;
    kept_.push_back({index, data});
    free_[index].push_back({data, true, std::prev(kept_.end())});
    kept_bytes_ += bytes;
    used_bytes_ -= bytes;
    drop_beyond_peak();
  }

 private:
  struct Kept {
    size_t index;
    void* data;
  };
  struct Free {
    void* data;
    bool kept;  // its memory
    std::list<Kept>::iterator position;
  };

  Blocks(void* range, void* sizes)
      : begin_(round_up(reinterpret_cast<uintptr_t>(range), kHugePage)),
        end_(begin_),
        sizes_(static_cast<size_t*>(sizes)) {}

  void* coloured(void* block) const { return static_cast<std::byte*>(block) + taken_ * 7 % kColours * kColourBytes; }

  void count_taken(size_t bytes) {
    used_bytes_ += bytes;
    if (++taken_ % kWindow == 0) {
      last_peak_ = peak_;
      peak_ = 0;
    }
    peak_ = std::max(peak_, used_bytes_);
  }

  void drop_beyond_peak() {
    const size_t allowed = std::max(peak_, last_peak_) + kSlack;
    while (!kept_.empty() && used_bytes_ + kept_bytes_ > allowed) drop_oldest();
  }

  void drop_oldest() {
    const Kept oldest = kept_.front();
    kept_.pop_front();
    std::vector<Free>& free = free_[oldest.index];
    size_t at = 0;
    while (free[at].data != oldest.data) ++at;
    const size_t bytes = sizes_[(reinterpret_cast<uintptr_t>(oldest.data) - begin_) / kUnit];
    ::madvise(oldest.data, bytes, MADV_DONTNEED);
    kept_bytes_ -= bytes;
    // To the front: blocks that have their memory are taken first.
    const Free block{oldest.data, false, {}};
    free.erase(free.begin() + static_cast<std::ptrdiff_t>(at));
    free.insert(free.begin(), block);
  }

  std::mutex mutex_;
  uintptr_t begin_, end_;  // begin_ is aligned to huge pages: offsets are as aligned as addresses
  size_t* sizes_;          // by first unit
  std::array<std::vector<Free>, kNumClasses> free_;
  std::list<Kept> kept_;  // oldest first
  size_t kept_bytes_ = 0, used_bytes_ = 0;
  size_t peak_ = 0, last_peak_ = 0;  // of what was in use, in this window and the one before
  uint64_t taken_ = 0;
};

class LargeTensorAllocator final : public c10::Allocator {
 public:
  LargeTensorAllocator(Blocks& blocks, c10::Allocator& small) : blocks_(blocks), small_(small) { self_ = this; }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= kLeast) {
      if (void* data = blocks_.take(bytes)) return {data, data, &free_any, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DataPtr small = small_.allocate(bytes);
    void* data = small.release_context();
    return {data, data, &free_any, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void free_any(void* data) {
    if (self_->blocks_.holds(data)) {
      self_->blocks_.give_back(data);
    } else {
      self_->small_.raw_deleter()(data);
    }
  }

  static inline LargeTensorAllocator* self_ = nullptr;
  Blocks& blocks_;
  c10::Allocator& small_;
};

}  // namespace

void install_cpu_allocator() {
  static const bool tried = [] {
    const char* text = std::getenv("FSDP2_CPU_ALLOCATOR");
    if (text != nullptr && std::strcmp(text, "0") == 0) return true;
    c10::Allocator* usual = c10::GetDefaultCPUAllocator();
    Blocks* blocks = c10::GetCPUAllocator() == usual && usual->raw_deleter() != nullptr ? Blocks::instance() : nullptr;
    // Never freed: tensors outlive everything.
    if (blocks != nullptr) c10::SetCPUAllocator(new LargeTensorAllocator(*blocks, *usual), /*priority=*/1);
    return true;
  }();
  (void)tried;
}

}  // namespace fsdp2::detail
