#include <fsdp2/grad_scaler.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include <fsdp2/error.h>

#include "process/collectives.h"
#include "tensor/dtensor_spec.h"
#include "torch_compat.h"

namespace fsdp2 {
namespace {

void check(const GradScalerOptions& options) {
  const auto as_float = static_cast<float>(options.init_scale);
  FSDP2_CHECK(as_float > 0 && std::isfinite(as_float), kInvalidArgument, "[grad_scaler] the scale is ",
              options.init_scale, "; it must be positive and finite as a float32");
  FSDP2_CHECK(options.growth_factor > 1 && std::isfinite(options.growth_factor), kInvalidArgument,
              "[grad_scaler] growth_factor is ", options.growth_factor, "; it must be above 1");
  FSDP2_CHECK(options.backoff_factor > 0 && options.backoff_factor < 1, kInvalidArgument,
              "[grad_scaler] backoff_factor is ", options.backoff_factor, "; it must be between 0 and 1");
  FSDP2_CHECK(options.growth_interval >= 1, kInvalidArgument, "[grad_scaler] growth_interval is ",
              options.growth_interval, "; it must be 1 or more");
}

/// The plain values behind a gradient that may be scaled.
Tensor values_of(const Tensor& param, const std::string& place) {
  const Tensor& grad = param.grad();
  const auto* spec = detail::spec_of(grad);
  const auto* param_spec = detail::spec_of(param);
  const std::string name = spec != nullptr         ? detail::describe(*spec)
                           : param_spec != nullptr ? detail::describe(*param_spec)
                                                   : place;
  FSDP2_CHECK(spec == nullptr || !spec->has_partial(), kUsage, "[grad_scaler] the gradient of ", name,
              " waits for its reduction: call synchronize_gradients() before unscale_() or step()");
  FSDP2_CHECK(spec != nullptr || param_spec == nullptr, kUsage, "[grad_scaler] the gradient of ", name,
              " is a plain tensor of shape ", grad.sizes(), ": it must be a DTensor like its parameter");
  FSDP2_CHECK(grad.scalar_type() != at::kHalf, kUsage, "[grad_scaler] the gradient of ", name,
              " is in float16, which cannot hold what the scale was made for: keep the parameters in float32 and let "
              "mp_policy.param_dtype = torch::kHalf do the computation in float16");
  if (spec != nullptr) return spec->local;
  return grad.is_sparse() ? grad._values() : grad;
}

struct Batch {
  std::vector<Tensor> values;  // of one device and dtype
  bool takes(const Tensor& tensor) const {
    return values[0].device() == tensor.device() && values[0].scalar_type() == tensor.scalar_type();
  }
};

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(static_cast<float>(options.init_scale)) {
  check(options);
}

GradScaler::~GradScaler() = default;

Tensor GradScaler::scale(const Tensor& loss) {
  FSDP2_CHECK(loss.defined(), kInvalidArgument, "[grad_scaler] scale() was given an undefined tensor");
  scaled_ = true;
  return loss * at::full({}, scale_, at::TensorOptions(at::kFloat).device(loss.device()));
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  FSDP2_CHECK(scaled_, kUsage,
              "[grad_scaler] unscale_() or step() before the first scale(): the gradients are not those "
              "of a scaled loss; call scaler.scale(loss).backward()");
  const auto found = optimizers_.find(&optimizer);
  const Stage stage = found == optimizers_.end() ? Stage::kReady : found->second.stage;
  FSDP2_CHECK(stage != Stage::kUnscaled, kUsage,
              "[grad_scaler] unscale_() was called twice for one optimizer since the "
              "last update(); call it once, and update() at the end of each iteration");
  FSDP2_CHECK(stage != Stage::kStepped, kUsage,
              "[grad_scaler] unscale_() was called after step() of the same optimizer; "
              "call it before, and update() at the end of each iteration");

  const at::NoGradGuard no_grad;
  const detail::BelowDTensor below;
  PerOptimizer state;
  std::vector<Batch> batches;
  std::unordered_set<const c10::TensorImpl*> seen;
  size_t position = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& param : group.params()) {
      const std::string place = c10::str("parameter ", position++, " of the optimizer");
      if (!param.grad().defined() || !seen.insert(param.unsafeGetTensorImpl()).second) continue;
      state.has_gradients = true;
      const Tensor values = values_of(param, place);
      if (values.numel() == 0) continue;
      auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) { return b.takes(values); });
      if (batch == batches.end()) batch = batches.insert(batches.end(), Batch{});
      batch->values.push_back(values);
    }
  }
  const auto inverse = static_cast<float>(1.0 / static_cast<double>(scale_));
  for (Batch& batch : batches) {
    const auto options = at::TensorOptions(at::kFloat).device(batch.values[0].device());
    Tensor infinite = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(batch.values, infinite, at::full({}, inverse, options));
    state.found.push_back(infinite);
  }
  state.stage = Stage::kUnscaled;
  optimizers_[&optimizer] = std::move(state);
}

