// labels: ranks
// backends: gloo, shm

// Random values do not depend on how a tensor is distributed.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>

#include "support/ranks.h"

namespace fsdp2 {
namespace {

using Fill = std::function<void(Tensor&)>;

void fills_equal_the_unsharded_ones() {
  torch::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {get_world_size()});
  const std::vector<Fill> fills{
      [](Tensor& t) { t.uniform_(-2, 3); },
      [](Tensor& t) { t.normal_(1, 2); },
      [](Tensor& t) { t.bernoulli_(0.3); },
      [](Tensor& t) { t.random_(); },
      [](Tensor& t) { t.random_(7); },
      [](Tensor& t) { t.random_(-3, 7); },
      [](Tensor& t) { t.exponential_(2); },
      [](Tensor& t) { t.cauchy_(); },
      [](Tensor& t) { t.log_normal_(); },
      [](Tensor& t) { t.geometric_(0.4); },
      [](Tensor& t) { t.normal_(0, 1, at::detail::createCPUGenerator(21)); },
      [](Tensor& t) { torch::nn::init::constant_(t, 0.5); },
      [](Tensor& t) { torch::nn::init::ones_(t); },
      [](Tensor& t) { torch::nn::init::uniform_(t); },
      [](Tensor& t) { torch::nn::init::normal_(t); },
      [](Tensor& t) { torch::nn::init::xavier_uniform_(t); },
      [](Tensor& t) { torch::nn::init::xavier_normal_(t); },
      [](Tensor& t) { torch::nn::init::kaiming_uniform_(t, std::sqrt(5)); },
      [](Tensor& t) { torch::nn::init::kaiming_normal_(t); },
      [](Tensor& t) { t.copy_(torch::randn_like(t)); },
      [](Tensor& t) { t.copy_(torch::rand_like(t)); },
  };
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{17, 5}, {1, 8}, {40, 3}}) {
    for (const Placement& placement : {Placement(Shard{0}), Placement(Shard{1}), Placement(Replicate{})}) {
      Tensor plain = torch::zeros(sizes);
      Tensor sharded = distribute_tensor(plain, mesh, {placement}).tensor();
      torch::manual_seed(7);
      for (const auto& fill : fills) fill(plain);
      torch::manual_seed(7);
      for (const auto& fill : fills) fill(sharded);
      EXPECT_TRUE(torch::equal(DTensor(sharded).full_tensor(), plain));
      for (size_t index = 0; index < fills.size(); ++index) {
        torch::manual_seed(100 + index);
        fills[index](plain);
        torch::manual_seed(100 + index);
        fills[index](sharded);
        EXPECT_TRUE(torch::equal(DTensor(sharded).full_tensor(), plain)) << "fill " << index << " on " << sizes;
      }
      // The generator has moved as far as without sharding.
      const Tensor next = torch::rand({3});
      torch::manual_seed(100 + fills.size() - 1);
      fills.back()(plain);
      EXPECT_TRUE(torch::equal(torch::rand({3}), next));
    }
  }
}

RANKS_TEST(RandomFills, EqualUnshardedOnOneRank, 1) { fills_equal_the_unsharded_ones(); }
RANKS_TEST(RandomFills, EqualUnshardedOnTwoRanks, 2) { fills_equal_the_unsharded_ones(); }
RANKS_TEST(RandomFills, EqualUnshardedOnThreeRanks, 3) { fills_equal_the_unsharded_ones(); }

RANKS_TEST(RandomFills, DifferentStatesAreAnError, 3) {
  torch::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {3});
  for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})}) {
    Tensor tensor = distribute_tensor(torch::zeros({6, 2}), mesh, {placement}).tensor();
    torch::manual_seed(rank == 1 ? 2 : 1);
    EXPECT_FSDP2_ERROR(tensor.normal_(), kUsage, "rank(s) 1");
    torch::manual_seed(1);
    if (rank == 2) torch::rand({1});
    EXPECT_FSDP2_ERROR(tensor.uniform_(), kUsage, "rank(s) 2");
    EXPECT_EQ(tensor.abs().max().item<float>(), 0.0F);
    EXPECT_FSDP2_ERROR(tensor.normal_(0, 1, at::detail::createCPUGenerator(rank)), kUsage, "generator");
  }
}

RANKS_TEST(RandomFills, WhatOnlyFillsPartsIsRefused, 2) {
  torch::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  Tensor tensor = distribute_tensor(torch::zeros({6, 4}), mesh, {Shard{0}}).tensor();
  EXPECT_THROW(torch::nn::init::orthogonal_(tensor), Error);
  EXPECT_THROW(torch::nn::init::eye_(tensor), Error);
  EXPECT_THROW(torch::nn::init::sparse_(tensor, 0.5), Error);
  EXPECT_THROW(torch::dropout(tensor, 0.5, true), Error);
  EXPECT_THROW(torch::bernoulli(tensor), Error);
  EXPECT_THROW(torch::multinomial(tensor, 1), Error);
  const Tensor meta = distribute_tensor(torch::empty({6, 4}, torch::kMeta), mesh, {Shard{0}}).tensor();
  EXPECT_NO_THROW(meta.detach().normal_());
}

}  // namespace
}  // namespace fsdp2
