// labels: ranks
// backends: gloo, shm

// Unmodified torch::optim and torch::nn::utils on DTensors against the unsharded run.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>

#include <fsdp2/clip_grad.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>

#include "fsdp/ignored_params.h"
#include "support/ranks.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2 {
namespace {

using torch::optim::Optimizer;
using Params = std::vector<Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(const Params&)>;
using Clip = std::function<double(const Params&)>;

// Uneven, even, empty on some ranks, cut on the last dim, replicated.
const std::vector<std::pair<std::vector<int64_t>, Placement>> kParams{
    {{17, 5}, Shard{0}}, {{8}, Shard{0}}, {{1, 8}, Shard{0}}, {{4, 6}, Shard{1}}, {{3}, Replicate{}}};

struct Run {
  Params plain, sharded;

  explicit Run(const DeviceMesh& mesh) {
    torch::manual_seed(3);
    for (const auto& [sizes, placement] : kParams) {
      const Tensor values = torch::randn(sizes);
      plain.push_back(values.clone().requires_grad_());
      auto tensor = distribute_tensor(values, mesh, {placement}).tensor();
      detail::spec_of(tensor)->fqn = "param" + std::to_string(sharded.size());
      sharded.push_back(tensor.set_requires_grad(true));
    }
  }

  void set_gradients(const DeviceMesh& mesh) {
    for (size_t index = 0; index < plain.size(); ++index) {
      const Tensor grad = torch::randn(kParams[index].first) * 3;
      plain[index].mutable_grad() = grad;
      sharded[index].mutable_grad() = distribute_tensor(grad, mesh, {kParams[index].second}).tensor();
    }
  }

  void expect_equal(double tolerance) const {
    for (size_t index = 0; index < plain.size(); ++index) {
      const Tensor whole = DTensor(sharded[index].detach()).full_tensor();
      EXPECT_TRUE(torch::allclose(whole, plain[index].detach(), tolerance, tolerance))
          << "parameter " << index << " differs by " << (whole - plain[index].detach()).abs().max().item<double>();
    }
  }
};

void same_as_unsharded(const MakeOptimizer& make, const Clip& clip) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {get_world_size()});
  Run run(mesh);
  auto plain = make(run.plain);
  auto sharded = make(run.sharded);
  for (int step = 0; step < 5; ++step) {
    run.set_gradients(mesh);
    const double expected = clip(run.plain);
    EXPECT_NEAR(clip(run.sharded), expected, 1e-5 * expected);
    plain->step();
    sharded->step();
    sharded->zero_grad(step % 2 == 0);
    if (step % 2 != 0) {
      EXPECT_EQ(run.sharded[0].grad().abs().max().item<double>(), 0.0);
    }
  }
  run.expect_equal(2e-6);
}

Clip stock_clip(double norm_type) {
  return [norm_type](const Params& params) { return torch::nn::utils::clip_grad_norm_(params, 1.0, norm_type); };
}
Clip own_clip(double norm_type) {
  return [norm_type](const Params& params) { return clip_grad_norm_(params, 1.0, norm_type).item<double>(); };
}

void stock_optimizers() {
  using namespace torch::optim;
  const double infinity = std::numeric_limits<double>::infinity();
  same_as_unsharded([](const Params& p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); }, stock_clip(2));
  same_as_unsharded(
      [](const Params& p) {
        return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).weight_decay(0.1).nesterov(true));
      },
      own_clip(2));
  same_as_unsharded(
      [](const Params& p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9).dampening(0.2)); },
      own_clip(infinity));
  same_as_unsharded(
      [](const Params& p) { return std::make_unique<Adam>(p, AdamOptions(0.1).amsgrad(true).weight_decay(0.01)); },
      stock_clip(infinity));
  same_as_unsharded([](const Params& p) { return std::make_unique<AdamW>(p, AdamWOptions(0.1)); }, stock_clip(3));
  same_as_unsharded([](const Params& p) { return std::make_unique<AdamW>(p, AdamWOptions(0.1).amsgrad(true)); },
                    own_clip(3));
  same_as_unsharded([](const Params& p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.1).weight_decay(0.1)); },
                    own_clip(1));
  same_as_unsharded(
      [](const Params& p) {
        return std::make_unique<RMSprop>(p, RMSpropOptions(0.1).centered(true).momentum(0.5).weight_decay(0.1));
      },
      own_clip(2.5));
}

