// labels: ranks
// Faults that users of FSDP2 reported about gradients on their way to the optimizer: row 2 (torchtitan#2972) a divide
// factor on Gloo, row 8 (pytorch#180666) hooks and offload, row 9 (pytorch#180665) HSDP and offload, row 11
// (pytorch#125484) HSDP accumulation; and row 16 (pytorch#149029) a root that ignores reshard_after_forward.

#include <cstdlib>
#include <map>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

fsdp2::DeviceMesh hsdp_mesh(int64_t replicas, int64_t shards) {
  return fsdp2::init_device_mesh(torch::kCPU, {replicas, shards}, {"replicate", "shard"});
}

void fill(const Linear& layer, double value) {
  torch::NoGradGuard no_grad;
  layer->weight.fill_(value);
}

// ---- Row 2

struct TwoImpl : torch::nn::Module {
  TwoImpl() {
    child = register_module("child", linear(4, 4));
    layer = register_module("layer", linear(4, 2));
    fill(child, 0.25);  // its output is its input
    fill(layer, 1);
  }
  Tensor forward(const Tensor& x) { return layer(child(x)); }
  Linear child{nullptr}, layer{nullptr};
};
FSDP2_MODULE(Two);

void expect_divided_once(int rank, const std::optional<fsdp2::DeviceMesh>& mesh) {
  const double ranks = fsdp2::get_world_size(), sum = ranks * (ranks + 1) / 2;
  for (const auto reduce_dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    for (const double factor : {1.0, 4.0, 2.0, 0.5}) {
      for (const bool force_sum : {false, true}) {
        const fsdp2::FullyShardOptions options{.mesh = mesh, .mp_policy = {.reduce_dtype = reduce_dtype}};
        Two model;
        fsdp2::fully_shard(model->child, options);
        auto root = fsdp2::fully_shard(model, options);
        root.set_gradient_divide_factor(factor);
        root.set_force_sum_reduction_for_comms(force_sum);
        model(torch::full({1, 4}, rank + 1.0)).sum().backward();
        const std::string where = c10::str(reduce_dtype, " factor ", factor, " force sum ", force_sum);
        EXPECT_EQ(max_difference(whole(model->layer->weight.grad()), torch::full({2, 4}, sum / factor)), 0) << where;
        // Only the groups of the module that was asked: its child keeps the average.
        EXPECT_EQ(max_difference(whole(model->child->weight.grad()), torch::full({4, 4}, 2 * sum / ranks)), 0) << where;
      }
    }
  }
}

RANKS_TEST(Row02, ADivideFactorReplacesTheNumberOfRanks, 2) { expect_divided_once(rank, {}); }
RANKS_TEST(Row02, AlsoOnOneRank, 1) { expect_divided_once(rank, {}); }
RANKS_TEST(Row02, AlsoOverReplicasAndShards, 4) {
  const std::pair<int, int> shapes[] = {{2, 2}, {4, 1}, {1, 4}};
  for (const auto& [replicas, shards] : shapes) {
    expect_divided_once(rank, hsdp_mesh(replicas, shards));
  }
}

RANKS_TEST(Row02, FactorsThatAreNoDivisorsAreRefused, 1) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_FSDP2_ERROR(handle.set_gradient_divide_factor(factor), kInvalidArgument, "factor");
  }
}

// ---- Rows 8 and 9

struct ThreeImpl : torch::nn::Module {
  ThreeImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("l" + std::to_string(i), linear(6, 6, true)));
  }
  Tensor forward(Tensor x) {
    for (Linear& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<Linear> layers;
};
FSDP2_MODULE(Three);

struct Twins {
  Three model, reference;
};

Twins make_twins(const fsdp2::FullyShardOptions& options) {
  torch::manual_seed(11);
  Twins twins;
  copy_state(*twins.model, *twins.reference);
  for (Linear& layer : twins.model->layers) fsdp2::fully_shard(layer, options);
  fsdp2::fully_shard(twins.model, options);
  return twins;
}

/// Backward of this rank's part, and of the whole batch in the reference.
void backward(Twins& twins, int rank) {
  const int size = fsdp2::get_world_size();
  const Tensor all = torch::randn({2 * size, 6});
  twins.model(all.narrow(0, 2 * rank, 2)).square().mean().backward();
  twins.reference(all).square().mean().backward();
}

void expect_equal_gradients(const Twins& twins, double tolerance, const std::string& where) {
  const auto params = twins.model->named_parameters();
  for (const auto& named : twins.reference->named_parameters()) {
    const Tensor grad = params[named.key()].grad();
    ASSERT_TRUE(grad.defined()) << named.key() << " " << where;
    EXPECT_LE(max_difference(whole(grad), named.value().grad()), tolerance) << named.key() << " " << where;
  }
}

fsdp2::FullyShardOptions offloaded(std::optional<fsdp2::DeviceMesh> mesh = {}) {
  return {.mesh = std::move(mesh), .offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false}};
}

