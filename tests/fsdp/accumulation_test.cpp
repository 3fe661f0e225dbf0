// labels: ranks
// backends: gloo, shm
// timeout: 600
// Accumulation with and without communication: exact numbers of collectives and the whole model's gradients, over
// meshes, resharding, which modules leave communication out, and offload.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

constexpr int64_t kDim = 6, kMlps = 3, kMicros = 3;
constexpr int64_t kQuiet = 2;  // MLPs that leave communication out where only some do

enum class Mode { kAll, kRootOnly, kSomeMlps };

struct Case {
  bool hsdp = false;
  fsdp2::ReshardAfterForward reshard_after_forward = true;
  Mode mode = Mode::kAll;
  bool reshard_after_backward = true;
  bool offload = false;
  bool reduce_scatter_only = false;  // HSDP: the shard sums are formed each time, the replicas' only in the end

  bool keeps_after_forward() const {
    return std::holds_alternative<bool>(*reshard_after_forward) && !std::get<bool>(*reshard_after_forward);
  }
  std::string text() const {
    return c10::str(hsdp ? "HSDP" : "FSDP", " mode ", static_cast<int>(mode), " raf index ",
                    reshard_after_forward->index(), keeps_after_forward() ? " kept" : "", " rab ",
                    reshard_after_backward, " offload ", offload, " rs only ", reduce_scatter_only);
  }
};

fsdp2::DeviceMesh mesh_of(const Case& c) {
  return c.hsdp ? fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"})
                : fsdp2::init_device_mesh(torch::kCPU, {4});
}

void set_flags(Tower& model, const Case& c, bool last) {
  const auto set = [&](fsdp2::FSDPModule module, bool recurse) {
    if (c.reduce_scatter_only) {
      module.set_requires_all_reduce(last, recurse);
    } else {
      module.set_requires_gradient_sync(last, recurse);
    }
    if (!c.reshard_after_backward) module.set_reshard_after_backward(last, recurse);
  };
  switch (c.mode) {
    case Mode::kAll:
      set(fsdp2::fsdp_module(model), true);
      break;
    case Mode::kRootOnly:
      set(fsdp2::fsdp_module(model), false);
      break;
    case Mode::kSomeMlps:
      for (int64_t i = 0; i < kQuiet; ++i) set(fsdp2::fsdp_module(model->mlps[i]), true);
      break;
  }
}

/// Of one step of kMicros forwards and backwards.
fsdp2::Counters expected_counts(const Case& c) {
  constexpr int64_t kGroups = kMlps + 1, kEarlier = kMicros - 1;
  fsdp2::Counters expected;
  // Every group once in the last backward, and those that are not quiet in the earlier ones.
  int64_t reductions = kGroups;
  if (c.mode == Mode::kRootOnly) reductions += kMlps * kEarlier;
  if (c.mode == Mode::kSomeMlps) reductions += (kGroups - kQuiet) * kEarlier;
  expected.all_reduces = c.hsdp ? reductions : 0;
  expected.reduce_scatters = c.reduce_scatter_only ? kGroups * kMicros : reductions;
  if (!c.keeps_after_forward()) {
    expected.all_gathers = 2 * kGroups * kMicros;
  } else if (c.reshard_after_backward) {
    expected.all_gathers = kGroups * kMicros;
  } else {
    expected.all_gathers = kGroups + (c.mode == Mode::kRootOnly ? kMlps * kEarlier : 0);
  }
  return expected;
}

