// The forms of optimizer state dicts: nested, flat, by number; groups, several optimizers, notes and errors.

#include <fsdp2/fsdp2.h>
#include <fsdp2/log.h>
#include <torch/torch.h>

#include <memory>

#include "dcp/same.h"
#include "dcp/sample_state.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

using dcp::StateDict;
using dcp::Value;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

struct PairImpl : torch::nn::Module {
  PairImpl() {
    a = register_parameter("a", torch::zeros({2, 3}));
    b = register_module("b", torch::nn::Linear(3, 2));
  }
  torch::Tensor a;
  torch::nn::Linear b = nullptr;
};
TORCH_MODULE(Pair);

/// Everything that is logged while it lives.
struct Notes {
  Notes() {
    set_log_sink([this](LogLevel, const std::string& line) { text += line + "\n"; });
  }
  ~Notes() { set_log_sink({}); }
  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
  std::string text;
};

AdamW with_groups(std::vector<std::pair<std::vector<torch::Tensor>, double>> groups) {
  std::vector<OptimizerParamGroup> made;
  for (auto& [params, lr] : groups) made.emplace_back(std::move(params), std::make_unique<AdamWOptions>(lr));
  return AdamW(std::move(made), AdamWOptions(0.5));
}
double lr_of(AdamW& optimizer, size_t group) { return optimizer.param_groups()[group].options().get_lr(); }
torch::optim::AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const torch::Tensor& param) {
  return static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

/// One step, so that there is state.
void step(Pair& pair, torch::optim::Optimizer& optimizer) {
  for (torch::Tensor& param : pair->parameters()) param.mutable_grad() = torch::ones_like(param) * 3;
  optimizer.step();
  optimizer.zero_grad();
}

TEST(OptimizerForms, FlatHasOneLevelOfKeysLikePython) {
  Pair pair;
  AdamW optimizer = with_groups({{{pair->a}, 0.1}, {{pair->b->weight, pair->b->bias}, 0.2}});
  step(pair, optimizer);
  const StateDict flat = get_optimizer_state_dict(pair, optimizer, {.flatten_optimizer_state_dict = true});
  std::vector<std::string> expected;
  for (const std::string fqn : {"a", "b.weight", "b.bias"}) {
    for (const std::string field : {"step", "exp_avg", "exp_avg_sq"}) expected.push_back("state." + fqn + "." + field);
  }
  for (const std::string fqn : {"a", "b.weight", "b.bias"}) {
    for (const std::string key : {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable",
                                  "differentiable", "fused", "decoupled_weight_decay"})
      expected.push_back("param_groups." + fqn + "." + key);
  }
  EXPECT_EQ(flat.keys(), expected);
  EXPECT_EQ(flat.at("param_groups.a.lr").number(), 0.1);
  EXPECT_EQ(flat.at("param_groups.b.bias.lr").number(), 0.2);
  EXPECT_TRUE(flat.at("state.b.bias.exp_avg").tensor().equal(torch::full({2}, 0.3f)));  // (1 - 0.9) * 3
}

TEST(OptimizerForms, FlatGoesIntoAnyGroupingWhereValuesAgree) {
  Pair pair;
  AdamW saved = with_groups({{{pair->a}, 0.1}, {{pair->b->weight, pair->b->bias}, 0.2}});
  step(pair, saved);
  const StateDict flat = get_optimizer_state_dict(pair, saved, {.flatten_optimizer_state_dict = true});
  const StateDict before = flat;
  // Told apart from the nested form without the option.
  AdamW split = with_groups({{{pair->b->bias}, 0.7}, {{pair->a}, 0.7}, {{pair->b->weight}, 0.7}});
  set_optimizer_state_dict(pair, split, flat);
  EXPECT_EQ(lr_of(split, 0), 0.2);
  EXPECT_EQ(lr_of(split, 1), 0.1);
  EXPECT_EQ(lr_of(split, 2), 0.2);
  for (const torch::Tensor& param : pair->parameters()) {
    EXPECT_TRUE(state_of(split, param).exp_avg_sq().equal(state_of(saved, param).exp_avg_sq()));
    EXPECT_EQ(state_of(split, param).step(), 1);
  }
  EXPECT_TRUE(same(flat, before));

  AdamW joined = with_groups({{{pair->a, pair->b->weight, pair->b->bias}, 0.7}});
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, joined, flat), kInvalidArgument,
                     "a and b.weight are in one group of the optimizer and have different lr");
  EXPECT_EQ(lr_of(joined, 0), 0.7);
  Notes notes;
  set_optimizer_state_dict(pair, joined, flat, {.strict = false});
  EXPECT_EQ(lr_of(joined, 0), 0.1);
  EXPECT_TRUE(notes.has("different lr")) << notes.text;
}

