// labels: ranks

// fsdp2::optim against stock optimizers on whole tensors, what it refuses, and state that goes from one to the other.

#include <fsdp2/fsdp2.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <sstream>

#include "dcp/same.h"
#include "support/ranks.h"
#include "support/tensors.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::testing {
namespace {

using torch::Tensor;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::Optimizer;
using torch::optim::SGDOptions;
using Params = std::vector<Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(const Params&)>;

struct Case {
  std::string name;
  MakeOptimizer stock, ours;
};

template <class Stock, class Ours, class Options>
Case make_case(std::string name, Options options) {
  return {std::move(name), [options](const Params& p) { return std::make_unique<Stock>(p, options); },
          [options](const Params& p) { return std::make_unique<Ours>(p, options); }};
}

std::vector<Case> cases() {
  const auto adamw = make_case<torch::optim::AdamW, optim::AdamW, AdamWOptions>;
  const auto adam = make_case<torch::optim::Adam, optim::Adam, AdamOptions>;
  const auto sgd = make_case<torch::optim::SGD, optim::SGD, SGDOptions>;
  return {
      adamw("AdamW", AdamWOptions(0.1)),
      adamw("AdamW amsgrad", AdamWOptions(0.1).amsgrad(true).betas({0.5, 0.7}).eps(1e-3).weight_decay(0.2)),
      adamw("AdamW no decay", AdamWOptions(0.1).weight_decay(0)),
      adam("Adam", AdamOptions(0.1)),
      adam("Adam amsgrad", AdamOptions(0.1).amsgrad(true).betas({0.5, 0.7}).eps(1e-3).weight_decay(0.2)),
      sgd("SGD", SGDOptions(0.1)),
      sgd("SGD decay", SGDOptions(0.1).weight_decay(0.2)),
      sgd("SGD momentum", SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.2)),
      sgd("SGD Nesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
  };
}

// Uneven, even, empty on some ranks, cut on the last dim, replicated.
const std::vector<std::pair<std::vector<int64_t>, Placement>> kParams{
    {{17, 5}, Shard{0}}, {{8}, Shard{0}}, {{1, 8}, Shard{0}}, {{4, 6}, Shard{1}}, {{3}, Replicate{}}};

/// The same values whole and distributed.
struct Run {
  DeviceMesh mesh = init_device_mesh(c10::kCPU, {get_world_size()});
  Params plain, sharded;

  explicit Run(at::ScalarType dtype) {
    torch::manual_seed(3);
    for (const auto& [sizes, placement] : kParams) {
      const Tensor values = torch::randn(sizes).to(dtype);
      plain.push_back(values.clone().requires_grad_());
      sharded.push_back(distribute_tensor(values, mesh, {placement}).tensor().set_requires_grad(true));
    }
  }
  void set_gradients() {
    for (size_t index = 0; index < plain.size(); ++index) {
      const Tensor grad = torch::randn(kParams[index].first).to(plain[index].scalar_type());
      plain[index].mutable_grad() = grad;
      sharded[index].mutable_grad() = distribute_tensor(grad, mesh, {kParams[index].second}).tensor();
    }
  }
};

void expect_close(const Params& actual, const Params& expected, double tolerance, const std::string& where) {
  for (size_t index = 0; index < actual.size(); ++index) {
    const Tensor a = whole(actual[index]).to(at::kDouble), b = whole(expected[index]).to(at::kDouble);
    EXPECT_TRUE(torch::allclose(a, b, tolerance, tolerance))
        << where << ", parameter " << index << " differs by " << max_difference(a, b);
  }
}

void equals_stock() {
  for (const Case& test : cases()) {
    for (const auto& [dtype, tolerance] : {std::pair(at::kFloat, 3e-6), {at::kDouble, 1e-12}}) {
      Run run(dtype);
      Params plain;
      for (const Tensor& param : run.plain) plain.push_back(param.detach().clone().requires_grad_());
      const auto stock = test.stock(run.plain), ours = test.ours(plain), sharded = test.ours(run.sharded);
      for (int step = 0; step < 5; ++step) {
        run.set_gradients();
        for (size_t index = 0; index < plain.size(); ++index) plain[index].mutable_grad() = run.plain[index].grad();
        if (step == 2) {  // one is left alone, its step count as well
          for (const Params* params : {&plain, &run.plain, &run.sharded}) (*params)[1].mutable_grad().reset();
        }
        for (Optimizer* optimizer : {stock.get(), ours.get(), sharded.get()}) {
          optimizer->param_groups()[0].options().set_lr(0.1 / (1 + step));
          optimizer->step();
        }
      }
      expect_close(plain, run.plain, tolerance, test.name);
      expect_close(run.sharded, run.plain, tolerance, test.name + " sharded");
      EXPECT_EQ(sharded->state().size(), stock->state().size()) << test.name;
    }
  }
}

RANKS_TEST(Optim, EqualsStockOnOneRank, 1) { equals_stock(); }
RANKS_TEST(Optim, EqualsStockOnTwoRanks, 2) { equals_stock(); }
RANKS_TEST(Optim, EqualsStockOnThreeRanks, 3) { equals_stock(); }

/// Small, with a state of every kind.
Tensor param_of(const std::vector<int64_t>& sizes, at::ScalarType dtype = at::kFloat) {
  Tensor param = torch::linspace(-1, 1, c10::multiply_integers(sizes)).reshape(sizes).to(dtype).requires_grad_();
  param.mutable_grad() = torch::full(sizes, 0.5, dtype);
  return param;
}

TEST(Optim, AnyStrides) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    for (const Case& test : cases()) {
      const auto make = [] {
        torch::manual_seed(1);
        const Tensor base = torch::randn({4, 6});
        Params params{torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast), base.clone().t(),
                      base.clone().slice(1, 0, 6, 2), torch::randn({}), torch::randn({0, 3})};
        for (Tensor& param : params) param = param.detach().requires_grad_();
        return params;
      };
      const Params expected = make(), actual = make();
      const auto stock = test.stock(expected), ours = test.ours(actual);
      for (int step = 0; step < 3; ++step) {
        for (size_t index = 0; index < actual.size(); ++index) {
          Tensor grad = torch::randn(actual[index].sizes());
          if (index == 0 && step != 1) grad = grad.contiguous(at::MemoryFormat::ChannelsLast);
          actual[index].mutable_grad() = expected[index].mutable_grad() = grad;
        }
        const auto versions = [&] { return std::pair(actual[0]._version(), actual[2]._version()); };
        const auto before = versions();
        stock->step();
        ours->step();
        EXPECT_NE(versions().first, before.first);
        EXPECT_NE(versions().second, before.second);
      }
      expect_close(actual, expected, 3e-6, test.name);
      EXPECT_EQ(actual[1].strides(), expected[1].strides());
    }
  }));
}

