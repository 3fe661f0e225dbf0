// labels: ranks
// backends: gloo, shm
// Which modules, parameters and buffers a fully_shard call takes, and by which names they are known.

#include <fsdp2/detail/trace.h>

#include <algorithm>
#include <set>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::fsdp_module;
using fsdp2::fully_shard;
using fsdp2::is_dtensor;
using fsdp2::is_fsdp_module;
using torch::Tensor;
using Names = std::vector<std::string>;

constexpr int64_t kDim = 3;  // 3 and 9 rows: uneven on two ranks

struct ProjImpl : torch::nn::Module {
  ProjImpl(int64_t in, int64_t out, const Tensor& tied = {}) {
    weight = register_parameter("weight", tied.defined() ? tied : torch::randn({out, in}) * 0.3);
    bias = register_parameter("bias", torch::randn({out}));
  }
  Tensor forward(const Tensor& x) { return torch::addmm(bias, x, weight.t()); }
  Tensor weight, bias;
};
FSDP2_MODULE(Proj);

struct MlpImpl : torch::nn::Module {
  MlpImpl() : MlpImpl(Proj(kDim, 3 * kDim), torch::zeros({kDim})) {}
  MlpImpl(const Proj& in, const Tensor& count) {
    own = register_parameter("own", torch::ones({kDim}));  // registered first, but children come first in a group
    in_proj = register_module("in_proj", in);
    out_proj = register_module("out_proj", Proj(3 * kDim, kDim));
    buffer = register_buffer("buffer", count);
  }
  Tensor forward(const Tensor& x) {
    seen = buffer.scalar_type();
    {
      torch::NoGradGuard no_grad;
      buffer.add_(1);
    }
    return out_proj(torch::tanh(in_proj(x))) * own;
  }
  Tensor own, buffer;
  Proj in_proj{nullptr}, out_proj{nullptr};
  at::ScalarType seen{};
};
FSDP2_MODULE(Mlp);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(const std::vector<Mlp>& parts) : mlps(parts) {
    for (size_t i = 0; i < mlps.size(); ++i) register_module(std::to_string(i), mlps[i]);
  }
  Tensor forward(Tensor x) {
    for (Mlp& mlp : mlps) x = mlp(x);
    return x;
  }
  std::vector<Mlp> mlps;
};
FSDP2_MODULE(Stack);

Stack stack_of(int count) {
  std::vector<Mlp> mlps;
  for (int i = 0; i < count; ++i) mlps.emplace_back();
  return Stack(mlps);
}

/// Names of all parameters of these Mlps, in the order of a group.
Names names_of(const std::vector<int>& mlps) {
  Names names;
  for (int i : mlps) {
    for (const char* name : {"in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias", "own"}) {
      names.push_back(std::to_string(i) + "." + name);
    }
  }
  return names;
}

/// One step of both: gradients on this rank's half of the batch are those of the whole batch.
void expect_same_gradients(Stack& stack, Stack& reference, int rank) {
  torch::manual_seed(9);
  const Tensor x = torch::randn({4, kDim});
  stack->zero_grad();
  reference->zero_grad();
  stack(x.narrow(0, 2 * rank, 2)).pow(2).mean().backward();
  reference(x).pow(2).mean().backward();
  for (const auto& named : reference->named_parameters()) {
    const Tensor& grad = stack->named_parameters()[named.key()].grad();
    ASSERT_TRUE(grad.defined()) << named.key();
    EXPECT_LE(max_difference(whole(grad), named.value().grad()), 1e-5) << named.key();
  }
}

/// The model twice, with equal values; `make` draws them.
template <class Make>
std::pair<Stack, Stack> twice(Make&& make) {
  torch::manual_seed(1);
  Stack first = make();
  torch::manual_seed(1);
  return {first, make()};
}

// ----- one module --------------------------------------------------------------------------------------------------

