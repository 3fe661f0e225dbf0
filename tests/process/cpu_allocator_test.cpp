// labels: ranks
// Memory of large CPU tensors: what is asked for is there, and what cannot be there is refused.

#include <torch/torch.h>

#include "support/ranks.h"

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

RANKS_TEST(CpuAllocator, WhatNoMachineHasIsRefused, 1) {
  for (const int64_t bytes : {int64_t{1} << 46, int64_t{1} << 58, int64_t{1} << 62}) {
    EXPECT_ANY_THROW(torch::empty({bytes}, torch::kByte)) << bytes;
  }
  EXPECT_EQ(torch::ones({1 << 20}).sum().item<float>(), 1 << 20);
}

}  // namespace
