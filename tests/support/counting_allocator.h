#pragma once

// Exact bytes of tensors on the CPU, as libtorch asks for them.

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fsdp2::testing {

/// From its construction to the end of the process, counts what CPU tensors hold.
class CountingAllocator : public c10::Allocator {
 public:
  static CountingAllocator& install() {
    static CountingAllocator* counter = [] {
      auto* made = new CountingAllocator();
      c10::SetCPUAllocator(made, /*priority=*/255);
      return made;
    }();
    return *counter;
  }

  /// Peak of live bytes during `body`, beyond what was live before.
  template <class Body>
  int64_t peak_of(Body body) {
    const int64_t before = live_;
    peak_ = before;
    body();
    return peak_ - before;
  }
  int64_t live() const { return live_; }

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr inner = c10::GetDefaultCPUAllocator()->allocate(size);
    live_ += static_cast<int64_t>(size);
    peak_ = std::max(peak_, live_);
    void* data = inner.get();
    auto* block = new Block{std::move(inner), static_cast<int64_t>(size)};
    return {data, block, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

 private:
  struct Block {
    c10::DataPtr inner;
    int64_t size;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    live_ -= block->size;
    delete block;
  }
  static inline int64_t live_ = 0, peak_ = 0;  // ranks of tests use one thread for tensors
};

}  // namespace fsdp2::testing