void run_case(int rank, const Case& c) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(kDim, kMlps);
  fsdp2::FullyShardOptions options{.mesh = mesh_of(c), .reshard_after_forward = c.reshard_after_forward};
  if (c.offload) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
  fsdp2::fully_shard(model, options);
  torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
  const fsdp2::Counters expected = expected_counts(c);
  for (int step = 0; step < 2; ++step) {
    const std::string where = c10::str(c.text(), " step ", step);
    fsdp2::reset_counters();
    for (int64_t micro = 0; micro < kMicros; ++micro) {
      set_flags(model, c, micro + 1 == kMicros);
      const Tensor all = torch::randn({8, kDim}, torch::kDouble);
      const Tensor out = model(rows_of(all, rank)), expected_out = reference(all);
      EXPECT_LE(max_difference(out.detach(), rows_of(expected_out.detach(), rank)), 1e-9) << where;
      out.sum().backward();
      (expected_out.sum() / 4).backward();
    }
    const fsdp2::Counters seen = fsdp2::counters();
    EXPECT_EQ(seen.all_gathers, expected.all_gathers) << where;
    EXPECT_EQ(seen.reduce_scatters, expected.reduce_scatters) << where;
    EXPECT_EQ(seen.all_reduces, expected.all_reduces) << where;
    EXPECT_EQ(seen.broadcasts, 0) << where;
    EXPECT_EQ(seen.unsharded_bytes, 0) << where;
    expect_same_gradients(*model, *reference, where);
    optimizer.step();
    expected_optimizer.step();
    // Gradients of zeros stay sharded ones, to which unsharded ones are added in the next step.
    optimizer.zero_grad(step % 2 == 1);
    expected_optimizer.zero_grad(step % 2 == 1);
  }
  expect_same_values(*model, *reference, c.text());
}

/// All that make sense: keeping parameters after backward needs them kept after forward too.
void run_matrix(int rank, bool hsdp, bool reduce_scatter_only, bool offload) {
  for (const auto& setting : std::vector<fsdp2::ReshardAfterForward>{true, false, 2}) {
    for (const Mode mode : {Mode::kAll, Mode::kRootOnly, Mode::kSomeMlps}) {
      for (const bool reshard_after_backward : {false, true}) {
        const Case c{hsdp, setting, mode, reshard_after_backward, offload, reduce_scatter_only};
        const bool is_true = std::holds_alternative<bool>(*setting) && std::get<bool>(*setting);
        if (!reshard_after_backward && (!c.keeps_after_forward() || mode == Mode::kSomeMlps)) continue;
        if (offload && !is_true) continue;
        run_case(rank, c);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

RANKS_TEST(AccumulationCounts, OneDimensionalMesh, 4) { run_matrix(rank, false, false, false); }
RANKS_TEST(AccumulationCounts, OneDimensionalMeshOffloaded, 4) { run_matrix(rank, false, false, true); }
RANKS_TEST(AccumulationCounts, Replicas, 4) { run_matrix(rank, true, false, false); }
RANKS_TEST(AccumulationCounts, ReplicasOffloaded, 4) { run_matrix(rank, true, false, true); }
RANKS_TEST(AccumulationCounts, ReplicasWithShardSumsEachTime, 4) { run_matrix(rank, true, true, false); }
RANKS_TEST(AccumulationCounts, ReplicasWithShardSumsEachTimeOffloaded, 4) { run_matrix(rank, true, true, true); }

// The schedule of a pipeline stage: parameters stay whole between the micro-batches, gradients are reduced once.
RANKS_TEST(AccumulationCounts, OneForwardOneBackwardSchedule, 2) {
  for (const bool explicit_unshard : {false, true}) {
    for (const bool reshard_after_backward : {false, true}) {
      const std::string where = c10::str("explicit ", explicit_unshard, " rab ", reshard_after_backward);
      torch::manual_seed(42);
      auto [reference, model] = make_twins<Tower>(kDim, kMlps);
      const fsdp2::FullyShardOptions options{.reshard_after_forward = false};
      for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
      auto root = fsdp2::fully_shard(model, options);
      torch::optim::AdamW optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
      fsdp2::reset_counters();
      std::vector<fsdp2::UnshardHandle> handles;
      if (explicit_unshard) {
        handles.push_back(root.unshard_async());
        for (Mlp& mlp : model->mlps) handles.push_back(fsdp2::fsdp_module(mlp).unshard_async());
      }
      for (int64_t micro = 0; micro < kMicros; ++micro) {
        const bool last = micro + 1 == kMicros;
        root.set_requires_gradient_sync(last);
        root.set_is_last_backward(last);
        if (!reshard_after_backward) root.set_reshard_after_backward(last);
        const Tensor all = torch::randn({4, kDim}, torch::kDouble);
        const Tensor out = model(rows_of(all, rank)), expected = reference(all);
        EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), 1e-9) << where;
        out.sum().backward();
        (expected.sum() / 2).backward();
      }
      EXPECT_EQ(fsdp2::counters().all_gathers, (kMlps + 1) * (reshard_after_backward ? kMicros : 1)) << where;
      EXPECT_EQ(fsdp2::counters().reduce_scatters, kMlps + 1) << where;
      expect_same_gradients(*model, *reference, where);
      optimizer.step();
      expected_optimizer.step();
      expect_same_values(*model, *reference, where);
    }
  }
}

// Several forwards wait for their backwards, with an evaluation in between, in whatever form parameters were left.
RANKS_TEST(AccumulationCounts, ForwardsAndBackwardsInterleave, 4) {
  const std::vector<fsdp2::ReshardAfterForward> settings{true, false, 2, std::nullopt};
  for (size_t i = 0; i < settings.size(); ++i) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Tower>(5, 2);  // 5 rows on 4 ranks
    for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, {.reshard_after_forward = settings[i]});
    auto root = fsdp2::fully_shard(model, {.reshard_after_forward = settings[i]});
    const auto batch = [] { return torch::randn({8, 5}, torch::kDouble); };
    const Tensor first = batch(), second = batch(), between = batch();
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      EXPECT_LE(max_difference(model(rows_of(between, rank)), rows_of(reference(between), rank)), 1e-9) << i;
    };
    for (const bool apart : {false, true}) {
      const Tensor a = model(rows_of(first, rank));
      evaluate();
      const Tensor b = model(rows_of(second, rank));
      evaluate();
      fsdp2::reset_counters();
      if (apart) {
        root.set_is_last_backward(false);
        b.sum().backward();
        root.set_is_last_backward(true);
        a.sum().backward();
      } else {
        (a + b).sum().backward();
      }
      EXPECT_EQ(fsdp2::counters().reduce_scatters, apart ? 6 : 3) << i;
      EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << i;
      ((reference(first) + reference(second)).sum() / 4).backward();
      expect_same_gradients(*model, *reference, c10::str("setting ", i, " apart ", apart));
      model->zero_grad();
      reference->zero_grad();
    }
  }
}

