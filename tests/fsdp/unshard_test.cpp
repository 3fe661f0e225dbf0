// labels: ranks
// backends: gloo, shm
// Gathering and freeing by hand, and how many collectives each way of resharding needs.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

constexpr int64_t kDim = 5, kBlocks = 3;

Tower make_sharded(const fsdp2::ReshardAfterForward& setting) {
  torch::manual_seed(42);
  Tower model(kDim, kBlocks);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, {.reshard_after_forward = setting});
  fsdp2::fully_shard(model, {.reshard_after_forward = setting});
  return model;
}

fsdp2::Counters counts_of(const std::function<void()>& action) {
  fsdp2::reset_counters();
  action();
  return fsdp2::counters();
}

/// Expects `forward_gathers`, then `backward_gathers` and one reduction per group, and nothing else.
void expect_counts(
    Tower& model, int64_t forward_gathers, int64_t backward_gathers, const std::string& where,
    const std::function<void()>& between = [] {}) {
  Tensor out;
  const auto forward = counts_of([&] { out = model(torch::ones({2, kDim})); });
  between();
  const auto backward = counts_of([&] { out.sum().backward(); });
  EXPECT_EQ(forward.all_gathers, forward_gathers) << where;
  EXPECT_EQ(forward.reduce_scatters, 0) << where;
  EXPECT_EQ(backward.all_gathers, backward_gathers) << where;
  EXPECT_EQ(backward.reduce_scatters, kBlocks + 1) << where;
  EXPECT_EQ(forward.all_reduces + forward.broadcasts + backward.all_reduces + backward.broadcasts, 0) << where;
}

RANKS_TEST(Collectives, OfEachWayOfResharding, 4) {
  const struct {
    fsdp2::ReshardAfterForward setting;
    int64_t backward_gathers;
    const char* name;
  } cases[] = {
      {true, kBlocks + 1, "true"}, {false, 0, "false"}, {2, kBlocks + 1, "int"}, {std::nullopt, kBlocks, "unset"}};
  for (const auto& c : cases) {
    Tower model = make_sharded(c.setting);
    for (int step = 0; step < 2; ++step) expect_counts(model, kBlocks + 1, c.backward_gathers, c.name);
  }
}

RANKS_TEST(Collectives, FreedByHandBetweenForwardAndBackward, 2) {
  Tower model = make_sharded(false);
  expect_counts(model, kBlocks + 1, kBlocks + 1, "by hand", [&] { reshard_all(*model); });
  expect_counts(model, kBlocks + 1, 0, "not by hand");
}

RANKS_TEST(Collectives, FollowTheSettingMadeWhileTraining, 2) {
  for (const bool recurse : {true, false}) {
    Tower unset = make_sharded(std::nullopt);
    expect_counts(unset, kBlocks + 1, kBlocks, "unset");
    Tower off = make_sharded(false);
    fsdp2::fsdp_module(off).set_reshard_after_forward(true, recurse);
    expect_counts(off, kBlocks + 1, recurse ? kBlocks + 1 : 1, c10::str("switched on, recurse ", recurse));
    Tower on = make_sharded(true);
    fsdp2::fsdp_module(on).set_reshard_after_forward(false, recurse);
    expect_counts(on, kBlocks + 1, recurse ? 0 : kBlocks, c10::str("switched off, recurse ", recurse));
    fsdp2::fsdp_module(on).set_reshard_after_forward(true);
    expect_counts(on, kBlocks + 1, kBlocks + 1, "and on again");
  }
}

// ----- by hand -----

struct ShapesImpl : torch::nn::Module {
  ShapesImpl() {
    int64_t count = 0;
    for (const auto& sizes :
         std::vector<std::vector<int64_t>>{{17, 25}, {17}, {8, 31}, {3}, {8, 8}, {1, 9}, {32, 2, 2}, {0, 4}}) {
      weights.push_back(register_parameter("w" + std::to_string(count++), torch::randn(sizes)));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (const Tensor& weight : weights) y = y + weight.sin().sum();
    return y;
  }
  std::vector<Tensor> weights;
};
FSDP2_MODULE(Shapes);

void expect_gathered_values(int) {
  for (const auto& setting :
       std::vector<fsdp2::ReshardAfterForward>{std::nullopt, true, fsdp2::get_world_size() == 4 ? 2 : 1}) {
    torch::manual_seed(42);
    Shapes reference, model;
    copy_state(*model, *reference);
    auto handle = fsdp2::fully_shard(model, {.reshard_after_forward = setting});
    expect_same_values(*model, *reference, "sharded", 0);
    for (int i = 0; i < 2; ++i) {
      handle.unshard();  // the first before any forward
      EXPECT_TRUE(handle.is_unsharded());
      for (size_t k = 0; k < model->weights.size(); ++k) {
        EXPECT_FALSE(fsdp2::is_dtensor(model->weights[k])) << k;
        EXPECT_TRUE(torch::equal(model->weights[k], reference->weights[k])) << k;
      }
      handle.unshard();  // whole already
      handle.reshard();
      handle.reshard();
      EXPECT_FALSE(handle.is_unsharded());
      // From the shard over fewer ranks, where one is kept: in backward, and by hand.
      const Tensor x = torch::ones({1});
      model(x).backward();
      {
        torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(model(x), reference(x)));
      }
      handle.unshard();
      for (size_t k = 0; k < model->weights.size(); ++k) {
        EXPECT_TRUE(torch::equal(model->weights[k], reference->weights[k])) << k;
      }
      handle.reshard();
      if (i == 0) reference(x).backward();
    }
    for (Tensor& param : reference->parameters()) param.mutable_grad().mul_(2);
    expect_same_gradients(*model, *reference, "two backwards", 1e-5);
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
  }
}
RANKS_TEST(Unshard, GivesTheValuesOfEveryShapeOnThreeRanks, 3) { expect_gathered_values(rank); }
RANKS_TEST(Unshard, GivesTheValuesOfEveryShapeOnFourRanks, 4) { expect_gathered_values(rank); }

