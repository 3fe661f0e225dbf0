// labels: ranks
// pytorch#95805 and its likes: a frozen base with trained adapters, where memory grew through backward, frozen weights
// were cast up, or only the first layer trained. Eight layers, seven of them frozen, an adapter on each.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

constexpr int kLayers = 8, kTrained = 4;
constexpr int64_t kDim = 8, kRank = 2;
constexpr int64_t kAdapterBytes = 2 * kDim * kRank * 4;

struct Seen {
  std::vector<int64_t> bytes, bytes_at_input, reductions;
};

struct AdaptedImpl : torch::nn::Module {
  explicit AdaptedImpl(at::ScalarType base_dtype) {
    base = register_module("base", linear(kDim, kDim));
    base->to(base_dtype);
    down = register_module("down", linear(kDim, kRank));
    up = register_module("up", linear(kRank, kDim));
  }
  Tensor forward(Tensor x) {
    if (seen != nullptr && x.requires_grad()) {
      x.register_hook([seen = seen](const Tensor&) {
        seen->bytes_at_input.push_back(fsdp2::counters().unsharded_bytes);
      });
    }
    const Tensor sum = base(x.to(base->weight.scalar_type())).to(torch::kFloat) + up(down(x));
    if (seen != nullptr) {
      sum.register_hook([seen = seen](const Tensor&) {
        seen->bytes.push_back(fsdp2::counters().unsharded_bytes);
        seen->reductions.push_back(fsdp2::counters().reduce_scatters);
      });
    }
    return x + torch::tanh(sum);
  }
  Linear base{nullptr}, down{nullptr}, up{nullptr};
  Seen* seen = nullptr;
};
FSDP2_MODULE(Adapted);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(at::ScalarType base_dtype) {
    for (int i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Adapted(base_dtype)));
      blocks[i]->base->weight.set_requires_grad(i == kTrained);
    }
  }
  Tensor forward(Tensor x) {
    for (Adapted& block : blocks) x = block(x);
    return x;
  }
  std::vector<Adapted> blocks;
};
FSDP2_MODULE(Stack);

/// The base in the block's group, or in one of its own, where nothing is trained.
void shard(Stack& stack, bool base_alone) {
  for (Adapted& block : stack->blocks) {
    if (base_alone) fsdp2::fully_shard(block->base);
    fsdp2::fully_shard(block);
  }
  fsdp2::fully_shard(stack);
}

void expect_memory_and_traffic(bool base_alone) {
  constexpr int64_t kBaseBytes = kDim * kDim * 2;  // bfloat16: a cast would show in every count
  torch::manual_seed(1);
  Stack stack(torch::kBFloat16);
  Seen seen;
  for (Adapted& block : stack->blocks) block->seen = &seen;
  shard(stack, base_alone);
  for (int step = 0; step < 2; ++step) {
    seen = {};
    fsdp2::reset_counters();
    stack(torch::randn({2, kDim})).sum().backward();
    // Whole inside the backward of each block: itself alone, and not its base once that is through.
    const int64_t open = base_alone ? kAdapterBytes : kAdapterBytes + kBaseBytes;
    EXPECT_EQ(seen.bytes, std::vector<int64_t>(kLayers, open));
    EXPECT_EQ(seen.bytes_at_input, std::vector<int64_t>(kLayers - 1, open));
    // Reduced: the adapters of the blocks after it, and the one base that is trained.
    std::vector<int64_t> reductions;
    for (int i = kLayers - 1; i >= 0; --i) reductions.push_back(kLayers - 1 - i + (i < kTrained ? 1 : 0));
    EXPECT_EQ(seen.reductions, reductions);

    const auto counters = fsdp2::counters();
    EXPECT_EQ(counters.unsharded_bytes, 0);
    EXPECT_EQ(counters.unsharded_bytes_peak, kAdapterBytes + kBaseBytes);
    EXPECT_EQ(counters.reduce_scatters, kLayers + 1);
    // The first base gets no gradient and passes none on: alone, backward does not even gather it.
    const int64_t base_gathers = 2 * kLayers - (base_alone ? 1 : 0);
    EXPECT_EQ(counters.all_gathers, 2 * kLayers + base_gathers);
    EXPECT_EQ(counters.bytes, (2 * kLayers + kLayers) * kAdapterBytes + (base_gathers + 1) * kBaseBytes);
    for (int i = 0; i < kLayers; ++i) {
      const Tensor& base = stack->blocks[i]->base->weight;
      EXPECT_EQ(base.grad().defined(), i == kTrained) << i;
      EXPECT_EQ(base.scalar_type(), torch::kBFloat16) << i;
    }
    stack->zero_grad();
  }
}

RANKS_TEST(Row15, BackwardHoldsOneBlockAndMovesNoFrozenGradient, 2) { expect_memory_and_traffic(false); }
RANKS_TEST(Row15, AFrozenGroupIsFreedByItsInputsGradient, 2) { expect_memory_and_traffic(true); }

RANKS_TEST(Row15, EveryAdapterTrainsLikeWhole, 2) {
  for (const bool base_alone : {false, true}) {
    torch::manual_seed(1);
    Stack reference(torch::kFloat), stack(torch::kFloat);
    copy_state(*stack, *reference);
    const auto before = reference->named_parameters();
    std::map<std::string, Tensor> start;
    for (const auto& named : before) start[named.key()] = named.value().detach().clone();
    shard(stack, base_alone);
    torch::optim::AdamW optimizer(stack->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0));
    torch::optim::AdamW expected_optimizer(reference->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0));
    for (int step = 0; step < 3; ++step) {
      const Tensor x = torch::randn({4, kDim});
      stack(x.narrow(0, 2 * rank, 2)).pow(2).mean().backward();
      reference(x).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
      expected_optimizer.step();
      expected_optimizer.zero_grad();
    }
    for (const auto& named : stack->named_parameters()) {
      const Tensor now = whole(named.value()), expected = reference->named_parameters()[named.key()].detach();
      EXPECT_LE(max_difference(now, expected), 1e-5) << named.key();
      EXPECT_EQ(max_difference(now, start[named.key()]) > 1e-3, named.value().requires_grad()) << named.key();
    }
  }
}

}  // namespace
