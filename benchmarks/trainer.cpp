#include "trainer.h"

#include <ATen/autocast_mode.h>
#include <fsdp2/optim.h>

#include <algorithm>
#include <optional>

#include "hash_rule.h"
#include "measure.h"
#include "stub_collectives.h"

namespace bench {
namespace {

using torch::Tensor;

/// This rank's rows of the ceil(rows / world) that each rank has, as Shard(0) cuts; possibly none.
Tensor own_rows(const Tensor& whole, int rank, int world) {
  const int64_t rows = whole.size(0), each = (rows + world - 1) / world, begin = std::min(rows, each * rank);
  return whole.narrow(0, begin, std::min(each, rows - begin));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<Tensor>& parameters,
                                                        const TrainOptions& options) {
  const auto adamw = torch::optim::AdamWOptions(options.lr).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1);
  if (options.opt_impl == "fused") return std::make_unique<fsdp2::optim::AdamW>(parameters, adamw);
  return std::make_unique<torch::optim::AdamW>(parameters, adamw);
}

/// bf16 for the operators that gain by it, as torch.autocast("cpu", torch.bfloat16).
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  Autocast(const Autocast&) = delete;
};

}  // namespace

llama::Llama build_model(const TrainOptions& options) {
  llama::Llama model(options.model);
  if (options.dtype == "bf16") model->to(torch::kBFloat16);
  llama::hash_weights(model);
  return model;
}

Trainer::Trainer(std::string mode, const TrainOptions& options)
    : mode_(std::move(mode)),
      options_(options),
      rank_(fsdp2::get_rank()),
      world_(fsdp2::get_world_size()),
      model_(build_model(options)) {
  for (const Tensor& parameter : model_->parameters()) num_parameters_ += parameter.numel();
  if (mode_ == "fsdp2" || mode_ == "stub") {
    shard();
  } else if (mode_ == "nocomm") {
    take_own_shards();
  } else if (mode_ == "local") {
    parameters_ = model_->parameters();
  } else {
    FSDP2_CHECK(mode_ != "ddp", kUnsupported, "[bench] mode ddp: DistributedDataParallel is not there yet");
    FSDP2_THROW(kInvalidArgument, "[bench] mode ", mode_, " is unknown; use fsdp2, nocomm, stub, local or ddp");
  }
  optimizer_ = make_optimizer(parameters_, options_);
}

void Trainer::shard() {
  fsdp2::FullyShardOptions blocks;
  if (options_.mp) blocks.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
  fsdp2::FullyShardOptions root = blocks;
  const std::string& reshard = options_.reshard_after_forward;
  if (reshard == "always" || reshard == "never") {
    blocks.reshard_after_forward = root.reshard_after_forward = reshard == "always";
  } else if (reshard != "default") {
    blocks.reshard_after_forward = std::stoi(reshard);
  }
  for (const auto& block : model_->blocks()) fsdp2::fully_shard(block, blocks);
  sharded_ = fsdp2::fully_shard(model_, root);
  if (mode_ == "stub") {
    const auto all_gather = std::make_shared<StubAllGather>();
    const auto reduce_scatter = std::make_shared<StubReduceScatter>();
    std::vector<fsdp2::FSDPModule> modules{*sharded_};
    for (const auto& block : model_->blocks()) modules.push_back(fsdp2::fsdp_module(block));
    for (auto& module : modules) {
      module.set_custom_all_gather(all_gather);
      module.set_custom_reduce_scatter(reduce_scatter);
    }
  }
  parameters_ = model_->parameters();
}

void Trainer::take_own_shards() {
  std::vector<Tensor> own;
  for (const Tensor& parameter : model_->parameters()) own.push_back(own_rows(parameter.detach(), rank_, world_));
  if (options_.mp) {  // fp32 shards to train, bf16 weights to compute with
    for (Tensor& part : own) part = part.clone();
    model_->to(torch::kBFloat16);
  }
  const std::vector<Tensor> whole = model_->parameters();
  for (size_t i = 0; i < own.size(); ++i) {
    parameters_.push_back(own[i].detach().requires_grad_(true));
    own_shards_.emplace_back(whole[i], parameters_.back());
  }
}

void Trainer::gradients_to_shards() {
  const torch::NoGradGuard no_grad;
  for (auto& [whole, own] : own_shards_) {
    own.mutable_grad() = own_rows(whole.grad(), rank_, world_).to(own.scalar_type()).detach();  // no view: zero_grad
  }
}

void Trainer::shards_to_weights() {
  const torch::NoGradGuard no_grad;
  for (auto& [whole, own] : own_shards_) {
    whole.mutable_grad() = Tensor();
    if (options_.mp) own_rows(whole.detach(), rank_, world_).copy_(own);
  }
}

void Trainer::step(int64_t index, const std::function<void()>& at_peak) {
  const int64_t accum = options_.grad_accum;
  std::vector<std::pair<Tensor, Tensor>> batches;
  for (int64_t micro = 0; micro < accum; ++micro) {
    batches.push_back(
        llama::hash_tokens(index, micro, accum, rank_, world_, options_.batch, options_.seq, options_.model.vocab));
  }
  StepTimes times;
  double total = 0;
  fsdp2::barrier();
  const double start = now();
  for (int64_t micro = 0; micro < accum; ++micro) {
    if (sharded_) sharded_->set_requires_gradient_sync(micro == accum - 1);
    const auto& [tokens, targets] = batches[static_cast<size_t>(micro)];
    const double before = now();
    Tensor logits;
    {
      std::optional<Autocast> autocast;
      if (options_.mp && mode_ == "local") autocast.emplace();
      logits = model_(tokens);
    }
    const Tensor rows = logits.to(torch::kFloat32).view({-1, options_.model.vocab});
    Tensor loss = torch::nn::functional::cross_entropy(rows, targets.view({-1})) / accum;
    const double between = now();
    if (at_peak) at_peak();
    loss.backward();
    const double after = now();
    if (at_peak) at_peak();
    total += loss.item<double>();
    times.forward += between - before;
    times.backward += after - between;
  }
  gradients_to_shards();
  const double before_clip = now();
  if (options_.clip > 0) fsdp2::clip_grad_norm_(parameters_, options_.clip);
  const double after_clip = now();
  optimizer_->step();
  optimizer_->zero_grad();
  shards_to_weights();
  const double end = now();
  if (at_peak) at_peak();
  times.clip = after_clip - before_clip;
  times.optim = end - after_clip;
  times.step = end - start;
  times_.push_back(times);
  losses_.push_back(total);
}

}  // namespace bench
