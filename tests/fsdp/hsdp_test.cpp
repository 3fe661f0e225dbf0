// labels: ranks
// backends: gloo, shm
// timeout: 600
// Two-dimensional meshes: sharded on the second axis, replicated on the first.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

fsdp2::DeviceMesh replicas(int64_t replicate, int64_t shard) {
  return fsdp2::init_device_mesh(torch::kCPU, {replicate, shard}, {"replicate", "shard"});
}

struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(int64_t dim) {
    norm = register_module("norm", fsdp2::Hooked<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({dim})));
    for (const int64_t multiplier : {3, 2, 3}) {
      mlps.push_back(register_module("mlp" + std::to_string(mlps.size()), Mlp(dim, multiplier)));
    }
  }
  Tensor forward(Tensor x) {
    x = norm(x);
    for (Mlp& mlp : mlps) x = mlp(x);
    return x;
  }
  fsdp2::Hooked<torch::nn::LayerNorm> norm{nullptr};
  std::vector<Mlp> mlps;
};
FSDP2_MODULE(Normed);

struct Case {
  bool reshard = true, sync_last = false, offload = false;
  int64_t dim = 4;
  std::string text() const {
    return c10::str("dim ", dim, " reshard ", reshard, " sync last ", sync_last, " offload ", offload);
  }
};

void train_case(int rank, const fsdp2::DeviceMesh& mesh, const Case& c) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Normed>(c.dim);
  fsdp2::FullyShardOptions options{.mesh = mesh, .reshard_after_forward = c.reshard};
  if (c.offload) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
  fsdp2::fully_shard(model->norm, options);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
  auto root = fsdp2::fully_shard(model, options);
  torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
  expect_same_values(*model, *reference, c.text(), 0);
  for (int step = 0; step < 2; ++step) {
    for (int micro = 0; micro < 3; ++micro) {
      if (c.sync_last) root.set_requires_gradient_sync(micro == 2);
      const Tensor all = torch::randn({2 * fsdp2::get_world_size(), c.dim}, torch::kDouble);
      const Tensor out = model(rows_of(all, rank)), expected = reference(all);
      EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), 1e-9) << c.text();
      out.sum().backward();
      (expected.sum() / fsdp2::get_world_size()).backward();
    }
    expect_same_gradients(*model, *reference, c.text());
    optimizer.step();
    expected_optimizer.step();
    expect_same_values(*model, *reference, c.text());
    optimizer.zero_grad(step % 2 == 0);
    expected_optimizer.zero_grad(step % 2 == 0);
  }
  for (const auto& named : model->named_parameters()) {
    const fsdp2::DTensor handle(named.value().detach());
    EXPECT_TRUE(handle.placements() == (std::vector<fsdp2::Placement>{fsdp2::Replicate{}, fsdp2::Shard{0}}));
    EXPECT_TRUE(handle.device_mesh() == mesh);
    const Tensor expected = reference->named_parameters()[named.key()].detach();
    const int64_t rows = (expected.size(0) + mesh.size(1) - 1) / mesh.size(1);
    const int64_t first = std::min(mesh.get_local_rank(1) * rows, expected.size(0));
    const int64_t own = std::min(rows, expected.size(0) - first);
    EXPECT_LE(max_difference(handle.to_local(), expected.narrow(0, first, own)), 1e-9) << named.key() << c.text();
  }
}

void train_cases(int rank, bool offload) {
  const auto mesh = replicas(2, 2);
  for (const int64_t dim : {3, 4, 5}) {
    for (const bool reshard : {false, true}) {
      for (const bool sync_last : {false, true}) train_case(rank, mesh, {reshard, sync_last, offload, dim});
    }
  }
}

RANKS_TEST(Hsdp, TrainsLikeWhole, 4) { train_cases(rank, false); }
RANKS_TEST(Hsdp, TrainsLikeWholeOffloaded, 4) { train_cases(rank, true); }

RANKS_TEST(Hsdp, OneOfTheAxesMayHaveOneRank, 4) {
  for (const auto& [replicate, shard] : std::vector<std::pair<int64_t, int64_t>>{{4, 1}, {1, 4}, {2, 2}}) {
    fsdp2::reset_counters();
    train_case(rank, replicas(replicate, shard), {true, true, false, 5});
    if (shard == 1) {  // nothing to gather or scatter
      EXPECT_EQ(fsdp2::counters().all_gathers, 0);
      EXPECT_EQ(fsdp2::counters().reduce_scatters, 0);
      EXPECT_GT(fsdp2::counters().all_reduces, 0);
    }
  }
}

