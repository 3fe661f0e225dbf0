// labels: ranks
// State dicts with whole tensors and on the CPU: values, who gets them, memory, and errors that reach every rank.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include "dcp/same.h"
#include "dcp/state_models.h"
#include "support/counting_allocator.h"
#include "support/ranks.h"

namespace fsdp2::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(FullStateDict, WholeTensorsOnAllRanksForEveryLayout) {
  for (const int world : {1, 2, 3, 4}) {
    ASSERT_TRUE(run_ranks(world, [&](int) {
      for (const Layout layout : kLayouts) {
        RuleTraining run(layout);
        const auto [model, optim] = get_state_dict(run.net, *run.optimizer, {.full_state_dict = true});
        const dcp::StateDict expected = rule_optimizer();
        const std::string where = c10::str("layout ", static_cast<int>(layout), " on ", world);
        EXPECT_EQ(model.keys(), (std::vector<std::string>{"one_row", "frozen", "steps", "up.weight", "up.bias",
                                                          "down.weight", "tied.weight"}));
        EXPECT_TRUE(same(model, rule_model())) << where;
        EXPECT_TRUE(same(optim.at("state"), expected.at("state"), "state")) << where;
        const dcp::StateDict& group = optim.at("param_groups").list()[0].dict();
        for (const auto& [key, value] : expected.at("param_groups").list()[0].dict()) {
          EXPECT_TRUE(same(group.at(key), value, key)) << where;
        }
        // New memory where a tensor was distributed, the model's own otherwise.
        const bool shared =
            model.at("up.weight")
                .tensor()
                .is_alias_of(is_dtensor(run.net->up->weight) ? DTensor(run.net->up->weight.detach()).to_local()
                                                             : run.net->up->weight);
        EXPECT_EQ(shared, layout == Layout::kPlain) << where;
      }
    }));
  }
}

RANKS_TEST(FullStateDict, WithCpuOffloadOnlyRankZeroHasEntries, 4) {
  for (const Layout layout : kLayouts) {
    if (layout == Layout::kPlain) continue;
    RuleTraining run(layout);
    const StateDictOptions options{.full_state_dict = true, .cpu_offload = true};
    const auto [model, optim] = get_state_dict(run.net, *run.optimizer, options);
    if (rank != 0) {
      EXPECT_TRUE(model.empty() && optim.empty());
      continue;
    }
    EXPECT_TRUE(same(model, rule_model()));
    EXPECT_TRUE(same(optim.at("state"), rule_optimizer().at("state"), "state"));
  }
}

RANKS_TEST(FullStateDict, CpuOffloadAloneKeepsShards, 2) {
  RuleTraining run(Layout::kSharded);
  const dcp::StateDict state = get_model_state_dict(run.net, {.cpu_offload = true});
  ASSERT_TRUE(is_dtensor(state.at("up.weight").tensor()));
  EXPECT_TRUE(DTensor(state.at("up.weight").tensor()).to_local().is_cpu());
  EXPECT_EQ(DTensor(state.at("up.weight").tensor()).to_local().size(0), rank == 0 ? 9 : 8);
}

struct GridImpl : torch::nn::Module {
  GridImpl() { weight = register_parameter("weight", rule_values({7, 9}, at::kFloat, 3)); }
  torch::Tensor weight;
};
TORCH_MODULE(Grid);

RANKS_TEST(FullStateDict, TwoShardedAxesOfAMesh, 4) {
  const DeviceMesh mesh = init_device_mesh(c10::kCPU, {2, 2}, {"a", "b"});
  const std::vector<std::vector<Placement>> placements = {
      {Shard{0}, Shard{1}},    {Shard{1}, Shard{0}},    {Shard{0}, Shard{0}},      {StridedShard{0, 2}, Shard{0}},
      {Replicate{}, Shard{1}}, {Shard{1}, Replicate{}}, {Replicate{}, Replicate{}}};
  for (const auto& placement : placements) {
    Grid grid;
    distribute_parameter(grid, "weight", mesh, placement);
    const torch::Tensor expected = rule_values({7, 9}, at::kFloat, 3);
    const std::string where = to_string(placement);
    EXPECT_TRUE(get_model_state_dict(grid, {.full_state_dict = true}).at("weight").tensor().equal(expected)) << where;
    const dcp::StateDict one = get_model_state_dict(grid, {.full_state_dict = true, .cpu_offload = true});
    EXPECT_EQ(one.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) {
      EXPECT_TRUE(one.at("weight").tensor().equal(expected)) << where;
    }
    // And back: each rank takes its part of its own copy.
    Grid target;
    target->weight.data().zero_();
    distribute_parameter(target, "weight", mesh, placement);
    set_model_state_dict(target, {{"weight", expected}}, {.full_state_dict = true});
    EXPECT_TRUE(whole_of(target->weight).equal(expected)) << where;
  }
}

