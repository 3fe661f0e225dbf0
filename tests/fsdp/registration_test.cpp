// labels: ranks
// backends: gloo, shm
// What stands in a module's slots before, between and after forward and backward; sharding along any dim trains.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

const fsdp2::ReshardAfterForward kSettings[] = {true, false, 2, std::nullopt};

std::string name_of(const fsdp2::ReshardAfterForward& setting) {
  if (!setting) return "unset";
  return std::holds_alternative<int>(*setting) ? "int" : std::get<bool>(*setting) ? "true" : "false";
}
bool is_false(const fsdp2::ReshardAfterForward& setting) { return name_of(setting) == "false"; }

std::vector<const c10::TensorImpl*> identities(const torch::nn::Module& module) {
  std::vector<const c10::TensorImpl*> found;
  for (const Tensor& param : module.parameters()) found.push_back(param.unsafeGetTensorImpl());
  return found;
}

void expect_sharded(const torch::nn::Module& module, bool sharded, const std::string& where) {
  ASSERT_FALSE(module.parameters().empty());
  for (const auto& named : module.named_parameters()) {
    EXPECT_EQ(fsdp2::is_dtensor(named.value()), sharded) << named.key() << " " << where;
  }
}

// ----- slots -----

RANKS_TEST(Registration, OneGroup, 4) {
  for (const auto& setting : kSettings) {
    const std::string where = name_of(setting);
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Mlp>(5);  // 5 rows on 4 ranks: 2, 2, 1, 0
    const auto before = identities(*model);
    auto handle = fsdp2::fully_shard(model, {.reshard_after_forward = setting});
    const Tensor x = torch::randn({2, 5}, torch::kDouble);
    expect_sharded(*model, true, where);
    expect_same_values(*model, *reference, where, 0);

    model(x);
    const bool stays_whole = !setting || is_false(setting);  // unset: the root keeps its own
    EXPECT_EQ(handle.is_unsharded(), stays_whole) << where;
    expect_sharded(*model, !stays_whole, where + " after forward");
    expect_same_values(*model, *reference, where + " after forward", 0);

    handle.reshard();
    expect_sharded(*model, true, where + " by hand");
    expect_same_values(*model, *reference, where + " by hand", 0);

    model(x).sum().backward();
    expect_sharded(*model, true, where + " after backward");
    expect_same_values(*model, *reference, where + " after backward", 0);
    EXPECT_EQ(identities(*model), before) << where;
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << where;
  }
}

struct TwoMlpsImpl : torch::nn::Module {
  explicit TwoMlpsImpl(int64_t dim) {
    a = register_module("a", Mlp(dim));
    b = register_module("b", Mlp(dim));
  }
  Tensor forward(const Tensor& x) { return b(a(x)); }
  Mlp a{nullptr}, b{nullptr};
};
FSDP2_MODULE(TwoMlps);

RANKS_TEST(Registration, SeveralGroups, 4) {
  for (const auto& setting : kSettings) {
    const std::string where = name_of(setting);
    torch::manual_seed(42);
    auto [reference, model] = make_twins<TwoMlps>(3);
    const fsdp2::FullyShardOptions options{.reshard_after_forward = setting};
    fsdp2::fully_shard(model->a->in_proj, options);
    fsdp2::fully_shard(model->a->out_proj, options);
    fsdp2::fully_shard(model, options);
    const Tensor x = torch::randn({2, 3}, torch::kDouble);
    expect_sharded(*model, true, where);
    expect_same_values(*model, *reference, where, 0);

    model(x);
    expect_sharded(*model->a, !is_false(setting), where + " after forward");
    expect_sharded(*model->b, setting && !is_false(setting), where + " after forward");
    expect_same_values(*model, *reference, where + " after forward", 0);

    reshard_all(*model);
    expect_sharded(*model, true, where + " by hand");
    expect_same_values(*model, *reference, where + " by hand", 0);

    model(x).sum().backward();
    expect_sharded(*model, true, where + " after backward");
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << where;
  }
}

RANKS_TEST(Registration, AShardOverFewerRanksIsFreedWithTheRest, 4) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Mlp>(5);
  fsdp2::fully_shard(model->in_proj, {.reshard_after_forward = 2});
  fsdp2::fully_shard(model->out_proj, {.reshard_after_forward = 2});
  fsdp2::fully_shard(model, {.reshard_after_forward = 2});
  const auto next = [] { return torch::randn({8, 5}, torch::kDouble); };
  expect_trains_like(model, reference, rank, 3, next, "kept over two ranks");
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

