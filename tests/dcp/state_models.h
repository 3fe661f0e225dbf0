#pragma once

// A model for tests of state dicts, sharded in several ways; tests/peer/state_dicts.py builds the same one.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "dcp/sample_state.h"

namespace fsdp2::testing {

/// Uneven on 2 to 4 ranks, one row, a tied weight, a frozen one, a buffer.
struct StateNetImpl : torch::nn::Module {
  StateNetImpl() {
    one_row = register_parameter("one_row", torch::zeros({1, 8}));
    frozen = register_parameter("frozen", torch::zeros({3, 2}), /*requires_grad=*/false);
    register_buffer("steps", torch::zeros({2}, torch::kLong));
    up = register_module("up", torch::nn::Linear(5, 17));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(17, 3).bias(false)));
    register_module("tied", down);
  }
  torch::Tensor one_row, frozen;
  torch::nn::Linear up = nullptr, down = nullptr;
};
FSDP2_MODULE(StateNet);

/// How a model lies on the ranks. kHybrid: two replicas of half as many shards where the number is even. kColumns: FSDP
/// over columns where they can be cut. kGrid: a mesh with two axes, weights cut by both where the number is even.
enum class Layout { kPlain, kSharded, kHybrid, kColumns, kGrid, kOffloaded };
inline constexpr Layout kLayouts[] = {Layout::kPlain,   Layout::kSharded, Layout::kHybrid,
                                      Layout::kColumns, Layout::kGrid,    Layout::kOffloaded};

inline void shard(StateNet& net, Layout layout) {
  const int64_t world = layout == Layout::kPlain ? 1 : get_world_size();
  FullyShardOptions options;
  if (layout == Layout::kHybrid) {
    const int64_t replicas = world % 2 == 0 ? 2 : 1;
    options.mesh = init_device_mesh(c10::kCPU, {replicas, world / replicas}, {"replicate", "shard"});
  }
  if (layout == Layout::kColumns) {
    options.shard_placement_fn = [](const std::string&, const Tensor& param) -> std::optional<ShardPlacement> {
      if (param.dim() < 2 || param.size(1) % get_world_size() != 0) return std::nullopt;
      return ShardPlacement{Shard{1}, std::nullopt};
    };
  }
  if (layout == Layout::kGrid) {
    const int64_t tensor = world % 2 == 0 ? 2 : 1;
    const DeviceMesh mesh = init_device_mesh(c10::kCPU, {world / tensor, tensor}, {"dp", "tp"});
    for (const std::string fqn : {"one_row", "frozen", "up.weight", "up.bias", "down.weight"}) {
      const bool is_weight = fqn.ends_with("weight");
      distribute_parameter(net, fqn, mesh, {Replicate{}, is_weight ? Placement(Shard{1}) : Placement(Replicate{})});
    }
    options.mesh = mesh;
    options.dp_mesh_dims = DataParallelMeshDims{.shard = {"dp"}, .replicate = {}};
  }
  if (layout == Layout::kOffloaded) options.offload_policy = CPUOffloadPolicy{};
  if (layout == Layout::kPlain) return;
  fully_shard(net->up, options);
  fully_shard(net, options);
}

inline StateNet make_state_net(Layout layout, bool on_meta = false) {
  StateNet net = nullptr;
  if (on_meta) {
    const MetaDeviceGuard meta;
    net = StateNet();
  } else {
    net = StateNet();
  }
  shard(net, layout);
  return net;
}

/// Python's parameters() gives tied parameters once.
inline std::vector<torch::Tensor> distinct_parameters(torch::nn::Module& model) {
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& param : model.parameters()) {
    const bool known =
        std::any_of(result.begin(), result.end(), [&](const torch::Tensor& other) { return other.is_same(param); });
    if (!known) result.push_back(param);
  }
  return result;
}