RANKS_TEST(Hsdp, AShardOverFewerRanksIsKeptAfterForward, 4) {
  for (const auto& [replicate, shard, kept] : std::vector<std::array<int, 3>>{{1, 4, 2}, {2, 2, 1}, {2, 2, 2}}) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Tower>(5, 2);
    const fsdp2::FullyShardOptions options{.mesh = replicas(replicate, shard), .reshard_after_forward = kept};
    for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
    fsdp2::fully_shard(model, options);
    const auto next = [] { return torch::randn({8, 5}, torch::kDouble); };
    expect_trains_like(model, reference, rank, 2, next, c10::str(replicate, " x ", shard, " kept over ", kept));
    fsdp2::reset_counters();
    model(torch::ones({2, 5}, torch::kDouble)).sum().backward();
    EXPECT_EQ(fsdp2::counters().all_gathers, kept == 1 ? 3 : 6);
    EXPECT_EQ(fsdp2::counters().all_reduces, replicate == 1 ? 0 : 3);
  }
}

// ----- shard sums first, the replicas' sum in the end
// -----------------------------------------------------------------

/// Gradient of rank r: r + 1 everywhere, 2.5 on average.
struct Constant {
  explicit Constant(const fsdp2::FullyShardOptions& options)
      : layer(linear(4, 3)), handle(fsdp2::fully_shard(layer, options)) {}
  void backward(double value) { layer(torch::full({1, 4}, value)).sum().backward(); }
  void expect(double value, const char* where) {
    ASSERT_TRUE(layer->weight.grad().defined()) << where;
    EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({3, 4}, value)), 0) << where;
  }
  bool waits_for_replicas() const {
    const Tensor& grad = layer->weight.grad();
    return grad.defined() && fsdp2::DTensor(grad).placements()[0] == fsdp2::Placement(fsdp2::Partial{});
  }
  Linear layer;
  fsdp2::FSDPModule handle;
};

RANKS_TEST(Hsdp, ShardSumsAddUpUntilTheReplicasAreSummed, 4) {
  Constant model({.mesh = replicas(2, 2)});
  torch::optim::SGD optimizer(model.layer->parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    fsdp2::reset_counters();
    for (int micro = 0; micro < 3; ++micro) {
      model.handle.set_requires_all_reduce(micro == 2);
      model.backward(rank + 1);
      EXPECT_EQ(fsdp2::counters().reduce_scatters, micro + 1);
      EXPECT_EQ(fsdp2::counters().all_reduces, micro == 2 ? 1 : 0);
      EXPECT_EQ(model.waits_for_replicas(), micro < 2) << micro;
      if (micro < 2) {
        EXPECT_THROW(optimizer.step(), fsdp2::Error);
      }
    }
    model.expect(7.5, "three times 2.5");
    optimizer.zero_grad(step == 0);
  }
}

RANKS_TEST(Hsdp, AllThreeWaysOfAccumulatingMix, 4) {
  Constant model({.mesh = replicas(2, 2)});
  model.backward(rank + 1);
  model.expect(2.5, "reduced");
  model.handle.set_requires_gradient_sync(false);
  model.backward(rank + 1);  // kept whole
  model.handle.set_requires_gradient_sync(true);
  model.handle.set_requires_all_reduce(false);
  model.backward(rank + 1);  // shard sums, of the one before too
  model.handle.set_requires_all_reduce(true);
  model.backward(rank + 1);
  model.expect(10, "all four");
}

RANKS_TEST(Hsdp, LaterSwitchesWin, 4) {
  Constant model({.mesh = replicas(2, 2)});
  model.handle.set_requires_all_reduce(false);
  model.handle.set_requires_gradient_sync(true);
  model.backward(rank + 1);
  model.expect(2.5, "gradient sync was set last");
  Constant flat({.mesh = fsdp2::init_device_mesh(torch::kCPU, {4})});
  flat.handle.set_requires_all_reduce(false);  // there are no replicas
  flat.backward(rank + 1);
  flat.expect(2.5, "one axis");
}

RANKS_TEST(Hsdp, ShardSumsAreDroppedByZeroGradAndSummedOnDemand, 4) {
  for (const bool by_optimizer : {false, true}) {
    Constant model({.mesh = replicas(2, 2)});
    torch::optim::SGD optimizer(model.layer->parameters(), 0.1);
    model.handle.set_requires_all_reduce(false);
    model.backward(100);
    if (by_optimizer) {
      optimizer.zero_grad();
    } else {
      model.handle.zero_grad();
    }
    model.handle.set_requires_all_reduce(true);
    model.backward(rank + 1);
    model.expect(2.5, "the first was dropped");
  }
  Constant model({.mesh = replicas(2, 2)});
  model.handle.set_requires_all_reduce(false);
  model.backward(rank + 1);
  model.handle.synchronize_gradients();
  model.expect(2.5, "on demand");
}