RANKS_TEST(Managed, ACallTakesWhatNoInnerCallHasTaken, 2) {
  auto [stack, reference] = twice([] { return stack_of(3); });
  auto inner = fully_shard(stack->mlps[0]);
  auto projection = fully_shard(stack->mlps[1]->in_proj);
  EXPECT_EQ(inner.param_fqns(), (Names{"in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias", "own"}));
  for (const Tensor& param : stack->mlps[2]->parameters()) EXPECT_FALSE(is_dtensor(param));
  auto outer = fully_shard(stack);
  Names expected = names_of({1, 2});
  expected.erase(expected.begin(), expected.begin() + 2);  // 1.in_proj has a group of its own
  EXPECT_EQ(outer.param_fqns(), expected);
  EXPECT_EQ(inner.param_fqns(), names_of({0}));
  EXPECT_EQ(projection.param_fqns(), (Names{"1.in_proj.weight", "1.in_proj.bias"}));
  for (const Tensor& param : stack->parameters()) EXPECT_TRUE(is_dtensor(param));
  // Only the modules that were passed are marked.
  std::set<const torch::nn::Module*> marked;
  for (const auto& module : stack->modules()) {
    if (is_fsdp_module(*module)) marked.insert(module.get());
  }
  EXPECT_EQ(marked,
            (std::set<const torch::nn::Module*>{stack.get(), stack->mlps[0].get(), stack->mlps[1]->in_proj.get()}));
  EXPECT_FSDP2_ERROR(fsdp_module(stack->mlps[2]), kUsage, "was not given to fully_shard");
  expect_same_gradients(stack, reference, rank);
}

RANKS_TEST(Managed, EachCallHasAStateOfItsOwn, 2) {
  Stack stack = stack_of(3);
  for (Mlp& mlp : stack->mlps) fully_shard(mlp);
  fully_shard(stack);
  for (int i = 0; i < 3; ++i) {
    auto handle = fsdp_module(stack->mlps[i]);
    EXPECT_EQ(handle.param_fqns(), names_of({i}));
    handle.unshard();
    for (int j = 0; j < 3; ++j) {
      EXPECT_EQ(fsdp_module(stack->mlps[j]).is_unsharded(), i == j);
      EXPECT_EQ(is_dtensor(stack->mlps[j]->own), i != j);
    }
    handle.reshard();
  }
  EXPECT_TRUE(fsdp_module(stack).param_fqns().empty());  // nothing was left; its hooks and casts run all the same
}

RANKS_TEST(Managed, ContainersOfShardedModulesAreNotMarked, 2) {
  Linear first = linear(kDim, kDim), second = linear(kDim, kDim);
  torch::nn::Sequential row(first, second, linear(kDim, kDim));
  fully_shard(row);
  EXPECT_TRUE(is_fsdp_module(row));
  torch::nn::Sequential part(first, second);
  EXPECT_FALSE(is_fsdp_module(part));
  EXPECT_FALSE(is_fsdp_module(first));
}

// ----- shared modules and parameters -------------------------------------------------------------------------------

RANKS_TEST(Managed, ASharedModuleIsTakenOnce, 2) {
  auto [stack, reference] = twice([] {
    Mlp mlp;
    return Stack(std::vector<Mlp>{mlp, mlp});
  });
  auto handle = fully_shard(stack);
  EXPECT_EQ(handle.param_fqns(), names_of({0}));
  EXPECT_EQ(fsdp2::num_parameters(stack), 2 * kDim * 3 * kDim + 3 * kDim + kDim + kDim);
  expect_same_gradients(stack, reference, rank);
  EXPECT_EQ(max_difference(stack->mlps[1]->buffer, torch::full({kDim}, 2)), 0);

  std::tie(stack, reference) = twice([] {  // only a part is shared
    Mlp first;
    return Stack(std::vector<Mlp>{first, Mlp(first->in_proj, torch::zeros({kDim}))});
  });
  handle = fully_shard(stack);
  EXPECT_EQ(handle.param_fqns(), (Names{"0.in_proj.weight", "0.in_proj.bias", "0.out_proj.weight", "0.out_proj.bias",
                                        "0.own", "1.out_proj.weight", "1.out_proj.bias", "1.own"}));
  expect_same_gradients(stack, reference, rank);
}

