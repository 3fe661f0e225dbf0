// labels: ranks
// backends: gloo, shm
// What would be silently wrong is an error that names the parameter and the rule.

#include <filesystem>
#include <sstream>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(action, text) \
  EXPECT_NE(error_of([&] { action; }).find(text), std::string::npos) << error_of([&] { action; })

RANKS_TEST(Misuse, ForwardPastTheHooksNamesParameterAndRule, 2) {
  Net net(2);
  shard(net);
  const Tensor tokens = torch::zeros({1, 3}, torch::kLong);
  EXPECT_FSDP2_ERROR(net->forward(tokens), kUsage, "embed.weight");
  EXPECT_FSDP2_ERROR(net->forward(tokens), kUsage, "model->forward(x)");
  EXPECT_FSDP2_ERROR(net->blocks[0]->forward(torch::zeros({1, 6})), kUsage, "block0.norm.weight");
}

RANKS_TEST(Misuse, ForwardPastTheHooksOnWholeParametersReducesTheirGradients, 2) {
  Linear layer = linear(2, 2);
  { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
  auto handle = fsdp2::fully_shard(layer);
  handle.unshard();
  layer->forward(torch::full({1, 2}, rank + 1.0)).sum().backward();
  EXPECT_FALSE(handle.is_unsharded());
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({2, 2}, 1.5)), 0);
}

RANKS_TEST(Misuse, MixingAShardWithAPlainTensor, 2) {
  Linear layer = linear(4, 4);
  fsdp2::fully_shard(layer);
  torch::NoGradGuard no_grad;
  EXPECT_FSDP2_ERROR(layer->weight + torch::ones({4, 4}), kUsage, "weight");
  EXPECT_FSDP2_ERROR(torch::matmul(torch::ones({1, 4}), layer->weight), kUsage, "weight");
}

RANKS_TEST(Misuse, InPlaceOnAModuleInput, 2) {
  struct EditorImpl : torch::nn::Module {
    EditorImpl() { inner = register_module("inner", torch::nn::Linear(3, 3)); }
    Tensor forward(Tensor x) { return inner(x.mul_(2)); }
    torch::nn::Linear inner{nullptr};
  };
  auto editor = std::make_shared<EditorImpl>();
  fsdp2::fully_shard(editor);
  const Tensor leaf = torch::ones({2, 3}).requires_grad_();
  EXPECT_SAYS(fsdp2::call(editor, leaf * 1).sum().backward(), "inplace");
  EXPECT_NO_THROW(fsdp2::call(editor, torch::ones({2, 3})).sum().backward());  // no gradient, no harm
}

RANKS_TEST(Misuse, WriteWhileUnshardedIsNamedAtTheNextTransition, 2) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  handle.unshard();
  { torch::NoGradGuard no_grad; layer->weight.fill_(7); }
  EXPECT_FSDP2_ERROR(handle.reshard(), kUsage, "weight was written in place while it was unsharded");
}

RANKS_TEST(Misuse, WriteWhileAGatherIsUnderWayIsNamed, 2) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  handle.unshard_async();
  { torch::NoGradGuard no_grad; layer->weight.fill_(7); }
  EXPECT_FSDP2_ERROR(layer(torch::ones({1, 2})), kUsage, "weight was written while its gather was under way");
  EXPECT_EQ(layer(torch::ones({1, 2})).sum().item<double>(), 28);
}

// Block 2 is gathered ahead and then left out; the step after must not leave it with old values.
RANKS_TEST(Misuse, AGatherAheadThatNobodyUsedIsDropped, 2) {
  Net net(3);
  shard(net);
  fsdp2::fsdp_module(net->blocks[0]).set_modules_to_forward_prefetch({fsdp2::fsdp_module(net->blocks[2])});
  const Tensor tokens = torch::arange(4).view({1, 4});
  torch::NoGradGuard no_grad;
  const std::vector<Block> all = net->blocks;
  net->blocks.pop_back();
  net(tokens);
  net->blocks = all;
  fsdp2::fsdp_module(net).reshard();
  for (Tensor& param : net->parameters()) param.fill_(0.5);
  const Tensor out = net(tokens);
  fsdp2::fsdp_module(net).reshard();
  EXPECT_TRUE(torch::equal(out, net(tokens)));
  Net plain(3);
  for (Tensor& param : plain->parameters()) param.fill_(0.5);
  EXPECT_LT(max_difference(out, plain->forward(tokens)), 1e-5);
}

