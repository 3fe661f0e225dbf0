// labels: ranks
// A full state dict that only rank 0 has goes into uneven shards, and no rank holds more than one tensor beyond its
// part of the model meanwhile.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include "dcp/sample_state.h"
#include "support/counting_allocator.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

constexpr int kLayers = 8;

/// Weights of 17 rows.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t columns) {
    for (int i = 0; i < kLayers; ++i) {
      register_module("layer" + std::to_string(i),
                      torch::nn::Linear(torch::nn::LinearOptions(columns, 17).bias(false)));
    }
  }
};
TORCH_MODULE(Stack);

Stack sharded_on_meta(int64_t columns) {
  Stack stack = nullptr;
  {
    const MetaDeviceGuard meta;
    stack = Stack(columns);
  }
  for (const auto& child : stack->children()) fully_shard_module(*child, {});
  fully_shard(stack);
  return stack;
}

std::string key(int layer) { return "layer" + std::to_string(layer) + ".weight"; }

dcp::StateDict full_state(int64_t columns) {
  dcp::StateDict state;
  for (int i = 0; i < kLayers; ++i) state[key(i)] = rule_values({17, columns}, at::kFloat, i);
  return state;
}

RANKS_TEST(Row45, UnevenShardsFromRankZero, 2) {
  Stack stack = sharded_on_meta(5);
  set_model_state_dict(stack, rank == 0 ? full_state(5) : dcp::StateDict(),
                       {.full_state_dict = true, .broadcast_from_rank0 = true});
  for (const auto& [fqn, value] : get_model_state_dict(stack)) {
    const DTensor tensor(value.tensor());
    EXPECT_EQ(tensor.to_local().sizes(), (std::vector<int64_t>{rank == 0 ? 9 : 8, 5}));
    EXPECT_TRUE(tensor.full_tensor().equal(full_state(5).at(fqn).tensor())) << fqn;
  }
}

RANKS_TEST(Row45, PeakOfBytesIsOneTensorBeyondTheDestination, 2) {
  constexpr int64_t kColumns = 50000;
  constexpr int64_t kTensor = 17 * kColumns * 4, kSlack = 16384;  // lengths and keys that travel
  CountingAllocator& counter = CountingAllocator::install();
  Stack stack = sharded_on_meta(kColumns);
  torch::optim::AdamW optimizer(stack->parameters(), torch::optim::AdamWOptions(0.1));
  const int64_t shard = (rank == 0 ? 9 : 8) * kColumns * 4;
  const StateDictOptions from_rank0{.full_state_dict = true, .broadcast_from_rank0 = true};
  dcp::StateDict full, moments;
  if (rank == 0) {
    full = full_state(kColumns);
    dcp::StateDict states;
    for (const auto& [fqn, value] : full_state(kColumns)) {
      states[fqn] = dcp::StateDict{
          {"step", torch::tensor(3.0f)}, {"exp_avg", value}, {"exp_avg_sq", full_state(kColumns).at(fqn)}};
    }
    moments = {{"state", states},
               {"param_groups", std::vector<dcp::Value>{dcp::StateDict{{"params", std::vector<dcp::Value>{key(0)}}}}}};
  }
  const int64_t model = counter.peak_of([&] { set_model_state_dict(stack, full, from_rank0); });
  EXPECT_LE(model, kLayers * shard + kTensor + kSlack) << "a copy of all would be " << kLayers * kTensor;
  EXPECT_GE(model, kLayers * shard);
  const int64_t state = counter.peak_of([&] { set_optimizer_state_dict(stack, optimizer, moments, from_rank0); });
  EXPECT_LE(state, 2 * kLayers * shard + kTensor + kSlack);
  // Back: only rank 0 collects.
  const int64_t collected = counter.peak_of([&] {
    const dcp::StateDict back = get_model_state_dict(stack, {.full_state_dict = true, .cpu_offload = true});
    EXPECT_EQ(back.size(), rank == 0 ? kLayers : 0u);
    for (const auto& [fqn, value] : back) EXPECT_TRUE(value.tensor().equal(full.at(fqn).tensor()));
  });
  EXPECT_LE(collected, (rank == 0 ? kLayers + 1 : 1) * kTensor + kSlack);
}

}  // namespace
}  // namespace fsdp2::testing
