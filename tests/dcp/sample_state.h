#pragma once

// The state that C++ and Python save for each other: tests/peer/dcp_peer.py builds the same one.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/tensor/dtensor.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp2::testing {

/// Whole numbers by a rule that both sides compute: exact in every dtype used here.
inline torch::Tensor rule_values(const std::vector<int64_t>& sizes, at::ScalarType dtype, int64_t seed) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  torch::Tensor values = (torch::arange(numel, torch::kInt64) * 2654435761 + seed * 40503).remainder(4294967296);
  values = torch::floor_divide(values, 256).remainder(200) - 100;
  return values.reshape(sizes).to(dtype);
}

struct SampleTensor {
  std::string key;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  std::optional<Placement> placement;  // none: plain
};

inline const std::vector<SampleTensor>& sample_tensors() {
  static const std::vector<SampleTensor> kTensors = {
      {"uneven", {7, 3}, at::kFloat, Shard{0}},
      {"half", {5, 4}, at::kBFloat16, Shard{0}},
      {"ids", {3}, at::kLong, Shard{0}},
      {"one_row", {1, 8}, at::kFloat, Shard{0}},
      {"columns", {4, 6}, at::kFloat, Shard{1}},
      {"narrow_columns", {4, 2}, at::kBFloat16, Shard{1}},
      {"replicated", {3, 3}, at::kFloat, Replicate{}},
      {"plain", {2, 2}, at::kFloat, {}},
      {"scalar", {}, at::kFloat, {}},
      {"flags", {5}, at::kBool, {}},
      {"no_rows", {0, 3}, at::kFloat, Shard{0}},
      {"plain_empty", {0}, at::kLong, {}},
      {"double", {3, 2}, at::kDouble, {}},
      {"complex", {2}, at::kComplexFloat, {}},
      {"small", {4}, at::kFloat8_e4m3fn, {}},
      {"unsigned", {3}, at::kUInt16, {}},
      {"name.with.dots", {2}, at::kInt, Shard{0}},
      {"float16", {6}, at::kHalf, Shard{0}},
      {"float8_e5m2", {9}, at::kFloat8_e5m2, {}},
      {"float8_e4m3fnuz", {3}, at::kFloat8_e4m3fnuz, {}},
      {"float8_e5m2fnuz", {3}, at::kFloat8_e5m2fnuz, {}},
      {"int8", {5}, at::kChar, Shard{0}},
      {"uint8", {5}, at::kByte, {}},
      {"int16", {5}, at::kShort, {}},
      {"uint32", {5}, at::kUInt32, {}},
      {"uint64", {5}, at::kUInt64, {}},
      {"complex128", {2, 2}, at::kComplexDouble, {}},
  };
  return kTensors;
}

inline torch::Tensor sample_values(size_t index) {
  const SampleTensor& info = sample_tensors()[index];
  const auto seed = static_cast<int64_t>(index) + 1;
  const bool small = at::isFloat8Type(info.dtype) || at::isBarebonesUnsignedType(info.dtype) || info.dtype == at::kByte;
  if (small) return rule_values(info.sizes, at::kLong, seed).remainder(8).to(info.dtype);
  if (info.dtype == at::kBool) return rule_values(info.sizes, at::kLong, seed).remainder(2).to(at::kBool);
  return rule_values(info.sizes, info.dtype, seed);
}

/// `zero`: the same structure with zeros and empty values, to load into.
inline dcp::StateDict sample_state(const DeviceMesh& mesh, bool zero) {
  using dcp::StateDict;
  using dcp::Value;
  StateDict tensors;
  for (size_t i = 0; i < sample_tensors().size(); ++i) {
    const SampleTensor& info = sample_tensors()[i];
    torch::Tensor full = sample_values(i);
    if (zero) full = torch::zeros_like(full);
    tensors[info.key] = info.placement ? distribute_tensor(full, mesh, {*info.placement}).tensor() : full;
  }
  // The ranks once more as a mesh of two axes.
  const int64_t ranks = mesh.size(), rows = ranks % 2 == 0 ? 2 : 1;
  const DeviceMesh square = init_device_mesh(c10::kCPU, {rows, ranks / rows});
  const std::pair<const char*, std::vector<Placement>> layouts[] = {
      {"hybrid", {Replicate{}, Shard{0}}}, {"blocks", {Shard{1}, Shard{0}}}, {"twice", {Shard{0}, Shard{0}}}};
  for (const auto& [key, placements] : layouts) {
    torch::Tensor full = rule_values({7, 5}, at::kFloat, 90);
    if (zero) full = torch::zeros_like(full);
    tensors[key] = distribute_tensor(full, square, placements).tensor();
  }
  StateDict adam;
  for (const std::string name : {"uneven", "one_row"}) {
    StateDict state;
    state["step"] = torch::full({}, zero ? 0.0 : 12.0, torch::kFloat);
    for (const std::string moment : {"exp_avg", "exp_avg_sq"}) {
      torch::Tensor full = rule_values(name == "uneven" ? std::vector<int64_t>{7, 3} : std::vector<int64_t>{1, 8},
                                       at::kFloat, moment == "exp_avg" ? 70 : 71);
      if (zero) full = torch::zeros_like(full);
      state[moment] = distribute_tensor(full, mesh, {Shard{0}}).tensor();
    }
    adam[name] = state;
  }
  StateDict group;
  group["lr"] = zero ? Value() : Value(0.25);
  group["betas"] = zero ? Value() : Value::tuple({0.9, 0.999});
  group["foreach"] = nullptr;
  group["amsgrad"] = zero ? Value() : Value(false);
  group["params"] = zero ? Value() : Value(std::vector<Value>{"uneven", "one_row"});
  StateDict values;
  values["int"] = zero ? Value() : Value(42);
  values["negative"] = zero ? Value() : Value(int64_t{-5000000000});
  values["big"] = zero ? Value() : Value::big_int("-123456789012345678901234567890");
  values["float"] = zero ? Value() : Value(2.5);
  values["text"] = zero ? Value() : Value("grüße\n");
  values["bytes"] = zero ? Value() : Value::bytes(std::string("\x00\xff\x80 raw", 7));
  values["true"] = zero ? Value() : Value(true);
  values["numbers"] = zero ? Value() : Value(std::vector<Value>{1, 2.5, "x", nullptr});
  values["nested_tuple"] = zero ? Value() : Value::tuple({1, Value::tuple({"a", Value(std::vector<Value>{})})});
  StateDict state;
  state["tensors"] = tensors;
  state["optim"] = StateDict{{"state", adam}, {"param_groups", std::vector<Value>{group}}};
  state["values"] = values;
  state["list"] =
      std::vector<Value>{zero ? torch::zeros({2}) : torch::ones({2}), StateDict{{"deep", zero ? Value() : Value(7)}}};
  return state;
}

}  // namespace fsdp2::testing