// Reduced in float32 from a bfloat16 computation: what is kept unreduced is float32 too, so nothing is rounded between.
RANKS_TEST(AccumulationCounts, UnreducedGradientsAreKeptInTheReductionDtype, 2) {
  for (const bool reshard : {true, false}) {
    torch::manual_seed(42);
    Tower reference(kDim, kMlps), model(kDim, kMlps);
    copy_state(*model, *reference);
    std::vector<Tower> compute;  // what each rank computes with
    for (int r = 0; r < 2; ++r) {
      compute.emplace_back(kDim, kMlps);
      copy_state(*compute.back(), *reference);
      compute.back()->to(torch::kBFloat16);
    }
    const fsdp2::FullyShardOptions options{
        .reshard_after_forward = reshard,
        .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
    for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, options);
    auto root = fsdp2::fully_shard(model, options);
    for (int64_t micro = 0; micro < kMicros; ++micro) {
      root.set_requires_gradient_sync(micro + 1 == kMicros);
      root.set_reshard_after_backward(micro + 1 == kMicros || reshard);
      const Tensor all = torch::randn({4, kDim}).to(torch::kBFloat16);
      const Tensor out = model(rows_of(all, rank));
      EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
      out.sum().backward();
      for (int r = 0; r < 2; ++r) {
        compute[r](rows_of(all, r)).sum().backward();
        for (auto& named : reference->named_parameters()) {
          Tensor grad = compute[r]->named_parameters()[named.key()].mutable_grad();
          Tensor& sum = named.value().mutable_grad();
          sum = (sum.defined() ? sum : torch::zeros_like(named.value())).detach() + grad.to(torch::kFloat) / 2;
        }
        compute[r]->zero_grad();
      }
    }
    // The last one is cast, summed and divided in float32: only the order of additions may differ.
    expect_same_gradients(*model, *reference, c10::str("reshard ", reshard), 1e-5);
    for (const Tensor& param : model->parameters()) EXPECT_EQ(param.grad().scalar_type(), torch::kFloat);
  }
}

}  // namespace