/// Big enough to go part by part where rows are uneven.
struct BigImpl : torch::nn::Module {
  BigImpl() {
    even = register_parameter("even", torch::ones({4, kMiB}));                                         // 16 MiB
    one_row = register_parameter("one_row", torch::arange(2 * kMiB).reshape({1, -1}).to(at::kFloat));  // 8 MiB
    uneven = register_parameter("uneven", torch::arange(5 * kMiB).reshape({5, -1}).to(at::kFloat));    // 20 MiB
    columns = register_parameter("columns", torch::arange(2 * kMiB).reshape({-1, 4}).to(at::kFloat));  // 8 MiB
  }
  torch::Tensor even, one_row, uneven, columns;
};
TORCH_MODULE(Big);

Big sharded_big() {
  Big big;
  fully_shard(big, {.shard_placement_fn = [](const std::string& fqn, const Tensor&) -> std::optional<ShardPlacement> {
                return ShardPlacement{Shard{fqn == "columns" ? 1 : 0}, std::nullopt};
              }});
  return big;
}

RANKS_TEST(FullStateDict, PeakOfMemory, 4) {
  CountingAllocator& counter = CountingAllocator::install();
  Big big = sharded_big();
  get_model_state_dict(big, {.full_state_dict = true, .cpu_offload = true});  // makes groups
  const int64_t whole = (16 + 8 + 20 + 8) * kMiB, largest = 20 * kMiB;
  dcp::StateDict state;
  const int64_t offloaded =
      counter.peak_of([&] { state = get_model_state_dict(big, {.full_state_dict = true, .cpu_offload = true}); });
  if (rank == 0) {
    EXPECT_LT(offloaded, whole + largest);
    EXPECT_TRUE(state.at("uneven").tensor().equal(Big()->uneven));
    EXPECT_TRUE(state.at("columns").tensor().equal(Big()->columns));
    EXPECT_TRUE(state.at("one_row").tensor().equal(Big()->one_row));
    EXPECT_TRUE(state.at("even").tensor().equal(Big()->even));
  } else {
    EXPECT_LE(offloaded, largest);
  }
  state = dcp::StateDict();
  const int64_t everywhere = counter.peak_of([&] { state = get_model_state_dict(big, {.full_state_dict = true}); });
  EXPECT_LT(everywhere, whole + largest);
  EXPECT_TRUE(state.at("uneven").tensor().equal(Big()->uneven));
}

RANKS_TEST(FullStateDict, FrozenParametersAreLeftOut, 2) {
  for (const Layout layout : {Layout::kPlain, Layout::kSharded}) {
    RuleTraining run(layout);
    const StateDictOptions options{.full_state_dict = true, .ignore_frozen_params = true};
    const dcp::StateDict state = get_model_state_dict(run.net, options);
    EXPECT_EQ(state.keys(),
              (std::vector<std::string>{"one_row", "steps", "up.weight", "up.bias", "down.weight", "tied.weight"}));
    // Back without it: no missing key, and its value stays.
    dcp::StateDict other = rule_model(1000);
    other.erase("frozen");
    EXPECT_FSDP2_ERROR(set_model_state_dict(run.net, other, {.full_state_dict = true}), kNotFound, "frozen");
    EXPECT_TRUE(set_model_state_dict(run.net, other, options).missing.empty());
    other["frozen"] = rule_model().at("frozen");
    expect_model(run.net, other, "without frozen parameters");
  }
}

