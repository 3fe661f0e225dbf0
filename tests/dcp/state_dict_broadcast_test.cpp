// labels: ranks
// State dicts that only rank 0 has: values, layouts, meta models, errors, and dicts that stay as they were.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include "dcp/same.h"
#include "dcp/state_models.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

const StateDictOptions kBroadcast{.full_state_dict = true, .broadcast_from_rank0 = true};

/// What rank 0 passes; the others pass nothing, or rubbish.
dcp::StateDict on_rank0(int rank, const dcp::StateDict& state) {
  if (rank == 0) return state;
  return rank % 2 == 1 ? dcp::StateDict() : dcp::StateDict{{"rubbish", torch::ones({3})}};
}

/// A copy that shares no memory.
dcp::StateDict deep_copy(const dcp::StateDict& state) {
  dcp::StateDict copy;
  for (const auto& [key, value] : state) copy[key] = value.tensor().clone();
  return copy;
}

TEST(Broadcast, EveryLayoutOnOneToFourRanks) {
  for (const int world : {1, 2, 3, 4}) {
    ASSERT_TRUE(run_ranks(world, [&](int rank) {
      for (const Layout layout : kLayouts) {
        for (const bool on_meta : {false, true}) {
          RuleTraining run(layout, RuleTraining::Fresh{on_meta});
          set_state_dict(run.net, *run.optimizer, on_rank0(rank, rule_model()), on_rank0(rank, rule_optimizer()),
                         kBroadcast);
          const std::string where = c10::str("layout ", static_cast<int>(layout), " on ", world, " meta ", on_meta);
          expect_model(run.net, rule_model(), where);
          expect_optimizer(run.net, *run.optimizer, rule_optimizer(), where);
          EXPECT_TRUE(run.net->down->weight.is_same(run.net->named_children()["tied"]->parameters()[0]));
        }
      }
    }));
  }
}

RANKS_TEST(Broadcast, TheDictCanBeUsedTwiceAndStaysAsItWas, 2) {
  const dcp::StateDict model = rule_model(), optim = rule_optimizer();
  const dcp::StateDict before = deep_copy(model);
  for (int use = 0; use < 2; ++use) {
    // Plain on meta: where values could be taken over.
    RuleTraining run(use == 0 ? Layout::kPlain : Layout::kSharded, RuleTraining::Fresh{true});
    set_state_dict(run.net, *run.optimizer, on_rank0(rank, model), on_rank0(rank, optim), kBroadcast);
    expect_model(run.net, before, "use");
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& param : run.net->parameters()) param.fill_(7);
    for (auto& [key, state] : run.optimizer->state())
      static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().fill_(7);
  }
  EXPECT_TRUE(same(model, before));
  EXPECT_TRUE(same(optim, rule_optimizer()));
  // The same without broadcast: every rank has the whole.
  RuleTraining plain(Layout::kPlain, RuleTraining::Fresh{true});
  set_state_dict(plain.net, *plain.optimizer, model, optim, {.full_state_dict = true});
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& param : plain.net->parameters()) param.fill_(7);
  for (auto& [key, state] : plain.optimizer->state())
    static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().fill_(7);
  EXPECT_TRUE(same(model, before));
  EXPECT_TRUE(same(optim, rule_optimizer()));
}

RANKS_TEST(Broadcast, EachSetterAlone, 3) {
  RuleTraining run(Layout::kSharded, RuleTraining::Fresh{false});
  const dcp::LoadReport report = set_model_state_dict(run.net, on_rank0(rank, rule_model()), kBroadcast);
  EXPECT_EQ(report.loaded.size(), 7u);
  expect_model(run.net, rule_model(), "model");
  set_optimizer_state_dict(run.net, *run.optimizer, on_rank0(rank, rule_optimizer()), kBroadcast);
  expect_optimizer(run.net, *run.optimizer, rule_optimizer(), "optimizer");
}

