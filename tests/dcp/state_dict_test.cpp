// labels: ranks
// State dicts of sharded models and their optimizers: resuming, meta models, what is left out, what
// is refused.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <filesystem>

#include "dcp/same.h"
#include "dcp/sample_state.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    scale = register_parameter("scale", torch::ones({1, 6}));
    first = register_module("first", torch::nn::Linear(6, 7));
    second = register_module("second", torch::nn::Linear(7, 6));
    register_buffer("seen", torch::zeros({1}, torch::kLong));
    fsdp2::register_buffer(*this, "cache", torch::full({2}, 9.0f), /*persistent=*/false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return fsdp2::call(second, torch::relu(fsdp2::call(first, x * scale))).sum(1);
  }
  torch::Tensor scale;
  torch::nn::Linear first = nullptr, second = nullptr;
};
FSDP2_MODULE(Net);

/// The same values on every rank and in every process.
Net make_net() {
  Net net;
  const torch::NoGradGuard no_grad;
  int64_t seed = 0;
  for (torch::Tensor& param : net->parameters())
    param.copy_(rule_values(param.sizes().vec(), at::kFloat, ++seed) / 100);
  return net;
}
void shard(Net& net) {
  fully_shard(net->first);
  fully_shard(net);
}

void train_step(Net& net, torch::optim::Optimizer& optimizer, int64_t step) {
  // All ranks see the same rows: the mean gradient is that of one process.
  const torch::Tensor x = rule_values({4, 6}, at::kFloat, 1000 + step) / 50;
  net(x).mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

torch::Tensor whole(const torch::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

TEST(StateDicts, ResumeOnAnotherNumberOfRanksContinuesTheSameRun) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt", end = folder.path() + "/end";
  ASSERT_TRUE(run_ranks(2, [&](int) {
    Net net = make_net();
    shard(net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    for (int64_t step = 0; step < 3; ++step) train_step(net, optimizer, step);
    dcp::save({{"model", get_model_state_dict(net)}, {"optim", get_optimizer_state_dict(net, optimizer)}}, path);
    for (int64_t step = 3; step < 6; ++step) train_step(net, optimizer, step);
    dcp::save({{"model", get_model_state_dict(net)}}, end);
  }));
  for (int world : {1, 2, 3}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      Net net = nullptr;
      {
        MetaDeviceGuard meta;
        net = Net();
      }
      shard(net);
      torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.7));
      dcp::StateDict state{{"model", get_model_state_dict(net)}, {"optim", get_optimizer_state_dict(net, optimizer)}};
      dcp::load(state, path);
      set_state_dict(net, optimizer, state["model"].dict(), state["optim"].dict());
      for (const auto& buffer : net->named_buffers()) {
        if (buffer.value().is_meta())
          buffer.value().unsafeGetTensorImpl()->shallow_copy_from(torch::full({2}, 9.0f).getIntrusivePtr());
      }
      for (int64_t step = 3; step < 6; ++step) train_step(net, optimizer, step);
      dcp::Reader expected(end);
      for (const auto& [fqn, value] : get_model_state_dict(net)) {
        const torch::Tensor wanted = expected.read("model." + fqn).tensor();
        EXPECT_TRUE(torch::allclose(whole(value.tensor()), wanted, 1e-5, 1e-6)) << fqn << " on " << world;
      }
    }));
  }
}

RANKS_TEST(StateDicts, WhatIsInAndWhatIsNot, 2) {
  Net net = make_net();
  EXPECT_EQ(get_model_state_dict(net).keys(),
            (std::vector<std::string>{"scale", "seen", "first.weight", "first.bias", "second.weight", "second.bias"}));
  shard(net);
  const dcp::StateDict state = get_model_state_dict(net);
  EXPECT_TRUE(is_dtensor(state.at("scale").tensor()));
  EXPECT_FALSE(state.at("scale").tensor().requires_grad());
  EXPECT_FALSE(state.contains("cache"));
  EXPECT_TRUE(DTensor(state.at("first.weight").tensor()).to_local().data_ptr() ==
              DTensor(net->first->weight).to_local().data_ptr());
}