RANKS_TEST(Optimizers, EqualUnshardedOnOneRank, 1) { stock_optimizers(); }
RANKS_TEST(Optimizers, EqualUnshardedOnTwoRanks, 2) { stock_optimizers(); }
RANKS_TEST(Optimizers, EqualUnshardedOnThreeRanks, 3) { stock_optimizers(); }

RANKS_TEST(Optimizers, StateMadeBeforeShardingIsRefused, 2) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  torch::nn::Linear layer(4, 6);
  torch::optim::Adagrad optimizer(layer->parameters(), torch::optim::AdagradOptions(0.1));
  distribute_parameter(layer, "weight", mesh, {Shard{0}});
  layer->weight.mutable_grad() = distribute_tensor(torch::ones({6, 4}), mesh, {Shard{0}}).tensor();
  EXPECT_FSDP2_ERROR(optimizer.step(), kUsage, "make the optimizer after");
}

RANKS_TEST(Optimizers, LbfgsIsRefusedByName, 2) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  torch::nn::Linear layer(4, 6);
  distribute_parameter(layer, "weight", mesh, {Shard{0}});
  torch::optim::LBFGS optimizer(std::vector<Tensor>{layer->weight});
  const auto closure = [&]() -> Tensor {
    const Tensor loss = DTensor(layer->weight).full_tensor().pow(2).sum();
    loss.backward();
    return loss;
  };
  EXPECT_FSDP2_ERROR(optimizer.step(closure), kUnsupported, "aten::view");
}

RANKS_TEST(Optimizers, PartialGradientsAreRefused, 2) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  const auto fresh = [&] {
    torch::nn::Linear layer(torch::nn::LinearOptions(4, 6).bias(false));
    distribute_parameter(layer, "weight", mesh, {Shard{0}});
    layer->weight.mutable_grad() = from_local(torch::ones({6, 4}), mesh, {Partial{}}).tensor();
    return layer;
  };
  const std::vector<MakeOptimizer> optimizers{
      [](const Params& p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1)); },
      [](const Params& p) {
        return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9));
      },
      // Without weight decay, which AdamW applies before it looks at the gradient.
      [](const Params& p) {
        return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.1).weight_decay(0));
      },
      [](const Params& p) { return std::make_unique<torch::optim::Adam>(p); },
      [](const Params& p) { return std::make_unique<torch::optim::Adagrad>(p); },
      [](const Params& p) { return std::make_unique<torch::optim::RMSprop>(p); }};
  for (const auto& make : optimizers) {
    auto layer = fresh();
    auto optimizer = make(layer->parameters());
    const Tensor before = DTensor(layer->weight.detach()).full_tensor();
    EXPECT_FSDP2_ERROR(optimizer->step(), kUsage, "synchronize_gradients()");
    EXPECT_TRUE(torch::equal(DTensor(layer->weight.detach()).full_tensor(), before));
    EXPECT_FSDP2_ERROR(clip_grad_norm_(layer->parameters(), 1.0), kUsage, "synchronize_gradients()");
    EXPECT_FSDP2_ERROR(torch::nn::utils::clip_grad_norm_(layer->parameters(), 1.0), kUsage, "synchronize_gradients()");
    optimizer->zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(DTensor(layer->weight.grad()).to_local().abs().max().item<float>(), 0.0F);
    optimizer->zero_grad();
    EXPECT_FALSE(layer->weight.grad().defined());
  }
}

