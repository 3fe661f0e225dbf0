// labels: ranks
// backends: gloo, shm
// Ways into a sharded model besides one forward of its root: parts of it, modules used twice, other methods, explicit
// prefetching, several roots.

#include "fsdp/parity.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

const fsdp2::ReshardAfterForward kSettings[] = {true, false, 2};

Tensor random_rows(int64_t rows, int64_t columns) {
  return torch::randn({rows * fsdp2::get_world_size(), columns}, torch::kDouble);
}

// The model is also called without its root in between: the part is then the root of that iteration.
RANKS_TEST(Entries, APartAloneAfterTheRootTrains, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(6, 3);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp);
  fsdp2::fully_shard(model);
  torch::optim::Adam optimizer(model->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
  const auto step = [&] {
    for (auto* each : {&optimizer, &expected_optimizer}) {
      each->step();
      each->zero_grad();
    }
  };
  const Tensor all = random_rows(4, 6);
  for (int i = 0; i < 2; ++i) {
    model(rows_of(all, rank)).sum().backward();
    (reference(all).sum() / 2).backward();
    expect_same_gradients(*model, *reference, "through the root");
    step();
    fsdp2::reset_counters();
    const Tensor out = model->mlps[1](rows_of(all, rank)), expected = reference->mlps[1](all);
    EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), 1e-9);
    out.sum().backward();
    (expected.sum() / 2).backward();
    EXPECT_EQ(fsdp2::counters().all_gathers, 2);
    EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
    expect_same_gradients(*model, *reference, "the part alone");  // none for the other parts
    step();
  }
  EXPECT_LE(max_difference(model(rows_of(all, rank)).detach(), rows_of(reference(all).detach(), rank)), 1e-9);
  reshard_all(*model);
  expect_same_values(*model, *reference, "at the end");
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    inner = register_module("inner", linear(4, 4, true));
    outer = register_module("outer", torch::nn::Linear(4, 5));
  }
  Tensor forward(const Tensor& x) { return outer(torch::tanh(inner(x)) + inner(torch::sin(x))); }
  Linear inner{nullptr};
  torch::nn::Linear outer{nullptr};
};
FSDP2_MODULE(Twice);

RANKS_TEST(Entries, AModuleUsedTwiceInOneForwardTrains, 4) {
  for (const auto& setting : kSettings) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Twice>();
    fsdp2::fully_shard(model->inner, {.reshard_after_forward = setting});
    fsdp2::fully_shard(model, {.reshard_after_forward = setting});
    const auto next = [] { return random_rows(3, 4); };
    expect_trains_like(model, reference, rank, 4, next, "used twice");
    fsdp2::reset_counters();
    model(torch::ones({1, 4}, torch::kDouble)).sum().backward();
    EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);  // one per group, not per use
  }
}

// ----- prefetching -----

/// Every MLP names the `depth` after it for forward and before it for backward.
void prefetch(Tower& model, size_t depth) {
  const auto handles = [&](size_t first, int step) {
    std::vector<fsdp2::FSDPModule> found;
    for (size_t i = 1; i <= depth; ++i)
      found.push_back(fsdp2::fsdp_module(model->mlps[first + step * static_cast<int>(i)]));
    return found;
  };
  for (size_t i = 0; i < model->mlps.size(); ++i) {
    auto handle = fsdp2::fsdp_module(model->mlps[i]);
    if (i + depth < model->mlps.size()) handle.set_modules_to_forward_prefetch(handles(i, 1));
    if (i >= depth) handle.set_modules_to_backward_prefetch(handles(i, -1));
  }
}

RANKS_TEST(Entries, ExplicitPrefetchingBothWaysTrains, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(4, 6);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp);
  fsdp2::fully_shard(model);
  const auto next = [] { return random_rows(2, 4); };
  for (const size_t depth : {2u, 1u, 3u}) {  // the lists of a module are replaced while training
    prefetch(model, depth);
    fsdp2::reset_counters();
    expect_trains_like(model, reference, rank, 2, next, c10::str("depth ", depth));
    EXPECT_EQ(fsdp2::counters().all_gathers, 2 * (6 + 1 + 6)) << depth;  // only the order differs
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << depth;
  }
}

RANKS_TEST(Entries, PrefetchingAModuleThatIsNoLongerNeededIsHarmless, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Mlp>(4);
  auto in = fsdp2::fully_shard(model->in_proj);
  auto out = fsdp2::fully_shard(model->out_proj);
  fsdp2::fully_shard(model);
  in.set_modules_to_backward_prefetch({out});  // backward went through it before
  const auto next = [] { return random_rows(2, 4); };
  expect_trains_like(model, reference, rank, 3, next, "wrong list");
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
  in.set_modules_to_backward_prefetch({});  // back to the default
  expect_trains_like(model, reference, rank, 2, next, "default");
}

// ----- other methods -----

struct VisionImpl : torch::nn::Module {
  VisionImpl() { patches = register_module("patches", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 2).stride(2))); }
  Tensor features(const Tensor& images) { return patches(images).flatten(2).transpose(1, 2); }
  Tensor forward(const Tensor& images) { return features(images).sum(1); }
  /// Its own other entry, and its parameters again afterwards.
  Tensor mixed(const Tensor& images) {
    const Tensor inside = fsdp2::call_method(*this, &VisionImpl::features, images).sum(1);
    return inside * patches->bias + patches->weight.sum();
  }
  torch::nn::Conv2d patches{nullptr};
};
FSDP2_MODULE(Vision);