void expect_dtype(const torch::nn::Module& module, bool gradients) {
  for (const auto& named : module.named_parameters()) {
    std::vector<Tensor> seen{named.value()};
    if (gradients) seen.push_back(named.value().grad());
    for (const Tensor& tensor : seen) {
      const fsdp2::DTensor handle(tensor.detach());
      EXPECT_EQ(tensor.scalar_type(), torch::kDouble) << named.key();
      EXPECT_EQ(handle.to_local().scalar_type(), torch::kDouble) << named.key();
      EXPECT_EQ(handle.tensor().scalar_type(), torch::kDouble) << named.key();
      EXPECT_EQ(handle.full_tensor().scalar_type(), torch::kDouble) << named.key();
    }
  }
}

RANKS_TEST(Registration, ConversionAfterShardingReachesShardsAndGradients, 2) {
  torch::manual_seed(42);
  Mlp reference(4), model(4);
  copy_state(*model, *reference);
  fsdp2::fully_shard(model->in_proj);
  fsdp2::fully_shard(model->out_proj);
  fsdp2::fully_shard(model);
  model->to(torch::kDouble);
  reference->to(torch::kDouble);
  expect_dtype(*model, false);
  expect_same_values(*model, *reference, "converted", 0);
  torch::optim::Adam optimizer(model->parameters(), 1e-2), expected(reference->parameters(), 1e-2);
  for (int step = 0; step < 5; ++step) {
    const Tensor all = torch::randn({4, 4}, torch::kDouble);
    model(rows_of(all, rank)).sum().backward();
    (reference(all).sum() / 2).backward();
    expect_same_gradients(*model, *reference, "converted");
    expect_dtype(*model, true);
    for (auto* each : {&optimizer, &expected}) {
      each->step();
      each->zero_grad(step % 2 == 0);
    }
  }
  expect_same_values(*model, *reference, "trained");
}

struct WeightOnlyImpl : torch::nn::Module {
  explicit WeightOnlyImpl(const Tensor& value) { weight = register_parameter("weight", value); }
  Tensor forward() { return weight.mm(weight); }
  Tensor weight;
};
FSDP2_MODULE(WeightOnly);

RANKS_TEST(Registration, AForwardWithoutInputsTrains, 2) {
  torch::manual_seed(1);
  const Tensor value = torch::randn({4, 4});
  WeightOnly reference(value.clone()), model(value.clone());
  fsdp2::fully_shard(model);
  for (int i = 0; i < 2; ++i) {  // the second adds to the first
    const Tensor out = model();
    EXPECT_EQ(out.sizes(), (std::vector<int64_t>{4, 4}));
    out.sum().backward();
    reference().sum().backward();
    expect_same_gradients(*model, *reference, "without inputs", 1e-5);
  }
}

// ----- shapes and dims -----

struct ChainImpl : torch::nn::Module {
  ChainImpl(int64_t in, int64_t hidden, int64_t out) {
    first = register_module("first", torch::nn::Linear(in, hidden));
    second = register_module("second", torch::nn::Linear(hidden, out));
  }
  Tensor forward(const Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
FSDP2_MODULE(Chain);

void expect_uneven_shapes_train(int rank) {
  for (const auto& [in, hidden, out] : std::vector<std::array<int64_t, 3>>{{16, 15, 8}, {7, 15, 3}, {16, 17, 8}}) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Chain>(in, hidden, out);
    fsdp2::fully_shard(model);
    fsdp2::reset_counters();
    const auto next = [in = in] { return torch::randn({4 * fsdp2::get_world_size(), in}, torch::kDouble); };
    expect_trains_like(model, reference, rank, 10, next, c10::str(in, "-", hidden, "-", out));
    if (fsdp2::get_world_size() == 1) {
      const auto counters = fsdp2::counters();
      EXPECT_EQ(counters.all_gathers + counters.reduce_scatters + counters.all_reduces + counters.broadcasts, 0);
      EXPECT_EQ(counters.bytes, 0);
    }
  }
}
RANKS_TEST(Shapes, UnevenRowsTrainOnFourRanks, 4) { expect_uneven_shapes_train(rank); }
RANKS_TEST(Shapes, UnevenRowsTrainOnOneRankWithoutCollectives, 1) { expect_uneven_shapes_train(rank); }

int64_t largest_dim(const Tensor& param) {
  const auto sizes = param.sizes();
  return std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
}

fsdp2::FullyShardOptions on_largest_dim() {
  fsdp2::FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&, const Tensor& param) -> std::optional<fsdp2::ShardPlacement> {
    return fsdp2::ShardPlacement{.placement = fsdp2::Shard{largest_dim(param)}};
  };
  return options;
}

