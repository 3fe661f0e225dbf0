#pragma once

// Loss scaling, so that small gradients do not vanish in float16. Python twin: torch.amp.GradScaler.

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>
#include <fsdp2/process_group.h>

namespace torch::optim {
class Optimizer;
}

namespace fsdp2 {

struct GradScalerOptions {
  double init_scale = 65536;     ///< positive, finite as a float
  double growth_factor = 2;      ///< above 1
  double backoff_factor = 0.5;   ///< between 0 and 1
  int growth_interval = 2000;    ///< steps without infinity or NaN before the scale grows; 1 or more
  ProcessGroup group = {};       ///< ranks that skip together; default: all. One process needs no group.
};

/// scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); and, before step(), unscale_(optimizer) for
/// who wants to clip or look at gradients. Several optimizers: step() for each, then one update().
///
/// A step is skipped on all ranks of the group where the gradients of any of them hold an infinity or NaN.
/// Can stand in a checkpoint as a dcp::Stateful, under the keys of its Python twin.
class FSDP2_API GradScaler : public dcp::Stateful {
 public:
  /// kInvalidArgument for an option outside its range.
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  ~GradScaler() override;

  /// `loss` times the scale, a float32 scalar, on the device of `loss`. Differentiable.
  Tensor scale(const Tensor& loss);

  /// Divides the optimizer's gradients by the scale, in place, and notes infinities and NaN. Local: of a DTensor this
  /// rank's part. At most once an update() for one optimizer, before its step().
  /// Errors (kUsage): called twice, or after step(); scale() never called; a gradient in float16; a gradient that
  /// waits for its reduction (synchronize_gradients() first). Nothing was divided then.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// unscale_() unless that was done, then optimizer.step() unless a rank met an infinity or NaN. False: skipped.
  /// Collective over the group, one all-reduce of 8 bytes; every rank calls it for its optimizers in the same order.
  /// Errors (kUsage): those of unscale_(); called twice without update(); no rank has a gradient.
  bool step(torch::optim::Optimizer& optimizer);

  /// The scale for the next iteration: smaller after an infinity or NaN in any optimizer since the last update(),
  /// larger after growth_interval updates without. Collective only where an optimizer had unscale_() but no step().
  /// kUsage where no optimizer had either.
  void update();

  double get_scale() const { return scale_; }

  /// "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker". Call it after update().
  dcp::StateDict state_dict() override;
  /// kNotFound naming a missing key, kInvalidArgument for values outside their range.
  void load_state_dict(const dcp::StateDict& state) override;

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kReady;
    bool has_gradients = false;
    std::vector<Tensor> found;  // per device and dtype: 1 where this rank met an infinity or NaN
    bool agreed_found = false;  // of all ranks, from step() on
  };
  struct Findings {
    bool infinite, any_gradient;
  };
  Findings agree(const std::vector<const PerOptimizer*>& optimizers) const;

  GradScalerOptions options_;
  float scale_;
  int finite_updates_ = 0;  // since the scale last changed
  bool scaled_ = false;     // scale() was called
  std::unordered_map<const torch::optim::Optimizer*, PerOptimizer> optimizers_;  // since the last update()
};

}  // namespace fsdp2