RANKS_TEST(Optim, WritesAreCounted, 2) {
  const auto mesh = init_device_mesh(c10::kCPU, {2});
  Tensor param = distribute_tensor(torch::ones({5, 3}), mesh, {Shard{0}}).tensor().set_requires_grad(true);
  param.mutable_grad() = distribute_tensor(torch::ones({5, 3}), mesh, {Shard{0}}).tensor();
  for (const Case& test : cases()) {
    const auto optimizer = test.ours({param});
    const auto before = detail::local_of(param)._version();
    optimizer->step();
    EXPECT_GT(detail::local_of(param)._version(), before) << test.name;
    for (const auto& [key, state] : optimizer->state()) {
      if (auto* adam = dynamic_cast<AdamWParamState*>(state.get())) {
        EXPECT_TRUE(detail::spec_of(adam->exp_avg())->same_layout(*detail::spec_of(param)));
        EXPECT_EQ(adam->step(), 1);
      }
    }
  }
}

TEST(Optim, ClosuresGroupsAndZeroGrad) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    Tensor a = param_of({3}), b = param_of({2});
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Params{a}, std::make_unique<SGDOptions>(SGDOptions(0.5)));
    groups.emplace_back(Params{b}, std::make_unique<SGDOptions>(SGDOptions(0.25).weight_decay(1)));
    optim::SGD optimizer(groups, SGDOptions(1.0));
    const Tensor b_before = b.detach().clone(), a_before = a.detach().clone();
    const Tensor loss = optimizer.step([&] {
      EXPECT_TRUE(at::GradMode::is_enabled());
      return a.sum();
    });
    EXPECT_TRUE(loss.requires_grad());
    EXPECT_TRUE(torch::allclose(a.detach(), a_before - 0.25));
    EXPECT_TRUE(torch::allclose(b.detach(), b_before - 0.25 * (0.5 + b_before)));
    optimizer.zero_grad();
    EXPECT_FALSE(a.grad().defined());
    optimizer.step();  // nothing to do
    EXPECT_TRUE(torch::allclose(a.detach(), a_before - 0.25));
    EXPECT_THROW(optim::AdamW({a}, AdamWOptions(-1.0)), c10::Error);
  }));
}

