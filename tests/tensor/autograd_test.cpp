// labels: ranks
// backends: gloo, shm

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>

#include "support/ranks.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2 {
namespace {

DeviceMesh world_mesh() { return init_device_mesh(c10::DeviceType::CPU, {get_world_size()}); }

Tensor leaf(const Tensor& full, const Placement& placement) {
  return distribute_tensor(full, world_mesh(), {placement}).tensor().set_requires_grad(true);
}

Tensor whole_grad(const Tensor& param) {
  EXPECT_TRUE(is_dtensor(param.grad()));
  return DTensor(param.grad()).full_tensor();
}

void gradients_equal_the_plain_ones() {
  torch::manual_seed(5);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{17, 5}, {1, 8}, {4, 6}}) {
    const Tensor full = torch::randn(sizes), factor = torch::randn(sizes);
    Tensor plain = full.clone().requires_grad_();
    (plain.pow(2) * factor).sum().backward();
    for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
      // The whole, used the same way on every rank.
      Tensor param = leaf(full, placement);
      (DTensor(param).full_tensor().pow(2) * factor).sum().backward();
      EXPECT_TRUE(torch::allclose(whole_grad(param), plain.grad()));
      EXPECT_TRUE(DTensor(param.grad()).placements() == DTensor(param).placements());

      // The parts, each rank with its own.
      param = leaf(full, placement);
      const Tensor part = distribute_tensor(factor, world_mesh(), {placement}).to_local();
      const Tensor local = DTensor(param).to_local();
      EXPECT_FALSE(is_dtensor(local));
      ((local.pow(2) * part).sum() + DTensor(param).to_local().sum()).backward();
      EXPECT_TRUE(torch::allclose(whole_grad(param), plain.grad() + 1));

      // Through another layout, twice, and accumulated.
      for (const Placement& target : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
        param = leaf(full, placement);
        const Tensor moved_factor = distribute_tensor(factor, world_mesh(), {target}).to_local();
        for (int repeat = 0; repeat < 2; ++repeat) {
          const auto moved = DTensor(param).redistribute({target});
          EXPECT_TRUE(moved.tensor().requires_grad());
          (moved.to_local().pow(2) * moved_factor).sum().backward();
        }
        EXPECT_TRUE(torch::allclose(whole_grad(param), plain.grad() * 2));
      }

      // In another dtype.
      param = leaf(full, placement);
      const Tensor wide = param.to(torch::kDouble);
      EXPECT_TRUE(is_dtensor(wide) && wide.requires_grad());
      (DTensor(wide).full_tensor().pow(2) * factor).sum().backward();
      EXPECT_TRUE(torch::allclose(whole_grad(param), plain.grad()));
      EXPECT_EQ(param.grad().scalar_type(), torch::kFloat);
    }
  }
}

RANKS_TEST(DTensorAutograd, EqualsPlainOnOneRank, 1) { gradients_equal_the_plain_ones(); }
RANKS_TEST(DTensorAutograd, EqualsPlainOnTwoRanks, 2) { gradients_equal_the_plain_ones(); }
RANKS_TEST(DTensorAutograd, EqualsPlainOnThreeRanks, 3) { gradients_equal_the_plain_ones(); }

RANKS_TEST(DTensorAutograd, FromLocal, 2) {
  for (const bool with_sizes : {true, false}) {
    Tensor local = torch::full({2, 3}, rank + 1.0).requires_grad_();
    const auto sizes = with_sizes ? std::optional(std::vector<int64_t>{4, 3}) : std::nullopt;
    const auto tensor = from_local(local * 2, world_mesh(), {Shard{0}}, sizes);
    tensor.full_tensor().pow(2).sum().backward();
    EXPECT_TRUE(torch::allclose(local.grad(), torch::full({2, 3}, 8.0 * (rank + 1))));
  }
  // A term of a sum: its gradient is that of the sum.
  Tensor term = torch::full({3}, rank + 1.0).requires_grad_();
  const auto sum = from_local(term, world_mesh(), {Partial{}}).redistribute({Shard{0}});
  sum.full_tensor().pow(2).sum().backward();
  EXPECT_TRUE(torch::allclose(term.grad(), torch::full({3}, 6.0)));
  EXPECT_FSDP2_ERROR(from_local(term, world_mesh(), {Partial{}}).to_local(), kUnsupported, "redistribute");
  // Parts of other lengths than torch.chunk's keep them in the gradient.
  Tensor uneven = torch::ones({rank == 0 ? 3 : 1, 2}).requires_grad_();
  (from_local(uneven, world_mesh(), {Shard{0}}).full_tensor() * torch::arange(8).view({4, 2})).sum().backward();
  EXPECT_TRUE(torch::allclose(uneven.grad(), torch::arange(8, torch::kFloat).view({4, 2}).narrow(0, rank == 0 ? 0 : 3,
                                                                                                 rank == 0 ? 3 : 1)));
}