TEST(OptimizerForms, FlatThatLacksThings) {
  Pair pair;
  AdamW saved = with_groups({{{pair->a, pair->b->weight, pair->b->bias}, 0.1}});
  step(pair, saved);
  const StateDict flat = get_optimizer_state_dict(pair, saved, {.flatten_optimizer_state_dict = true});
  AdamW fresh = with_groups({{{pair->a, pair->b->weight}, 0.7}, {{pair->b->bias}, 0.9}});
  StateDict state = flat;
  state.erase("state.b.bias.exp_avg");
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, fresh, state), kNotFound,
                     "the optimizer state of b.bias has no exp_avg;");
  state.erase("state.b.bias.exp_avg_sq");
  state.erase("state.b.bias.step");
  for (const std::string& key : flat.keys()) {
    if (key.starts_with("param_groups.b.bias.")) state.erase(key);
  }
  state["state.elsewhere.weight.exp_avg"] = torch::ones({2});
  Notes notes;
  set_optimizer_state_dict(pair, fresh, state);
  EXPECT_TRUE(notes.has("group 1 of the optimizer (b.bias, ...) is in no group")) << notes.text;
  EXPECT_TRUE(notes.has("no optimizer state for 1 parameters, e.g. b.bias")) << notes.text;
  EXPECT_EQ(lr_of(fresh, 0), 0.1);
  EXPECT_EQ(lr_of(fresh, 1), 0.9);
  EXPECT_EQ(fresh.state().size(), 2u);
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, fresh, {{"lr", 0.1}}), kInvalidArgument, "this one has 'lr'");
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, fresh, {}), kInvalidArgument, "is empty");
  state["what"] = 1;
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, fresh, state), kInvalidArgument, "'what'");
}

/// What torch.optim's state_dict() gives: keys are numbers, as they are in memory or as text, as they are in a file.
StateDict by_number(bool text_keys) {
  std::vector<std::pair<Value, Value>> states;
  for (int64_t i = 0; i < 3; ++i) {
    const std::vector<std::vector<int64_t>> sizes = {{2, 3}, {2, 3}, {2}};
    StateDict entry{{"step", torch::tensor(4.0f)},
                    {"exp_avg", rule_values(sizes[i], at::kFloat, i)},
                    {"exp_avg_sq", rule_values(sizes[i], at::kFloat, i + 10)}};
    states.emplace_back(text_keys ? Value(std::to_string(i)) : Value(i), entry);
  }
  StateDict first{{"lr", 0.25}, {"params", std::vector<Value>{0}}};
  StateDict second{{"lr", 0.75}, {"params", std::vector<Value>{1, 2}}};
  return {{"state", Value::from_items(states)}, {"param_groups", std::vector<Value>{first, second}}};
}

TEST(OptimizerForms, ByNumberWhereTheNumbersOfParametersAgree) {
  Pair pair;
  for (const bool text_keys : {false, true}) {
    AdamW optimizer = with_groups({{{pair->a}, 0.1}, {{pair->b->weight, pair->b->bias}, 0.2}});
    set_optimizer_state_dict(pair, optimizer, by_number(text_keys));
    EXPECT_EQ(lr_of(optimizer, 0), 0.25);
    EXPECT_EQ(lr_of(optimizer, 1), 0.75);
    EXPECT_TRUE(state_of(optimizer, pair->a).exp_avg().equal(rule_values({2, 3}, at::kFloat, 0)));
    EXPECT_TRUE(state_of(optimizer, pair->b->bias).exp_avg_sq().equal(rule_values({2}, at::kFloat, 12)));
    EXPECT_EQ(state_of(optimizer, pair->b->weight).step(), 4);
  }
  AdamW fewer = with_groups({{{pair->a, pair->b->weight}, 0.1}});
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, fewer, by_number(false)), kInvalidArgument,
                     "has 3 parameters, by number, and the optimizer 2");
  AdamW joined = with_groups({{{pair->a, pair->b->weight, pair->b->bias}, 0.1}});
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, joined, by_number(false)), kInvalidArgument,
                     "group 0 of the optimizer has a of group 0 and b.weight of group 1");
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, {&fewer, &joined}, by_number(false)), kInvalidArgument,
                     "2 optimizers");
}