RANKS_TEST(FullStateDict, SubmodulesWithAndWithoutPrefix, 2) {
  RuleTraining run(Layout::kSharded);
  StateDictOptions options{.full_state_dict = true, .submodules = {run.net->up}};
  EXPECT_EQ(get_model_state_dict(run.net, options).keys(), (std::vector<std::string>{"up.weight", "up.bias"}));
  const dcp::StateDict optim = get_optimizer_state_dict(run.net, *run.optimizer, options);
  EXPECT_EQ(optim.at("state").dict().keys(), (std::vector<std::string>{"up.weight", "up.bias"}));
  options.keep_submodule_prefixes = false;
  dcp::StateDict model = get_model_state_dict(run.net, options);
  EXPECT_EQ(model.keys(), (std::vector<std::string>{"weight", "bias"}));
  dcp::StateDict bare = get_optimizer_state_dict(run.net, *run.optimizer, options);
  EXPECT_TRUE(
      same(bare.at("param_groups").list()[0].dict().at("params"), std::vector<dcp::Value>{"weight", "bias"}, "params"));
  // Only the submodule changes.
  model["weight"] = rule_values({17, 5}, at::kFloat, 77);
  bare["state"].dict()["bias"].dict()["exp_avg"] = rule_values({17}, at::kFloat, 78);
  set_state_dict(run.net, *run.optimizer, model, bare, options);
  dcp::StateDict expected = rule_model(), expected_optim = rule_optimizer();
  expected["up.weight"] = rule_values({17, 5}, at::kFloat, 77);
  expected_optim["state"].dict()["up.bias"].dict()["exp_avg"] = rule_values({17}, at::kFloat, 78);
  expect_model(run.net, expected, "submodule");
  expect_optimizer(run.net, *run.optimizer, expected_optim, "submodule");
  // A module with two names.
  options = {.full_state_dict = true, .submodules = {run.net->down}};
  EXPECT_EQ(get_model_state_dict(run.net, options).keys(), (std::vector<std::string>{"down.weight", "tied.weight"}));
  options.keep_submodule_prefixes = false;
  EXPECT_EQ(get_model_state_dict(run.net, options).keys(), (std::vector<std::string>{"weight"}));
}

TEST(FullStateDict, OptionsThatContradictEachOther) {
  torch::nn::Linear net(2, 2), other(2, 2);
  EXPECT_FSDP2_ERROR(get_model_state_dict(net, {.keep_submodule_prefixes = false}), kInvalidArgument, "exactly one");
  EXPECT_FSDP2_ERROR(get_model_state_dict(net, {.submodules = {other}}), kInvalidArgument, "not inside of the model");
  EXPECT_FSDP2_ERROR(set_model_state_dict(net, {}, {.broadcast_from_rank0 = true}), kInvalidArgument,
                     "full_state_dict");
  EXPECT_EQ(get_model_state_dict(net, {.full_state_dict = true, .cpu_offload = true}).size(), 2u);
}

RANKS_TEST(FullStateDict, AnErrorOfOneRankReachesAll, 3) {
  RuleTraining run(Layout::kSharded);
  torch::optim::SGD stranger({torch::ones({2})}, 0.1);
  torch::optim::Optimizer& optimizer = rank == 1 ? static_cast<torch::optim::Optimizer&>(stranger) : *run.optimizer;
  EXPECT_FSDP2_ERROR(get_optimizer_state_dict(run.net, optimizer, {.full_state_dict = true}), kInvalidArgument,
                     "rank 1 failed while collecting a state dict: [rank 1] [dcp] parameter 0 of group 0");
  // And the next call works.
  EXPECT_TRUE(same(get_model_state_dict(run.net, {.full_state_dict = true}), rule_model()));
}

RANKS_TEST(FullStateDict, DictsThatDifferBetweenRanksAreNamedInsteadOfAHang, 3) {
  RuleTraining run(Layout::kSharded);
  run.net->up->bias.set_requires_grad(rank != 2);
  EXPECT_FSDP2_ERROR(get_model_state_dict(run.net, {.full_state_dict = true, .ignore_frozen_params = true}),
                     kInvalidArgument, "ranks 0 and 2 hold different distributed tensors: model.up.bias [17] Float");
}

RANKS_TEST(FullStateDict, AGroupOfOwnForAModelOnSomeRanks, 3) {
  const ProcessGroup pair = new_group({1, 2});
  if (rank == 0) return;
  StateNet net;
  const DeviceMesh mesh = DeviceMesh::from_group(pair, c10::kCPU);
  fully_shard(net, {.mesh = mesh});
  set_model_state_dict(net, rule_model(), {.full_state_dict = true});
  const dcp::StateDict state = get_model_state_dict(net, {.full_state_dict = true, .cpu_offload = true, .group = pair});
  EXPECT_EQ(state.empty(), rank == 2);
  if (rank == 1) {
    EXPECT_TRUE(same(state, rule_model()));
  }
}

}  // namespace
}  // namespace fsdp2::testing