RANKS_TEST(StateDicts, AnUnshardedGroupIsReshardedFirst, 2) {
  Net net = make_net();
  shard(net);
  fsdp_module(net->first).unshard();
  ASSERT_FALSE(is_dtensor(net->first->weight));
  EXPECT_TRUE(is_dtensor(get_model_state_dict(net).at("first.weight").tensor()));
  fsdp_module(net->first).unshard();
  dcp::StateDict state = get_model_state_dict(make_net());
  state["first.weight"] = torch::full({7, 6}, 3.0f);
  set_model_state_dict(net, state);
  EXPECT_TRUE(whole(net->first->weight).equal(torch::full({7, 6}, 3.0f)));
}

RANKS_TEST(StateDicts, AForgottenRootIsNamed, 2) {
  Net net = make_net();
  fully_shard(net->first);
  EXPECT_FSDP2_ERROR(get_model_state_dict(net), kUsage, "scale, second.weight, second.bias");
  Net ignoring = make_net();
  fully_shard(ignoring->first);
  fully_shard(ignoring, {.ignored_params = {ignoring->scale, ignoring->second->weight, ignoring->second->bias}});
  EXPECT_EQ(get_model_state_dict(ignoring).size(), 6u);
}

RANKS_TEST(StateDicts, SettingAModel, 2) {
  Net net = make_net();
  shard(net);
  // Whole plain values, as a Reader gives them.
  dcp::StateDict plain;
  int64_t seed = 50;
  for (const auto& [fqn, value] : get_model_state_dict(net)) {
    plain[fqn] = rule_values(value.tensor().sizes().vec(), value.tensor().scalar_type(), ++seed);
  }
  const dcp::LoadReport report = set_model_state_dict(net, plain);
  EXPECT_EQ(report.loaded.size(), 6u);
  for (const auto& [fqn, value] : get_model_state_dict(net))
    EXPECT_TRUE(whole(value.tensor()).equal(plain.at(fqn).tensor())) << fqn;

  dcp::StateDict state = plain;
  state.erase("second.bias");
  EXPECT_FSDP2_ERROR(set_model_state_dict(net, state), kNotFound, "second.bias");
  state["extra"] = torch::ones({1});
  const dcp::LoadReport partial = set_model_state_dict(net, state, {.strict = false});
  EXPECT_EQ(partial.missing, std::vector<std::string>{"second.bias"});
  EXPECT_EQ(partial.unexpected, std::vector<std::string>{"extra"});
  state["second.bias"] = torch::ones({6});
  EXPECT_FSDP2_ERROR(set_model_state_dict(net, state), kInvalidArgument, "extra");
  state.erase("extra");
  state["second.bias"] = torch::ones({7});
  EXPECT_FSDP2_ERROR(set_model_state_dict(net, state), kInvalidArgument, "second.bias has shape [6]");
  state["second.bias"] = distribute_tensor(torch::ones({6}), init_device_mesh(c10::kCPU, {2}), {Replicate{}}).tensor();
  EXPECT_FSDP2_ERROR(set_model_state_dict(net, state), kInvalidArgument, "redistribute");
}

TEST(StateDicts, ReadingTheOptimizerStateTakesNoStep) {
  torch::nn::Linear net(3, 2);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
  const torch::Tensor before = net->weight.detach().clone();
  const dcp::StateDict state = get_optimizer_state_dict(net, optimizer);
  const dcp::StateDict& weight = state.at("state").dict().at("weight").dict();
  EXPECT_EQ(weight.at("step").tensor().item<float>(), 0);
  EXPECT_EQ(weight.at("step").tensor().scalar_type(), torch::kFloat);
  EXPECT_TRUE(weight.at("exp_avg").tensor().equal(torch::zeros({2, 3})));
  EXPECT_TRUE(net->weight.equal(before));
  EXPECT_TRUE(optimizer.state().empty());
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_FSDP2_ERROR(get_optimizer_state_dict(net, lbfgs), kUnsupported, "LBFGS");
  torch::optim::SGD stranger({torch::ones({2})}, 0.1);
  EXPECT_FSDP2_ERROR(get_optimizer_state_dict(net, stranger), kInvalidArgument, "parameter 0 of group 0");
}