GradScaler::Findings GradScaler::agree(const std::vector<const PerOptimizer*>& optimizers) const {
  Findings mine{false, false};
  for (const PerOptimizer* optimizer : optimizers) {
    mine.any_gradient |= optimizer->has_gradients;
    for (const Tensor& found : optimizer->found) mine.infinite |= found.item<float>() != 0;
  }
  if (!options_.group.defined() && !is_initialized()) return mine;
  const ProcessGroup& over = detail::group_or_default(options_.group);
  const auto device = detail::has_backend(*over, c10::DeviceType::CPU) ? c10::Device(at::kCPU) : local_device();
  const at::NoGradGuard no_grad;
  Tensor flags = at::empty({2}, at::kFloat);
  flags[0] = mine.infinite ? 1 : 0;
  flags[1] = mine.any_gradient ? 1 : 0;
  flags = flags.to(device);
  detail::all_reduce(flags, ReduceOp::MAX, over, {"the check of scaled gradients"}).wait();
  flags = flags.cpu();
  const auto* values = flags.const_data_ptr<float>();
  return {values[0] != 0, values[1] != 0};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  const auto found = optimizers_.find(&optimizer);
  const Stage stage = found == optimizers_.end() ? Stage::kReady : found->second.stage;
  FSDP2_CHECK(stage != Stage::kStepped, kUsage,
              "[grad_scaler] step() was called twice for one optimizer since the last "
              "update(); call update() at the end of each iteration");
  if (stage == Stage::kReady) unscale_(optimizer);
  PerOptimizer& state = optimizers_.at(&optimizer);
  const Findings all = agree({&state});
  FSDP2_CHECK(all.any_gradient, kUsage,
              "[grad_scaler] step() of an optimizer none of whose parameters has a gradient, on "
              "any rank; call scaler.scale(loss).backward() before it");
  if (!all.infinite) optimizer.step();
  state.agreed_found = all.infinite;
  state.stage = Stage::kStepped;
  return !all.infinite;
}

void GradScaler::update() {
  bool infinite = false;
  std::vector<const PerOptimizer*> only_unscaled;
  for (const auto& [optimizer, state] : optimizers_) {
    if (state.stage == Stage::kStepped) infinite |= state.agreed_found;
    if (state.stage == Stage::kUnscaled) only_unscaled.push_back(&state);
  }
  FSDP2_CHECK(!optimizers_.empty(), kUsage,
              "[grad_scaler] update() without step() or unscale_() of any optimizer since "
              "the last update()");
  if (!only_unscaled.empty()) infinite |= agree(only_unscaled).infinite;
  if (infinite) {
    scale_ = static_cast<float>(scale_ * options_.backoff_factor);
    finite_updates_ = 0;
  } else if (++finite_updates_ >= options_.growth_interval) {
    const auto grown = static_cast<float>(scale_ * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    finite_updates_ = 0;
  }
  optimizers_.clear();
}

dcp::StateDict GradScaler::state_dict() {
  return {{"scale", static_cast<double>(scale_)},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", options_.growth_interval},
          {"_growth_tracker", finite_updates_}};
}

void GradScaler::load_state_dict(const dcp::StateDict& state) {
  GradScalerOptions loaded;
  loaded.group = options_.group;
  loaded.init_scale = state.at("scale").number();
  loaded.growth_factor = state.at("growth_factor").number();
  loaded.backoff_factor = state.at("backoff_factor").number();
  const auto count = [&](const char* key) {
    const int64_t value = state.at(key).integer();
    FSDP2_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), kInvalidArgument, "[grad_scaler] ", key, " is ",
                value, "; it must lie in [0, ", std::numeric_limits<int>::max(), "]");
    return static_cast<int>(value);
  };
  loaded.growth_interval = count("growth_interval");
  const int tracker = count("_growth_tracker");
  check(loaded);
  options_ = loaded;
  scale_ = static_cast<float>(loaded.init_scale);
  finite_updates_ = tracker;
}

}  // namespace fsdp2
