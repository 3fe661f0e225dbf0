// labels: ranks
// backends: gloo, shm
// How many whole parameters are alive, and when reductions start, seen from inside the backward of each block.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

struct Seen {
  std::vector<int64_t> bytes;
  std::vector<int64_t> reduce_scatters;
};

/// Runs in the middle of the module's forward, and again in the middle of its backward.
struct Probe {
  Seen* forward = nullptr;
  Seen* backward = nullptr;
  Tensor operator()(const Tensor& x) const {
    if (forward != nullptr) note(*forward);
    if (backward != nullptr && x.requires_grad()) {
      x.register_hook([seen = backward](const Tensor&) { note(*seen); });
    }
    return x;
  }
  static void note(Seen& seen) {
    seen.bytes.push_back(fsdp2::counters().unsharded_bytes);
    seen.reduce_scatters.push_back(fsdp2::counters().reduce_scatters);
  }
};

constexpr int64_t kDim = 8;
constexpr int64_t kLayerBytes = kDim * kDim * 4;

struct ProbedImpl : torch::nn::Module {
  ProbedImpl() {
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(kDim, kDim).bias(false)));
  }
  // The probe sits between two uses of the input, so its hook runs while this block's backward is under way.
  Tensor forward(const Tensor& x) { return torch::tanh(probe(first(x))); }
  torch::nn::Linear first{nullptr};
  Probe probe;
};
FSDP2_MODULE(Probed);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int layers, bool embedding) {
    if (embedding) {
      embed = register_module("embed", torch::nn::Embedding(kDim, kDim));
    }
    for (int i = 0; i < layers; ++i) blocks.push_back(register_module("b" + std::to_string(i), Probed()));
  }
  Tensor forward(Tensor x) {
    if (embed) x = embed(x);
    for (size_t i = 0; i < blocks.size(); ++i) {
      x = blocks[i](x);
      if (i == twice) x = blocks[i](x);
    }
    return x;
  }
  torch::nn::Embedding embed{nullptr};
  std::vector<Probed> blocks;
  size_t twice = 1000;
};
FSDP2_MODULE(Stack);

Stack make_stack(int layers, bool embedding, Seen& forward, Seen& backward, const std::vector<int>& frozen = {}) {
  torch::manual_seed(0);
  Stack stack(layers, embedding);
  for (int i : frozen) stack->blocks[i]->first->weight.set_requires_grad(false);
  for (Probed& block : stack->blocks) {
    block->probe.forward = &forward;
    block->probe.backward = &backward;
    fsdp2::fully_shard(block);
  }
  fsdp2::fully_shard(stack);
  return stack;
}

RANKS_TEST(Memory, OneBlockIsWholeAtATime, 2) {
  Seen forward, backward;
  Stack stack = make_stack(4, false, forward, backward);
  const Tensor x = torch::randn({2, kDim});
  for (int step = 0; step < 2; ++step) {
    forward = backward = {};
    fsdp2::reset_counters();
    stack(x).sum().backward();
    EXPECT_EQ(forward.bytes, std::vector<int64_t>(4, kLayerBytes));
    EXPECT_EQ(backward.bytes, std::vector<int64_t>(4, kLayerBytes));
    // Inside the backward of block i, the reductions of all blocks after it were issued.
    EXPECT_EQ(backward.reduce_scatters, (std::vector<int64_t>{0, 1, 2, 3}));
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
    EXPECT_EQ(fsdp2::counters().unsharded_bytes_peak, kLayerBytes);
  }
}

