#pragma once

// A small Llama that trains on a device in the ways that check_device compares.

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "hash_rule.h"
#include "measure.h"
#include "model.h"

namespace bench {

using torch::Tensor;

struct Device {
  c10::Device device;
  bool is_cpu() const { return device.is_cpu(); }
  c10::impl::VirtualGuardImpl guard() const { return c10::impl::VirtualGuardImpl(device.type()); }

  void synchronize() const {
    if (!is_cpu()) guard().synchronizeDevice(device.index());
  }
  void forget_peak() const {
    if (is_cpu()) {
      bench::forget_peak_resident();
    } else {
      c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
    }
  }
  /// Of allocations since forget_peak() on an accelerator, of the process on the CPU.
  double peak_mib() const {
    if (is_cpu()) return bench::memory().peak_resident;
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return static_cast<double>(stats.allocated_bytes[0].peak) / (1 << 20);
  }
};

inline const llama::Config kSmall{.dim = 64, .layers = 4, .heads = 4, .kv_heads = 2, .ffn = 160, .vocab = 512};
constexpr int64_t kSeq = 32, kBatch = 2;
constexpr int kSteps = 4;

enum class OptimizerKind { kAdamW, kFusedAdamW, kFusedSGD, kSGD };

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind, const std::vector<Tensor>& params) {
  const auto adamw = torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).weight_decay(0.1);
  const auto sgd = torch::optim::SGDOptions(1e-2).momentum(0.9);
  switch (kind) {
    case OptimizerKind::kAdamW:
      return std::make_unique<torch::optim::AdamW>(params, adamw);
    case OptimizerKind::kFusedAdamW:
      return std::make_unique<fsdp2::optim::AdamW>(params, adamw);
    case OptimizerKind::kSGD:
      return std::make_unique<torch::optim::SGD>(params, sgd);
    default:
      return std::make_unique<fsdp2::optim::SGD>(params, sgd);
  }
}

struct Setup {
  bool sharded = true;
  fsdp2::FullyShardOptions sharding = {};
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double max_norm = 1.0;
  int steps = kSteps;
  std::function<void(llama::Llama&)> prepare = {};      // after sharding
  std::function<void(const Tensor&)> before_step = {};  // with a tensor on the device
  bool side_stream = false;                             // clip and optimizer run there
};

/// A model on the device with the optimizer, stepping on tokens that follow from step and rank.
class Run {
 public:
  Run(const Device& device, Setup setup, const llama::Config& config = kSmall)
      : device_(device), setup_(std::move(setup)), model_(config), vocab_(config.vocab) {
    llama::hash_weights(model_);
    model_->to(device_.device);
    if (setup_.sharded) {
      setup_.sharding.mesh = fsdp2::init_device_mesh(device_.device.type(), {fsdp2::get_world_size()}, {"shard"});
      llama::shard(model_, setup_.sharding);
    }
    if (setup_.prepare) setup_.prepare(model_);
    optimizer_ = make_optimizer(setup_.optimizer, model_->parameters());
    if (setup_.side_stream && !device_.is_cpu()) side_ = device_.guard().getStreamFromGlobalPool(device_.device);
  }

  void step() {
    const int world = fsdp2::get_world_size(), rank = fsdp2::get_rank();
    double loss = 0;
    // The unsharded model takes the batches of all ranks, as the gradients are averaged over them.
    for (int r = setup_.sharded ? rank : 0; r < (setup_.sharded ? rank + 1 : world); ++r) {
      auto [inputs, targets] = llama::hash_tokens(index_, 0, 1, r, world, kBatch, kSeq, vocab_);
      inputs = inputs.to(device_.device);
      if (setup_.before_step) setup_.before_step(inputs);
      const Tensor logits = model_(inputs);
      const Tensor each = torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(torch::kFloat),
                                                               targets.to(device_.device).flatten());
      (setup_.sharded ? each : each / world).backward();
      loss += each.item<double>();
    }
    Tensor mean = torch::full({}, loss / world, torch::TensorOptions(torch::kDouble).device(device_.device));
    if (setup_.sharded) fsdp2::all_reduce(mean);
    losses_.push_back(mean.item<double>());
    update();
    ++index_;
  }

  const std::vector<double>& losses() const { return losses_; }
  const std::vector<double>& norms() const { return norms_; }
  llama::Llama& model() { return model_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  /// Collective.
  std::vector<Tensor> whole_parameters() const {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> whole;
    for (const Tensor& param : model_->parameters()) {
      whole.push_back((fsdp2::is_dtensor(param) ? fsdp2::DTensor(param).full_tensor() : param).detach().cpu().clone());
    }
    return whole;
  }

 private:
  void update() {
    const auto clip_and_step = [&] {
      norms_.push_back(fsdp2::clip_grad_norm_(model_->parameters(), setup_.max_norm).item<double>());
      optimizer_->step();
      optimizer_->zero_grad();
    };
    if (!side_) return clip_and_step();
    const auto guard = device_.guard();
    c10::Event before(device_.device.type());
    before.record(guard.getStream(device_.device));
    before.block(*side_);
    const auto after = std::make_shared<c10::Event>(device_.device.type());
    {
      const c10::StreamGuard on_side(*side_);
      clip_and_step();
      after->record(*side_);
    }
    fsdp2::fsdp_module(model_).set_post_optim_event(after);
  }

  Device device_;
  Setup setup_;
  llama::Llama model_;
  int64_t vocab_, index_ = 0;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<c10::Stream> side_;
  std::vector<double> losses_, norms_;
};

}  // namespace bench