RANKS_TEST(Misuse, AnOptimizerStepOnWholeParametersSaysReshard, 2) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  layer(torch::ones({1, 2})).sum().backward();
  { torch::NoGradGuard no_grad; layer(torch::ones({1, 2})); }  // leaves the root's parameters whole
  EXPECT_FSDP2_ERROR(optimizer.step(), kUsage, "call reshard() on its module first");
  handle.reshard();
  EXPECT_NO_THROW(optimizer.step());
}

RANKS_TEST(Misuse, ConversionWhileUnshardedIsNamedAtTheNextTransition, 2) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  handle.unshard();
  layer->to(torch::kDouble);
  EXPECT_FSDP2_ERROR(handle.reshard(), kUsage, "weight was replaced while it was unsharded");
}

RANKS_TEST(Misuse, ConversionWhileShardedIsTaken, 2) {
  Linear layer = linear(3, 3);
  const Tensor before = layer->weight.detach().clone();
  fsdp2::fully_shard(layer);
  torch::manual_seed(0);
  layer->to(torch::kDouble);
  const Tensor x = torch::ones({1, 3}, torch::kDouble);
  EXPECT_EQ(layer(x).scalar_type(), torch::kDouble);
  fsdp2::fsdp_module(layer).reshard();
  EXPECT_EQ(layer->weight.scalar_type(), torch::kDouble);
  Tensor expected = before.clone();
  fsdp2::broadcast(expected, 0);
  const Tensor now = whole(layer->weight);
  EXPECT_EQ(now.scalar_type(), torch::kDouble);
  EXPECT_EQ(max_difference(now.narrow(0, 0, 2), expected.narrow(0, 0, 2)), 0);  // rank 0's rows
}

RANKS_TEST(Misuse, SavingWithTorchSave, 2) {
  Linear layer = linear(2, 2);
  fsdp2::fully_shard(layer);
  std::ostringstream out;
  EXPECT_SAYS(torch::save(layer, out), "DTensor");
}

RANKS_TEST(Misuse, UseOfFreedWholeData, 2) {
  Linear layer = linear(2, 2);
  auto handle = fsdp2::fully_shard(layer);
  handle.unshard();
  const Tensor view = layer->weight.detach().t();
  handle.reshard();
  EXPECT_SAYS(view.sum(), "weight was used after it was freed");
  handle.unshard();
  EXPECT_NO_THROW(view.sum());  // the same view, valid again
}

RANKS_TEST(Misuse, PenaltyOnAShardedParameter, 2) {
  torch::manual_seed(0);
  Linear layer = linear(3, 5);
  const Tensor reference = layer->weight.detach().clone().requires_grad_();
  fsdp2::fully_shard(layer);
  EXPECT_FSDP2_ERROR(layer->weight.pow(2).sum(), kUsage, "weight");
  // Through full_tensor() it is right: each rank keeps its own part of the same gradient.
  (0.5 * fsdp2::DTensor(layer->weight).full_tensor().pow(2).sum()).backward();
  (0.5 * reference.pow(2).sum()).backward();
  EXPECT_LE(max_difference(whole(layer->weight.grad()), reference.grad()), 1e-6);
}