TEST(OptimizerForms, SeveralOptimizersAreOneDict) {
  Pair pair;
  AdamW first({pair->a}, AdamWOptions(0.1));
  torch::optim::SGD second({pair->b->weight, pair->b->bias}, torch::optim::SGDOptions(0.2).momentum(0.5));
  step(pair, first);
  step(pair, second);
  for (const bool flatten : {false, true}) {
    const StateDict state =
        get_optimizer_state_dict(pair, {&first, &second}, {.flatten_optimizer_state_dict = flatten});
    AdamW one({pair->a}, AdamWOptions(0.7));
    torch::optim::SGD two({pair->b->bias, pair->b->weight}, torch::optim::SGDOptions(0.7).momentum(0.5));
    set_optimizer_state_dict(pair, {&two, &one}, state);
    EXPECT_EQ(lr_of(one, 0), 0.1);
    EXPECT_EQ(two.param_groups()[0].options().get_lr(), 0.2);
    const auto& buffer =
        static_cast<torch::optim::SGDParamState&>(*two.state().at(pair->b->weight.unsafeGetTensorImpl()));
    EXPECT_TRUE(buffer.momentum_buffer().equal(torch::full({2, 3}, 3.0f)));
    // One of them takes its part of the whole.
    AdamW alone({pair->a}, AdamWOptions(0.7));
    set_optimizer_state_dict(pair, alone, state);
    EXPECT_EQ(lr_of(alone, 0), 0.1);
    EXPECT_EQ(state_of(alone, pair->a).step(), 1);
  }
  EXPECT_FSDP2_ERROR(get_optimizer_state_dict(pair, {&first, &first}), kInvalidArgument, "a is twice");
}

TEST(OptimizerForms, FrozenParametersKeepTheirState) {
  Pair pair;
  AdamW optimizer = with_groups({{{pair->a, pair->b->weight, pair->b->bias}, 0.1}});
  step(pair, optimizer);
  pair->a.set_requires_grad(false);
  StateDict state = get_optimizer_state_dict(pair, optimizer);
  EXPECT_TRUE(state.at("state").dict().contains("a"));  // there is state: it is saved
  const torch::Tensor kept = state_of(optimizer, pair->a).exp_avg().clone();
  state["state"].dict().erase("a");
  set_optimizer_state_dict(pair, optimizer, state);
  EXPECT_TRUE(state_of(optimizer, pair->a).exp_avg().equal(kept));
  // Frozen from the start: in the group, without state; and Python's None counts as none.
  AdamW fresh = with_groups({{{pair->a, pair->b->weight, pair->b->bias}, 0.1}});
  state = get_optimizer_state_dict(pair, fresh);
  EXPECT_FALSE(state.at("state").dict().contains("a"));
  EXPECT_EQ(state.at("param_groups").list()[0].dict().at("params").list().size(), 3u);
  torch::optim::SGD sgd(pair->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  StateDict nones;
  for (const std::string fqn : {"b.weight", "b.bias"}) nones[fqn] = StateDict{{"momentum_buffer", nullptr}};
  state = get_optimizer_state_dict(pair, sgd);
  state["state"] = nones;
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, sgd, state), kNotFound, "state for no parameter");
  state["state"].dict()["b.weight"] = StateDict{{"momentum_buffer", torch::ones({2, 3})}};
  set_optimizer_state_dict(pair, sgd, state);
  EXPECT_EQ(sgd.state().size(), 1u);
}

