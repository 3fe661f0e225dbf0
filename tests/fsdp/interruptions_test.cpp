// labels: ranks
// backends: gloo, shm
// Steps that go another way: exceptions in backward, settings changed midway, parts used by some ranks only.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

Linear ones_linear(int64_t in, int64_t out) {
  Linear layer = linear(in, out);
  torch::NoGradGuard no_grad;
  layer->weight.fill_(1);
  return layer;
}

struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t dim = 2) {
    a = register_module("a", ones_linear(dim, dim));
    b = register_module("b", ones_linear(dim, dim));
  }
  Tensor forward(const Tensor& x, bool use_a, bool use_b) {
    Tensor y = x;
    if (use_a) y = a(y);
    if (use_b) y = b(y);
    return y;
  }
  Linear a{nullptr}, b{nullptr};
};
FSDP2_MODULE(Pair);

const Tensor kInput = torch::ones({1, 2});

RANKS_TEST(Interruptions, WhatZeroGradClearsAfterAnExceptionStaysCleared, 2) {
  for (const bool to_none : {true, false}) {
    Pair pair;
    fsdp2::fully_shard(pair->a);
    fsdp2::fully_shard(pair->b);
    fsdp2::fully_shard(pair);
    torch::optim::SGD optimizer(pair->parameters(), 0.1);
    pair(kInput, true, true).sum().backward();
    const Tensor expected_a = whole(pair->a->weight.grad()), expected_b = whole(pair->b->weight.grad());
    // Thrown while the gradient of `a` is on its way, and its earlier one is put aside.
    const auto hook = pair->a->weight.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("no"); });
    EXPECT_ANY_THROW(pair(kInput, true, true).sum().backward());
    pair->a->weight.remove_hook(hook);
    optimizer.zero_grad(to_none);
    pair(kInput, true, true).sum().backward();
    EXPECT_EQ(max_difference(whole(pair->a->weight.grad()), expected_a), 0) << to_none;
    EXPECT_EQ(max_difference(whole(pair->b->weight.grad()), expected_b), 0) << to_none;
  }
}

RANKS_TEST(Interruptions, PendingGradientsThatWereClearedDoNotComeBack, 2) {
  Pair pair;
  auto root = fsdp2::fully_shard(pair);
  pair(kInput, true, true).sum().backward();
  root.set_requires_gradient_sync(false);
  pair(kInput, true, true).sum().backward();
  pair->zero_grad();
  root.reset_iter_state();
  for (const Tensor& param : pair->parameters()) EXPECT_FALSE(param.grad().defined());
}

RANKS_TEST(Interruptions, UnusedParametersAreReducedAlsoAfterSynchronizeGradients, 2) {
  Pair pair;
  auto root = fsdp2::fully_shard(pair);
  root.set_reduce_scatter_unused_params(true);
  root.set_requires_gradient_sync(false);
  pair(kInput, rank == 0, rank == 1).sum().backward();
  root.set_requires_gradient_sync(true);
  root.synchronize_gradients();
  pair->zero_grad();
  pair(kInput, rank == 0, rank == 1).sum().backward();  // each rank used one of them: half of its gradient on average
  EXPECT_EQ(max_difference(whole(pair->a->weight.grad()), torch::full({2, 2}, 0.5)), 0);
  EXPECT_EQ(max_difference(whole(pair->b->weight.grad()), torch::full({2, 2}, 0.5)), 0);
}

RANKS_TEST(Interruptions, HooksRunForGradientsThatNeedNoReduction, 2) {
  Linear layer = ones_linear(2, 2);
  fsdp2::fully_shard(layer);
  int calls = 0;
  fsdp2::register_post_accumulate_grad_hook(layer->weight, [&](Tensor& param) {
    ++calls;
    EXPECT_TRUE(param.grad().defined());
  });
  layer(kInput);
  fsdp2::fsdp_module(layer).reshard();
  fsdp2::DTensor(layer->weight).to_local().sum().backward();
  // Without a module's backward nobody ends it but the engine.
  EXPECT_EQ(calls, 1);
}

struct OwnTensor : fsdp2::AllGather {
  Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return torch::full(sizes, std::nan(""), options);
  }
  c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in, const fsdp2::ProcessGroup& group) override {
    Tensor mine = torch::empty_like(out);
    fsdp2::all_gather_into_tensor(mine, in, group);
    out = too_small ? mine.narrow(0, 0, 1) : mine;
    return nullptr;
  }
  bool too_small = false;
};

RANKS_TEST(Interruptions, ACustomGatherMayHandBackItsOwnTensor, 2) {
  Linear layer = ones_linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  auto gather = std::make_shared<OwnTensor>();
  handle.set_custom_all_gather(gather);
  EXPECT_EQ(max_difference(layer(kInput).detach(), torch::full({1, 2}, 2.0)), 0);
  handle.reshard();
  gather->too_small = true;
  EXPECT_FSDP2_ERROR(layer(kInput), kInvalidArgument, "expected 4 contiguous elements");
  gather->too_small = false;
  EXPECT_EQ(max_difference(layer(kInput).detach(), torch::full({1, 2}, 2.0)), 0);
}

RANKS_TEST(Interruptions, ReshardSettingsMayChangeBetweenForwardAndBackward, 4) {
  Pair pair(4);
  fsdp2::fully_shard(pair->a, {.reshard_after_forward = 2});
  fsdp2::fully_shard(pair->b, {.reshard_after_forward = 2});
  auto root = fsdp2::fully_shard(pair);
  const Tensor out = pair(torch::ones({1, 4}), true, true);
  root.set_reshard_after_forward(true);
  out.sum().backward();
  EXPECT_EQ(max_difference(whole(pair->a->weight.grad()), torch::full({4, 4}, 4.0)), 0);
  EXPECT_EQ(max_difference(whole(pair->b->weight.grad()), torch::full({4, 4}, 4.0)), 0);
}

