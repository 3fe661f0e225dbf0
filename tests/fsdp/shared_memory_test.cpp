// labels: ranks
// Groups whose whole parameters lie in memory that all ranks map: what is read, when, and what a write means.

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "fsdp/parity.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

#define SHM_TEST(name, num_ranks)                                                                      \
  static void name##_body(int rank);                                                                   \
  TEST(SharedMemory, name) { ASSERT_TRUE(run_ranks(num_ranks, name##_body, {.backend = "cpu:shm"})); } \
  static void name##_body([[maybe_unused]] int rank)

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

Tensor local_of(const Tensor& param) { return fsdp2::DTensor(param.detach()).to_local(); }

/// y = W x, which calls `during` inside forward, before W is used.
struct PausedImpl : torch::nn::Module {
  PausedImpl() { fc = register_module("fc", linear(2, 4)); }
  Tensor forward(const Tensor& x) {
    if (during) during();
    return fc(x);
  }
  Linear fc{nullptr};
  std::function<void()> during;
};
FSDP2_MODULE(Paused);

Paused paused(const fsdp2::FullyShardOptions& options = {}) {
  Paused model;
  {
    torch::NoGradGuard no_grad;
    model->fc->weight.fill_(1);
  }
  fsdp2::fully_shard(model->fc, options);
  fsdp2::fully_shard(model, options);
  return model;
}

void train_like_whole(int rank, const char* where) {
  torch::manual_seed(3);
  Tower model(5, 3), reference(5, 3);
  for (torch::nn::Module* each :
       {static_cast<torch::nn::Module*>(model.get()), static_cast<torch::nn::Module*>(reference.get())}) {
    each->to(torch::kDouble);
  }
  copy_state(*model, *reference);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp);
  fsdp2::fully_shard(model);
  expect_trains_like(
      model, reference, rank, 4,
      [] {
        return torch::randn({6, 5}, torch::kDouble);
      },
      where);
}

SHM_TEST(TrainsLikeTheWholeModel2, 2) { train_like_whole(rank, "2 ranks"); }
SHM_TEST(TrainsLikeTheWholeModel3, 3) { train_like_whole(rank, "3 ranks, uneven"); }

SHM_TEST(TrainsLikeTheWholeModelWithCopies, 2) {
  ::setenv("FSDP2_SHM_IN_PLACE", "0", 1);
  train_like_whole(rank, "not in place");
}

SHM_TEST(LocalTensorsTakenBeforeTheFirstForwardStayAliases, 2) {
  Paused model = paused();
  const Tensor before = local_of(model->fc->weight);
  const torch::NoGradGuard no_grad;
  model(torch::ones({1, 2}));
  before.fill_(static_cast<float>(rank + 2));
  EXPECT_EQ(before.data_ptr(), local_of(model->fc->weight).data_ptr());
  const Tensor expected = torch::tensor({{4.f, 4.f, 6.f, 6.f}});
  EXPECT_EQ(max_difference(model(torch::ones({1, 2})), expected), 0);
}

SHM_TEST(WritesOfOneRankAloneAreSeenByAll, 2) {
  Paused model = paused();
  const torch::NoGradGuard no_grad;
  model(torch::ones({1, 2}));
  if (rank == 1) {
    sleep_ms(50);
    local_of(model->fc->weight).data_ptr<float>()[0] = 5;  // past every version counter
  }
  EXPECT_EQ(max_difference(model(torch::ones({1, 2})), torch::tensor({{2.f, 2.f, 6.f, 2.f}})), 0);
}

SHM_TEST(RawWritesReachCastCopies, 2) {
  fsdp2::FullyShardOptions options;
  options.mp_policy.param_dtype = torch::kBFloat16;
  Paused model = paused(options);
  const torch::NoGradGuard no_grad;
  model(torch::ones({1, 2}));
  local_of(model->fc->weight).data_ptr<float>()[0] = static_cast<float>(rank + 4);
  const Tensor out = model(torch::ones({1, 2}));
  EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(max_difference(out, torch::tensor({{5.f, 2.f, 6.f, 2.f}})), 0);
}

SHM_TEST(AFastRankDoesNotWriteUnderASlowOne, 2) {
  Paused model = paused();
  const torch::NoGradGuard no_grad;
  for (int round = 0; round < 3; ++round) {
    if (rank == 1) model->during = [] { sleep_ms(60); };
    const float value = static_cast<float>(round + 1);
    EXPECT_EQ(max_difference(model(torch::ones({1, 2})), torch::full({1, 4}, 2 * value)), 0) << round;
    local_of(model->fc->weight).fill_(value + 1);
  }
}

SHM_TEST(AWriteBetweenForwardAndBackwardIsSeenInBackward, 2) {
  Paused model = paused();
  Tensor x = torch::ones({1, 2}, torch::requires_grad());
  const Tensor out = model(x);
  if (rank == 0) {
    sleep_ms(50);
    const torch::NoGradGuard no_grad;
    local_of(model->fc->weight).fill_(3);  // rows 0 and 1
  }
  out.sum().backward();
  EXPECT_EQ(max_difference(x.grad(), torch::tensor({{8.f, 8.f}})), 0);
}

SHM_TEST(AWriteInsideForwardIsRefused, 2) {
  Paused model = paused();
  model(torch::ones({1, 2}));
  model->during = [&] {
    const torch::NoGradGuard no_grad;
    local_of(model->fc->weight).fill_(3);
  };
  EXPECT_FSDP2_ERROR(model(torch::ones({1, 2})), kUsage, "fc.weight was written inside forward or backward");
}

/// Two layers; `between` runs after the first was used. The second skips the first where `use_first` is false.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    first = register_module("first", linear(4, 4));
    second = register_module("second", linear(4, 4));
  }
  Tensor forward(const Tensor& x, bool use_first) {
    const Tensor hidden = first(x);
    if (between) between();
    return second(use_first ? hidden : x.to(hidden.scalar_type()));
  }
  Linear first{nullptr}, second{nullptr};
  std::function<void()> between;
};
FSDP2_MODULE(Chain);

