// labels: ranks
// alone: it replaces mmap()
// Memory of large CPU tensors: what is asked for is there, and what cannot be there is refused.

#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/torch.h>
#include <unistd.h>

#include "support/ranks.h"

/// Large ranges begin at any page, as on kernels that do not align them to huge pages.
extern "C" __attribute__((visibility("default"))) void* mmap(void* at, size_t bytes, int protection, int flags, int fd,
                                                             off_t offset) noexcept {
  const bool large = at == nullptr && bytes >= size_t{1} << 40;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const long result = ::syscall(SYS_mmap, at, large ? bytes + page : bytes, protection, flags, fd, offset);
  return reinterpret_cast<void*>(large && result != -1 ? result + static_cast<long>(page) : result);
}

namespace {

using torch::Tensor;

RANKS_TEST(CpuAllocator, TensorsOfAllSizesKeepTheirValues, 1) {
  std::vector<Tensor> alive;
  for (int round = 0; round < 3; ++round) {
    for (int64_t bytes = 1 << 12; bytes < 1 << 24; bytes += bytes / 3) {
      const double value = static_cast<double>(bytes % 251 + round);
      alive.push_back(torch::full({bytes}, value, torch::kByte));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(alive.back().data_ptr()) % 64, 0u) << bytes;
      if (alive.size() % 3 == 0) alive[alive.size() / 2] = Tensor();
    }
    for (const Tensor& tensor : alive) {
      if (!tensor.defined()) continue;
      EXPECT_TRUE(tensor.eq(tensor[0]).all().item<bool>()) << tensor.numel();
    }
    alive.clear();
  }
}

RANKS_TEST(CpuAllocator, MemoryThatIsUsedAgainIsThatOfTheTensor, 1) {
  std::vector<Tensor> alive;
  for (int i = 0; i < 4; ++i) alive.push_back(torch::full({50000 + 9000 * i}, i));
  alive.erase(alive.begin() + 1);
  alive.erase(alive.begin());
  for (int i = 0; i < 4; ++i) alive.push_back(torch::full({50000 + 9000 * i}, i + 10));
  const std::vector<int> expected{2, 3, 10, 11, 12, 13};
  for (size_t i = 0; i < alive.size(); ++i) EXPECT_TRUE(alive[i].eq(expected[i]).all().item<bool>()) << i;
}

RANKS_TEST(CpuAllocator, WhatNoMachineHasIsRefused, 1) {
  for (const int64_t bytes : {int64_t{1} << 46, int64_t{1} << 58, int64_t{1} << 62}) {
    EXPECT_ANY_THROW(torch::empty({bytes}, torch::kByte)) << bytes;
  }
  EXPECT_EQ(torch::ones({1 << 20}).sum().item<float>(), 1 << 20);
}

}  // namespace