/// Three Mlps over one in-projection weight, and one buffer for the last two.
Stack stack_with_shared_tensors() {
  Mlp middle;
  const Tensor weight = middle->in_proj->weight;
  const Mlp first(Proj(kDim, 3 * kDim, weight), torch::zeros({kDim}));
  const Mlp last(Proj(kDim, 3 * kDim, weight), middle->buffer);
  return Stack(std::vector<Mlp>{first, middle, last});
}

RANKS_TEST(Managed, ASharedParameterHasOneRecordAndAllItsUsersFollow, 2) {
  auto [stack, reference] = twice(stack_with_shared_tensors);
  auto handle = fully_shard(stack, {.mp_policy = {.buffer_dtype = torch::kDouble}});
  Names expected = names_of({0, 1, 2});
  for (const char* repeated : {"1.in_proj.weight", "2.in_proj.weight"}) {
    expected.erase(std::find(expected.begin(), expected.end(), repeated));
  }
  EXPECT_EQ(handle.param_fqns(), expected);
  const auto weight = [&](int i) -> const Tensor& { return stack->mlps[i]->in_proj->weight; };
  const auto expect_tied = [&](bool sharded) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(weight(i).is_same(weight(0)));
      EXPECT_TRUE(stack->named_parameters()[std::to_string(i) + ".in_proj.weight"].is_same(weight(0)));
      EXPECT_EQ(is_dtensor(weight(i)), sharded);
    }
  };
  expect_tied(true);
  handle.unshard();
  expect_tied(false);
  handle.reshard();
  expect_tied(true);
  expect_same_gradients(stack, reference, rank);
  expect_tied(true);
  // Every Mlp saw its buffer cast; the shared one was taken once and holds the writes of both its users.
  for (Mlp& mlp : stack->mlps) {
    EXPECT_EQ(mlp->seen, torch::kDouble);
    EXPECT_EQ(mlp->buffer.scalar_type(), torch::kFloat);
  }
  EXPECT_TRUE(stack->mlps[1]->buffer.is_same(stack->mlps[2]->buffer));
  EXPECT_EQ(max_difference(stack->mlps[0]->buffer, torch::full({kDim}, 1)), 0);
  EXPECT_EQ(max_difference(stack->mlps[2]->buffer, torch::full({kDim}, 2)), 0);
}

RANKS_TEST(Managed, BuffersBelongToTheCallThatTookTheirModule, 2) {
  Stack stack = stack_of(3);
  fully_shard(stack->mlps[0]);
  fully_shard(stack->mlps[1], {.mp_policy = {.buffer_dtype = torch::kHalf}});
  fully_shard(stack, {.mp_policy = {.buffer_dtype = torch::kDouble}});
  stack(torch::ones({2, kDim}));
  EXPECT_EQ(stack->mlps[0]->seen, torch::kFloat);
  EXPECT_EQ(stack->mlps[1]->seen, torch::kHalf);
  EXPECT_EQ(stack->mlps[2]->seen, torch::kDouble);
  for (const Tensor& buffer : stack->buffers()) {
    EXPECT_FALSE(is_dtensor(buffer));
    EXPECT_EQ(max_difference(buffer, torch::ones({kDim})), 0);
  }
}

// ----- lists -------------------------------------------------------------------------------------------------------