Chain chain(const fsdp2::FullyShardOptions& options = {}) {
  Chain model;
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& param : model->parameters()) param.fill_(1);
  }
  fsdp2::fully_shard(model->first, options);
  fsdp2::fully_shard(model->second, options);
  fsdp2::fully_shard(model, options);
  return model;
}

SHM_TEST(AWriteInsideForwardAfterTheLastUseIsRefused, 2) {
  Chain model = chain();
  const torch::NoGradGuard no_grad;
  model(torch::ones({1, 4}), true);
  if (rank == 0) model->between = [&] { local_of(model->first->weight).mul_(100); };
  if (rank == 0) {
    EXPECT_FSDP2_ERROR(model(torch::ones({1, 4}), true), kUsage, "first.weight was written inside forward");
  } else {
    model(torch::ones({1, 4}), true);  // no hang: the error of the other comes after the last barrier
  }
}

SHM_TEST(RawWritesBetweenMicroBatchesReachCastCopies, 2) {
  fsdp2::FullyShardOptions options;
  options.mp_policy.param_dtype = torch::kBFloat16;
  Chain model = chain(options);
  fsdp2::fsdp_module(model).set_requires_gradient_sync(false);
  model(torch::ones({1, 4}), true).sum().backward();
  float* data = local_of(model->first->weight).data_ptr<float>();
  std::fill_n(data, 8, 2.f);
  EXPECT_EQ(max_difference(model(torch::ones({1, 4}), true), torch::full({1, 4}, 32.f)), 0);
}

/// The gradients of one rank were accumulated in float, those of the other come in bfloat16.
SHM_TEST(RanksWithGradientsOfDifferentDtypesAddUp, 2) {
  fsdp2::FullyShardOptions options;
  options.mp_policy.param_dtype = torch::kBFloat16;
  options.mp_policy.reduce_dtype = torch::kFloat;
  Chain model = chain(options);
  const Tensor x = torch::full({1, 4}, static_cast<float>(rank + 1)).requires_grad_();
  fsdp2::FSDPModule handle = fsdp2::fsdp_module(model);
  handle.set_requires_gradient_sync(false);
  model(x, rank == 0).sum().backward();
  handle.set_requires_gradient_sync(true);
  model(x, true).sum().backward();
  // d/dW1 of a use is 4 x, of which rank 0 made two and rank 1 one; over 2 ranks.
  EXPECT_EQ(max_difference(whole(model->first->weight.grad()), torch::full({4, 4}, (2 * 4 * 1.f + 4 * 2.f) / 2)), 0);
}

SHM_TEST(WhatStaysWholeAfterEvaluationIsACopy, 2) {
  Chain model;
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& param : model->parameters()) param.fill_(1);
  }
  fsdp2::fully_shard(model);
  const torch::NoGradGuard no_grad;
  model(torch::ones({1, 4}), true);
  if (rank == 0) {
    fsdp2::fsdp_module(model).reshard();
    local_of(model->first->weight).fill_(1000);
  }
  fsdp2::barrier();
  if (rank == 1) {
    EXPECT_EQ(model->first->weight.sum().item<float>(), 16);
  }
  fsdp2::barrier();
}

