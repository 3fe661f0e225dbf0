#pragma once

// Learning rates as a function of the step. Python twin: torch.optim.lr_scheduler.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <vector>

#include <fsdp2/dcp/value.h>
#include <fsdp2/export.h>

namespace fsdp2 {

/// Factors of the base learning rate. Every schedule is a plain function of the step, which counts from 0: it can be
/// asked for any step in any order, which is what makes a resumed run equal to one that was never stopped. A lambda of
/// one's own is a schedule too (LambdaLR).
namespace lr_schedule {

using Schedule = std::function<double(int64_t step)>;

// Named after their twins, which give base_lr times these factors. kInvalidArgument for a count that is not positive,
// milestones that do not rise, a factor that is not finite.
FSDP2_API Schedule constant_lr(double factor = 1.0 / 3, int64_t total_iters = 5);
FSDP2_API Schedule linear_lr(double start_factor = 1.0 / 3, double end_factor = 1, int64_t total_iters = 5);
FSDP2_API Schedule step_lr(int64_t step_size, double gamma = 0.1);
FSDP2_API Schedule multi_step_lr(std::vector<int64_t> milestones, double gamma = 0.1);
FSDP2_API Schedule exponential_lr(double gamma);
FSDP2_API Schedule polynomial_lr(int64_t total_iters = 5, double power = 1);
/// eta_min of the twin is a learning rate, min_factor a factor: eta_min = min_factor * base_lr. Rises again after t_max
/// steps, as the twin does; warmup_cosine() stays down.
FSDP2_API Schedule cosine_annealing_lr(int64_t t_max, double min_factor = 0);
/// SequentialLR: schedules[i] from milestones[i - 1] on, counting its own steps from 0.
FSDP2_API Schedule sequential_lr(std::vector<Schedule> schedules, std::vector<int64_t> milestones);
/// ChainedScheduler: the product of all factors.
FSDP2_API Schedule chained_lr(std::vector<Schedule> schedules);

enum class Decay { Linear, Cosine, OneMinusSqrt };
struct WarmupStableDecayOptions {
  int64_t warmup_steps = 0;  ///< step s of them has the factor (s + 1) / (warmup_steps + 1): no step is wasted on 0
  int64_t stable_steps = 0;  ///< with the factor 1
  int64_t decay_steps = 1;   ///< from 1 to min_factor, which stays from then on
  Decay decay = Decay::Linear;
  double min_factor = 0;
};
FSDP2_API Schedule warmup_stable_decay(const WarmupStableDecayOptions& options);
/// warmup_stable_decay() without a stable part: step `total_steps` is the first with min_factor.
FSDP2_API Schedule warmup_cosine(int64_t warmup_steps, int64_t total_steps, double min_factor = 0);
FSDP2_API Schedule warmup_linear(int64_t warmup_steps, int64_t total_steps, double min_factor = 0);

}  // namespace lr_schedule

/// Keeps the learning rates of one or several optimizers at base_lr * schedule(step), group by group; the base is what
/// a group had when the scheduler was made.
///
///     fsdp2::LRScheduler scheduler(optimizer, fsdp2::lr_schedule::warmup_cosine(100, 10000));
///     for (...) { ...; optimizer.step(); scheduler.step(); }
///
/// Stands in a checkpoint as a dcp::Stateful, under the keys of its Python twin. Base rates are part of that state and
/// loading sets the learning rates again, so it does not matter whether the scheduler was made, and loaded, before or
/// after the optimizer was loaded: load both. The optimizers must outlive it. Not collective.
class FSDP2_API LRScheduler : public dcp::Stateful {
 public:
  /// Sets the learning rates of step 0. kInvalidArgument: no optimizer, an empty schedule, a factor that is negative or
  /// not finite.
  LRScheduler(torch::optim::Optimizer& optimizer, lr_schedule::Schedule schedule);
  LRScheduler(std::vector<torch::optim::Optimizer*> optimizers, lr_schedule::Schedule schedule);

  /// Sets the learning rates of the next step; call it after optimizer.step(). kUsage: the optimizers have another
  /// number of groups than when the scheduler was made.
  void step();
  /// Goes to a step, 0 or later: for who has a step but no state to load.
  void set_last_epoch(int64_t step);
  /// Calls of step() so far.
  int64_t last_epoch() const { return last_epoch_; }
  /// The learning rates that are set, group by group, one optimizer after the other.
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  /// What get_last_lr() is at another step. Changes nothing.
  std::vector<double> lr_at(int64_t step) const;

  /// "last_epoch", "base_lrs", "_last_lr", "_step_count".
  dcp::StateDict state_dict() override;
  /// Sets the learning rates too. The schedule is that of this object: if it gives other rates for the saved step than
  /// the saved ones, the log says so. kNotFound naming a missing key; kInvalidArgument: another number of groups,
  /// values outside their range. Nothing is changed then.
  void load_state_dict(const dcp::StateDict& state) override;

 private:
  std::vector<double> scaled(const std::vector<double>& base_lrs, int64_t step) const;
  void apply(std::vector<double> base_lrs, int64_t step);

  std::vector<torch::optim::Optimizer*> optimizers_;
  lr_schedule::Schedule schedule_;
  std::vector<double> base_lrs_, last_lr_;
  int64_t last_epoch_ = 0;
};

}  // namespace fsdp2
