// labels: ranks
// backends: gloo, shm
// One training step phase by phase: how many bytes are whole, what clipping does, and what deletion frees.

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "fsdp/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace {

using namespace fsdp2::testing;
using fsdp2::counters;
using fsdp2::DTensor;
using fsdp2::fully_shard;
using torch::Tensor;

// ----- bytes -------------------------------------------------------------------------------------------------------

constexpr int64_t kDim = 8, kLayers = 3;

/// Even sizes, so that nothing is padded: a table and a head of the root's own, layers between.
struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    up = register_module("up", linear(kDim, 2 * kDim));
    down = register_module("down", linear(2 * kDim, kDim));
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::relu(up(x));
    forward_bytes.push_back(counters().unsharded_bytes);
    hidden.register_hook([this](const Tensor&) { backward_bytes.push_back(counters().unsharded_bytes); });
    return x + down(hidden);
  }
  Linear up{nullptr}, down{nullptr};
  std::vector<int64_t> forward_bytes, backward_bytes;
};
FSDP2_MODULE(Layer);

struct LanguageImpl : torch::nn::Module {
  LanguageImpl() {
    table = register_module("table", torch::nn::Embedding(kDim, kDim));
    for (int64_t i = 0; i < kLayers; ++i) layers.push_back(register_module("layer" + std::to_string(i), Layer()));
    head = register_module("head", linear(kDim, kDim));
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = table(tokens);
    for (Layer& layer : layers) x = layer(x);
    return head(x);
  }
  torch::nn::Embedding table{nullptr};
  std::vector<Layer> layers;
  Linear head{nullptr};
};
FSDP2_MODULE(Language);

constexpr int64_t kLayerBytes = 2 * kDim * 2 * kDim * 4, kRootBytes = 2 * kDim * kDim * 4;
constexpr int64_t kAllBytes = kRootBytes + kLayers * kLayerBytes;

/// Bytes of whole parameters that one setting holds.
struct Expected {
  fsdp2::ReshardAfterForward setting;
  int64_t after_forward, peak;
};

RANKS_TEST(StepPhases, WholeBytesAtEachPhase, 2) {
  const Expected expected[] = {{std::nullopt, kRootBytes, kRootBytes + kLayerBytes},
                               {true, 0, kRootBytes + kLayerBytes},
                               {false, kAllBytes, kAllBytes}};
  for (const Expected& each : expected) {
    for (const bool offload : {false, true}) {
      fsdp2::FullyShardOptions options{.reshard_after_forward = each.setting};
      if (offload) options.offload_policy = fsdp2::CPUOffloadPolicy{.pin_memory = false};
      fsdp2::reset_counters();
      torch::manual_seed(1);
      Language model;
      for (Layer& layer : model->layers) fully_shard(layer, options);
      fully_shard(model, options);
      torch::optim::Adam optimizer(model->parameters(), 1e-2);
      EXPECT_EQ(counters().unsharded_bytes_peak, 0);  // sharding frees, and gathers nothing
      for (int step = 0; step < 2; ++step) {
        const std::string where = c10::str("peak ", each.peak, " offload ", offload, " step ", step);
        fsdp2::reset_counters();
        const Tensor loss = model(torch::arange(4).view({1, 4})).sum();
        EXPECT_EQ(counters().unsharded_bytes, each.after_forward) << where;
        EXPECT_EQ(counters().unsharded_bytes_peak, each.peak) << where;
        fsdp2::reset_counters();
        loss.backward();
        EXPECT_EQ(counters().unsharded_bytes, 0) << where;
        EXPECT_EQ(counters().unsharded_bytes_peak, each.peak) << where;
        for (int64_t i = 0; i < kLayers; ++i) {
          Layer& layer = model->layers[i];
          const bool keeps = each.after_forward == kAllBytes;
          EXPECT_EQ(layer->forward_bytes.back(), kRootBytes + (keeps ? i + 1 : 1) * kLayerBytes) << where << i;
          EXPECT_EQ(layer->backward_bytes.back(), kRootBytes + (keeps ? i + 1 : 1) * kLayerBytes) << where << i;
        }
        for (const Tensor& param : model->parameters()) {  // gradients are shards
          EXPECT_EQ(DTensor(param.grad()).to_local().numel(), param.numel() / 2) << where;
        }
        fsdp2::reset_counters();
        optimizer.step();
        optimizer.zero_grad();
        EXPECT_EQ(counters().unsharded_bytes_peak, 0) << where;
        for (const Tensor& param : model->parameters()) EXPECT_FALSE(param.grad().defined()) << where;
      }
    }
  }
}

