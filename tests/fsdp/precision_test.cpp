// labels: ranks
// backends: gloo, shm
// MixedPrecisionPolicy, several dtypes, frozen, tied and unused parameters.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

/// Notes what its forward sees.
struct WitnessImpl : torch::nn::Module {
  WitnessImpl() {
    linear = register_module("linear", torch::nn::Linear(2, 3));
    seen = register_buffer("seen", torch::zeros({2}));
    count = register_buffer("count", torch::zeros({1}, torch::kLong));
  }
  Tensor forward(const Tensor& x, const Tensor& ids) {
    input = x.scalar_type();
    weight = linear->weight.scalar_type();
    buffer = seen.scalar_type();
    id = ids.scalar_type();
    torch::NoGradGuard no_grad;
    seen.add_(1);
    count.add_(1);
    torch::AutoGradMode grad(true);
    return linear(x);
  }
  torch::nn::Linear linear{nullptr};
  Tensor seen, count;
  at::ScalarType input{}, weight{}, buffer{}, id{};
};
FSDP2_MODULE(Witness);

RANKS_TEST(Precision, PolicyDecidesWhatForwardSeesAndReturns, 2) {
  Witness witness;
  fsdp2::fully_shard(witness, {.mp_policy = {.param_dtype = torch::kBFloat16,
                                             .reduce_dtype = torch::kFloat,
                                             .output_dtype = torch::kDouble,
                                             .buffer_dtype = torch::kHalf}});
  const Tensor out = witness(torch::ones({1, 2}), torch::ones({1}, torch::kInt));
  EXPECT_EQ(witness->input, torch::kBFloat16);
  EXPECT_EQ(witness->weight, torch::kBFloat16);
  EXPECT_EQ(witness->buffer, torch::kHalf);
  EXPECT_EQ(witness->id, torch::kInt);
  EXPECT_EQ(out.scalar_type(), torch::kDouble);
  out.sum().backward();
  EXPECT_EQ(witness->linear->weight.scalar_type(), torch::kFloat);
  EXPECT_EQ(witness->linear->weight.grad().scalar_type(), torch::kFloat);
  // The registered buffer keeps its dtype and gets what forward wrote.
  EXPECT_EQ(witness->seen.scalar_type(), torch::kFloat);
  EXPECT_EQ(max_difference(witness->seen, torch::ones({2})), 0);
  EXPECT_EQ(witness->count.item<int64_t>(), 1);
}

RANKS_TEST(Precision, InputsStayWhereThePolicySaysSo, 2) {
  Witness witness;
  fsdp2::fully_shard(witness, {.mp_policy = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = false}});
  EXPECT_ANY_THROW(witness(torch::ones({1, 2}), torch::ones({1})));
  EXPECT_EQ(witness->input, torch::kFloat);
}

RANKS_TEST(Precision, GradientsAreReducedInReduceDtype, 2) {
  // 1 + 2^-8 is not a bfloat16: a bfloat16 reduction loses it, a float32 one does not.
  for (const bool wide : {false, true}) {
    Linear layer = linear(1, 1);
    { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
    fsdp2::MixedPrecisionPolicy policy{.param_dtype = torch::kBFloat16};
    if (wide) policy.reduce_dtype = torch::kFloat;
    fsdp2::fully_shard(layer, {.mp_policy = policy});
    fsdp2::reset_counters();
    layer(torch::full({1, 1}, rank == 0 ? 1.0 : 0.0078125)).sum().backward();
    const double expected = wide ? (1 + 0.0078125) / 2 : 0.50390625;
    EXPECT_EQ(whole(layer->weight.grad()).item<double>(), expected);
    EXPECT_EQ(fsdp2::counters().bytes, 2 * 2 + 2 * (wide ? 4 : 2));  // bfloat16 gather, and the reduction
  }
}

RANKS_TEST(Precision, ReductionsDivideOnceInEveryDtype, 2) {
  for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    Linear layer = linear(4, 2);
    layer->to(dtype);
    { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
    fsdp2::fully_shard(layer);
    layer(torch::full({1, 4}, rank + 1.0, dtype)).sum().backward();
    EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({2, 4}, 1.5)), 0) << dtype;
  }
}