/// An error leaves parameters, step counts and state as they were.
void expect_refused(const MakeOptimizer& make, const Params& params, ErrorCode code, const std::string& text) {
  Params good{param_of({4})};
  good.insert(good.end(), params.begin(), params.end());
  const Tensor before = good[0].detach().clone();
  const auto optimizer = make(good);
  try {
    optimizer->step();
    ADD_FAILURE() << "no error of " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
  EXPECT_TRUE(good[0].detach().equal(before));
  EXPECT_TRUE(optimizer->state().empty());
}

RANKS_TEST(Optim, WhatIsRefused, 2) {
  const auto mesh = init_device_mesh(c10::kCPU, {2});
  const auto sharded = [&](const Tensor& full) { return distribute_tensor(full, mesh, {Shard{0}}).tensor(); };
  const auto with_grad = [](Tensor param, const Tensor& grad) {
    param.set_requires_grad(true);
    param.mutable_grad() = grad;
    return param;
  };
  const Tensor ones = torch::ones({6, 4});
  for (const Case& test : cases()) {
    const auto refused = [&](Tensor param, const Tensor& grad, ErrorCode code, const std::string& text) {
      expect_refused(test.ours, {with_grad(std::move(param), grad)}, code, text);
    };
    refused(sharded(ones), from_local(ones, mesh, {Partial{}}).tensor(), ErrorCode::kUsage, "synchronize_gradients()");
    refused(ones.clone(), sharded(ones), ErrorCode::kUsage, "call reshard() on its module first");
    refused(sharded(ones), ones, ErrorCode::kUsage, "it must be a DTensor like its parameter");
    refused(sharded(ones), distribute_tensor(ones, mesh, {Shard{1}}).tensor(), ErrorCode::kUsage, "another layout");
    refused(ones.clone(), torch::eye(6).slice(1, 0, 4).to_sparse(), ErrorCode::kUnsupported, "dense");
    refused(torch::ones({2}, at::kComplexFloat), torch::ones({2}, at::kComplexFloat), ErrorCode::kUnsupported,
            "parameter 1 of group 0 of shape [2]");
    // Autograd does not let one set such gradients, but what autograd does not see may become one.
    Tensor other = with_grad(ones.clone(), ones.clone());
    other.mutable_grad().unsafeGetTensorImpl()->shallow_copy_from(ones.to(at::kBFloat16).getIntrusivePtr());
    expect_refused(test.ours, {other}, ErrorCode::kInvalidArgument, "BFloat16");
  }
}

TEST(Optim, ARefusedStepLeavesTheStateOfEarlierOnes) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    for (const Case& test : cases()) {
      Tensor stepped = param_of({4}), fresh = param_of({3}), sparse = param_of({2});
      fresh.mutable_grad().reset();
      sparse.mutable_grad().reset();
      const auto optimizer = test.ours({stepped, fresh, sparse});
      optimizer->step();
      const size_t size = optimizer->state().size();
      EXPECT_LE(size, 1u);
      fresh.mutable_grad() = torch::ones({3});
      sparse.mutable_grad() = torch::ones({2}).to_sparse();
      EXPECT_FSDP2_ERROR(optimizer->step(), kUnsupported, "dense");
      EXPECT_EQ(optimizer->state().size(), size) << test.name;
      for (const auto& [key, state] : optimizer->state()) {
        EXPECT_EQ(key, stepped.unsafeGetTensorImpl());
        if (auto* adam = dynamic_cast<AdamWParamState*>(state.get())) {
          EXPECT_EQ(adam->step(), 1);
        }
      }
      sparse.mutable_grad().reset();
      optimizer->step();
      EXPECT_EQ(optimizer->state().size(), 2 * size) << test.name;
    }
  }));
}

RANKS_TEST(Optim, StateFromBeforeShardingAndWholeParametersAreRefused, 2) {
  torch::nn::Linear layer(4, 6);
  optim::AdamW early(layer->parameters(), AdamWOptions(0.1));
  for (Tensor& param : layer->parameters()) param.mutable_grad() = torch::ones_like(param);
  early.step();
  early.zero_grad();
  auto handle = fully_shard(layer);
  optim::AdamW late(layer->parameters(), AdamWOptions(0.1));
  call(layer, torch::ones({2, 4})).sum().backward();
  EXPECT_FSDP2_ERROR(early.step(), kUsage, "exp_avg of 'weight'");
  EXPECT_FSDP2_ERROR(early.step(), kUsage, "after fully_shard");
  late.step();
  const torch::NoGradGuard no_grad;
  call(layer, torch::ones({2, 4}));
  handle.unshard();
  EXPECT_FSDP2_ERROR(late.step(), kUsage, "call reshard() on its module first");
  handle.reshard();
  late.step();
}

