// labels: ranks
// Checkpoints of models whose parameters are replicated, cut on other dims, in parts over fewer ranks, or offloaded.

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using torch::Tensor;

Net seeded(int64_t seed) {
  torch::manual_seed(seed);
  return Net(2, 6);
}

torch::optim::AdamW optimizer_of(Net& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.05));
}

Tensor tokens_of(int step) { return torch::arange(8).view({2, 4}).add(step).remainder(NetImpl::kVocab); }

/// All ranks see the same rows: the mean gradient is that of one process.
void train(Net& net, torch::optim::Optimizer& optimizer, int first, int steps) {
  for (int step = first; step < first + steps; ++step) {
    loss_of(net, tokens_of(step)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

void save_and_load(int ranks, const std::function<fsdp2::FullyShardOptions()>& options_of, bool between) {
  const TempDir folder;
  const std::string path = folder.path() + "/ckpt";
  ASSERT_TRUE(run_ranks(ranks, [&](int) {
    Net net = shard(seeded(3), options_of());
    auto optimizer = optimizer_of(net);
    train(net, optimizer, 0, 2);
    Tensor loss;
    if (between) loss = loss_of(net, tokens_of(5));  // forward ran, backward did not
    fsdp2::dcp::StateDict state;
    state["model"] = fsdp2::get_model_state_dict(net);
    state["optim"] = fsdp2::get_optimizer_state_dict(net, optimizer);
    fsdp2::dcp::save(state, path);
  }));
  const auto continue_like_whole = [&](Net& net) {
    auto optimizer = optimizer_of(net);
    fsdp2::dcp::StateDict state;
    state["model"] = fsdp2::get_model_state_dict(net);
    state["optim"] = fsdp2::get_optimizer_state_dict(net, optimizer);
    fsdp2::dcp::load(state, path);
    fsdp2::set_model_state_dict(net, state.at("model").dict());
    fsdp2::set_optimizer_state_dict(net, optimizer, state.at("optim").dict());
    train(net, optimizer, 2, 2);
    Net reference = seeded(3);
    auto reference_optimizer = optimizer_of(reference);
    train(reference, reference_optimizer, 0, 4);
    const auto expected = reference->named_parameters();
    for (const auto& named : net->named_parameters()) {
      EXPECT_LE(max_difference(whole(named.value()), expected[named.key()].detach()), 2e-5) << named.key();
    }
  };
  ASSERT_TRUE(run_ranks(1, [&](int) {
    Net net = seeded(4);
    continue_like_whole(net);
  }));
  ASSERT_TRUE(run_ranks(ranks, [&](int) {
    Net net = shard(seeded(4), options_of());
    continue_like_whole(net);
  }));
}

TEST(DcpLayouts, ReplicatedAndSharded) {
  save_and_load(4, [] {
    return fsdp2::FullyShardOptions{.mesh = fsdp2::init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"})};
  }, false);
}

TEST(DcpLayouts, CutOnTheLastDim) {
  save_and_load(3, [] {
    return fsdp2::FullyShardOptions{.shard_placement_fn = [](const std::string&, const Tensor& param) {
      const int64_t last = param.dim() - 1;
      return param.size(last) % 3 == 0 ? std::optional(fsdp2::ShardPlacement{{last}}) : std::nullopt;
    }};
  }, false);
}

TEST(DcpLayouts, BetweenForwardAndBackwardInParts) {
  save_and_load(4, [] { return fsdp2::FullyShardOptions{.reshard_after_forward = 2}; }, true);
}

TEST(DcpLayouts, Offloaded) {
  save_and_load(
      2, [] { return fsdp2::FullyShardOptions{.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false}}; },
      false);
}

}  // namespace