RANKS_TEST(Hsdp, ShardSumsAreKeptInTheReductionDtype, 4) {
  // 256 + 1 + 1 is 258 in float32 and 256 in bfloat16.
  Constant model(
      {.mesh = replicas(2, 2), .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  for (const double value : {256., 1., 1.}) {
    model.handle.set_requires_all_reduce(false);
    model.backward(value);
  }
  model.handle.set_requires_all_reduce(true);
  model.backward(0);
  model.expect(258, "in float32");
}

struct ChoiceImpl : torch::nn::Module {
  ChoiceImpl() {
    for (const char* name : {"a", "b", "c"}) layers.push_back(register_module(name, torch::nn::Linear(3, 3)));
  }
  Tensor forward(const Tensor& x, const std::vector<int>& used) {
    Tensor sum = torch::zeros({1}, x.options());
    for (const int i : used) sum = sum + layers[i](x).pow(2).sum();
    return sum;
  }
  std::vector<torch::nn::Linear> layers;
};
FSDP2_MODULE(Choice);

// What an earlier micro-batch left waiting is reduced also where the last one does not use the parameter.
RANKS_TEST(Hsdp, TheLastMicroBatchMayUseOtherParameters, 4) {
  for (const bool two_axes : {false, true}) {
    for (const bool shard_sums : {false, true}) {
      torch::manual_seed(42);
      auto [reference, model] = make_twins<Choice>();
      auto handle =
          fsdp2::fully_shard(model, {.mesh = two_axes ? replicas(2, 2) : fsdp2::init_device_mesh(torch::kCPU, {4})});
      const std::vector<std::vector<int>> used{{0, 1}, {1}, {1, 2}};
      for (size_t micro = 0; micro < used.size(); ++micro) {
        const bool last = micro + 1 == used.size();
        if (shard_sums) {
          handle.set_requires_all_reduce(last);
        } else {
          handle.set_requires_gradient_sync(last);
        }
        const Tensor all = torch::randn({8, 3}, torch::kDouble);
        model(rows_of(all, rank), used[micro]).backward();
        (reference(all, used[micro]) / 4).backward();
      }
      expect_same_gradients(*model, *reference, c10::str("axes ", two_axes + 1, " shard sums ", shard_sums));
    }
  }
}

RANKS_TEST(Hsdp, AnyDimMayBeSharded, 4) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(4, 2);
  fsdp2::FullyShardOptions options{.mesh = replicas(2, 2)};
  options.shard_placement_fn = [](const std::string&, const Tensor& param) -> std::optional<fsdp2::ShardPlacement> {
    return fsdp2::ShardPlacement{.placement = fsdp2::Shard{param.dim() - 1}};
  };
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
  auto root = fsdp2::fully_shard(model, options);
  const auto placements = fsdp2::DTensor(model->first->weight.detach()).placements();
  EXPECT_TRUE(placements == (std::vector<fsdp2::Placement>{fsdp2::Replicate{}, fsdp2::Shard{1}}));
  const auto next = [] { return torch::randn({8, 4}, torch::kDouble); };
  expect_trains_like(model, reference, rank, 2, next, "last dim");
  for (int micro = 0; micro < 3; ++micro) {
    root.set_requires_all_reduce(micro == 2);
    const Tensor all = next();
    model(rows_of(all, rank)).sum().backward();
    (reference(all).sum() / 4).backward();
  }
  expect_same_gradients(*model, *reference, "shard sums along the last dim");
}

RANKS_TEST(Hsdp, ResetDropsShardSums, 4) {
  Constant model({.mesh = replicas(2, 2)});
  model.handle.set_requires_all_reduce(false);
  model.backward(100);
  model.handle.reset_iter_state();
  EXPECT_FALSE(model.layer->weight.grad().defined());
  model.handle.set_requires_all_reduce(true);
  model.backward(rank + 1);
  model.expect(2.5, "after the reset");
}

void expect_trains_on_small_meshes(int rank) {
  const int64_t ranks = fsdp2::get_world_size();
  for (const auto& [replicate, shard] : std::vector<std::pair<int64_t, int64_t>>{{ranks, 1}, {1, ranks}}) {
    for (const bool sync_last : {false, true}) {
      train_case(rank, replicas(replicate, shard), {true, sync_last, false, 5});
      train_case(rank, replicas(replicate, shard), {false, sync_last, true, 5});
    }
  }
}
RANKS_TEST(Hsdp, TrainsOnOneRank, 1) { expect_trains_on_small_meshes(rank); }
RANKS_TEST(Hsdp, TrainsOnThreeRanks, 3) { expect_trains_on_small_meshes(rank); }

}  // namespace
