// labels: ranks
// Faults that users of FSDP2 reported, seen on one small layer:
// row 1 (pytorch#162338) gradients W times too big, row 5 (pytorch#149205) an optimizer made after a forward never
// changes a weight, row 17 (pytorch#123962) forward past the hooks, row 20 fewer rows than ranks.

#include <fsdp2/clip_grad.h>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

// ---- Row 1

void expect_averaged_gradients(int rank) {
  const double average = (fsdp2::get_world_size() + 1) / 2.0;
  const fsdp2::MixedPrecisionPolicy policies[] = {
      {},
      {.reduce_dtype = torch::kBFloat16},
      {.reduce_dtype = torch::kHalf},
      {.reduce_dtype = torch::kDouble},
      {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
  };
  for (const auto& policy : policies) {
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      Linear layer = linear(4, 2);
      { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
      layer->to(dtype);
      fsdp2::fully_shard(layer, {.mp_policy = policy});
      layer(torch::full({1, 4}, rank + 1.0, dtype)).sum().backward();
      const Tensor grad = whole(layer->weight.grad());
      EXPECT_EQ(grad.scalar_type(), dtype);
      EXPECT_EQ(max_difference(grad, torch::full({2, 4}, average)), 0) << dtype << " " << grad;
    }
  }
}

RANKS_TEST(Row01, GradientsAreAveragedOnTwoRanks, 2) { expect_averaged_gradients(rank); }
RANKS_TEST(Row01, GradientsAreAveragedOnThreeRanks, 3) { expect_averaged_gradients(rank); }

RANKS_TEST(Row01, CollectivesAndPartialsAverageInEveryDtype, 3) {
  const auto mesh = fsdp2::init_device_mesh(torch::kCPU, {3});
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    const Tensor mine = torch::full({3, 2}, rank + 1.0, dtype);
    Tensor reduced = mine.clone(), scattered = torch::empty({1, 2}, dtype);
    fsdp2::all_reduce(reduced, fsdp2::ReduceOp::AVG);
    EXPECT_EQ(max_difference(reduced, torch::full({3, 2}, 2.0)), 0) << dtype;
    fsdp2::reduce_scatter_tensor(scattered, mine, fsdp2::ReduceOp::AVG);
    EXPECT_EQ(max_difference(scattered, torch::full({1, 2}, 2.0)), 0) << dtype;
    const auto partial = fsdp2::from_local(mine, mesh, {fsdp2::Partial{fsdp2::ReduceOp::AVG}});
    EXPECT_EQ(max_difference(partial.full_tensor(), torch::full({3, 2}, 2.0)), 0) << dtype;
    EXPECT_EQ(max_difference(partial.redistribute({fsdp2::Shard{0}}).to_local(), torch::full({1, 2}, 2.0)), 0) << dtype;
  }
}

// ---- Row 5

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { weight = register_parameter("weight", torch::ones({8})); }
  Tensor forward(const Tensor& x) { return x * weight; }
  Tensor weight;
};
FSDP2_MODULE(Scale);

enum Moment {
  kBeforeSharding,
  kAfterSharding,
  kAfterForwardWithoutGrad,
  kWhileUnsharded,
  kBeforeBackward,
  kAfterBackward
};

RANKS_TEST(Row05, AnOptimizerMadeAtAnyMomentChangesTheWeights, 2) {
  const Tensor x = torch::ones({8});
  for (const Moment moment :
       {kBeforeSharding, kAfterSharding, kAfterForwardWithoutGrad, kWhileUnsharded, kBeforeBackward, kAfterBackward}) {
    Scale model;
    std::optional<torch::optim::SGD> optimizer;
    const auto now = [&](Moment when) {
      if (when == moment) optimizer.emplace(model->parameters(), 0.1);
    };
    now(kBeforeSharding);
    auto handle = fsdp2::fully_shard(model);
    now(kAfterSharding);
    if (moment == kAfterForwardWithoutGrad) {
      torch::NoGradGuard no_grad;
      model(x);
      EXPECT_TRUE(handle.is_unsharded());  // the root stays whole
    }
    now(kAfterForwardWithoutGrad);
    if (moment == kWhileUnsharded) handle.unshard();
    now(kWhileUnsharded);
    for (int step = 1; step <= 3; ++step) {
      const Tensor loss = model(x).sum();
      if (!optimizer) now(kBeforeBackward);
      loss.backward();
      if (!optimizer) now(kAfterBackward);
      optimizer->step();
      optimizer->zero_grad();
      const Tensor expected = torch::full({8}, 1 - 0.1 * step);
      EXPECT_LE(max_difference(whole(model->weight), expected), 1e-6) << "moment " << moment << " step " << step;
      torch::NoGradGuard no_grad;
      EXPECT_LE(max_difference(model(x), expected), 1e-6) << "moment " << moment << " step " << step;
    }
  }
}

RANKS_TEST(Row05, AStepWhileWeightsAreWholeIsAnErrorAndNotLost, 2) {
  const Tensor x = torch::ones({8});
  Scale model;
  auto handle = fsdp2::fully_shard(model);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  model(x).sum().backward();
  { torch::NoGradGuard no_grad; model(x); }
  EXPECT_FSDP2_ERROR(optimizer.step(), kUsage, "weight");
  handle.reshard();
  optimizer.step();
  EXPECT_LE(max_difference(whole(model->weight), torch::full({8}, 0.9)), 1e-6);
}