struct PairedImpl : torch::nn::Module {
  PairedImpl() {
    vision = register_module("vision", Vision());
    projector = register_module("projector", linear(5, 7, true));
  }
  Tensor forward(const Tensor& images) {
    return projector(fsdp2::call_method(vision, &VisionImpl::features, images)).sum(1);
  }
  Vision vision{nullptr};
  Linear projector{nullptr};
};
FSDP2_MODULE(Paired);

Tensor random_images() { return torch::randn({2 * fsdp2::get_world_size(), 3, 4, 4}, torch::kDouble); }

RANKS_TEST(Entries, AnotherMethodOfAChildTrains, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Paired>();
  fsdp2::fully_shard(model->vision);
  fsdp2::fully_shard(model->projector);
  fsdp2::fully_shard(model);
  expect_trains_like(model, reference, rank, 3, random_images, "another method");
  fsdp2::reset_counters();
  model(rows_of(random_images(), rank)).sum().backward();
  EXPECT_EQ(fsdp2::counters().all_gathers, 4);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);
}

RANKS_TEST(Entries, AMethodInsideTheModulesOwnEntryKeepsItWhole, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Vision>();
  fsdp2::fully_shard(model, {.reshard_after_forward = true});
  fsdp2::reset_counters();
  const Tensor all = random_images();
  const Tensor out = fsdp2::call_method(model, &VisionImpl::mixed, rows_of(all, rank)),
               expected = reference->mixed(all);
  EXPECT_TRUE(fsdp2::is_dtensor(model->patches->weight));
  EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), 1e-9);
  EXPECT_EQ(fsdp2::counters().all_gathers, 1);
  out.sum().backward();
  (expected.sum() / 2).backward();
  expect_same_gradients(*model, *reference, "inside its own entry");
  EXPECT_EQ(fsdp2::counters().all_gathers, 2);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 1);
}

// ----- several roots, and modules that come and go -----

void run_several_roots(int rank, bool after_first_use) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(4, 3);
  std::vector<fsdp2::FSDPModule> roots;
  for (Mlp& mlp : model->mlps) roots.push_back(fsdp2::fully_shard(mlp));
  std::vector<Tensor> shared;
  const auto step = [&] {
    const Tensor all = random_rows(3, 4);
    Tensor out = rows_of(all, rank), expected = all;
    for (Mlp& mlp : model->mlps) out = mlp(out);
    for (Mlp& mlp : reference->mlps) expected = mlp(expected);
    EXPECT_LE(max_difference(out.detach(), rows_of(expected.detach(), rank)), 1e-9);
    out.sum().backward();
    (expected.sum() / 2).backward();
    for (size_t i = 0; i < roots.size(); ++i) {
      expect_same_gradients(*model->mlps[i], *reference->mlps[i], c10::str("root ", i, after_first_use));
      EXPECT_TRUE(roots[i].is_root());
    }
  };
  if (after_first_use) step();
  fsdp2::share_comm_ctx(roots);
  fsdp2::share_comm_ctx({});
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(Entries, RootsThatShareTheirCommunicationTrain, 2) {
  run_several_roots(rank, false);
  run_several_roots(rank, true);
}

RANKS_TEST(Entries, ModulesThatWereDeletedAreNotTakenForOthers, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(4, 6);
  for (size_t i = 0; i < model->mlps.size(); ++i) {
    for (int j = 0; j < 4; ++j) {  // memory of sharded modules is used again
      Mlp passing(4);
      fsdp2::fully_shard(passing);
    }
    Mlp block(4);
    block->to(torch::kDouble);
    copy_state(*block, *reference->mlps[i]);
    fsdp2::fully_shard(block);
    model->replace_module("mlp" + std::to_string(i), block.ptr());
    model->mlps[i] = block;
  }
  fsdp2::fully_shard(model);
  const auto next = [] { return random_rows(2, 4); };
  expect_trains_like(model, reference, rank, 2, next, "layer by layer");
}

// A module of its own group that the forward leaves out costs nothing and gets nothing.
RANKS_TEST(Entries, AModuleThatIsLeftOutIsNotGathered, 2) {
  torch::manual_seed(42);
  auto [reference, model] = make_twins<Tower>(4, 3);
  for (Mlp& mlp : model->mlps) fsdp2::fully_shard(mlp, {.reshard_after_forward = true});
  fsdp2::fully_shard(model);
  for (Tower* each : {&reference, &model}) (*each)->mlps.pop_back();
  for (int i = 0; i < 2; ++i) {
    fsdp2::reset_counters();
    const Tensor all = random_rows(2, 4);
    model(rows_of(all, rank)).sum().backward();
    (reference(all).sum() / 2).backward();
    EXPECT_EQ(fsdp2::counters().all_gathers, 3 + 2);
    EXPECT_EQ(fsdp2::counters().reduce_scatters, 3);
    expect_same_gradients(*model, *reference, "left out");
  }
}

}  // namespace