TEST(StateDicts, GroupsAreMatchedByTheirParameters) {
  using torch::optim::OptimizerParamGroup;
  using torch::optim::SGDOptions;
  torch::nn::Linear net(3, 2);
  const auto make = [&](std::vector<torch::Tensor> first, double a, std::vector<torch::Tensor> second, double b) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::move(first), std::make_unique<SGDOptions>(a));
    groups.emplace_back(std::move(second), std::make_unique<SGDOptions>(b));
    groups.emplace_back(std::vector<torch::Tensor>{}, std::make_unique<SGDOptions>(0.9));
    return torch::optim::SGD(std::move(groups), SGDOptions(0.5));
  };
  torch::optim::SGD saved = make({net->weight}, 0.1, {net->bias}, 0.2);
  torch::optim::SGD swapped = make({net->bias}, 0.3, {net->weight}, 0.3);
  dcp::StateDict state = get_optimizer_state_dict(net, saved);
  set_optimizer_state_dict(net, swapped, state);
  EXPECT_EQ(swapped.param_groups()[0].options().get_lr(), 0.2);
  EXPECT_EQ(swapped.param_groups()[1].options().get_lr(), 0.1);
  EXPECT_EQ(swapped.param_groups()[2].options().get_lr(), 0.9);
  torch::optim::SGD joined({net->weight, net->bias}, 0.4);
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(net, joined, state), kInvalidArgument, "group 0");
  // A hyper-parameter that the checkpoint does not have keeps its value.
  auto groups = state["param_groups"].list();
  groups[0].dict().erase("lr");
  state["param_groups"] = groups;
  swapped.param_groups()[1].options().set_lr(0.7);
  set_optimizer_state_dict(net, swapped, state);
  EXPECT_EQ(swapped.param_groups()[1].options().get_lr(), 0.7);
}

TEST(StateDicts, AbsentStateStartsAfreshAndIncompleteStateIsAnError) {
  torch::nn::Linear net(3, 2);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
  net->weight.mutable_grad() = torch::ones({2, 3});
  optimizer.step();
  dcp::StateDict state = get_optimizer_state_dict(net, optimizer);
  EXPECT_EQ(state["state"].dict()["weight"].dict()["step"].tensor().item<float>(), 1);
  state["state"].dict().erase("bias");
  torch::optim::AdamW fresh(net->parameters(), torch::optim::AdamWOptions(0.1));
  set_optimizer_state_dict(net, fresh, state);
  EXPECT_EQ(fresh.state().size(), 1u);
  state["state"].dict()["weight"].dict().erase("exp_avg_sq");
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(net, fresh, state), kNotFound, "weight has no exp_avg_sq");
  state["state"].dict().erase("weight");
  state["state"].dict()["other"] = dcp::StateDict{{"step", torch::ones({})}};
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(net, fresh, state), kNotFound, "other");
}

RANKS_TEST(StateDicts, StateMadeBeforeShardingIsCut, 2) {
  Net net = make_net();
  torch::optim::Adagrad optimizer(net->parameters(), torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.25));
  shard(net);
  const dcp::StateDict state = get_optimizer_state_dict(net, optimizer);
  const torch::Tensor sum = state.at("state").dict().at("first.weight").dict().at("sum").tensor();
  ASSERT_TRUE(is_dtensor(sum));
  EXPECT_TRUE(DTensor(sum).full_tensor().equal(torch::full({7, 6}, 0.25f)));
  set_optimizer_state_dict(net, optimizer, state);
  train_step(net, optimizer, 0);
}

}  // namespace
}  // namespace fsdp2::testing