// ---- Row 17

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    first = register_module("first", Linear(torch::nn::LinearOptions(4, 6)));
    last = register_module("last", torch::nn::Linear(6, 3));
  }
  Tensor forward(const Tensor& x) { return last(torch::relu(first(x))); }
  Tensor encode(const Tensor& x) { return torch::relu(first(x)); }
  Tensor project(const Tensor& h) const { return last->weight.mv(h); }
  Linear first{nullptr};
  torch::nn::Linear last{nullptr};
};
FSDP2_MODULE(Tower);

RANKS_TEST(Row17, ForwardPastTheHooksSaysWhatToCall, 2) {
  torch::manual_seed(0);
  Linear layer = linear(4, 4);
  const Tensor x = torch::randn({2, 4}), weight = layer->weight.detach().clone();
  fsdp2::fully_shard(layer);
  const auto expect_refused = [&] {
    try {
      layer->forward(x);
      ADD_FAILURE() << "computed something";
    } catch (const fsdp2::Error& error) {
      for (const char* text : {"'weight'", "call model(x)"}) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
    }
  };
  expect_refused();
  { torch::NoGradGuard no_grad; expect_refused(); }
  { torch::InferenceMode inference; expect_refused(); }
  EXPECT_LE(max_difference(layer(x).detach(), x.mm(weight.t())), 1e-6);
  fsdp2::fsdp_module(layer).reshard();
  expect_refused();
}

RANKS_TEST(Row17, OtherEntriesAndContainersRunTheHooksOrThrow, 2) {
  torch::manual_seed(0);
  Tower plain, tower;
  copy_state(*tower, *plain);
  fsdp2::fully_shard(tower->first);
  fsdp2::fully_shard(tower);
  const Tensor x = torch::randn({2, 4});
  EXPECT_LE(max_difference(tower(x).detach(), plain(x).detach()), 1e-6);
  fsdp2::fsdp_module(tower).reshard();
  EXPECT_FSDP2_ERROR(tower->forward(x), kUsage, "last.weight");
  EXPECT_FSDP2_ERROR(tower->project(torch::ones({6})), kUsage, "last.weight");
  EXPECT_LE(max_difference(fsdp2::call_method(tower, &TowerImpl::project, torch::ones({6})).detach(),
                           plain->project(torch::ones({6})).detach()),
            1e-6);
  EXPECT_LE(max_difference(fsdp2::call_method(tower, &TowerImpl::encode, x).detach(), plain->encode(x).detach()), 1e-6);
  EXPECT_LE(max_difference(tower(x).detach(), plain(x).detach()), 1e-6);

  torch::nn::Sequential container(tower->first, torch::nn::ReLU());
  EXPECT_FSDP2_ERROR(container->forward(x), kUsage, "first.weight");
}

// ---- Row 20

std::vector<int64_t> shard_of(const Tensor& param) { return fsdp2::DTensor(param.detach()).to_local().sizes().vec(); }

/// (1, 8) and (1): every rank but the first has nothing.
void expect_like_whole_with_empty_shards(int rank) {
  const int size = fsdp2::get_world_size();
  torch::manual_seed(2);
  Linear reference = linear(8, 1, true), layer = linear(8, 1, true);
  copy_state(*layer, *reference);
  fsdp2::fully_shard(layer);
  EXPECT_EQ(shard_of(layer->weight), (std::vector<int64_t>{rank == 0 ? 1 : 0, 8}));
  torch::optim::AdamW optimizer(layer->parameters(), torch::optim::AdamWOptions(0.1));
  torch::optim::AdamW expected_optimizer(reference->parameters(), torch::optim::AdamWOptions(0.1));
  fsdp2::reset_counters();
  for (int step = 0; step < 4; ++step) {
    const Tensor x = torch::randn({size, 8});
    layer(x.narrow(0, rank, 1)).pow(2).mean().backward();
    reference(x).pow(2).mean().backward();
    const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1);
    const double norm = step % 2 == 0 ? fsdp2::clip_grad_norm_(layer->parameters(), 0.1).item<double>()
                                      : torch::nn::utils::clip_grad_norm_(layer->parameters(), 0.1);
    EXPECT_NEAR(norm, expected, 1e-5) << "step " << step;
    for (auto* each : {&optimizer, &expected_optimizer}) {
      each->step();
      each->zero_grad();
    }
    EXPECT_LE(max_difference(whole(layer->weight), reference->weight.detach()), 1e-5) << "step " << step;
    EXPECT_LE(max_difference(whole(layer->bias), reference->bias.detach()), 1e-5) << "step " << step;
  }
  const auto counters = fsdp2::counters();
  const auto counts = fsdp2::all_gather_strings(c10::str(counters.all_gathers, " gathers, ", counters.reduce_scatters,
                                                         " reductions, ", counters.bytes, " bytes"));
  for (const std::string& other : counts) EXPECT_EQ(other, counts[0]);  // no rank leaves a collective out

  fsdp2::fsdp_module(layer).reshard();
  fsdp2::to_empty(layer, torch::kCPU);
  torch::manual_seed(5);
  fsdp2::reset_parameters(layer);
  torch::manual_seed(5);
  reference->reset_parameters();
  EXPECT_EQ(max_difference(whole(layer->weight), reference->weight.detach()), 0);
  EXPECT_EQ(max_difference(whole(layer->bias), reference->bias.detach()), 0);
}

RANKS_TEST(Row20, FewerRowsThanRanksTrainsLikeWholeOnTwo, 2) { expect_like_whole_with_empty_shards(rank); }
RANKS_TEST(Row20, FewerRowsThanRanksTrainsLikeWholeOnThree, 3) { expect_like_whole_with_empty_shards(rank); }

}  // namespace
