// labels: ranks
// backends: gloo, shm
// timeout: 600
// Random module trees, wrap choices and options: gradients and updated weights equal the unsharded model's.

#include <algorithm>
#include <random>
#include <unordered_map>

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
template <class T>
const T& any_of(Random& random, const std::vector<T>& choices) {
  return choices[static_cast<size_t>(pick(random, 0, static_cast<int64_t>(choices.size()) - 1))];
}

// In float64, so that a wrong value is told from rounding.
Tensor random_values(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble) * 0.15; }
constexpr double kTolerance = 1e-8;
double relative_difference(const Tensor& a, const Tensor& b) {
  return max_difference(a, b) / std::max(1.0, b.numel() == 0 ? 0.0 : b.abs().max().item<double>());
}

// ---- Models

/// What the modules of one tree share while they are made.
struct Making {
  Random& random;
  int64_t dim;
  int nodes_left = 14;
  std::vector<Tensor> made = {};  // "up" of the modules so far, to be tied to
};

/// Odd shapes; some parts frozen, tied inside the module or to another one, used twice or not at all.
struct TreeImpl : torch::nn::Module {
  TreeImpl(Making& making, int depth) {
    Random& random = making.random;
    --making.nodes_left;
    if (!making.made.empty() && chance(random, 0.2)) {
      up = register_parameter("up", any_of(random, making.made));
    } else {
      up = register_parameter("up", random_values({pick(random, 1, 9), making.dim}), !chance(random, 0.2));
      making.made.push_back(up);
    }
    if (chance(random, 0.3)) {
      down = register_parameter("down", up);  // used transposed
      tied = true;
    } else {
      down = register_parameter("down", random_values({making.dim, up.size(0)}), !chance(random, 0.2));
    }
    if (chance(random, 0.5)) bias = register_parameter("bias", random_values({making.dim}));
    uses = chance(random, 0.15) ? 0 : chance(random, 0.2) ? 2 : 1;
    if (depth > 0) {
      for (int64_t i = pick(random, 0, 3); i > 0 && making.nodes_left > 0; --i) {
        children_.push_back(std::make_shared<TreeImpl>(making, depth - 1));
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

std::shared_ptr<TreeImpl> make_tree(Random& random, int64_t dim, unsigned seed) {
  torch::manual_seed(seed);
  Making making{random, dim};
  return std::make_shared<TreeImpl>(making, 4);
}

// ---- Sharding

/// Shards some of the modules, alone or two siblings as one group, with options of their own.
class Sharder {
 public:
  Sharder(Random& random, int size) : random_(random) {
    std::vector<std::vector<int64_t>> shapes{{size}, {size}, {1, size}, {size, 1}};
    if (size == 4) shapes.push_back({2, 2});
    const auto& shape = any_of(random, shapes);
    std::vector<std::string> names{"replicate", "shard"};
    if (shape.size() == 1) names.erase(names.begin());
    mesh_ = fsdp2::init_device_mesh(torch::kCPU, shape, names);
    shard_size_ = shape.back();
    columns_ = chance(random, 0.5);
  }

  void shard_below(const TreeImpl& tree) {
    const auto& children = tree.children_;
    for (const auto& child : children) shard_below(*child);
    for (size_t i = 0; i < children.size(); ++i) {
      if (i + 1 < children.size() && chance(random_, 0.2)) {
        const std::vector<fsdp2::ModuleRef> pair{children[i], children[i + 1]};
        handles.push_back(fsdp2::fully_shard(pair, options()));
        ++i;
      } else if (chance(random_, 0.6)) {
        handles.push_back(fsdp2::fully_shard(children[i], options()));
      }
    }
  }
  fsdp2::FSDPModule shard_root(const std::shared_ptr<TreeImpl>& tree) {
    shard_below(*tree);
    handles.push_back(fsdp2::fully_shard(tree, options()));
    settings();
    return handles.back();
  }

  std::vector<fsdp2::FSDPModule> handles;  // the root's is the last
  bool zeros_for_unused = false;
  std::unordered_map<std::string, double> factors;  // by parameter, of its group's gradients

 private:
  fsdp2::FullyShardOptions options() {
    fsdp2::FullyShardOptions options;
    options.mesh = mesh_;
    switch (pick(random_, 0, columns_ ? 2 : 3)) {
      case 0: options.reshard_after_forward = true; break;
      case 1: options.reshard_after_forward = false; break;
      case 3: {
        std::vector<int> divisors;
        for (int n = 1; n <= shard_size_; ++n) {
          if (shard_size_ % n == 0) divisors.push_back(n);
        }
        options.reshard_after_forward = any_of(random_, divisors);
        break;
      }
      default: break;
    }
    if (columns_ && chance(random_, 0.6)) {
      const auto salt = static_cast<size_t>(pick(random_, 0, 1000));
      options.shard_placement_fn = [salt, size = shard_size_](const std::string& fqn, const Tensor& param)
          -> std::optional<fsdp2::ShardPlacement> {
        const bool columns = param.dim() > 1 && param.size(1) % size == 0 && (std::hash<std::string>()(fqn) + salt) % 3;
        return columns ? std::optional(fsdp2::ShardPlacement{fsdp2::Shard{salt % 2 == 0 ? 1 : -1}}) : std::nullopt;
      };
    }
    if (chance(random_, 0.25)) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
    return options;
  }

  void settings() {
    auto& root = handles.back();
    const double ranks = static_cast<double>(mesh_->size());
    for (auto& handle : handles) {
      double factor = 1;
      if (chance(random_, 0.2)) {
        const double divisor = any_of<double>(random_, {1, 2, 3, 2.5, 8});
        handle.set_gradient_divide_factor(divisor);
        factor = ranks / divisor;
      }
      for (const std::string& fqn : handle.param_fqns()) factors[fqn] = factor;
      if (chance(random_, 0.2)) handle.set_force_sum_reduction_for_comms(true);
      if (chance(random_, 0.3)) handle.set_modules_to_forward_prefetch(some_handles());
      if (chance(random_, 0.3)) handle.set_modules_to_backward_prefetch(some_handles());
    }
    zeros_for_unused = chance(random_, 0.3);
    if (zeros_for_unused) root.set_reduce_scatter_unused_params(true);
    if (chance(random_, 0.3)) root.set_reduce_scatter_max_input_buffers(static_cast<int>(pick(random_, 1, 3)));
    if (chance(random_, 0.2)) root.set_separate_reduce_scatter_group(true);
  }
  /// Also wrong ones: they cost memory and nothing else.
  std::vector<fsdp2::FSDPModule> some_handles() {
    std::vector<fsdp2::FSDPModule> some;
    for (int64_t i = pick(random_, 1, 2); i > 0; --i) some.push_back(any_of(random_, handles));
    return some;
  }

  Random& random_;
  std::optional<fsdp2::DeviceMesh> mesh_;
  int64_t shard_size_ = 1;
  /// Of a tree: some parameters are cut into columns, or some calls keep parts over fewer ranks, which are of rows.
  bool columns_ = false;
};

// ---- Cases

/// Gradients of the whole model as its sharded twin's divide factors make them; a tied one once.
void apply_factors(const TreeImpl& whole_tree, const Sharder& sharder) {
  torch::NoGradGuard no_grad;
  const auto params = whole_tree.named_parameters();
  for (const auto& [fqn, factor] : sharder.factors) {
    if (Tensor grad = params[fqn].grad(); grad.defined()) grad.mul_(factor);
  }
}

void compare_gradients(const TreeImpl& whole_tree, const TreeImpl& tree, bool zeros_allowed, const std::string& where) {
  const auto expected = whole_tree.named_parameters();
  for (const auto& named : tree.named_parameters()) {
    const Tensor &reference = expected[named.key()].grad(), &grad = named.value().grad();
    const std::string at = where + " " + named.key();
    if (reference.defined()) {
      ASSERT_TRUE(grad.defined()) << at;
      EXPECT_LE(relative_difference(whole(grad), reference), kTolerance) << at;
    } else if (grad.defined()) {
      ASSERT_TRUE(zeros_allowed) << at;
      EXPECT_FALSE(whole(grad).any().item<bool>()) << at;
    }
  }
}

void compare_weights(const TreeImpl& whole_tree, const TreeImpl& tree, const std::string& where) {
  const auto expected = whole_tree.named_parameters();
  for (const auto& named : tree.named_parameters()) {
    const Tensor reference = expected[named.key()].detach();
    EXPECT_LE(relative_difference(whole(named.value()), reference), kTolerance) << where << " " << named.key();
  }
}

enum class Accumulation { kReduceEach, kReduceLast, kAllReduceLast };

void run_case(int rank, unsigned seed) {
  const int size = fsdp2::get_world_size();
  const std::string where = "seed " + std::to_string(seed);
  Random for_whole(seed), random(seed);
  const int64_t dim = any_of<int64_t>(random, {4, 5, 6, 12});
  any_of<int64_t>(for_whole, {4, 5, 6, 12});
  auto whole_tree = make_tree(for_whole, dim, seed);
  auto tree = make_tree(random, dim, seed);
  Sharder sharder(random, size);
  auto root = sharder.shard_root(tree);
  torch::optim::SGD optimizer(tree->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  torch::optim::SGD reference(whole_tree->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  for (int step = 0; step < 2; ++step) {
    const int64_t micros = pick(random, 1, 3);
    const auto accumulation = any_of<Accumulation>(
        random, {Accumulation::kReduceEach, Accumulation::kReduceLast, Accumulation::kAllReduceLast});
    const bool input_grad = chance(random, 0.5);
    root.set_reshard_after_backward(chance(random, 0.7));
    if (chance(random, 0.3)) {
      torch::NoGradGuard no_grad;
      fsdp2::call(tree, torch::ones({1, dim}, torch::kDouble));
    }
    for (int64_t micro = 0; micro < micros; ++micro) {
      const bool last = micro + 1 == micros;
      root.set_requires_gradient_sync(last || accumulation != Accumulation::kReduceLast);
      root.set_requires_all_reduce(last || accumulation == Accumulation::kReduceEach);
      const Tensor all = random_values({2 * size, dim});
      Tensor mine = all.narrow(0, 2 * rank, 2).clone().set_requires_grad(input_grad);
      const Tensor out = fsdp2::call(tree, mine), expected = whole_tree->forward(all);
      EXPECT_LE(relative_difference(out.detach(), expected.detach().narrow(0, 2 * rank, 2)), kTolerance) << where;
      if (out.requires_grad()) out.pow(2).mean().backward();
      if (expected.requires_grad()) expected.pow(2).mean().backward();
    }
    // An optimizer steps on shards: set_reshard_after_backward(false) leaves the parameters whole.
    for (auto& handle : sharder.handles) handle.reshard();
    apply_factors(*whole_tree, sharder);
    compare_gradients(*whole_tree, *tree, sharder.zeros_for_unused,
                      where + " gradients of step " + std::to_string(step));
    optimizer.step();
    reference.step();
    optimizer.zero_grad(chance(random, 0.5));
    reference.zero_grad();
    compare_weights(*whole_tree, *tree, where + " weights after step " + std::to_string(step));
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