RANKS_TEST(Row08, HooksSeeTheFinalShardedGradientOncePerBackward, 2) {
  for (const bool offload : {false, true}) {
    Twins twins = make_twins(offload ? offloaded() : fsdp2::FullyShardOptions{});
    auto root = fsdp2::fsdp_module(twins.model);
    std::map<std::string, std::vector<Tensor>> seen;
    for (const auto& named : twins.model->named_parameters()) {
      fsdp2::register_post_accumulate_grad_hook(named.value(), [&seen, name = named.key()](Tensor& param) {
        ASSERT_TRUE(fsdp2::is_dtensor(param.grad()));
        seen[name].push_back(fsdp2::DTensor(param.grad()).to_local().clone());
      });
    }
    for (const bool sync : {true, false, true}) {  // the third reduces what the second kept, on top of the first
      root.set_requires_gradient_sync(sync);
      seen.clear();
      backward(twins, rank);
      if (!sync) {
        EXPECT_TRUE(seen.empty());
        continue;
      }
      expect_equal_gradients(twins, 1e-6, "offload " + std::to_string(offload));
      for (const auto& named : twins.model->named_parameters()) {
        ASSERT_EQ(seen[named.key()].size(), 1u) << named.key();
        const Tensor local = fsdp2::DTensor(named.value().grad()).to_local();
        EXPECT_EQ(max_difference(seen[named.key()][0], local), 0) << named.key();
      }
    }
  }
}

RANKS_TEST(Row08, AnOptimizerInBackwardTrainsLikeOneAfterIt, 2) {
  for (const bool offload : {false, true}) {
    Twins twins = make_twins(offload ? offloaded() : fsdp2::FullyShardOptions{});
    std::vector<std::unique_ptr<torch::optim::AdamW>> optimizers;
    for (Tensor& param : twins.model->parameters()) {
      optimizers.push_back(std::make_unique<torch::optim::AdamW>(std::vector<Tensor>{param}, 0.01));
      fsdp2::register_post_accumulate_grad_hook(param, [optimizer = optimizers.back().get()](Tensor&) {
        optimizer->step();
        optimizer->zero_grad();
      });
    }
    torch::optim::AdamW expected(twins.reference->parameters(), 0.01);
    for (int step = 0; step < 4; ++step) {
      backward(twins, rank);
      expected.step();
      expected.zero_grad();
      const auto params = twins.model->named_parameters();
      for (const auto& named : twins.reference->named_parameters()) {
        EXPECT_FALSE(params[named.key()].grad().defined());
        EXPECT_LE(max_difference(whole(params[named.key()]), named.value().detach()), 1e-5) << named.key();
      }
    }
  }
}

void expect_right_offloaded_gradients(int rank, int64_t replicas, int64_t shards) {
  // What is freed is filled with NaN, so that a copy that reads it too late is seen.
  ::setenv("FSDP2_DEBUG_POISON", "1", 1);
  for (const auto reduce_dtype : {std::optional<at::ScalarType>(), std::optional(torch::kBFloat16)}) {
    auto options = offloaded(hsdp_mesh(replicas, shards));
    options.mp_policy.reduce_dtype = reduce_dtype;
    Twins twins = make_twins(options);
    for (int i = 0; i < 20; ++i) {
      backward(twins, rank);
      expect_equal_gradients(twins, reduce_dtype ? 2e-3 : 1e-6, "backward " + std::to_string(i));
      const Tensor& param = twins.model->layers[0]->weight;
      EXPECT_TRUE(fsdp2::DTensor(param.grad()).to_local().device().is_cpu());
      twins.model->zero_grad();
      twins.reference->zero_grad();
    }
  }
}

RANKS_TEST(Row09, OffloadedGradientsOfReplicasAreRight, 2) { expect_right_offloaded_gradients(rank, 2, 1); }
RANKS_TEST(Row09, AlsoWhereReplicasAreSharded, 4) { expect_right_offloaded_gradients(rank, 2, 2); }

// ---- Row 11

enum Mode { kReduceAndAllReduce, kReduceOnly, kNothing };

void set_mode(fsdp2::FSDPModule& root, Mode mode) {
  root.set_requires_gradient_sync(mode != kNothing);
  root.set_requires_all_reduce(mode == kReduceAndAllReduce);
}