RANKS_TEST(ClipGrad, CountsEveryElementOnce, 4) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2, 2}, {"replicate", "shard"});
  const auto line = mesh["shard"];
  torch::manual_seed(1);
  Params params, grads;
  const auto add = [&](const DeviceMesh& on, std::vector<Placement> placements, std::vector<int64_t> sizes,
                       c10::ScalarType dtype) {
    const Tensor grad = torch::randn(sizes).to(dtype);
    Tensor param = distribute_tensor(torch::zeros(sizes, dtype), on, placements).tensor().set_requires_grad(true);
    param.mutable_grad() = distribute_tensor(grad, on, std::move(placements)).tensor();
    params.push_back(param);
    grads.push_back(grad.to(at::kDouble).flatten());
  };
  add(mesh, {Replicate{}, Shard{0}}, {7, 3}, at::kFloat);
  add(mesh, {Shard{0}, Shard{0}}, {5, 2}, at::kFloat);
  add(mesh, {Shard{1}, Replicate{}}, {3, 5}, at::kFloat);
  add(mesh, {Replicate{}, Replicate{}}, {4}, at::kBFloat16);
  add(line, {Shard{0}}, {1, 6}, at::kFloat);
  add(line, {Replicate{}}, {6}, at::kFloat);
  params.push_back(params[0]);  // a tied parameter counts once
  Tensor ignored = torch::ones({2}).requires_grad_();
  ignored.mutable_grad() = torch::full({2}, 2.0);
  params.push_back(ignored);
  EXPECT_FSDP2_ERROR(clip_grad_norm_(params, 1.0), kUsage, "parameter 7 of shape [2]");
  detail::add_ignored_param(ignored);
  grads.push_back(torch::full({2}, 2.0, at::kDouble));
  const Tensor whole = torch::cat(grads);
  for (const double order : {2.0, 1.0, 3.0, 0.0, std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()}) {
    const Tensor total = clip_grad_norm_(params, 1e9, order);
    EXPECT_FALSE(is_dtensor(total));
    EXPECT_EQ(total.dim(), 0);
    const double expected = torch::linalg_vector_norm(whole, order).item<double>();
    EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected + 1e-9) << order;
  }
  const double norm = whole.norm().item<double>();
  clip_grad_norm_(params, norm / 2);
  EXPECT_NEAR(clip_grad_norm_(params, 1e9).item<double>(), norm / 2, 1e-3 * norm);
  EXPECT_NEAR(ignored.grad()[0].item<double>(), 1.0, 1e-5);
}

RANKS_TEST(ClipGrad, NotANumberOnOneRankIsSeenByAll, 2) {
  const auto mesh = init_device_mesh(c10::DeviceType::CPU, {2});
  Tensor param = distribute_tensor(torch::zeros({4, 2}), mesh, {Shard{0}}).tensor().set_requires_grad(true);
  for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
    Tensor local = torch::ones({2, 2});
    if (rank == 1) local[0][0] = std::numeric_limits<float>::quiet_NaN();
    param.mutable_grad() = from_local(local, mesh, {Shard{0}}).tensor();
    EXPECT_FSDP2_ERROR(clip_grad_norm_({param}, 1.0, order, /*error_if_nonfinite=*/true), kInvalidArgument, "nan");
    EXPECT_EQ(local[1][1].item<float>(), 1.0F);
    EXPECT_TRUE(std::isnan(clip_grad_norm_({param}, 1.0, order).item<double>()));
    EXPECT_TRUE(std::isnan(local[1][1].item<float>()));
  }
}

RANKS_TEST(ClipGrad, PlainParametersAlone, 1) {
  Tensor param = torch::zeros({4}).requires_grad_();
  param.mutable_grad() = torch::full({4}, 3.0);
  EXPECT_NEAR(clip_grad_norm_({param}, 3.0).item<double>(), 6.0, 1e-6);
  EXPECT_NEAR(param.grad()[0].item<double>(), 1.5, 1e-5);
  EXPECT_EQ(clip_grad_norm_({torch::zeros({2}).requires_grad_()}, 1.0).item<double>(), 0.0);
  EXPECT_FSDP2_ERROR(clip_grad_norm_({param}, -1.0), kInvalidArgument, "max_norm");
}

}  // namespace
}  // namespace fsdp2