/// What every tensor of a model is filled with, by its place among the sorted names ("tied.weight" is "down.weight").
inline dcp::StateDict rule_model(int64_t seed = 0) {
  dcp::StateDict state;
  state["one_row"] = rule_values({1, 8}, at::kFloat, seed + 2);
  state["frozen"] = rule_values({3, 2}, at::kFloat, seed + 1);
  state["steps"] = rule_values({2}, at::kLong, seed + 3);
  state["up.weight"] = rule_values({17, 5}, at::kFloat, seed + 6);
  state["up.bias"] = rule_values({17}, at::kFloat, seed + 5);
  state["down.weight"] = rule_values({3, 17}, at::kFloat, seed + 0);
  state["tied.weight"] = rule_values({3, 17}, at::kFloat, seed + 0);
  return state;
}

/// The state of AdamW for the trainable parameters, and one group, without the keys of Python's that say how it
/// computes.
inline dcp::StateDict rule_optimizer(int64_t seed = 0) {
  const dcp::StateDict model = rule_model();
  dcp::StateDict states;
  int64_t i = 0;
  for (const std::string fqn : {"one_row", "up.weight", "up.bias", "down.weight"}) {
    const auto sizes = model.at(fqn).tensor().sizes().vec();
    states[fqn] = dcp::StateDict{{"step", torch::tensor(12.0f)},
                                 {"exp_avg", rule_values(sizes, at::kFloat, seed + 100 + i)},
                                 {"exp_avg_sq", rule_values(sizes, at::kFloat, seed + 200 + i).abs()}};
    ++i;
  }
  dcp::StateDict group{{"lr", 0.5}, {"betas", dcp::Value::tuple({0.8, 0.9})}, {"eps", 1e-7}, {"weight_decay", 0.25}};
  group["amsgrad"] = false;
  group["params"] = std::vector<dcp::Value>{"one_row", "frozen", "up.weight", "up.bias", "down.weight"};
  return {{"state", states}, {"param_groups", std::vector<dcp::Value>{group}}};
}

inline torch::Tensor whole_of(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor() : tensor.detach();
}

/// The model's tensors are those of `expected`. Collective where the model is sharded.
inline void expect_model(StateNet& net, const dcp::StateDict& expected, const std::string& where) {
  const dcp::StateDict state = get_model_state_dict(net);
  EXPECT_EQ(state.size(), expected.size()) << where;
  for (const auto& [fqn, value] : state) {
    EXPECT_TRUE(whole_of(value.tensor()).equal(expected.at(fqn).tensor())) << where << ": " << fqn;
  }
}

/// The optimizer's state and hyper-parameters are those of `expected`.
inline void expect_optimizer(StateNet& net, torch::optim::AdamW& optimizer, const dcp::StateDict& expected,
                             const std::string& where) {
  const dcp::StateDict state = get_optimizer_state_dict(net, optimizer);
  const dcp::StateDict& wanted = expected.at("state").dict();
  EXPECT_EQ(state.at("state").dict().size(), wanted.size()) << where;
  for (const auto& [fqn, entry] : state.at("state").dict()) {
    for (const auto& [field, value] : entry.dict()) {
      EXPECT_TRUE(whole_of(value.tensor()).equal(wanted.at(fqn).dict().at(field).tensor()))
          << where << ": " << fqn << "." << field;
    }
  }
  const auto& options = static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.5) << where;
  EXPECT_EQ(options.betas(), (std::tuple<double, double>(0.8, 0.9))) << where;
  EXPECT_EQ(options.weight_decay(), 0.25) << where;
}

/// A model and an AdamW that hold the values of the rules.
struct RuleTraining {
  explicit RuleTraining(Layout layout, int64_t seed = 0) : net(make_state_net(layout)) {
    make_optimizer();
    set_state_dict(net, *optimizer, rule_model(seed), rule_optimizer(seed), {.full_state_dict = true});
  }
  struct Fresh {
    bool on_meta = false;
  };
  RuleTraining(Layout layout, Fresh fresh) : net(make_state_net(layout, fresh.on_meta)) { make_optimizer(); }
  void make_optimizer() {
    optimizer = std::make_unique<torch::optim::AdamW>(distinct_parameters(*net), torch::optim::AdamWOptions(0.125));
  }
  StateNet net;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

}  // namespace fsdp2::testing