/// Three steps on the model of the rule, saved; two more.
template <class First, class Second, class Options>
void continues(const Options& options, const std::string& folder) {
  const auto gradients = [](torch::nn::Module& module, int step) {
    torch::manual_seed(step);
    for (Tensor& param : module.parameters()) {
      const Tensor grad = torch::randn(param.sizes());
      param.mutable_grad() = distribute_tensor(grad, DTensor(param).device_mesh(), {Shard{0}}).tensor();
    }
  };
  const auto make = [] {
    torch::manual_seed(9);
    torch::nn::Linear net(5, 7);
    fully_shard(net);
    return net;
  };
  auto net = make(), other = make();
  First first(net->parameters(), options);
  Options start = options;
  Second second(other->parameters(), start.lr(0.7));
  for (int step = 0; step < 3; ++step) {
    gradients(*net, step);
    first.step();
  }
  const auto state_of = [](auto& module, Optimizer& optimizer) {
    return dcp::StateDict{{"model", get_model_state_dict(module)},
                          {"optim", get_optimizer_state_dict(module, optimizer)}};
  };
  dcp::save(state_of(net, first), folder);
  dcp::StateDict state = state_of(other, second);
  dcp::load(state, folder);
  set_state_dict(other, second, state["model"].dict(), state["optim"].dict());
  EXPECT_TRUE(same(get_optimizer_state_dict(net, first), get_optimizer_state_dict(other, second), "loaded"));
  for (int step = 3; step < 5; ++step) {
    gradients(*net, step);
    gradients(*other, step);
    first.step();
    second.step();
  }
  expect_close(net->parameters(), other->parameters(), 3e-6, "continued");
}

TEST(Optim, CheckpointsOfStockAndOursAreOne) {
  const TempDir folder;
  ASSERT_TRUE(run_ranks(2, [&](int) {
    const auto adamw = AdamWOptions(0.1).amsgrad(true);
    continues<torch::optim::AdamW, optim::AdamW>(adamw, folder.path() + "/a");
    continues<optim::AdamW, torch::optim::AdamW>(adamw, folder.path() + "/b");
    continues<torch::optim::Adam, optim::Adam>(AdamOptions(0.1), folder.path() + "/c");
    continues<optim::Adam, torch::optim::Adam>(AdamOptions(0.1), folder.path() + "/d");
    const auto sgd = SGDOptions(0.1).momentum(0.9).dampening(0.5);
    continues<torch::optim::SGD, optim::SGD>(sgd, folder.path() + "/e");
    continues<optim::SGD, torch::optim::SGD>(sgd, folder.path() + "/f");
  }));
}

TEST(Optim, TorchSaveOfStockAndOursIsOne) {
  ASSERT_TRUE(run_ranks(1, [](int) {
    Tensor a = param_of({3, 2}), b = param_of({3, 2});
    optim::AdamW ours({a}, AdamWOptions(0.1));
    ours.step();
    std::stringstream stream;
    torch::save(ours, stream);
    torch::optim::AdamW stock({b}, AdamWOptions(0.7));
    torch::load(stock, stream);
    EXPECT_EQ(stock.param_groups()[0].options().get_lr(), 0.1);
    std::stringstream back;
    torch::save(stock, back);
    Tensor c = param_of({3, 2});
    optim::AdamW again({c}, AdamWOptions(0.7));
    torch::load(again, back);
    auto& state = static_cast<AdamWParamState&>(*again.state().at(c.unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 1);
    // (1 - beta1) g and (1 - beta2) g^2
    EXPECT_TRUE(torch::allclose(state.exp_avg(), torch::full({3, 2}, 0.05)));
    EXPECT_TRUE(torch::allclose(state.exp_avg_sq(), torch::full({3, 2}, 0.00025)));
    again.step();
    EXPECT_EQ(state.step(), 2);
  }));
}

RANKS_TEST(Optim, AGradScalerSkipsAndSteps, 2) {
  const auto mesh = init_device_mesh(c10::kCPU, {2});
  Tensor param = distribute_tensor(torch::ones({4, 2}), mesh, {Shard{0}}).tensor().set_requires_grad(true);
  optim::SGD optimizer({param}, SGDOptions(1.0));
  GradScaler scaler({.init_scale = 8});
  const auto step = [&](double gradient) {
    scaler.scale(torch::ones({}));
    param.mutable_grad() = from_local(torch::full({2, 2}, gradient * scaler.get_scale()), mesh, {Shard{0}}).tensor();
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    return stepped;
  };
  EXPECT_FALSE(step(rank == 1 ? std::numeric_limits<double>::infinity() : 1.0));
  EXPECT_TRUE(whole(param).equal(torch::ones({4, 2})));
  EXPECT_EQ(scaler.get_scale(), 4);
  EXPECT_TRUE(step(0.25));
  EXPECT_TRUE(whole(param).equal(torch::full({4, 2}, 0.75)));
}

}  // namespace
}  // namespace fsdp2::testing
