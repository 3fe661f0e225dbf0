// labels: peer, ranks

// fsdp2::optim against Python's fused optimizers, to the last bit, and checkpoints both ways.

#include <fsdp2/fsdp2.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "dcp/same.h"
#include "dcp/sample_state.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace fsdp2::testing {
namespace {

using nlohmann::json;
using torch::Tensor;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::SGDOptions;

json cases() {
  const json adam{{"lr", 0.1}, {"betas", {0.5, 0.7}}, {"eps", 1e-3}, {"weight_decay", 0.2}, {"amsgrad", true}};
  const std::vector<std::pair<std::string, json>> optimizers{
      {"AdamW", {{"lr", 0.1}}},
      {"AdamW", adam},
      {"Adam", {{"lr", 0.1}}},
      {"Adam", adam},
      {"SGD", {{"lr", 0.1}}},
      {"SGD", {{"lr", 0.1}, {"momentum", 0.9}, {"dampening", 0.3}, {"weight_decay", 0.2}}},
      {"SGD", {{"lr", 0.1}, {"momentum", 0.9}, {"nesterov", true}}}};
  json result;
  for (const char* dtype : {"float32", "float64", "bfloat16", "float16"}) {
    for (const auto& [optimizer, options] : optimizers) {
      // Python's own momentum of short floats has garbage in it (libtorch 2.13, CPU).
      if (options.contains("momentum") && std::string(dtype).ends_with("float16")) continue;
      result["case" + std::to_string(result.size())] = {{"optimizer", optimizer},
                                                        {"options", options},
                                                        {"dtype", dtype},
                                                        {"steps", 4},
                                                        {"sizes", json::parse("[[17, 5], [8], [1, 8], [40, 33]]")}};
    }
  }
  return result;
}

template <class Options>
Options adam_options(const json& given) {
  Options options(given["lr"].get<double>());
  if (given.contains("betas")) options.betas({given["betas"][0].get<double>(), given["betas"][1].get<double>()});
  return options.eps(given.value("eps", options.eps()))
      .weight_decay(given.value("weight_decay", options.weight_decay()))
      .amsgrad(given.value("amsgrad", false));
}

std::unique_ptr<Optimizer> make_optimizer(const json& test, const std::vector<Tensor>& params) {
  const json& given = test["options"];
  if (test["optimizer"] == "AdamW") return std::make_unique<optim::AdamW>(params, adam_options<AdamWOptions>(given));
  if (test["optimizer"] == "Adam") return std::make_unique<optim::Adam>(params, adam_options<AdamOptions>(given));
  return std::make_unique<optim::SGD>(params, SGDOptions(given["lr"].get<double>())
                                                  .momentum(given.value("momentum", 0.0))
                                                  .dampening(given.value("dampening", 0.0))
                                                  .weight_decay(given.value("weight_decay", 0.0))
                                                  .nesterov(given.value("nesterov", false)));
}

Tensor values(const std::vector<int64_t>& sizes, at::ScalarType dtype, int64_t seed) {
  return (rule_values(sizes, at::kFloat, seed) / 64).to(dtype);
}

dcp::StateDict state_of(const Tensor& param, Optimizer& optimizer) {
  dcp::StateDict state{{"param", param.detach()}};
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return state;
  const auto add = [&](const char* name, const Tensor& value) {
    if (value.defined()) state[name] = value;
  };
  const auto add_adam = [&](auto& adam) {
    add("exp_avg", adam.exp_avg());
    add("exp_avg_sq", adam.exp_avg_sq());
    add("max_exp_avg_sq", adam.max_exp_avg_sq());
  };
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(found->second.get())) add_adam(*adamw);
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(found->second.get())) add_adam(*adam);
  if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(found->second.get())) {
    add("momentum_buffer", sgd->momentum_buffer());
  }
  return state;
}