TEST(OptimizerForms, SavedOptionsDecideWhichStateThereMustBe) {
  Pair pair;
  AdamW saved(pair->parameters(), AdamWOptions(0.1).amsgrad(true));
  step(pair, saved);
  const StateDict state = get_optimizer_state_dict(pair, saved);
  AdamW fresh(pair->parameters(), AdamWOptions(0.1));
  set_optimizer_state_dict(pair, fresh, state);
  EXPECT_TRUE(state_of(fresh, pair->a).max_exp_avg_sq().equal(state_of(saved, pair->a).max_exp_avg_sq()));
  StateDict incomplete = state;
  incomplete["state"].dict()["a"].dict().erase("max_exp_avg_sq");
  AdamW other(pair->parameters(), AdamWOptions(0.7));
  EXPECT_FSDP2_ERROR(set_optimizer_state_dict(pair, other, incomplete), kNotFound, "a has no max_exp_avg_sq");
  EXPECT_EQ(lr_of(other, 0), 0.7);  // nothing was changed
  EXPECT_TRUE(other.state().empty());
  Notes notes;
  set_optimizer_state_dict(pair, other, incomplete, {.strict = false});
  EXPECT_TRUE(notes.has("a has no max_exp_avg_sq; it starts afresh")) << notes.text;
  EXPECT_EQ(other.state().size(), 2u);
}

TEST(OptimizerForms, UnknownHyperParametersAreNoted) {
  Pair pair;
  AdamW optimizer(pair->parameters(), AdamWOptions(0.1));
  StateDict state = get_optimizer_state_dict(pair, optimizer);
  auto groups = state["param_groups"].list();
  groups[0].dict()["maximize"] = true;
  groups[0].dict()["initial_lr"] = 0.3;
  groups[0].dict().erase("weight_decay");
  state["param_groups"] = groups;
  Notes notes;
  set_optimizer_state_dict(pair, optimizer, state);
  EXPECT_TRUE(notes.has("are not used: maximize, initial_lr")) << notes.text;
  EXPECT_TRUE(notes.has("keep their values: weight_decay")) << notes.text;
}

TEST(OptimizerForms, EmptyGroupsAreMatchedByTheirOrder) {
  Pair pair;
  AdamW saved = with_groups({{{}, 0.3}, {{pair->a}, 0.1}, {{}, 0.4}, {{pair->b->weight, pair->b->bias}, 0.2}});
  const StateDict state = get_optimizer_state_dict(pair, saved);
  AdamW target = with_groups({{{pair->b->weight, pair->b->bias}, 0.9}, {{}, 0.9}, {{}, 0.8}, {{pair->a}, 0.9}});
  set_optimizer_state_dict(pair, target, state);
  EXPECT_EQ(lr_of(target, 0), 0.2);
  EXPECT_EQ(lr_of(target, 1), 0.3);
  EXPECT_EQ(lr_of(target, 2), 0.4);
  EXPECT_EQ(lr_of(target, 3), 0.1);
  AdamW fewer = with_groups({{{pair->b->weight, pair->b->bias}, 0.9}, {{}, 0.9}, {{pair->a}, 0.9}});
  Notes notes;
  set_optimizer_state_dict(pair, fewer, state);
  EXPECT_EQ(lr_of(fewer, 1), 0.9);
  EXPECT_TRUE(notes.has("group 1 of the optimizer has no parameters")) << notes.text;
}

TEST(AppState, IsOneEntryThatComesBackIntoAFreshModelAndOptimizer) {
  const TempDir folder;
  torch::manual_seed(1);
  Pair model;
  AdamW optimizer(model->parameters(), AdamWOptions(0.1));
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    (model->a.sum() + model->b(torch::ones({1, 3})).pow(2).sum()).backward();
    optimizer.step();
  }
  dcp::save({{"app", app_state(model, optimizer)}, {"step", 2}}, folder.path() + "/saved");

  Pair fresh;
  AdamW fresh_optimizer(fresh->parameters(), AdamWOptions(0.5));
  StateDict state{{"app", app_state(fresh, fresh_optimizer)}, {"step", 0}};
  dcp::load(state, folder.path() + "/saved");
  EXPECT_EQ(state["step"].integer(), 2);
  EXPECT_TRUE(same(get_model_state_dict(fresh), get_model_state_dict(model)));
  EXPECT_TRUE(same(get_optimizer_state_dict(fresh, fresh_optimizer), get_optimizer_state_dict(model, optimizer)));
  const dcp::Reader reader(folder.path() + "/saved");
  EXPECT_EQ(reader.metadata().entries.front().first, "app.model.a");
}

}  // namespace
}  // namespace fsdp2::testing