/// As on Gloo nothing is communicated by micro-batches that neither gather nor reduce, so they need no partner.
SHM_TEST(LocalMicroBatchesNeedNoPartner, 2) {
  Chain model;
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& param : model->parameters()) param.fill_(1);
  }
  fsdp2::FSDPModule handle = fsdp2::fully_shard(model, {.reshard_after_forward = false});
  const Tensor x = torch::full({1, 4}, static_cast<float>(rank + 1));
  handle.set_requires_gradient_sync(false);
  handle.set_reshard_after_backward(false);
  const int batches = rank == 0 ? 4 : 2;
  for (int i = 0; i < batches; ++i) model(x, true).sum().backward();
  handle.set_requires_gradient_sync(true);
  handle.set_reshard_after_backward(true);
  model(x, true).sum().backward();
  const float uses = 5 * 1 + 3 * 2;  // batches times x
  EXPECT_EQ(max_difference(whole(model->first->weight.grad()), torch::full({4, 4}, 4 * uses / 2)), 0);
}

SHM_TEST(AGroupWithoutElementsRuns, 2) {
  struct EmptyImpl : torch::nn::Module {
    EmptyImpl() { weight = register_parameter("weight", torch::zeros({0, 4})); }
    Tensor forward(const Tensor& x) { return x + weight.sum(); }
    Tensor weight;
  };
  auto model = std::make_shared<EmptyImpl>();
  fsdp2::fully_shard(model);
  EXPECT_EQ(fsdp2::call(model, torch::ones({1})).item<float>(), 1);
}

SHM_TEST(SharedMemoryGoesWithItsGroup, 2) {
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("memfd:fsdp2") != std::string::npos;
    return count;
  };
  const auto train = [] {
    Chain model;
    const fsdp2::ProcessGroup group = fsdp2::new_group({0, 1});
    fsdp2::fully_shard(model, {.mesh = fsdp2::DeviceMesh::from_group(group, torch::kCPU)});
    model(torch::ones({1, 4}), true).sum().backward();
  };
  train();
  const int before = mappings();
  for (int i = 0; i < 3; ++i) train();
  EXPECT_LE(mappings(), before + 2);  // a group may outlive its last user for a moment
}

SHM_TEST(AWriteIntoTheWholeSaysThatItReachedAllRanks, 2) {
  Paused model = paused();
  struct WriterImpl : torch::nn::Module {
    WriterImpl() { weight = register_parameter("weight", torch::ones({4, 2})); }
    Tensor forward(const Tensor& x) {
      const torch::NoGradGuard no_grad;
      weight.mul_(2);
      return x;
    }
    Tensor weight;
  };
  auto writer = std::make_shared<WriterImpl>();
  fsdp2::fully_shard(writer, {.reshard_after_forward = true});
  EXPECT_FSDP2_ERROR(fsdp2::call(writer, torch::ones({1})), kUsage, "the write has reached the shards of all ranks");
}

SHM_TEST(UnshardOutsideForwardIsACopy, 2) {
  Paused model = paused();
  model(torch::ones({1, 2}));
  fsdp2::fsdp_module(model->fc).unshard();
  const Tensor whole_weight = model->fc->weight.detach();
  EXPECT_EQ(max_difference(whole_weight, torch::ones({4, 2})), 0);
  {
    const torch::NoGradGuard no_grad;
    model->fc->weight.mul_(7);
  }
  EXPECT_FSDP2_ERROR(fsdp2::fsdp_module(model->fc).reshard(), kUsage, "the write cannot be kept");
  fsdp2::fsdp_module(model).reset_iter_state();
  EXPECT_EQ(max_difference(whole(model->fc->weight), torch::ones({4, 2})), 0);
}

SHM_TEST(SavedViewsThrowAfterReshard, 2) {
  Paused model = paused();
  Tensor view;
  struct TakerImpl : torch::nn::Module {
    TakerImpl() { weight = register_parameter("weight", torch::ones({4, 2})); }
    Tensor forward(const Tensor& x) {
      taken = weight.detach();
      return x * weight.sum();
    }
    Tensor weight, taken;
  };
  auto taker = std::make_shared<TakerImpl>();
  fsdp2::fully_shard(taker, {.reshard_after_forward = true});
  EXPECT_EQ(fsdp2::call(taker, torch::ones({1})).item<float>(), 8);
  EXPECT_ANY_THROW(taker->taken.sum().item<float>());
}

