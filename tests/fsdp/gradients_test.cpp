// labels: ranks
// backends: gloo, shm
// The gradient slot: zero_grad at any time, accumulation with and without sync.

#include <sstream>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

constexpr int64_t kVocab = NetImpl::kVocab;

struct Pair {
  Net whole_net{nullptr}, net{nullptr};
};

Pair make_pair(int64_t layers = 2, const fsdp2::FullyShardOptions& options = {}) {
  torch::manual_seed(3);
  Pair pair;
  pair.whole_net = Net(layers);
  pair.net = Net(layers);
  copy_state(*pair.net, *pair.whole_net);
  shard(pair.net, options);
  return pair;
}

void expect_equal_gradients(const Pair& pair, const char* when, double tolerance = 1e-6) {
  const auto expected = pair.whole_net->named_parameters();
  for (const auto& named : pair.net->named_parameters()) {
    const Tensor& grad = named.value().grad();
    const Tensor& whole_grad = expected[named.key()].grad();
    ASSERT_EQ(grad.defined(), whole_grad.defined()) << named.key() << " " << when;
    if (grad.defined()) {
      EXPECT_LE(max_difference(whole(grad), whole_grad), tolerance) << named.key() << " " << when;
    }
  }
}

/// The part of this rank and the whole batch.
struct Batch {
  Tensor mine, all;
};
Batch next_batch(int rank) {
  const Tensor all = torch::randint(kVocab, {2 * fsdp2::get_world_size(), 4});
  return {all.narrow(0, 2 * rank, 2), all};
}

void zero(torch::nn::Module& module, torch::optim::Optimizer& optimizer, bool by_module, bool to_none) {
  if (by_module) {
    module.zero_grad(to_none);
  } else {
    optimizer.zero_grad(to_none);
  }
}

enum When { kBeforeForward, kBetween, kAfterStep };

RANKS_TEST(ZeroGrad, AnyTimeAndFormGivesTheGradientsOfTheLastBatch, 2) {
  for (const When when : {kBeforeForward, kBetween, kAfterStep}) {
    for (const bool by_module : {false, true}) {
      for (const bool to_none : {false, true}) {
        Pair pair = make_pair();
        torch::optim::SGD optimizer(pair.net->parameters(), 0.1), reference(pair.whole_net->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          const auto clear = [&] {
            zero(*pair.net, optimizer, by_module, to_none);
            zero(*pair.whole_net, reference, by_module, to_none);
          };
          const Batch batch = next_batch(rank);
          if (when == kBeforeForward) clear();
          const Tensor loss = loss_of(pair.net, batch.mine), expected = loss_of(pair.whole_net, batch.all);
          if (when == kBetween) clear();
          loss.backward();
          expected.backward();
          expect_equal_gradients(pair, c10::str("when ", when, " module ", by_module, " none ", to_none).c_str());
          optimizer.step();
          reference.step();
          if (when == kAfterStep) clear();
        }
      }
    }
  }
}

RANKS_TEST(Accumulation, WithSyncAddsShardedGradients, 2) {
  Pair pair = make_pair();
  for (int i = 0; i < 3; ++i) {
    const Batch batch = next_batch(rank);
    loss_of(pair.net, batch.mine).backward();
    loss_of(pair.whole_net, batch.all).backward();
    expect_equal_gradients(pair, "after each");
  }
}

RANKS_TEST(Accumulation, WithoutSyncCommunicatesOnceAtTheEnd, 2) {
  for (const bool keep_unsharded : {false, true}) {
    Pair pair = make_pair();
    auto root = fsdp2::fsdp_module(pair.net);
    if (keep_unsharded) root.set_reshard_after_backward(false);
    fsdp2::reset_counters();
    for (int i = 0; i < 3; ++i) {
      root.set_requires_gradient_sync(i == 2);
      if (i == 2) root.set_reshard_after_backward(true);
      const Batch batch = next_batch(rank);
      loss_of(pair.net, batch.mine).backward();
      loss_of(pair.whole_net, batch.all).backward();
      EXPECT_EQ(fsdp2::counters().reduce_scatters, i == 2 ? 3 : 0);
      if (i < 2) {
        EXPECT_EQ(root.pending_gradients().size(), pair.net->parameters().size());
        const fsdp2::DTensor shown(pair.net->head->weight.grad());
        EXPECT_TRUE(shown.placements()[0] == fsdp2::Placement(fsdp2::Partial{}));
      }
    }
    EXPECT_TRUE(root.pending_gradients().empty());
    expect_equal_gradients(pair, "after the last");
  }
}