RANKS_TEST(Unshard, WithoutAGroupNothingHappens, 2) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() {
      a = register_module("a", linear(4, 4));
      b = register_module("b", linear(4, 4));
    }
    Tensor forward(const Tensor& x) { return b(a(x)); }
    Linear a{nullptr}, b{nullptr};
  };
  auto model = std::make_shared<TwoImpl>();
  fsdp2::fully_shard(model->a);
  fsdp2::fully_shard(model->b);
  auto root = fsdp2::fully_shard(model);
  EXPECT_TRUE(root.param_fqns().empty());
  const auto counts = counts_of([&] {
    auto handle = root.unshard_async();
    handle.wait();
    handle.wait();
    root.unshard();
    root.reshard();
  });
  EXPECT_EQ(counts.all_gathers, 0);
  EXPECT_TRUE(fsdp2::is_dtensor(model->a->weight));
  EXPECT_NO_THROW(fsdp2::call(model, torch::ones({1, 4})).sum().backward());
}

RANKS_TEST(Unshard, AHandleGathersOnceAndLeavesShardsInPlaceUntilItIsWaitedFor, 2) {
  Linear layer = linear(4, 4);
  auto module = fsdp2::fully_shard(layer);
  const auto counts = counts_of([&] {
    auto first = module.unshard_async();
    EXPECT_FALSE(module.is_unsharded());
    EXPECT_TRUE(fsdp2::is_dtensor(layer->weight));
    auto second = module.unshard_async();  // under way already
    first.wait();
    EXPECT_TRUE(module.is_unsharded());
    EXPECT_FALSE(fsdp2::is_dtensor(layer->weight));
    second.wait();
    first.wait();
  });
  EXPECT_EQ(counts.all_gathers, 1);
  module.reshard();
  { const auto dropped = module.unshard_async(); }  // nobody waits: the next forward does
  const auto in_forward = counts_of([&] { layer(torch::ones({1, 4})); });
  EXPECT_EQ(in_forward.all_gathers, 0);
  EXPECT_TRUE(module.is_unsharded());
}

/// Gathers of the MLPs are started while another part computes and communicates on its own.
struct OverlappedImpl : torch::nn::Module {
  OverlappedImpl() {
    for (int i = 0; i < 3; ++i) {
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::randn({kDim, kDim})));
      mlps.push_back(register_module("mlp" + std::to_string(i), Mlp(kDim)));
    }
  }
  Tensor forward(const Tensor& x) {
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < mlps.size(); ++i) {
      inputs.push_back(torch::tanh(x.mm(weights[i])));
      if (fsdp2::is_fsdp_module(mlps[i])) {
        fsdp2::fsdp_module(mlps[i]).unshard_async();
        Tensor other = torch::ones({3});
        fsdp2::all_reduce(other);  // the user's own, between start and use
        EXPECT_EQ(other[0].item<double>(), fsdp2::get_world_size());
      }
    }
    Tensor sum = torch::zeros({1}, x.options());
    for (size_t i = 0; i < mlps.size(); ++i) sum = sum + mlps[i](inputs[i]);
    return sum;
  }
  std::vector<Tensor> weights;
  std::vector<Mlp> mlps;
};
FSDP2_MODULE(Overlapped);

RANKS_TEST(Unshard, StartedAheadInsideForwardTrains, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Overlapped>();
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, {.reshard_after_forward = false});
  fsdp2::fully_shard(model);
  const auto next = [] { return torch::randn({4, kDim}, torch::kDouble); };
  expect_trains_like(model, reference, rank, 5, next, "ahead");
  const auto counts = counts_of([&] { model(torch::ones({2, kDim}, torch::kDouble)).sum().backward(); });
  EXPECT_EQ(counts.all_gathers, 4);
  EXPECT_EQ(counts.reduce_scatters, 4);
}

// ----- parameters that backward does not need -----

struct LookupImpl : torch::nn::Module {
  LookupImpl() {
    table = register_module("table", fsdp2::Hooked<torch::nn::Embedding>(7, kDim));
    mlp = register_module("mlp", Mlp(kDim));
  }
  Tensor forward(const Tensor& tokens) { return mlp(table(tokens)); }
  fsdp2::Hooked<torch::nn::Embedding> table{nullptr};
  Mlp mlp{nullptr};
};
FSDP2_MODULE(Lookup);

RANKS_TEST(Unshard, AModuleMayStayShardedInBackwardAndIsReducedAllTheSame, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Lookup>();
  const fsdp2::FullyShardOptions options{.reshard_after_forward = true};
  auto table = fsdp2::fully_shard(model->table, options);
  fsdp2::fully_shard(model->mlp, options);
  fsdp2::fully_shard(model, options);
  const auto next = [] { return torch::randint(7, {4, 3}); };
  for (const bool in_backward : {true, false}) {
    table.set_unshard_in_backward(in_backward);
    expect_trains_like(model, reference, rank, 3, next, c10::str("gathered in backward ", in_backward));
    Tensor out;
    counts_of([&] { out = model(rows_of(next(), rank)); });
    const auto backward = counts_of([&] { out.sum().backward(); });
    EXPECT_EQ(backward.all_gathers, in_backward ? 2 : 1);
    EXPECT_EQ(backward.reduce_scatters, 2);
    model->zero_grad();
    reference->zero_grad();
  }
}

}  // namespace