RANKS_TEST(Memory, TheRootsOwnParametersStayBesideOneBlock, 2) {
  Seen forward, backward;
  Stack stack = make_stack(3, true, forward, backward);
  const Tensor tokens = torch::zeros({2, 3}, torch::kLong);  // integer input: no gradient reaches the root's node
  stack(tokens).sum().backward();
  EXPECT_EQ(forward.bytes, std::vector<int64_t>(3, 2 * kLayerBytes));
  EXPECT_EQ(backward.bytes, std::vector<int64_t>(3, 2 * kLayerBytes));
  EXPECT_EQ(backward.reduce_scatters, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(Memory, FrozenBlocksAreFreedAndNeverReduced, 2) {
  Seen forward, backward;
  Stack stack = make_stack(5, false, forward, backward, {1, 2, 4});
  fsdp2::reset_counters();
  stack(torch::randn({2, kDim})).sum().backward();
  EXPECT_EQ(backward.bytes, std::vector<int64_t>(5, kLayerBytes));
  EXPECT_EQ(backward.reduce_scatters, (std::vector<int64_t>{0, 0, 1, 1, 1}));
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 2);
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
  EXPECT_FALSE(stack->blocks[1]->first->weight.grad().defined());
}

RANKS_TEST(Memory, AModuleUsedTwiceReducesOnceWithTheSum, 2) {
  Seen forward, backward;
  Stack stack = make_stack(3, false, forward, backward);
  stack->twice = 1;
  const Tensor x = torch::randn({2, kDim});
  torch::manual_seed(0);
  Stack plain(3, false);
  plain->twice = 1;
  fsdp2::reset_counters();
  stack(x).sum().backward();
  plain(x).sum().backward();
  EXPECT_EQ(backward.bytes, std::vector<int64_t>(4, kLayerBytes));
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 3);
  Tensor expected = plain->blocks[1]->first->weight.grad();
  fsdp2::all_reduce(expected, fsdp2::ReduceOp::AVG);
  EXPECT_LE(max_difference(whole(stack->blocks[1]->first->weight.grad()), expected), 1e-6);
}

/// Experts that all take the same tensor, which a module before them made.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    for (int i = 0; i < 5; ++i) parts.push_back(register_module("p" + std::to_string(i), Probed()));
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = parts[0](x);
    Tensor sum = hidden;
    for (size_t i = 1; i < parts.size(); ++i) sum = sum + parts[i](hidden);
    return sum;
  }
  std::vector<Probed> parts;
};
FSDP2_MODULE(Experts);

RANKS_TEST(Memory, ModulesThatTakeOneTensorAreFreedEachAfterItsBackward, 2) {
  Seen backward;
  torch::manual_seed(0);
  Experts experts;
  for (Probed& part : experts->parts) {
    part->probe.backward = &backward;
    fsdp2::fully_shard(part);
  }
  fsdp2::fully_shard(experts);
  fsdp2::reset_counters();
  experts(torch::randn({2, kDim})).sum().backward();
  EXPECT_EQ(backward.bytes, std::vector<int64_t>(5, kLayerBytes));
  EXPECT_EQ(backward.reduce_scatters, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

/// A layer left out, as in stochastic depth: its output is its input.
struct PassImpl : torch::nn::Module {
  PassImpl() { weight = register_parameter("weight", torch::ones({kDim, kDim})); }
  Tensor forward(const Tensor& x) { return x; }
  Tensor weight;
};
FSDP2_MODULE(Pass);

struct PassedImpl : torch::nn::Module {
  PassedImpl() {
    first = register_module("first", Probed());
    left_out = register_module("left_out", Pass());
    last = register_module("last", Probed());
  }
  Tensor forward(const Tensor& x) { return last(left_out(first(x))); }
  Probed first{nullptr}, last{nullptr};
  Pass left_out{nullptr};
};
FSDP2_MODULE(Passed);

RANKS_TEST(Memory, AModuleThatHandsItsInputThroughIsNotGatheredForBackward, 2) {
  Seen backward;
  Passed model;
  model->first->probe.backward = model->last->probe.backward = &backward;
  fsdp2::fully_shard(model->first);
  fsdp2::fully_shard(model->left_out);
  fsdp2::fully_shard(model->last);
  fsdp2::fully_shard(model);
  fsdp2::reset_counters();
  model(torch::randn({2, kDim})).sum().backward();
  EXPECT_EQ(backward.bytes, std::vector<int64_t>(2, kLayerBytes));
}

RANKS_TEST(Memory, DeletingAModelFreesEverything, 2) {
  {
    Seen forward, backward;
    Stack stack = make_stack(2, true, forward, backward);
    torch::NoGradGuard no_grad;
    stack(torch::zeros({2, 3}, torch::kLong));  // leaves the root's parameters whole
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, kLayerBytes);
  }
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
}

RANKS_TEST(Memory, ReshardSettingsDecideWhatStays, 2) {
  for (const bool keep : {false, true}) {
    Seen forward, backward;
    torch::manual_seed(0);
    Stack stack(3, false);
    for (Probed& block : stack->blocks) {
      block->probe.forward = &forward;
      fsdp2::fully_shard(block, {.reshard_after_forward = !keep});
    }
    fsdp2::fully_shard(stack);
    const Tensor loss = stack(torch::randn({2, kDim})).sum();
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, keep ? 3 * kLayerBytes : 0);
    fsdp2::reset_counters();
    loss.backward();
    EXPECT_EQ(fsdp2::counters().all_gathers, keep ? 0 : 3);
    EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0);
  }
}

}  // namespace