RANKS_TEST(DTensorAutograd, WhatWouldLoseAGradientThrows, 2) {
  Tensor param = leaf(torch::randn({4, 4}), Shard{0});
  EXPECT_FSDP2_ERROR(param.pow(2), kUsage, "requires grad");
  EXPECT_FSDP2_ERROR(param.norm(), kUsage, "requires grad");
  EXPECT_FSDP2_ERROR(param.clone(), kUsage, "requires grad");
  EXPECT_FSDP2_ERROR(param.add_(1), kUsage, "requires grad");
  EXPECT_FSDP2_ERROR(param.to(torch::kDouble).sum(), kUsage, "requires grad");
  const Tensor number = torch::ones({}).requires_grad_();
  EXPECT_FSDP2_ERROR(param.detach() * number, kUsage, "aten::mul.Tensor");
  const double squares = DTensor(param.detach()).full_tensor().pow(2).sum().item<double>();
  EXPECT_NEAR(param.detach().pow(2).sum().item<double>(), squares, 1e-4);
  torch::NoGradGuard no_grad;
  EXPECT_NO_THROW(param.add_(1));
}

RANKS_TEST(DTensorAutograd, BackwardCalls, 2) {
  const Tensor full = torch::randn({4, 2});
  Tensor param = leaf(full, Shard{0}), other = leaf(full, Shard{0});
  const Tensor whole = DTensor(param).full_tensor();
  const Tensor loss = whole.pow(2).sum() + DTensor(other).full_tensor().sum();
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false, std::vector<Tensor>{param});
  EXPECT_TRUE(torch::allclose(whole_grad(param), 2 * DTensor(param.detach()).full_tensor()));
  EXPECT_FALSE(other.grad().defined());
  const auto grads = torch::autograd::grad({loss}, {param, other});
  EXPECT_TRUE(is_dtensor(grads[0]) && is_dtensor(grads[1]));
  EXPECT_TRUE(torch::allclose(DTensor(grads[1]).full_tensor(), torch::ones({4, 2})));

  // From a DTensor itself, and retained on the way.
  param.mutable_grad().reset();
  Tensor moved = DTensor(param).redistribute({Replicate{}}).tensor();
  EXPECT_FSDP2_ERROR(moved.backward(torch::ones({4, 2})), kUsage, "plain gradient");
  moved = DTensor(param).redistribute({Replicate{}}).tensor();
  moved.retain_grad();
  moved.backward(distribute_tensor(torch::ones({4, 2}), world_mesh(), {Replicate{}}).tensor());
  EXPECT_TRUE(torch::allclose(whole_grad(param), torch::ones({4, 2})));
  EXPECT_TRUE(is_dtensor(moved.grad()));
  param.mutable_grad().reset();
  EXPECT_FSDP2_ERROR(DTensor(param).full_tensor().pow(2).sum().backward({}, {}, /*create_graph=*/true), kUnsupported,
                     "second derivatives");
}

RANKS_TEST(DTensorAutograd, EditsBetweenForwardAndBackward, 2) {
  // What autograd saved of the whole weight is not touched by an edit of the shard.
  const Tensor full = torch::randn({4, 2});
  Tensor param = leaf(full, Shard{0});
  const Tensor input = torch::randn({3, 2}).requires_grad_();
  const Tensor output = torch::linear(input, DTensor(param).full_tensor());
  {
    torch::NoGradGuard no_grad;
    param.mul_(2);
    param.detach().add_(1);
    param.data().zero_();
  }
  output.sum().backward();
  EXPECT_TRUE(torch::allclose(input.grad(), torch::ones({3, 4}).mm(DTensor(param.detach()).full_tensor() * 0 + full)) ||
              get_rank() != 0);
  EXPECT_EQ(param.detach().abs().max().item<float>(), 0.0F);
}

}  // namespace
}  // namespace fsdp2