RANKS_TEST(Managed, AListIsOneGroupOverItsSubtrees, 2) {
  auto [stack, reference] = twice([] { return stack_of(5); });
  auto list = fully_shard({stack->mlps[1], stack->mlps[3]});
  EXPECT_EQ(list.param_fqns().size(), 10u);
  for (int i = 0; i < 5; ++i) {
    const bool in_list = i == 1 || i == 3;
    EXPECT_EQ(is_fsdp_module(stack->mlps[i]), in_list);
    for (const Tensor& param : stack->mlps[i]->parameters()) EXPECT_EQ(is_dtensor(param), in_list);
  }
  auto root = fully_shard(stack);
  EXPECT_EQ(root.param_fqns(), names_of({0, 2, 4}));
  for (int i : {1, 3}) EXPECT_EQ(fsdp_module(stack->mlps[i]).param_fqns(), names_of({1, 3}));  // one state for both
  fsdp_module(stack->mlps[3]).unshard();
  EXPECT_TRUE(fsdp_module(stack->mlps[1]).is_unsharded());
  EXPECT_FALSE(is_dtensor(stack->mlps[1]->own));
  list.reshard();
  EXPECT_TRUE(is_dtensor(stack->mlps[3]->own));

  fsdp2::reset_counters();
  expect_same_gradients(stack, reference, rank);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);  // the list's and the root's
}

RANKS_TEST(Managed, AnElementInsideAnotherIsPartOfIt, 2) {
  auto [stack, reference] = twice([] { return stack_of(3); });
  auto list = fully_shard({stack->mlps[0]->in_proj, stack->mlps[0], stack->mlps[2]});
  EXPECT_FALSE(is_fsdp_module(stack->mlps[0]->in_proj));
  fully_shard(stack);
  Names names = list.param_fqns(), expected = names_of({0, 2});
  std::sort(names.begin(), names.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(names, expected);
  expect_same_gradients(stack, reference, rank);
}

// ----- the root ----------------------------------------------------------------------------------------------------

RANKS_TEST(Managed, TheFirstForwardFindsTheRootAndEveryName, 2) {
  Stack stack = stack_of(3);
  auto first = fully_shard(stack->mlps[0]->in_proj), second = fully_shard(stack->mlps[0]->out_proj);
  auto list = fully_shard({stack->mlps[1]->in_proj, stack->mlps[2]});
  auto root = fully_shard(stack);
  EXPECT_FALSE(root.is_root());
  std::vector<std::pair<std::string, std::string>> events;
  fsdp2::detail::set_trace([&](const char* event, const std::string& module) { events.emplace_back(event, module); });
  stack(torch::ones({2, kDim})).sum().backward();
  fsdp2::detail::set_trace({});
  EXPECT_TRUE(root.is_root());
  for (auto& handle : {&first, &second, &list}) EXPECT_FALSE(handle->is_root());
  EXPECT_EQ(first.param_fqns(), (Names{"0.in_proj.weight", "0.in_proj.bias"}));
  EXPECT_EQ(second.param_fqns(), (Names{"0.out_proj.weight", "0.out_proj.bias"}));
  EXPECT_EQ(list.param_fqns(), (Names{"1.in_proj.weight", "1.in_proj.bias", "2.in_proj.weight", "2.in_proj.bias",
                                      "2.out_proj.weight", "2.out_proj.bias", "2.own"}));
  EXPECT_EQ(root.param_fqns(), (Names{"0.own", "1.out_proj.weight", "1.out_proj.bias", "1.own"}));
  // Groups start to gather in the order of forward, under the name of their module.
  Names gathered;
  for (const auto& [event, module] : events) {
    if (event == "unshard" && gathered.size() < 4) gathered.push_back(module);
  }
  EXPECT_EQ(gathered, (Names{"", "0.in_proj", "0.out_proj", "1.in_proj, 2"}));
}

RANKS_TEST(Managed, ANestedModuleAloneComesAfterItsRoot, 2) {
  Stack stack = stack_of(2);
  fully_shard(stack->mlps[0]->in_proj);
  fully_shard(stack->mlps[0]->out_proj);
  auto root = fully_shard(stack);
  const Tensor x = torch::ones({2, kDim});
  stack->mlps[0]->in_proj(x);  // taken for a root
  EXPECT_FSDP2_ERROR(stack(x), kUsage, "ran its forward before its root");
  EXPECT_FSDP2_ERROR(stack(x), kUsage, "outermost module first");

  Stack again = stack_of(2);
  fully_shard(again->mlps[0]->in_proj);
  fully_shard(again);
  again(x);
  EXPECT_NO_THROW(again->mlps[0]->in_proj(x).sum().backward());  // the root is known: allowed
  EXPECT_FALSE(fsdp_module(again->mlps[0]->in_proj).is_root());
}

RANKS_TEST(Managed, AListCannotBeTheRoot, 2) {
  Stack stack = stack_of(2);
  fully_shard({stack->mlps[0], stack->mlps[1]});
  EXPECT_FSDP2_ERROR(stack(torch::ones({2, kDim})), kUsage, "root");
}

// ----- ignored parameters ------------------------------------------------------------------------------------------

/// C inside B inside A; B is sharded without C's parameters, A's are plain and averaged by hand like C's.
struct InnerImpl : torch::nn::Module {
  explicit InnerImpl(int64_t dim) {
    lin_b = register_module("lin_b", Proj(dim, dim));
    module_c = register_module("module_c", Proj(dim, dim));
    subtrahend = register_parameter("subtrahend", torch::randn({dim, dim}));
  }
  Tensor forward(const Tensor& x) { return lin_b(module_c(x)) - subtrahend; }
  Proj lin_b{nullptr}, module_c{nullptr};
  Tensor subtrahend;
};
FSDP2_MODULE(Inner);
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(int64_t dim) {
    module_b = register_module("module_b", Inner(dim));
    addend = register_parameter("addend", torch::randn({dim, dim}));
  }
  Tensor forward(const Tensor& x) { return (module_b(x) + addend).pow(2).mean(); }
  Inner module_b{nullptr};
  Tensor addend;
};
FSDP2_MODULE(Outer);