// ----- deletion ----------------------------------------------------------------------------------------------------

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

RANKS_TEST(StepPhases, DeletionFreesShardsGradientsStatesAndWholeParameters, 2) {
  std::vector<WeakStorage> storages;
  const auto watch = [&](const Tensor& tensor) { storages.push_back(tensor.storage().getWeakStorageImpl()); };
  const auto alive = [&] {
    return std::count_if(storages.begin(), storages.end(), [](const WeakStorage& each) { return !each.expired(); });
  };
  for (const bool pending_backward : {false, true}) {
    storages.clear();
    Tensor loss;
    {
      Language model;
      for (Layer& layer : model->layers) fully_shard(layer);
      auto root = fully_shard(model);
      torch::optim::Adam optimizer(model->parameters(), 1e-2);
      model(torch::arange(4).view({1, 4})).sum().backward();
      for (const Tensor& param : model->parameters()) {
        watch(DTensor(param.detach()).to_local());
        watch(DTensor(param.grad()).to_local());
      }
      optimizer.step();
      for (const auto& [key, state] : optimizer.state()) {
        watch(DTensor(static_cast<torch::optim::AdamParamState&>(*state).exp_avg()).to_local());
      }
      root.unshard();
      watch(model->head->weight);
      if (pending_backward) loss = model(torch::arange(4).view({1, 4})).sum();
      EXPECT_EQ(alive(), static_cast<int64_t>(storages.size()));
      EXPECT_EQ(storages.size(), 3 * model->parameters().size() + 1);
      EXPECT_GT(counters().unsharded_bytes, 0);
    }
    loss = Tensor();  // a graph that was never run keeps what it saved
    // The thread of a process group lets go of a finished operation and its tensors a little later.
    for (int i = 0; i < 500 && alive() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_EQ(alive(), 0) << pending_backward;
    EXPECT_EQ(counters().unsharded_bytes, 0) << pending_backward;
  }
}

// ----- clipping ----------------------------------------------------------------------------------------------------

RANKS_TEST(StepPhases, ClippingEqualsThatOfTheWholeModel, 2) {
  constexpr double kMax = 0.05;
  const auto backend = fsdp2::default_group()->getBackend(torch::kCPU);
  for (const double order : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    for (const bool stock : {false, true}) {
      torch::manual_seed(42);
      Net reference(2), net(2);
      copy_state(*net, *reference);
      reference->to(torch::kDouble);
      net->to(torch::kDouble);
      shard(net);
      torch::optim::Adam optimizer(net->parameters(), 1e-2), expected_optimizer(reference->parameters(), 1e-2);
      for (int step = 0; step < 3; ++step) {
        const std::string where = c10::str("order ", order, stock ? " stock" : "", " step ", step);
        const Tensor tokens = torch::randint(NetImpl::kVocab, {4, 5});
        (10 * net(tokens.narrow(0, 2 * rank, 2)).pow(2).mean()).backward();
        (10 * reference(tokens).pow(2).mean()).backward();
        const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), kMax, order);
        ASSERT_GT(expected, kMax) << where;  // else nothing would be clipped
        const uint64_t before = backend->getSequenceNumberForGroup();
        const double total = stock ? torch::nn::utils::clip_grad_norm_(net->parameters(), kMax, order)
                                   : fsdp2::clip_grad_norm_(net->parameters(), kMax, order).item<double>();
        EXPECT_NEAR(total, expected, 1e-9 * expected) << where;
        const uint64_t collectives = backend->getSequenceNumberForGroup() - before;
        EXPECT_EQ(stock ? 1u : collectives, 1u) << where;  // for all parameters together
        for (const auto& named : reference->named_parameters()) {
          const Tensor param = net->named_parameters()[named.key()];
          EXPECT_LE(max_difference(whole(param.grad()), named.value().grad()), 1e-9) << where << named.key();
          EXPECT_TRUE(fsdp2::is_dtensor(param.grad())) << where << named.key();
        }
        for (auto* each : {&optimizer, &expected_optimizer}) {
          each->step();
          each->zero_grad();
        }
      }
    }
  }
}

}  // namespace