void expect_on_largest_dim(const torch::nn::Module& module, const torch::nn::Module& reference, int64_t ranks) {
  bool any_other = false;
  for (const auto& named : module.named_parameters()) {
    const int64_t dim = largest_dim(reference.named_parameters()[named.key()]);
    any_other |= dim != 0;
    const fsdp2::DTensor handle(named.value().detach());
    EXPECT_TRUE(handle.placements()[0] == fsdp2::Placement(fsdp2::Shard{dim})) << named.key();
    std::vector<int64_t> sizes = handle.sizes().vec();
    sizes[dim] /= ranks;
    EXPECT_EQ(handle.to_local().sizes(), sizes) << named.key();
  }
  EXPECT_TRUE(any_other);
}

RANKS_TEST(Shapes, OneGroupShardedAlongTheLargestDimTrains, 4) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Chain>(32, 16, 8);
  fsdp2::fully_shard(model, on_largest_dim());
  expect_on_largest_dim(*model, *reference, 4);
  expect_same_values(*model, *reference, "at the start", 0);
  const auto next = [] { return torch::randn({16, 32}, torch::kDouble); };
  expect_trains_like(model, reference, rank, 10, next, "largest dim");
}

RANKS_TEST(Shapes, SeveralGroupsShardedAlongTheLargestDimTrain, 4) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(8, 2);
  const auto options = on_largest_dim();
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
  fsdp2::fully_shard(model, options);
  expect_on_largest_dim(*model, *reference, 4);
  expect_same_values(*model, *reference, "at the start", 0);
  const auto next = [] { return torch::randn({8, 8}, torch::kDouble); };
  expect_trains_like(model, reference, rank, 5, next, "largest dim");
}

/// Notes in forward whether its whole weight is contiguous.
struct WitnessImpl : torch::nn::Module {
  WitnessImpl() {
    weight = register_parameter("weight", torch::arange(32.0).view({4, 8}));
    bias = register_parameter("bias", torch::ones({4}));
  }
  Tensor forward(const Tensor& x) {
    contiguous = weight.is_contiguous() && bias.is_contiguous() && weight.numel() == 32;
    return torch::linear(x, weight, bias);
  }
  Tensor weight, bias;
  bool contiguous = false;
};
FSDP2_MODULE(Witness);

RANKS_TEST(Shapes, ParametersAndGradientsAreContiguousOnAnyDim, 4) {
  Witness model;
  fsdp2::FullyShardOptions options;
  options.shard_placement_fn = [](const std::string&, const Tensor& param) -> std::optional<fsdp2::ShardPlacement> {
    return fsdp2::ShardPlacement{.placement = fsdp2::Shard{param.dim() - 1}};
  };
  fsdp2::fully_shard(model, options);
  const auto expect_contiguous = [&](const Tensor& tensor) {
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_TRUE(fsdp2::DTensor(tensor.detach()).to_local().is_contiguous());
  };
  for (const Tensor& param : model->parameters()) expect_contiguous(param);
  const Tensor x = torch::arange(16.0).view({2, 8});
  const Tensor out = model(x);
  EXPECT_TRUE(model->contiguous);
  EXPECT_EQ(max_difference(out.detach(), torch::linear(x, torch::arange(32.0).view({4, 8}), torch::ones({4}))), 0);
  out.sum().backward();
  for (const Tensor& param : model->parameters()) {
    expect_contiguous(param);
    expect_contiguous(param.grad());
  }
  EXPECT_EQ(max_difference(whole(model->weight.grad()), x.sum(0).expand({4, 8})), 0);
  EXPECT_EQ(max_difference(whole(model->bias.grad()), torch::full({4}, 2.0)), 0);
}

}  // namespace
