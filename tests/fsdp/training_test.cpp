// labels: ranks
// backends: gloo, shm
// A sharded model trains like the whole one.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using fsdp2::testing::copy_state;
using fsdp2::testing::loss_of;
using fsdp2::testing::max_difference;
using fsdp2::testing::Net;
using fsdp2::testing::whole;
using torch::Tensor;

Net sharded_copy(Net& reference, const fsdp2::FullyShardOptions& options) {
  Net net;
  copy_state(*net, *reference);
  return fsdp2::testing::shard(net, options);
}

void train_and_compare(int rank, const fsdp2::FullyShardOptions& options, double tolerance) {
  const int size = fsdp2::get_world_size();
  torch::manual_seed(1);
  Net reference;
  Net net = sharded_copy(reference, options);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::optim::AdamW reference_optimizer(reference->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 6; ++step) {
    const Tensor tokens = torch::randint(fsdp2::testing::NetImpl::kVocab, {2 * size, 5});
    Tensor loss = loss_of(net, tokens.narrow(0, 2 * rank, 2));
    loss.backward();
    Tensor reference_loss = loss_of(reference, tokens);
    reference_loss.backward();
    for (const auto& named : net->named_parameters()) {
      const Tensor expected = reference->named_parameters()[named.key()].grad();
      ASSERT_TRUE(named.value().grad().defined()) << named.key();
      EXPECT_LE(max_difference(whole(named.value().grad()), expected), tolerance) << named.key() << " step " << step;
    }
    optimizer.step();
    optimizer.zero_grad();
    reference_optimizer.step();
    reference_optimizer.zero_grad();
    Tensor mean = loss.detach().clone();
    fsdp2::all_reduce(mean, fsdp2::ReduceOp::AVG);
    EXPECT_NEAR(mean.item<double>(), reference_loss.item<double>(), 10 * tolerance) << "step " << step;
  }
}

RANKS_TEST(Training, MatchesTheWholeModelOnOneRank, 1) { train_and_compare(rank, {}, 1e-6); }
RANKS_TEST(Training, MatchesTheWholeModelOnTwoRanks, 2) { train_and_compare(rank, {}, 1e-6); }
RANKS_TEST(Training, MatchesTheWholeModelOnThreeRanks, 3) { train_and_compare(rank, {}, 1e-6); }
RANKS_TEST(Training, MatchesWithoutReshardAfterForward, 2) {
  train_and_compare(rank, {.reshard_after_forward = false}, 1e-6);
}
RANKS_TEST(Training, MatchesInBfloat16WithinItsPrecision, 2) {
  train_and_compare(rank, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}, 3e-2);
}

}  // namespace