void expect_accumulated(int rank, int64_t replicas, int64_t shards) {
  constexpr int kGroups = 3;
  for (const Mode early : {kReduceAndAllReduce, kReduceOnly, kNothing}) {
    Twins twins = make_twins({.mesh = hsdp_mesh(replicas, shards)});
    auto root = fsdp2::fsdp_module(twins.model);
    for (int i = 0; i < 3; ++i) {
      const Mode mode = i < 2 ? early : kReduceAndAllReduce;
      set_mode(root, mode);
      fsdp2::reset_counters();
      backward(twins, rank);
      EXPECT_EQ(fsdp2::counters().reduce_scatters, mode == kNothing || shards == 1 ? 0 : kGroups) << "mode " << mode;
      EXPECT_EQ(fsdp2::counters().all_reduces, mode == kReduceAndAllReduce ? kGroups : 0) << "mode " << mode;
    }
    expect_equal_gradients(twins, 1e-6, "mode " + std::to_string(early));
  }
}

RANKS_TEST(Row11, EarlierMicroBatchesAreInTheSumOverReplicas, 2) { expect_accumulated(rank, 2, 1); }
RANKS_TEST(Row11, AlsoWhereReplicasAreSharded, 4) { expect_accumulated(rank, 2, 2); }

RANKS_TEST(Row11, WhatWasReducedOnceIsNotReducedAgain, 2) {
  // By hand, inputs rank + 1: each average is 1.5 a micro-batch, in whatever order the three modes come.
  const Mode orders[][3] = {{kReduceOnly, kNothing, kReduceAndAllReduce},
                            {kNothing, kReduceOnly, kReduceAndAllReduce},
                            {kReduceAndAllReduce, kReduceOnly, kReduceAndAllReduce}};
  for (const auto& order : orders) {
    Linear layer = linear(4, 2);
    fill(layer, 1);
    auto root = fsdp2::fully_shard(layer, {.mesh = hsdp_mesh(2, 1)});
    for (const Mode mode : order) {
      set_mode(root, mode);
      layer(torch::full({1, 4}, rank + 1.0)).sum().backward();
    }
    EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({2, 4}, 4.5)), 0);
  }
}

RANKS_TEST(Row11, SettingsOfAModuleThatIsNotShardedAreRefused, 1) {
  Linear plain = linear(2, 2);
  EXPECT_FSDP2_ERROR(fsdp2::fsdp_module(plain).set_requires_gradient_sync(false), kUsage, "not given to fully_shard");
}

// ---- Row 16

RANKS_TEST(Row16, RootsFollowTheirSettingWithAndWithoutGradients, 2) {
  constexpr int64_t kBytes = 6 * 6 * 4;
  const Tensor x = torch::ones({1, 6});
  for (const bool with_grad : {false, true}) {
    torch::AutoGradMode mode(with_grad);
    const std::pair<fsdp2::ReshardAfterForward, int64_t> cases[] = {
        {std::nullopt, kBytes}, {true, 0}, {false, kBytes}, {1, kBytes}, {2, 0}};
    for (const auto& [setting, expected] : cases) {
      Linear first = linear(6, 6), second = linear(6, 6);  // two roots, independent of each other
      auto of_first = fsdp2::fully_shard(first, {.reshard_after_forward = setting});
      auto of_second = fsdp2::fully_shard(second, {.reshard_after_forward = setting});
      const Tensor y = first(x);
      EXPECT_EQ(fsdp2::counters().unsharded_bytes, expected) << "with gradients " << with_grad;
      EXPECT_EQ(fsdp2::is_dtensor(first->weight), expected == 0);
      const Tensor z = second(y);
      EXPECT_EQ(fsdp2::counters().unsharded_bytes, 2 * expected) << "with gradients " << with_grad;
      if (with_grad) {
        z.sum().backward();
        EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
        EXPECT_TRUE(fsdp2::is_dtensor(first->weight));
      }
    }
  }
}

RANKS_TEST(Row16, TheSettingChangesAtRunTime, 2) {
  constexpr int64_t kBytes = 6 * 6 * 4;
  torch::NoGradGuard no_grad;
  Linear root = linear(6, 6);
  auto handle = fsdp2::fully_shard(root);
  const Tensor x = torch::ones({1, 6});
  root(x);
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, kBytes);
  for (const bool reshard : {true, false, true}) {
    handle.set_reshard_after_forward(reshard);
    root(x);
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, reshard ? 0 : kBytes);
  }
}

}  // namespace