/// Views, another dtype, no elements, one element, a lazy conjugate, the same memory under two keys.
struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    register_buffer("transposed", torch::zeros({5, 4}));
    register_buffer("cast", torch::zeros({3}, torch::kDouble));
    register_buffer("empty", torch::ones({0, 3}));
    register_buffer("scalar", torch::zeros({}));
    register_buffer("flags", torch::zeros({6}, torch::kBool));
    register_buffer("complex", torch::zeros({2}, torch::kComplexFloat));
    register_buffer("first", torch::zeros({4}));
    register_buffer("second", torch::zeros({4}));
  }
};
TORCH_MODULE(Many);

RANKS_TEST(Broadcast, ValuesOfOtherKinds, 2) {
  Many many;
  dcp::StateDict state;
  const torch::Tensor complex = torch::complex(torch::ones({2}), torch::full({2}, 2.0f)), shared = torch::ones({4}) * 3;
  state["transposed"] = rule_values({4, 5}, at::kFloat, 1).t();
  state["cast"] = rule_values({3}, at::kBFloat16, 2);
  state["empty"] = torch::ones({0, 3});
  state["scalar"] = torch::tensor(2.5f);
  state["flags"] = rule_values({6}, at::kLong, 3).remainder(2).to(at::kBool);
  state["complex"] = complex.conj();
  state["first"] = shared;
  state["second"] = shared;
  const dcp::LoadReport report = set_model_state_dict(many, on_rank0(rank, state), kBroadcast);
  EXPECT_EQ(report.cast, std::vector<std::string>{"cast"});
  for (const auto& [fqn, value] : get_model_state_dict(many)) {
    EXPECT_TRUE(value.tensor().equal(state.at(fqn).tensor().to(value.tensor().scalar_type()).resolve_conj())) << fqn;
  }
}

RANKS_TEST(Broadcast, WhatIsWrongWithTheDictIsSaidOnAllRanks, 3) {
  RuleTraining run(Layout::kSharded, 1000);
  const auto refused = [&](const dcp::StateDict& model, const dcp::StateDict& optim, const char* code_text,
                           const std::string& text) {
    try {
      set_state_dict(run.net, *run.optimizer, on_rank0(rank, model), on_rank0(rank, optim), kBroadcast);
      ADD_FAILURE() << "no error for " << text;
    } catch (const Error& error) {
      EXPECT_STREQ(to_string(error.code()), code_text);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
    expect_model(run.net, rule_model(1000), text);
    expect_optimizer(run.net, *run.optimizer, rule_optimizer(1000), text);
  };
  dcp::StateDict model = rule_model(), optim = rule_optimizer();
  model.erase("up.bias");
  refused(model, optim, "kNotFound", "lacks keys of the model: up.bias");
  model = rule_model();
  model["extra"] = torch::ones({2});
  refused(model, optim, "kInvalidArgument", "keys that the model lacks: extra");
  model = rule_model();
  model["up.bias"] = torch::ones({18});
  refused(model, optim, "kInvalidArgument", "up.bias has shape [17], the value for it has shape [18]");
  model["up.bias"] = 3;
  refused(model, optim, "kInvalidArgument", "the value for up.bias is of kind Int");
  model["up.bias"] = torch::empty({17}, torch::kMeta);
  refused(model, optim, "kInvalidArgument", "meta device");
  model = rule_model();
  // Wrong only in the second dict: the first must not have been used.
  optim["state"].dict()["up.bias"].dict().erase("exp_avg_sq");
  refused(model, optim, "kNotFound", "up.bias has no exp_avg_sq");
  refused(model, {}, "kInvalidArgument", "the optimizer state dict is empty");
  const torch::Tensor part = get_model_state_dict(run.net).at("up.bias").tensor();
  model["up.bias"] = part;
  refused(model, rule_optimizer(), "kInvalidArgument", "is a DTensor; with broadcast_from_rank0 values are whole");
}

RANKS_TEST(Broadcast, AModelThatIsDifferentOnOneRankIsNamed, 3) {
  torch::nn::Linear net(torch::nn::LinearOptions(2, rank == 2 ? 5 : 4));
  const dcp::StateDict state{{"weight", torch::ones({4, 2})}, {"bias", torch::ones({4})}};
  EXPECT_FSDP2_ERROR(set_model_state_dict(net, on_rank0(rank, state), kBroadcast), kInvalidArgument,
                     "rank 2 failed while checking a state dict");
  EXPECT_FALSE(net->bias.detach().equal(torch::ones_like(net->bias)));
}

RANKS_TEST(Broadcast, NotStrict, 2) {
  RuleTraining run(Layout::kSharded, 1000);
  StateDictOptions options = kBroadcast;
  options.strict = false;
  dcp::StateDict model = rule_model();
  model.erase("up.bias");
  model["extra"] = torch::ones({2000});
  const dcp::LoadReport report = set_model_state_dict(run.net, on_rank0(rank, model), options);
  EXPECT_EQ(report.missing, std::vector<std::string>{"up.bias"});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"extra"});
  model.erase("extra");
  model["up.bias"] = rule_model(1000).at("up.bias");
  expect_model(run.net, model, "not strict");
}