RANKS_TEST(Interruptions, APartialSumStaysInSightWhereNothingJoinsIt, 2) {
  Linear layer = ones_linear(2, 2);
  auto handle =
      fsdp2::fully_shard(layer, {.mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 1}, {"replicate", "shard"})});
  handle.set_requires_all_reduce(false);
  layer(kInput).sum().backward();
  handle.set_requires_gradient_sync(false);
  torch::autograd::grad({layer(kInput).sum()}, {layer->weight});
  EXPECT_TRUE(layer->weight.grad().defined());
  layer->zero_grad();
  handle.set_requires_gradient_sync(true);
  layer(kInput).sum().backward();
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::ones({2, 2})), 0);
}

RANKS_TEST(Interruptions, TheDivideFactorMayNotChangeUnderAPartialSum, 2) {
  Linear layer = ones_linear(2, 2);
  auto handle =
      fsdp2::fully_shard(layer, {.mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 1}, {"replicate", "shard"})});
  handle.set_gradient_divide_factor(4);
  handle.set_requires_all_reduce(false);
  layer(kInput).sum().backward();
  EXPECT_FSDP2_ERROR(handle.set_gradient_divide_factor(16), kUsage, "call synchronize_gradients()");
  EXPECT_NO_THROW(handle.set_gradient_divide_factor(4));
  handle.synchronize_gradients();
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({2, 2}, 0.5)), 0);
  EXPECT_NO_THROW(handle.set_gradient_divide_factor(16));
}

RANKS_TEST(Interruptions, ExpertsThatSomePlacesDoNotUseAreNoFault, 4) {
  Pair pair;
  const auto grid = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"ep", "efsdp"});
  fsdp2::fully_shard(pair->a, {.mesh = grid["efsdp"]});
  fsdp2::fully_shard(pair);
  EXPECT_NO_THROW(pair(kInput, rank < 2, true).sum().backward());
  EXPECT_EQ(pair->a->weight.grad().defined(), rank < 2);
  EXPECT_TRUE(pair->b->weight.grad().defined());
}

RANKS_TEST(Interruptions, RanksWithOtherOptionsAreTold, 2) {
  Linear first = ones_linear(2, 2), second = ones_linear(2, 2);
  fsdp2::fully_shard(first, {.mp_policy = {.param_dtype = rank == 0 ? torch::kHalf : torch::kBFloat16}});
  EXPECT_FSDP2_ERROR(first(kInput), kInvalidArgument, "param_dtype");
  auto handle = fsdp2::fully_shard(second);
  if (rank == 0) handle.set_gradient_divide_factor(5);
  EXPECT_FSDP2_ERROR(second(kInput), kInvalidArgument, "divide factor 5");
}

RANKS_TEST(Interruptions, TwoUsesWithOtherParametersEachAreReducedOnceAndRight, 2) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() {
      pair = register_module("pair", Pair());
      head = register_module("head", ones_linear(2, 2));
    }
    Tensor forward(const Tensor& x) { return head(pair(pair(x * 1, false, true), true, false)); }
    Pair pair{nullptr};
    Linear head{nullptr};
  };
  auto model = std::make_shared<TwiceImpl>();
  fsdp2::fully_shard(model->pair);
  auto root = fsdp2::fully_shard(model);
  root.set_reduce_scatter_unused_params(true);
  const Tensor x = kInput.clone().requires_grad_();
  for (int step = 0; step < 2; ++step) {
    model->zero_grad();
    fsdp2::call(model, x).sum().backward();
    EXPECT_EQ(max_difference(whole(model->pair->b->weight.grad()), torch::full({2, 2}, 4.0)), 0);
    EXPECT_EQ(max_difference(whole(model->pair->a->weight.grad()), torch::full({2, 2}, 4.0)), 0);
  }
}

RANKS_TEST(Interruptions, OutermostFirstIsRefused, 2) {
  Pair pair;
  fsdp2::fully_shard(pair);
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(pair->a), kUsage, "shard the modules inside first");
  pair(kInput, true, true);  // whole from here on
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(pair->a), kUsage, "shard the modules inside first");
  EXPECT_NO_THROW(pair(kInput, true, true).sum().backward());
}

RANKS_TEST(Interruptions, ARefusedCallLeavesTiedParametersWhereTheyWere, 2) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      first = register_module("first", ones_linear(2, 2));
      tied = register_parameter("tied", first->weight);
      odd = register_parameter("odd", torch::ones({3, 3}));
    }
    Tensor forward(const Tensor& x) { return torch::matmul(first(x), tied.t()) + odd.sum(); }
    Linear first{nullptr};
    Tensor tied, odd;
  };
  auto model = std::make_shared<TiedImpl>();
  fsdp2::fully_shard(model->first);
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(model, {.reshard_after_forward = 3}), kInvalidArgument, "3");
  EXPECT_EQ(fsdp2::fsdp_module(model->first).param_fqns().size(), 1u);
  EXPECT_FALSE(fsdp2::is_fsdp_module(model));
  fsdp2::fully_shard(model);
  EXPECT_EQ(max_difference(fsdp2::call(model, kInput).detach(), torch::full({1, 2}, 13.0)), 0);
}

}  // namespace