/// `on_mesh`: as DTensors, else (one rank) plain.
void expect_as_python(const std::string& name, const json& test, const dcp::StateDict& expected, bool on_mesh) {
  const auto mesh = init_device_mesh(c10::kCPU, {get_world_size()});
  const std::map<std::string, at::ScalarType> dtypes{
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  const auto make = [&](size_t index, int64_t seed) {
    const Tensor full = values(test["sizes"][index], dtypes.at(test["dtype"]), seed);
    return on_mesh ? distribute_tensor(full, mesh, {Shard{0}}).tensor() : full;
  };
  std::vector<Tensor> params;
  for (size_t index = 0; index < test["sizes"].size(); ++index) {
    params.push_back(make(index, static_cast<int64_t>(index)).set_requires_grad(true));
  }
  const auto optimizer = make_optimizer(test, params);
  for (int step = 0; step < test["steps"]; ++step) {
    for (size_t index = 0; index < params.size(); ++index) {
      params[index].mutable_grad() = make(index, 100 * (step + 1) + static_cast<int64_t>(index));
    }
    optimizer->step();
  }
  const std::string key = c10::str(name, ".", get_world_size(), ".", get_rank());
  for (size_t index = 0; index < params.size(); ++index) {
    EXPECT_TRUE(same(state_of(params[index], *optimizer), expected.at(key).dict().at(std::to_string(index)),
                     c10::str(key, " ", test["optimizer"].get<std::string>(), " ", test["dtype"].get<std::string>(),
                              ", parameter ", index)));
  }
}

struct Training {
  torch::nn::Linear net{5, 17};
  std::unique_ptr<optim::AdamW> optimizer;

  Training() {
    const torch::NoGradGuard no_grad;
    auto params = net->parameters();
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(values(params[i].sizes().vec(), at::kFloat, i));
    fully_shard(net);
    optimizer = std::make_unique<optim::AdamW>(net->parameters(), AdamWOptions(0.1).amsgrad(true));
  }
  void steps(int begin, int end) {
    auto params = net->parameters();
    for (int step = begin; step < end; ++step) {
      for (size_t i = 0; i < params.size(); ++i) {
        const Tensor grad = values(params[i].sizes().vec(), at::kFloat, 100 * (step + 1) + static_cast<int64_t>(i));
        params[i].mutable_grad() = distribute_tensor(grad, DTensor(params[i]).device_mesh(), {Shard{0}}).tensor();
      }
      optimizer->step();
    }
  }
  dcp::StateDict state() {
    return {{"model", get_model_state_dict(net)}, {"optim", get_optimizer_state_dict(net, *optimizer)}};
  }
  dcp::StateDict final() {
    dcp::StateDict result;
    for (const auto& item : net->named_parameters()) result[item.key()] = whole(item.value());
    return result;
  }
};

dcp::StateDict copy_of(const dcp::StateDict& state) {
  dcp::StateDict result;
  for (const auto& [key, value] : state) {
    if (value.kind() == dcp::Kind::Dict) {
      result[key] = copy_of(value.dict());
    } else {
      result[key] = value.kind() == dcp::Kind::Tensor ? dcp::Value(value.tensor().clone()) : value;
    }
  }
  return result;
}

void save_ours(const std::string& folder) {
  Training run;
  run.steps(0, 3);
  const torch::NoGradGuard no_grad;
  dcp::StateDict state = copy_of(run.state());
  run.steps(3, 5);
  state["final"] = run.final();
  dcp::save(state, folder);
}

void continue_python(const std::string& folder) {
  Training run;
  dcp::StateDict state = run.state();
  state["final"] = run.final();
  dcp::load(state, folder);
  set_state_dict(run.net, *run.optimizer, state["model"].dict(), state["optim"].dict());
  run.steps(3, 5);
  const dcp::StateDict ours = run.final();
  for (const auto& [name, value] : state["final"].dict()) {
    EXPECT_TRUE(torch::allclose(ours.at(name).tensor(), value.tensor(), 1e-6, 1e-6)) << name;
  }
}

TEST(OptimPeer, EqualsPythonsFusedOptimizersToTheLastBit) {
  const TempDir folder;
  const json tests = cases();
  std::ofstream(folder.path() + "/cases.json") << tests;
  ASSERT_TRUE(run_ranks(2, [&](int) { save_ours(folder.path() + "/cpp"); }));
  const auto python = run_python(test_file("optim/optim_peer.py"), {folder.path() + "/cases.json", folder.path()});
  ASSERT_EQ(python.exit_code, 0) << python.output;
  for (const int world : {1, 2, 3}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      const dcp::StateDict expected = dcp::Reader(folder.path() + "/parts").read_all();
      for (const auto& [name, test] : tests.items()) {
        expect_as_python(name, test, expected, /*on_mesh=*/true);
        if (world == 1) expect_as_python(name, test, expected, /*on_mesh=*/false);
      }
      continue_python(folder.path() + "/python");
    }));
  }
}

}  // namespace
}  // namespace fsdp2::testing