RANKS_TEST(Precision, SeveralDtypesInAGroupUseOneCollectiveEach, 2) {
  torch::manual_seed(0);
  torch::nn::Sequential plain(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  plain[1]->to(torch::kBFloat16);
  struct TwoImpl : torch::nn::Module {
    TwoImpl() {
      a = register_module("a", torch::nn::Linear(4, 4));
      b = register_module("b", torch::nn::Linear(4, 4));
      b->to(torch::kBFloat16);
    }
    Tensor forward(const Tensor& x) { return b(a(x).to(torch::kBFloat16)); }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  auto reference = std::make_shared<TwoImpl>(), model = std::make_shared<TwoImpl>();
  copy_state(*model, *reference);
  fsdp2::fully_shard(model);
  fsdp2::reset_counters();
  const Tensor x = torch::full({2, 4}, 0.5 * (rank + 1));
  fsdp2::call(model, x).to(torch::kFloat).sum().backward();
  EXPECT_EQ(fsdp2::counters().all_gathers, 2);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);
  for (int r = 0; r < 2; ++r)
    (reference->forward(torch::full({2, 4}, 0.5 * (r + 1))).to(torch::kFloat).sum() / 2).backward();
  for (const auto& named : model->named_parameters()) {
    const Tensor expected = reference->named_parameters()[named.key()].grad();
    EXPECT_EQ(named.value().scalar_type(), expected.scalar_type());
    EXPECT_LE(max_difference(whole(named.value().grad()), expected), 1e-2) << named.key();
  }
}

RANKS_TEST(Parameters, FrozenOnesAreGatheredButNotReduced, 2) {
  Linear layer = linear(4, 4, /*bias=*/true);
  layer->weight.set_requires_grad(false);
  fsdp2::fully_shard(layer);
  fsdp2::reset_counters();
  layer(torch::ones({1, 4})).sum().backward();
  EXPECT_FALSE(layer->weight.grad().defined());
  EXPECT_TRUE(layer->bias.grad().defined());
  EXPECT_EQ(fsdp2::counters().bytes, 20 * 4 + 4 * 4);  // the gather has both, the reduction the bias only
  layer->weight.set_requires_grad(true);
  layer(torch::ones({1, 4})).sum().backward();
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::ones({4, 4})), 0);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embed = register_module("embed", torch::nn::Embedding(9, 4));
    out = register_parameter("out", embed->weight);  // one TensorImpl under two names
  }
  Tensor forward(const Tensor& tokens) { return torch::matmul(embed(tokens), out.t()); }
  torch::nn::Embedding embed{nullptr};
  Tensor out;
};
FSDP2_MODULE(Tied);

RANKS_TEST(Parameters, TiedOnesInOneGroupStayTiedAndTrainAsOne, 2) {
  torch::manual_seed(5);
  Tied reference, model;
  copy_state(*model, *reference);
  fsdp2::fully_shard(model);
  EXPECT_EQ(fsdp2::num_parameters(model), 36);
  torch::optim::AdamW optimizer({model->embed->weight}, torch::optim::AdamWOptions(0.1));
  torch::optim::AdamW reference_optimizer({reference->embed->weight}, torch::optim::AdamWOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    const Tensor tokens = torch::randint(9, {4, 3});
    model(tokens.narrow(0, 2 * rank, 2)).pow(2).mean().backward();
    reference(tokens).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    reference_optimizer.step();
    reference_optimizer.zero_grad();
    EXPECT_LE(max_difference(whole(model->out), reference->out.detach()), 1e-5) << step;
  }
  EXPECT_TRUE(model->out.is_same(model->embed->weight));
}

RANKS_TEST(Parameters, UnusedModulesAndOutputsGetNoGradient, 2) {
  struct PartImpl : torch::nn::Module {
    PartImpl() {
      used = register_module("used", linear(3, 3));
      unused = register_module("unused", linear(3, 3));
    }
    std::pair<Tensor, Tensor> forward(const Tensor& x) { return {used(x), used(x * 2)}; }
    Linear used{nullptr}, unused{nullptr};
  };
  auto model = std::make_shared<PartImpl>();
  fsdp2::fully_shard(model->used);
  fsdp2::fully_shard(model->unused);
  fsdp2::fully_shard(model);
  fsdp2::call(model, torch::ones({1, 3})).first.sum().backward();
  EXPECT_EQ(max_difference(whole(model->used->weight.grad()), torch::ones({3, 3})), 0);
  EXPECT_FALSE(model->unused->weight.grad().defined());
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(Parameters, IgnoredOnesStayPlain, 2) {
  Linear layer = linear(3, 3, /*bias=*/true);
  fsdp2::fully_shard(layer, {.ignored_params = {layer->bias}});
  EXPECT_TRUE(fsdp2::is_dtensor(layer->weight));
  EXPECT_FALSE(fsdp2::is_dtensor(layer->bias));
  layer(torch::ones({1, 3})).sum().backward();
  EXPECT_FALSE(fsdp2::is_dtensor(layer->bias.grad()));
}

RANKS_TEST(Parameters, AModuleUsedTwiceWithParamDtypeAccumulatesBothUses, 2) {
  torch::manual_seed(0);
  Linear layer = linear(3, 3);
  const Tensor reference = layer->weight.detach().clone();
  Tensor start = reference.clone();
  fsdp2::broadcast(start, 0);
  { torch::NoGradGuard no_grad; layer->weight.copy_(start); }
  fsdp2::fully_shard(layer, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  int hooks = 0;
  layer->weight.register_hook([&](const Tensor&) { ++hooks; });
  layer(layer(torch::ones({1, 3}))).sum().backward();
  EXPECT_EQ(hooks, 1);
  Tensor weight = start.clone().requires_grad_();
  torch::matmul(torch::matmul(torch::ones({1, 3}), weight.t()), weight.t()).sum().backward();
  EXPECT_LE(max_difference(whole(layer->weight.grad()), weight.grad()), 3e-2);
}

}  // namespace
