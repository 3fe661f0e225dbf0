// labels: ranks
// timeout: 600
// Random module trees, wrap choices and options: gradients and updated weights equal the unsharded model's.

#include <random>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;
using Random = std::mt19937;

int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
bool chance(Random& random, double probability) { return std::bernoulli_distribution(probability)(random); }

constexpr int64_t kDim = 5;

// In float64, so that a wrong value is told from rounding.
Tensor random_values(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble) * 0.15; }
constexpr double kTolerance = 1e-8;
double relative_difference(const Tensor& a, const Tensor& b) {
  return max_difference(a, b) / std::max(1.0, b.numel() == 0 ? 0.0 : b.abs().max().item<double>());
}

/// Odd shapes; some parts frozen, tied, used twice or not at all.
struct TreeImpl : torch::nn::Module {
  TreeImpl(Random& random, int depth) {
    const int64_t hidden = pick(random, 1, 9);
    up = register_parameter("up", random_values({hidden, kDim}), !chance(random, 0.2));
    if (chance(random, 0.3)) {
      down = register_parameter("down", up);  // tied to it, used transposed
      tied = true;
    } else {
      down = register_parameter("down", random_values({kDim, hidden}), !chance(random, 0.2));
    }
    if (chance(random, 0.5)) bias = register_parameter("bias", random_values({kDim}));
    uses = chance(random, 0.15) ? 0 : chance(random, 0.2) ? 2 : 1;
    if (depth > 0) {
      for (int64_t i = pick(random, 0, 3); i > 0; --i) {
        children_.push_back(std::make_shared<TreeImpl>(random, depth - 1));
        register_module("c" + std::to_string(children_.size()), children_.back());
      }
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = torch::tanh(torch::matmul(x, up.t()));
    Tensor y = x + torch::matmul(hidden, tied ? down : down.t());
    if (bias.defined()) y = y + bias;
    for (auto& child : children_) {
      for (int i = 0; i < child->uses; ++i) y = fsdp2::call(child, y);
    }
    return y;
  }
  Tensor up, down, bias;
  bool tied = false;
  int uses = 1;
  std::vector<std::shared_ptr<TreeImpl>> children_;
};

void shard_some(const std::shared_ptr<TreeImpl>& tree, Random& random, bool root) {
  for (const auto& child : tree->children_) shard_some(child, random, false);
  if (!root && chance(random, 0.4)) return;
  fsdp2::FullyShardOptions options;
  switch (pick(random, 0, 2)) {
    case 0: options.reshard_after_forward = true; break;
    case 1: options.reshard_after_forward = false; break;
    default: break;
  }
  fsdp2::fully_shard(tree, options);
}

void compare(const TreeImpl& whole_tree, const TreeImpl& tree, bool gradients, const std::string& where) {
  const auto expected = whole_tree.named_parameters();
  for (const auto& named : tree.named_parameters()) {
    const Tensor& reference = expected[named.key()];
    if (!gradients) {
      EXPECT_LE(relative_difference(whole(named.value()), reference.detach()), kTolerance) << where << " " << named.key();
      continue;
    }
    ASSERT_EQ(named.value().grad().defined(), reference.grad().defined()) << where << " " << named.key();
    if (reference.grad().defined()) {
      EXPECT_LE(relative_difference(whole(named.value().grad()), reference.grad()), kTolerance) << where << " " << named.key();
    }
  }
}

void run_case(int rank, unsigned seed) {
  const int size = fsdp2::get_world_size();
  const std::string where = "seed " + std::to_string(seed);
  Random for_whole(seed), random(seed);
  torch::manual_seed(seed);
  auto whole_tree = std::make_shared<TreeImpl>(for_whole, 3);
  torch::manual_seed(seed);
  auto tree = std::make_shared<TreeImpl>(random, 3);
  shard_some(tree, random, true);
  auto root = fsdp2::fsdp_module(tree);
  torch::optim::SGD optimizer(tree->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  torch::optim::SGD reference(whole_tree->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    const int64_t micros = pick(random, 1, 3);
    const bool sync_each = chance(random, 0.5), input_grad = chance(random, 0.5);
    root.set_reshard_after_backward(chance(random, 0.7));
    if (chance(random, 0.3)) {
      torch::NoGradGuard no_grad;
      fsdp2::call(tree, torch::ones({1, kDim}, torch::kDouble));
    }
    for (int64_t micro = 0; micro < micros; ++micro) {
      root.set_requires_gradient_sync(sync_each || micro + 1 == micros);
      const Tensor all = random_values({2 * size, kDim});
      Tensor mine = all.narrow(0, 2 * rank, 2).clone().set_requires_grad(input_grad);
      const Tensor out = fsdp2::call(tree, mine), expected = whole_tree->forward(all);
      EXPECT_LE(relative_difference(out.detach(), expected.detach().narrow(0, 2 * rank, 2)), kTolerance) << where;
      if (out.requires_grad()) out.pow(2).mean().backward();
      if (expected.requires_grad()) expected.pow(2).mean().backward();
    }
    // An optimizer steps on shards: set_reshard_after_backward(false) leaves the parameters whole.
    for (const auto& module : tree->modules()) {
      if (fsdp2::is_fsdp_module(*module)) fsdp2::fsdp_module(*module).reshard();
    }
    compare(*whole_tree, *tree, true, where + " gradients of step " + std::to_string(step));
    optimizer.step();
    reference.step();
    optimizer.zero_grad(chance(random, 0.5));
    reference.zero_grad();
    compare(*whole_tree, *tree, false, where + " weights after step " + std::to_string(step));
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(fsdp2::counters().unsharded_bytes, 0) << where;
}

void run_cases(int rank, unsigned first) {
  for (unsigned seed = first; seed < first + 50 && !testing::Test::HasFailure(); ++seed) run_case(rank, seed);
}

RANKS_TEST(RandomTrees, OnOneRank, 1) { run_cases(rank, 100); }
RANKS_TEST(RandomTrees, OnTwoRanks, 2) { run_cases(rank, 200); }
RANKS_TEST(RandomTrees, OnThreeRanks, 3) { run_cases(rank, 300); }
RANKS_TEST(RandomTrees, OnFourRanks, 4) { run_cases(rank, 400); }

}  // namespace
