// alone: FSDP2_OPAQUE stands at global scope
// labels: ranks
// Hooks see the tensors inside nested inputs and outputs, wherever they are.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace data {

struct Batch {
  torch::Tensor tokens;
  std::optional<torch::Tensor> mask;
  int64_t step = 0;
};
FSDP2_FIELDS(Batch, tokens, mask);

enum class Mode { kTrain, kEval };
struct Settings {
  double scale = 2;
};

}  // namespace data

FSDP2_OPAQUE(data::Settings);

namespace {

using namespace fsdp2::testing;
using torch::Tensor;
using Nested = std::map<std::string, std::vector<std::pair<Tensor, std::optional<Tensor>>>>;

/// Multiplies by a 1x1 weight everything it gets, and notes dtypes.
struct EverythingImpl : torch::nn::Module {
  EverythingImpl() { weight = register_parameter("weight", torch::ones({1})); }
  std::tuple<Tensor, data::Batch, Nested, std::array<Tensor, 2>> forward(const data::Batch& batch, Nested nested,
                                                                        std::optional<Tensor> missing, data::Mode,
                                                                        const data::Settings& settings,
                                                                        const char* name) {
    seen = batch.tokens.scalar_type();
    EXPECT_FALSE(missing.has_value());
    EXPECT_EQ(settings.scale, 2);
    EXPECT_EQ(std::string(name), "text");
    data::Batch out{batch.tokens * weight, batch.mask, batch.step + 1};
    for (auto& [key, list] : nested) {
      for (auto& entry : list) entry.first = entry.first * weight;
    }
    return {batch.tokens.sum() * weight, out, nested, {weight * 1, weight * 2}};
  }
  Tensor encode(const Tensor& x) const noexcept { return x * weight * 3; }
  void nothing() { ++calls; }
  Tensor weight;
  at::ScalarType seen{};
  int calls = 0;
};
FSDP2_MODULE(Everything);

RANKS_TEST(Hooks, ReachTensorsInsideNestedInputsAndOutputs, 2) {
  Everything module;
  fsdp2::fully_shard(module, {.reshard_after_forward = true,
                               .mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
  const data::Batch batch{torch::full({2}, 3.0).requires_grad_(), torch::ones({2}), 4};
  Nested nested{{"a", {{torch::ones({1}), std::nullopt}, {torch::ones({1}), torch::ones({1})}}}};
  auto [sum, out, lists, pair] = module(batch, nested, std::nullopt, data::Mode::kEval, data::Settings{}, "text");
  EXPECT_EQ(module->seen, torch::kBFloat16);
  EXPECT_EQ(sum.scalar_type(), torch::kFloat);
  EXPECT_EQ(out.tokens.scalar_type(), torch::kFloat);
  EXPECT_EQ(out.mask->scalar_type(), torch::kFloat);
  EXPECT_EQ(out.step, 5);
  EXPECT_EQ(lists["a"][1].first.scalar_type(), torch::kFloat);
  EXPECT_EQ(nested["a"][0].first.scalar_type(), torch::kFloat);  // the caller's own is untouched
  EXPECT_TRUE(fsdp2::is_dtensor(module->weight));
  // Backward starts from an output deep inside, and the group was freed before: its hook gathers it again.
  (lists["a"][0].first.sum() + pair[1].sum()).backward();
  EXPECT_EQ(whole(module->weight.grad()).item<double>(), 3);
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(Hooks, AnyMemberFunctionCanBeAnEntry, 2) {
  Everything module;
  fsdp2::fully_shard(module, {.reshard_after_forward = true});
  EXPECT_EQ(fsdp2::call_method(module, &EverythingImpl::encode, torch::ones({1})).item<double>(), 3);
  fsdp2::call_method(module, &EverythingImpl::nothing);
  EXPECT_EQ(module->calls, 1);
  EXPECT_TRUE(fsdp2::is_dtensor(module->weight));
}

RANKS_TEST(Hooks, HoldersPointersAndReferencesAreModules, 2) {
  Linear layer = linear(2, 2);
  fsdp2::fully_shard(layer);
  const Tensor x = torch::ones({1, 2});
  const Tensor by_holder = layer(x);
  EXPECT_TRUE(torch::equal(fsdp2::call(layer, x), by_holder));
  EXPECT_TRUE(torch::equal(fsdp2::call(layer.ptr(), x), by_holder));
  EXPECT_TRUE(torch::equal(fsdp2::call(*layer, x), by_holder));
  Linear plain = linear(2, 2);  // a module without hooks
  EXPECT_TRUE(torch::equal(plain(x), plain->forward(x)));
}

struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() { weight = register_parameter("weight", torch::ones({1})); }
  Tensor forward(Tensor& state) {
    state = state + weight.detach();  // hands a new value to the caller
    return state * weight;
  }
  Tensor weight;
};
FSDP2_MODULE(InPlace);

RANKS_TEST(Hooks, ArgumentsByReferenceComeBack, 2) {
  InPlace module;
  fsdp2::fully_shard(module);
  Tensor state = torch::zeros({1});
  module(state);
  module(state);
  EXPECT_EQ(state.item<double>(), 2);
}

struct CountingImpl : torch::nn::Module {
  CountingImpl() { weight = register_parameter("weight", torch::ones({1})); }
  Tensor forward(const Tensor& x, int& calls, std::vector<Tensor>& cache, data::Batch& batch) {
    ++calls;
    cache.pop_back();
    ++batch.step;
    return x * weight;
  }
  Tensor weight;
};
FSDP2_MODULE(Counting);

// Whatever forward writes to: a number, the length of a list, a field without tensors.
RANKS_TEST(Hooks, EveryKindOfArgumentByReferenceComesBack, 2) {
  Counting module;
  fsdp2::fully_shard(module, {.mp_policy = {.param_dtype = torch::kBFloat16}});
  int calls = 0;
  std::vector<Tensor> cache{torch::ones({1}), torch::ones({1})};
  data::Batch batch{torch::ones({1}).requires_grad_(), std::nullopt, 0};
  const Tensor first = cache[0], tokens = batch.tokens;
  module(tokens, calls, cache, batch);
  EXPECT_EQ(calls, 1);
  ASSERT_EQ(cache.size(), 1);
  EXPECT_TRUE(cache[0].is_same(first));  // not the cast that forward saw
  EXPECT_EQ(batch.step, 1);
  EXPECT_TRUE(batch.tokens.is_same(tokens));
}

RANKS_TEST(Hooks, AReturnedParameterOrInputIsNoTrap, 2) {
  struct PassImpl : torch::nn::Module {
    PassImpl() { weight = register_parameter("weight", torch::ones({2})); }
    Tensor forward(const Tensor& x) { return x; }
    Tensor weight;
  };
  auto module = std::make_shared<PassImpl>();
  fsdp2::fully_shard(module);
  const Tensor x = torch::ones({2}).requires_grad_();
  for (int i = 0; i < 3; ++i) fsdp2::call(module, x).sum().backward();
  EXPECT_EQ(x.grad()[0].item<double>(), 3);
  EXPECT_FALSE(module->weight.grad().defined());
}

}  // namespace