SHM_TEST(ModelsAreConvertedAfterTheyWereShared, 2) {
  Paused model = paused();
  model(torch::ones({1, 2}));
  model->to(torch::kDouble);
  const Tensor x = torch::ones({1, 2}, torch::kDouble);
  EXPECT_EQ(max_difference(model(x), torch::full({1, 4}, 2.0)), 0);
  model(x).sum().backward();
  EXPECT_EQ(max_difference(whole(model->fc->weight.grad()), torch::ones({4, 2})), 0);
}

SHM_TEST(OtherWaysOfGatheringWorkAfterSharing, 2) {
  struct Count : fsdp2::AllGather {
    Tensor allocate(at::IntArrayRef size, const at::TensorOptions& options) override {
      return torch::empty(size, options);
    }
    c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in,
                                              const fsdp2::ProcessGroup& group) override {
      ++calls;
      fsdp2::all_gather_into_tensor(out, in, group);
      return nullptr;
    }
    int calls = 0;
  };
  Paused model = paused();
  EXPECT_EQ(max_difference(model(torch::ones({1, 2})), torch::full({1, 4}, 2.f)), 0);
  const auto count = std::make_shared<Count>();
  fsdp2::fsdp_module(model->fc).set_custom_all_gather(count);
  {
    const torch::NoGradGuard no_grad;
    local_of(model->fc->weight).fill_(static_cast<float>(rank + 1));
  }
  const Tensor out = model(torch::ones({1, 2}));
  EXPECT_EQ(max_difference(out, torch::tensor({{2.f, 2.f, 4.f, 4.f}})), 0);
  EXPECT_EQ(count->calls, 1);
  out.sum().backward();
  EXPECT_EQ(count->calls, 2);
}

/// Gradients larger than the ring, uneven rows, a parameter without a gradient in between.
SHM_TEST(LargeGradientsAreSummed, 3) {
  struct BigImpl : torch::nn::Module {
    BigImpl() {
      a = register_parameter("a", torch::zeros({7, 300001}));
      unused = register_parameter("unused", torch::zeros({5}));
      b = register_parameter("b", torch::zeros({4}));
    }
    Tensor forward(const Tensor& x) { return (a * x).sum() + (b * torch::arange(4) * x).sum(); }
    Tensor a, unused, b;
  };
  auto model = std::make_shared<BigImpl>();
  fsdp2::fully_shard(model);
  for (int step = 1; step < 3; ++step) {
    fsdp2::call(model, torch::full({1}, static_cast<float>(rank + step))).backward();
    const float mean = static_cast<float>(step + 1);  // of rank + step
    EXPECT_EQ(max_difference(whole(model->a.grad()), torch::full({7, 300001}, mean)), 0);
    EXPECT_EQ(max_difference(whole(model->b.grad()), torch::arange(4) * mean), 0);
    EXPECT_FALSE(model->unused.grad().defined());
    model->zero_grad();
  }
}

/// 256 + 1 + 1 + 1 = 259 is not a bfloat16; added one by one in bfloat16 the ones would vanish.
SHM_TEST(HalfPrecisionIsSummedInFloat, 4) {
  fsdp2::FullyShardOptions options;
  options.mp_policy.param_dtype = torch::kBFloat16;
  options.mp_policy.reduce_dtype = torch::kBFloat16;
  Paused model = paused(options);
  const Tensor x = torch::full({1, 2}, rank == 0 ? 256.f : 1.f);
  fsdp2::fsdp_module(model->fc).set_gradient_divide_factor(1);
  model(x).sum().backward();
  EXPECT_EQ(max_difference(whole(model->fc->weight.grad()), torch::full({4, 2}, 260.f)), 0);
}

SHM_TEST(EvaluationAndAccumulationMix, 2) {
  torch::manual_seed(1);
  Tower model(4, 2), reference(4, 2);
  copy_state(*model, *reference);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp);
  fsdp2::FSDPModule handle = fsdp2::fully_shard(model);
  torch::optim::SGD optimizer(model->parameters(), 0.1), expected_optimizer(reference->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    {
      const torch::NoGradGuard no_grad;
      const Tensor all = torch::randn({4, 4});
      EXPECT_LE(max_difference(model(rows_of(all, rank)), rows_of(reference(all), rank)), 1e-5) << step;
    }
    for (int micro = 0; micro < 3; ++micro) {
      const Tensor all = torch::randn({4, 4});
      handle.set_requires_gradient_sync(micro == 2);
      model(rows_of(all, rank)).sum().backward();
      (reference(all).sum() / 2).backward();
    }
    expect_same_gradients(*model, *reference, "step " + std::to_string(step), 1e-5);
    optimizer.step();
    expected_optimizer.step();
    optimizer.zero_grad();
    expected_optimizer.zero_grad();
  }
  expect_same_values(*model, *reference, "at the end", 1e-5);
}

}  // namespace