RANKS_TEST(Managed, IgnoredParametersInsideAnOuterDataParallelLayer, 2) {
  constexpr int64_t kSize = 8;
  torch::manual_seed(4);
  Outer reference(kSize), model(kSize);
  copy_state(*model, *reference);
  const std::vector<Tensor> ignored = model->module_b->module_c->parameters();
  fully_shard(model->module_b->lin_b, {.ignored_params = ignored});
  auto handle = fully_shard(model->module_b, {.ignored_params = ignored});
  EXPECT_EQ(handle.param_fqns(), Names{"subtrahend"});
  std::vector<Tensor> plain;
  for (const auto& named : model->named_parameters()) {
    const bool sharded = named.key() != "addend" && named.key().find("module_c") == std::string::npos;
    EXPECT_EQ(is_dtensor(named.value()), sharded) << named.key();
    if (!sharded) plain.push_back(named.value());
  }
  ASSERT_EQ(plain.size(), 3u);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  torch::optim::Adam expected(reference->parameters(), torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    for (int r = 0; r < 2; ++r) {  // the reference sees both ranks' batches
      const Tensor x = torch::randn({kSize, kSize});
      (reference(x) / 2).backward();
      if (r == rank) model(x).backward();
    }
    for (Tensor& param : plain) {
      EXPECT_FALSE(is_dtensor(param.grad()));
      fsdp2::all_reduce(param.mutable_grad(), fsdp2::ReduceOp::AVG);
    }
    for (auto* each : {&optimizer, &expected}) {
      each->step();
      each->zero_grad();
    }
    for (const auto& named : reference->named_parameters()) {
      const Tensor now = whole(model->named_parameters()[named.key()]);
      EXPECT_LE(max_difference(now, named.value().detach()), 1e-4) << named.key() << " step " << step;
    }
  }
}

}  // namespace