RANKS_TEST(Misuse, PenaltyBesideTheLossIsRightOrAnError, 2) {
  torch::manual_seed(0);
  Linear layer = linear(3, 5);
  const Tensor reference = layer->weight.detach().clone().requires_grad_();
  auto handle = fsdp2::fully_shard(layer);
  const Tensor x = torch::ones({1, 3});
  const auto both = [&] {
    const Tensor penalty = 0.5 * fsdp2::DTensor(layer->weight).full_tensor().pow(2).sum();
    (layer(x).sum() + penalty).backward();
  };
  std::string said = error_of(both);
  if (said == "no error") {
    (torch::matmul(x, reference.t()).sum() + 0.5 * reference.pow(2).sum()).backward();
    EXPECT_LE(max_difference(whole(layer->weight.grad()), reference.grad()), 1e-6);
  } else {
    EXPECT_NE(said.find("weight"), std::string::npos) << said;
    handle.reset_iter_state();
  }
}

RANKS_TEST(Misuse, MetaParametersAreNamed, 2) {
  Net net = nullptr;
  { fsdp2::MetaDeviceGuard meta; net = Net(1); }
  shard(net);
  const Tensor tokens = torch::zeros({1, 3}, torch::kLong);
  EXPECT_FSDP2_ERROR(net(tokens), kUsage, "embed.weight");
}

RANKS_TEST(Misuse, MaterialisedButNeverWrittenParametersAndBuffersAreNamed, 2) {
  Net net = nullptr;
  { fsdp2::MetaDeviceGuard meta; net = Net(1); }
  fsdp2::register_buffer(net, "table", torch::empty({3}, torch::kMeta));
  shard(net);
  fsdp2::to_empty(net, torch::kCPU);
  const Tensor tokens = torch::zeros({1, 3}, torch::kLong);
  EXPECT_FSDP2_ERROR(net(tokens), kUsage, "table");
  { torch::NoGradGuard no_grad; net->named_buffers()["table"].zero_(); }
  EXPECT_FSDP2_ERROR(net(tokens), kUsage, "embed.weight");
  { torch::NoGradGuard no_grad; for (Tensor& param : net->parameters()) param.zero_(); }
  EXPECT_NO_THROW(net(tokens));
}

RANKS_TEST(Misuse, ARankWithoutRowsHearsOfUnwrittenParametersToo, 3) {
  Linear layer{nullptr};
  { fsdp2::MetaDeviceGuard meta; layer = linear(4, 1); }  // one row: ranks 1 and 2 have none
  fsdp2::fully_shard(layer);
  fsdp2::to_empty(layer, torch::kCPU);
  EXPECT_FSDP2_ERROR(layer(torch::ones({1, 4})), kUsage, "weight");
  { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
  EXPECT_EQ(layer(torch::ones({1, 4})).item<double>(), 4);
}

RANKS_TEST(Misuse, ValuesWrittenThroughPointersAreDeclared, 2) {
  Linear layer{nullptr};
  { fsdp2::MetaDeviceGuard meta; layer = linear(4, 4); }
  fsdp2::fully_shard(layer);
  fsdp2::to_empty(layer, torch::kCPU);
  Tensor local = fsdp2::DTensor(layer->weight).to_local();
  std::fill_n(static_cast<float*>(local.data_ptr()), local.numel(), 1.0f);
  EXPECT_FSDP2_ERROR(layer(torch::ones({1, 4})), kUsage, "weight");
  fsdp2::mark_initialized(layer);
  EXPECT_EQ(layer(torch::ones({1, 4}))[0][0].item<float>(), 4);
}

RANKS_TEST(Misuse, TwiceOnOneModule, 2) {
  Linear layer = linear(2, 2);
  fsdp2::fully_shard(layer);
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(layer), kUsage, "twice");
}

RANKS_TEST(Misuse, ParametersThatCannotBeSharded, 2) {
  struct ScalarImpl : torch::nn::Module {
    explicit ScalarImpl(Tensor value) { register_parameter("odd", std::move(value)); }
    Tensor forward(Tensor x) { return x; }
  };
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(std::make_shared<ScalarImpl>(torch::tensor(1.0))), kInvalidArgument, "odd");
  EXPECT_FSDP2_ERROR(fsdp2::fully_shard(std::make_shared<ScalarImpl>(torch::ones({2, 3}).t())), kInvalidArgument,
                     "odd");
}

