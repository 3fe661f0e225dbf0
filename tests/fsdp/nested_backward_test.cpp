// labels: ranks
// backends: gloo, shm
// Gradients that forward uses, and backwards that a node of another backward runs: each trains like the whole model.

#include "fsdp/same_steps.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::fully_shard;
using torch::Tensor;

/// Of a model over rows; `shard(model, reshard)` calls fully_shard.
template <class Model, class Shard>
void expect_trains_like_whole(int rank, Shard&& shard) {
  for (const bool reshard : {true, false}) {
    torch::manual_seed(42);
    auto [reference, model] = make_twins<Model>();
    shard(model, reshard);
    torch::manual_seed(8);
    auto loss_of = [model = model, reference = reference](bool sharded, Tensor x, int) mutable {
      x.requires_grad_();
      return sharded ? model(x).sum() : reference(x).sum();
    };
    expect_same_steps(*model, *reference, rank, 3, reshard ? "reshard" : "keep", loss_of);
  }
}

// ----- gradients inside of forward -----------------------------------------------------------------------------------

/// Uses the gradient of an energy with respect to its own input, as force fields do, and its parameters after that.
struct ForceImpl : torch::nn::Module {
  ForceImpl() {
    energy = register_module("energy", torch::nn::Linear(kDim, kDim));
    out = register_module("out", torch::nn::Linear(kDim, kDim));
  }
  Tensor forward(const Tensor& x) {
    const Tensor force = torch::autograd::grad({energy(x).pow(3).sum()}, {x}, {}, true, true)[0];
    return torch::tanh(x + out(energy(force)));
  }
  torch::nn::Linear energy{nullptr}, out{nullptr};
};
FSDP2_MODULE(Force);

struct ForcesImpl : torch::nn::Module {
  ForcesImpl() {
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("layer" + std::to_string(i), Force()));
    head = register_module("head", torch::nn::Linear(kDim, 1));
  }
  Tensor forward(Tensor x) {
    for (Force& layer : layers) x = layer(x);
    return head(x);
  }
  std::vector<Force> layers;
  torch::nn::Linear head{nullptr};
};
FSDP2_MODULE(Forces);

RANKS_TEST(NestedBackward, AGradientOfTheInputInsideForward, 2) {
  expect_trains_like_whole<Forces>(rank, [](Forces& model, bool reshard) {
    for (Force& layer : model->layers) fully_shard(layer, {.reshard_after_forward = reshard});
    fully_shard(model);
  });
}

RANKS_TEST(NestedBackward, AGradientOfTheInputInsideForwardGathersNothingMore, 2) {
  torch::manual_seed(42);
  Forces model;
  for (Force& layer : model->layers) fully_shard(layer);
  fully_shard(model);
  fsdp2::reset_counters();
  model(torch::ones({2, kDim}, torch::requires_grad()));
  EXPECT_EQ(fsdp2::counters().all_gathers, 4);
}

// ----- a backward inside of backward ---------------------------------------------------------------------------------

/// Runs a module without recording it, and once more in backward, with a backward of its own.
struct Recompute : torch::autograd::Function<Recompute> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, Block* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return (*layer)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* layer = reinterpret_cast<Block*>(context->saved_data["layer"].toInt());
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    {
      const at::AutoGradMode enable(true);
      torch::autograd::backward({(*layer)(x)}, {gradients[0]});
    }
    return {x.grad(), Tensor()};
  }
};

/// `front` is the root's own, and its backward needs its weight after those of the blocks.
struct RecomputedImpl : torch::nn::Module {
  RecomputedImpl() {
    front = register_module("front", torch::nn::Linear(kDim, kDim));
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(kDim)));
    head = register_module("head", torch::nn::Linear(kDim, 1));
  }
  Tensor forward(Tensor x) {
    x = torch::tanh(front(x));
    for (Block& block : blocks) x = Recompute::apply(x, &block);
    return head(x);
  }
  torch::nn::Linear front{nullptr};
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
FSDP2_MODULE(Recomputed);

RANKS_TEST(NestedBackward, InsideOfBackward, 2) {
  expect_trains_like_whole<Recomputed>(rank, [](Recomputed& model, bool reshard) {
    for (Block& block : model->blocks) fully_shard(block, {.reshard_after_forward = reshard});
    fully_shard(model, {.reshard_after_forward = reshard});
  });
}

RANKS_TEST(NestedBackward, InsideOfBackwardGathersNothingMore, 2) {
  Recomputed model;
  for (Block& block : model->blocks) fully_shard(block);
  fully_shard(model, {.reshard_after_forward = true});
  fsdp2::reset_counters();
  model(torch::ones({2, kDim})).sum().backward();
  // The root for forward and for backward; each block for forward, for its second forward and for its backward.
  EXPECT_EQ(fsdp2::counters().all_gathers, 2 + 3 * 3);
  EXPECT_EQ(fsdp2::counters().reduce_scatters, 4);
}

}  // namespace