RANKS_TEST(Broadcast, ModelsThatDifferBetweenRanksTakeTheirPartOfOneDict, 2) {
  // Stages of a pipeline: the dict has both, and each rank its own.
  torch::nn::Sequential net;
  net->push_back(rank == 0 ? "first" : "second", torch::nn::Linear(rank == 0 ? 3 : 4, 2));
  dcp::StateDict state;
  state["first.weight"] = rule_values({2, 3}, at::kFloat, 1);
  state["first.bias"] = rule_values({2}, at::kFloat, 2);
  state["second.weight"] = rule_values({2, 4}, at::kFloat, 3);
  state["second.bias"] = rule_values({2}, at::kFloat, 4);
  StateDictOptions options = kBroadcast;
  options.strict = false;
  EXPECT_EQ(set_model_state_dict(net, on_rank0(rank, state), options).unexpected.size(), 2u);
  for (const auto& [fqn, value] : get_model_state_dict(net)) EXPECT_TRUE(value.tensor().equal(state.at(fqn).tensor()));
}

RANKS_TEST(Broadcast, SubmodulesAndFlatOptimizer, 2) {
  RuleTraining from(Layout::kSharded, 0), run(Layout::kSharded, 1000);
  const StateDictOptions out{.full_state_dict = true,
                             .cpu_offload = true,
                             .keep_submodule_prefixes = false,
                             .flatten_optimizer_state_dict = true,
                             .submodules = {from.net->up}};
  const auto [model, optim] = get_state_dict(from.net, *from.optimizer, out);
  EXPECT_EQ(optim.contains("state.weight.exp_avg"), rank == 0);
  StateDictOptions in = kBroadcast;
  in.submodules = {run.net->up};
  in.keep_submodule_prefixes = false;
  set_state_dict(run.net, *run.optimizer, model, optim, in);
  dcp::StateDict expected = rule_model(1000), expected_optim = rule_optimizer(1000);
  for (const std::string fqn : {"up.weight", "up.bias"}) {
    expected[fqn] = rule_model().at(fqn);
    const dcp::StateDict states = rule_optimizer();
    expected_optim["state"].dict()[fqn] = states.at("state").dict().at(fqn);
  }
  expect_model(run.net, expected, "submodule");
  expect_optimizer(run.net, *run.optimizer, expected_optim, "submodule");
}

RANKS_TEST(Broadcast, AGroupOfOwn, 3) {
  const ProcessGroup pair = new_group({1, 2});
  if (rank == 0) return;
  torch::nn::Linear net(3, 2);
  const dcp::StateDict state{{"weight", rule_values({2, 3}, at::kFloat, 1)}, {"bias", torch::ones({2})}};
  StateDictOptions options = kBroadcast;
  options.group = pair;
  set_model_state_dict(net, rank == 1 ? state : dcp::StateDict(), options);
  EXPECT_TRUE(net->weight.detach().equal(rule_values({2, 3}, at::kFloat, 1)));
}

}  // namespace
}  // namespace fsdp2::testing
