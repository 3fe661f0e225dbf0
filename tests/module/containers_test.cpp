// labels: ranks
// Sharded children of Sequential, ModuleList and ModuleDict: their hooks run, or the direct call is refused.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;
namespace nn = torch::nn;

nn::Sequential stack() {
  torch::manual_seed(1);  // the same on every rank
  return nn::Sequential(nn::Linear(4, 5), nn::ReLU(), nn::Linear(5, 3), nn::Tanh(), nn::Linear(3, 2));
}

/// Every Linear by itself; the Sequential around them too where `root`.
void shard_linears(nn::Sequential& layers, bool root) {
  for (const auto& module : layers->modules(/*include_self=*/false)) {
    if (module->as<nn::LinearImpl>() != nullptr) fsdp2::fully_shard(module);
  }
  if (root) fsdp2::fully_shard(layers);
}

/// `run` is the sharded model; gradients are those of the mean over ranks.
void expect_like_whole(nn::Sequential& reference, nn::Module& sharded,
                       const std::function<Tensor(const Tensor&)>& run) {
  const Tensor all = torch::arange(16, torch::kFloat).view({4, 4}) / 7 - 1;
  const Tensor mine = all.narrow(0, 2 * fsdp2::get_rank(), 2);
  const Tensor out = run(mine), expected = reference->forward(all);
  EXPECT_LE(max_difference(out.detach(), expected.detach().narrow(0, 2 * fsdp2::get_rank(), 2)), 1e-6);
  out.square().mean().backward();
  expected.square().mean().backward();
  const auto gradients = reference->named_parameters();
  for (const auto& named : sharded.named_parameters()) {
    EXPECT_LE(max_difference(whole(named.value().grad()), gradients[named.key()].grad()), 1e-6) << named.key();
  }
}

RANKS_TEST(Containers, ASequentialThatIsCalledRunsTheHooksInside, 2) {
  for (const bool root : {false, true}) {
    nn::Sequential reference = stack(), layers = stack();
    copy_state(*layers, *reference);
    shard_linears(layers, root);
    fsdp2::reset_counters();
    expect_like_whole(reference, *layers, [&](const Tensor& x) { return fsdp2::call(layers, x); });
    EXPECT_EQ(fsdp2::counters().reduce_scatters, 3);
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
    for (Tensor param : reference->parameters()) param.mutable_grad() = Tensor();
    for (Tensor param : layers->parameters()) param.mutable_grad() = Tensor();
    fsdp2::Hooked<nn::Sequential> hooked(layers);
    expect_like_whole(reference, *layers, [&](const Tensor& x) { return hooked(x); });
  }
}

RANKS_TEST(Containers, ASequentialsOwnForwardIsRefusedWhereChildrenAreSharded, 2) {
  nn::Sequential layers = stack();
  shard_linears(layers, false);
  EXPECT_FSDP2_ERROR(layers->forward(torch::ones({1, 4})), kUsage, "call model(x)");
  EXPECT_FSDP2_ERROR(fsdp2::call(nn::Sequential(), torch::ones({1, 4})), kUsage, "empty");
}

RANKS_TEST(Containers, ASequentialAsOneGroupMayBeCalledEitherWayInsideItsRoot, 2) {
  struct RootImpl : nn::Module {
    RootImpl() { layers = register_module("layers", stack()); }
    Tensor forward(const Tensor& x) { return layers->forward(x); }
    nn::Sequential layers{nullptr};
  };
  nn::Sequential reference = stack();
  auto root = std::make_shared<RootImpl>();
  copy_state(*root->layers, *reference);
  fsdp2::fully_shard(root);
  expect_like_whole(reference, *root->layers, [&](const Tensor& x) { return fsdp2::call(root, x); });
}

RANKS_TEST(Containers, ListsAndDictsHaveHooksOnTheirElements, 2) {
  struct RootImpl : nn::Module {
    RootImpl() {
      list = register_module("list", nn::ModuleList(nn::Linear(4, 4), nn::Linear(4, 4)));
      torch::OrderedDict<std::string, std::shared_ptr<nn::Module>> heads;
      heads.insert("head", nn::Linear(4, 2).ptr());
      dict = register_module("dict", nn::ModuleDict(heads));
    }
    Tensor forward(const Tensor& x) {
      Tensor y = x;
      for (size_t i = 0; i < list->size(); ++i) y = fsdp2::call(list->ptr<nn::LinearImpl>(i), y);
      return past_hooks ? (*dict)["head"]->as<nn::LinearImpl>()->forward(y)
                        : fsdp2::call(*(*dict)["head"]->as<nn::LinearImpl>(), y);
    }
    nn::ModuleList list{nullptr};
    nn::ModuleDict dict{nullptr};
    bool past_hooks = false;
  };
  torch::manual_seed(1);
  auto root = std::make_shared<RootImpl>();
  const Tensor x = torch::ones({1, 4});
  const Tensor expected = root->forward(x).detach();
  for (const auto& module : *root->list) fsdp2::fully_shard(module);
  fsdp2::fully_shard((*root->dict)["head"]);
  fsdp2::fully_shard(root);
  EXPECT_LE(max_difference(fsdp2::call(root, x).detach(), expected), 1e-6);
  root->past_hooks = true;
  EXPECT_FSDP2_ERROR(fsdp2::call(root, x), kUsage, "call model(x)");
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(root->list), kInvalidArgument, "no forward of its own");
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(root->dict), kInvalidArgument, "no forward of its own");
}

}  // namespace