RANKS_TEST(Misuse, RefusedOptionsLeaveTheModuleAsItWas, 2) {
  const auto refused = [](const fsdp2::FullyShardOptions& options, const char* text) {
    Linear layer = linear(2, 2);
    EXPECT_FSDP2_ERROR(fsdp2::fully_shard(layer, options), kInvalidArgument, text);
    EXPECT_FALSE(fsdp2::is_dtensor(layer->weight));
    EXPECT_FALSE(fsdp2::is_fsdp_module(layer));
  };
  refused({.mesh = fsdp2::init_device_mesh(torch::kCPU, {1, 2})}, "no names");
  refused({.mesh = fsdp2::init_device_mesh(torch::kCPU, {1, 2, 1}, {"a", "b", "c"})}, "3 axes");
  refused({.dp_mesh_dims = fsdp2::DataParallelMeshDims{}}, "dp_mesh_dims");
  refused({.reshard_after_forward = 3}, "3");
}

RANKS_TEST(Misuse, RanksWithDifferentModelsAreTold, 2) {
  Linear layer = linear(2, rank == 0 ? 4 : 6);
  fsdp2::fully_shard(layer);
  EXPECT_FSDP2_ERROR(layer(torch::ones({1, 2})), kInvalidArgument, "ranks built different sharded models");
}

RANKS_TEST(Misuse, RanksThatUsedDifferentParametersAreTold, 2) {
  struct ChoiceImpl : torch::nn::Module {
    ChoiceImpl() {
      a = register_module("a", linear(2, 2));
      b = register_module("b", linear(2, 2));
    }
    Tensor forward(const Tensor& x, bool first) { return first ? a(x) : b(x); }
    Linear a{nullptr}, b{nullptr};
  };
  auto model = std::make_shared<ChoiceImpl>();
  fsdp2::fully_shard(model);
  const Tensor x = torch::ones({1, 2});
  EXPECT_FSDP2_ERROR(fsdp2::call(model, x, rank == 0).sum().backward(), kUsage, "rank 0 of the mesh those of a.weight");
  model->zero_grad();
  EXPECT_NO_THROW(fsdp2::call(model, x, true).sum().backward());
  EXPECT_EQ(max_difference(whole(model->a->weight.grad()), torch::ones({2, 2})), 0);
}

RANKS_TEST(Misuse, BackwardOverTwoRootsIsSaidOnce, 2) {
  std::vector<std::string> lines;
  fsdp2::set_log_sink([&](fsdp2::LogLevel, const std::string& text) { lines.push_back(text); });
  Linear first = linear(2, 2), second = linear(2, 2);
  fsdp2::fully_shard(first);
  fsdp2::fully_shard(second);
  for (int i = 0; i < 3; ++i) second(first(torch::ones({1, 2}))).sum().backward();
  fsdp2::set_log_sink({});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("two roots"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("call 1"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("call 2"), std::string::npos) << lines[0];
}

RANKS_TEST(Misuse, AnExceptionInForwardOrBackwardLeavesTheModelUsable, 2) {
  torch::manual_seed(0);
  Net net(2);
  shard(net);
  const Tensor tokens = torch::randint(NetImpl::kVocab, {2, 4});
  const Tensor bad = torch::full({2, 4}, NetImpl::kVocab, torch::kLong);  // out of range
  EXPECT_ANY_THROW(net(bad));
  const Tensor loss = loss_of(net, tokens);
  const auto hook = loss.grad_fn();
  Tensor faulty = net(tokens);
  faulty.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("made to fail"); });
  EXPECT_ANY_THROW(faulty.sum().backward());
  for (Tensor& param : net->parameters()) param.mutable_grad() = Tensor();
  loss_of(net, tokens).backward();
  for (const auto& named : net->named_parameters()) {
    EXPECT_TRUE(fsdp2::is_dtensor(named.value())) << named.key();
    EXPECT_TRUE(named.value().grad().defined()) << named.key();
  }
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

}  // namespace