RANKS_TEST(Accumulation, PendingGradientsAreClearedByBothFormsOfZeroGrad, 2) {
  for (const bool by_module : {false, true}) {
    for (const bool to_none : {false, true}) {
      Pair pair = make_pair();
      torch::optim::SGD optimizer(pair.net->parameters(), 0.1), reference(pair.whole_net->parameters(), 0.1);
      auto root = fsdp2::fsdp_module(pair.net);
      root.set_requires_gradient_sync(false);
      loss_of(pair.net, next_batch(rank).mine).backward();
      zero(*pair.net, optimizer, by_module, to_none);
      root.set_requires_gradient_sync(true);
      const Batch batch = next_batch(rank);
      loss_of(pair.net, batch.mine).backward();
      loss_of(pair.whole_net, batch.all).backward();
      expect_equal_gradients(pair, c10::str("module ", by_module, " none ", to_none).c_str());
    }
  }
}

RANKS_TEST(Accumulation, ReducedAndPendingPartsAreBothCleared, 2) {
  for (const bool to_none : {false, true}) {
    Pair pair = make_pair();
    auto root = fsdp2::fsdp_module(pair.net);
    loss_of(pair.net, next_batch(rank).mine).backward();  // reduced
    root.set_requires_gradient_sync(false);
    loss_of(pair.net, next_batch(rank).mine).backward();  // pending beside it
    root.zero_grad(to_none);
    root.set_requires_gradient_sync(true);
    const Batch batch = next_batch(rank);
    loss_of(pair.net, batch.mine).backward();
    loss_of(pair.whole_net, batch.all).backward();
    expect_equal_gradients(pair, to_none ? "none" : "zeros");
  }
}

RANKS_TEST(Accumulation, ReducedAndPendingPartsAddUp, 2) {
  Pair pair = make_pair();
  auto root = fsdp2::fsdp_module(pair.net);
  for (const bool sync : {true, false, false}) {
    root.set_requires_gradient_sync(sync);
    const Batch batch = next_batch(rank);
    loss_of(pair.net, batch.mine).backward();
    loss_of(pair.whole_net, batch.all).backward();
  }
  root.synchronize_gradients();
  expect_equal_gradients(pair, "synchronized by hand");
}

RANKS_TEST(Accumulation, OptimizerAndClipRefusePendingGradients, 2) {
  Pair pair = make_pair();
  auto root = fsdp2::fsdp_module(pair.net);
  torch::optim::SGD optimizer(pair.net->parameters(), 0.1);
  root.set_requires_gradient_sync(false);
  loss_of(pair.net, next_batch(rank).mine).backward();
  EXPECT_FSDP2_ERROR(optimizer.step(), kUsage, "synchronize_gradients()");
  EXPECT_FSDP2_ERROR(torch::nn::utils::clip_grad_norm_(pair.net->parameters(), 1.0), kUsage, "synchronize_gradients()");
}

RANKS_TEST(Accumulation, KeepsUnreducedGradientsInReduceDtype, 2) {
  // 256 + 1 + 1 is 258 in float32 and 256 in bfloat16.
  Linear layer = linear(1, 1);
  { torch::NoGradGuard no_grad; layer->weight.fill_(1); }
  fsdp2::fully_shard(layer, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  auto handle = fsdp2::fsdp_module(layer);
  const float values[] = {256, 1, 1};
  for (int i = 0; i < 3; ++i) {
    handle.set_requires_gradient_sync(i == 2);
    layer(torch::full({1, 1}, values[i])).sum().backward();
  }
  EXPECT_EQ(whole(layer->weight.grad()).item<float>(), 258);
}

RANKS_TEST(Gradients, AreThereAfterABackwardThatIsNotTheLast, 2) {
  Pair pair = make_pair();
  auto root = fsdp2::fsdp_module(pair.net);
  for (const bool last : {false, true}) {
    root.set_is_last_backward(last);
    const Batch batch = next_batch(rank);
    loss_of(pair.net, batch.mine).backward();
    loss_of(pair.whole_net, batch.all).backward();
    expect_equal_gradients(pair, last ? "last" : "not the last");
    pair.net->zero_grad();
    pair.whole_net->zero_grad();
  }
}

RANKS_TEST(Gradients, DoubleBackwardAccumulates, 2) {
  Pair pair = make_pair();
  const Batch batch = next_batch(rank);
  const Tensor loss = loss_of(pair.net, batch.mine), expected = loss_of(pair.whole_net, batch.all);
  loss.backward({}, /*retain_graph=*/true);
  expected.backward({}, true);
  loss.backward();
  expected.backward();
  expect_equal_gradients(pair, "twice");
}

RANKS_TEST(Gradients, HooksOnParametersSeeTheUnreducedWholeGradient, 2) {
  Linear layer = linear(2, 3);
  fsdp2::fully_shard(layer);
  std::vector<Tensor> seen;
  layer->weight.register_hook([&](const Tensor& gradient) { seen.push_back(gradient.clone()); });
  const Tensor x = torch::full({1, 2}, rank + 1.0);
  layer(x).sum().backward();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(max_difference(seen[0], torch::full({3, 2}, rank + 1.0)), 0);
  EXPECT_EQ(max_difference(whole(layer->weight.grad()), torch::full({3, 2}, 1.5)), 0);
}

}  // namespace
