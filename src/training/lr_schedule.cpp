#include <fsdp2/error.h>
#include <fsdp2/lr_scheduler.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace fsdp2::lr_schedule {
namespace {

void check_count(int64_t value, int64_t least, const char* name) {
  FSDP2_CHECK(value >= least, kInvalidArgument, "[lr_scheduler] ", name, " is ", value, "; it must be ", least,
              " or more");
}

void check_factor(double value, const char* name) {
  FSDP2_CHECK(std::isfinite(value), kInvalidArgument, "[lr_scheduler] ", name, " is ", value,
              "; it must be a finite number");
}

void check_milestones(const std::vector<int64_t>& milestones, bool may_repeat) {
  for (size_t i = 0; i < milestones.size(); ++i) {
    const int64_t least = i == 0 ? 0 : milestones[i - 1] + (may_repeat ? 0 : 1);
    FSDP2_CHECK(milestones[i] >= least, kInvalidArgument, "[lr_scheduler] milestone ", i, " is ", milestones[i],
                "; it must be ", least, " or more: milestones rise");
  }
}

void check_schedules(const std::vector<Schedule>& schedules, const char* who) {
  FSDP2_CHECK(!schedules.empty(), kInvalidArgument, "[lr_scheduler] ", who, " needs at least one schedule");
  for (size_t i = 0; i < schedules.size(); ++i)
    FSDP2_CHECK(schedules[i], kInvalidArgument, "[lr_scheduler] schedule ", i, " of ", who, " is empty");
}

/// How many milestones a step has reached.
size_t passed(const std::vector<int64_t>& milestones, int64_t step) {
  return static_cast<size_t>(std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin());
}

/// From 1 down to 0 while `progress` goes from 0 to 1.
double decayed(Decay decay, double progress) {
  switch (decay) {
    case Decay::Linear:
      return 1 - progress;
    case Decay::Cosine:
      return (1 + std::cos(std::numbers::pi * progress)) / 2;
    case Decay::OneMinusSqrt:
      return 1 - std::sqrt(progress);
  }
  FSDP2_THROW(kInvalidArgument, "[lr_scheduler] there is no decay number ", static_cast<int>(decay));
}

}  // namespace

Schedule constant_lr(double factor, int64_t total_iters) {
  check_factor(factor, "factor");
  check_count(total_iters, 1, "total_iters");
  return [=](int64_t step) { return step < total_iters ? factor : 1.0; };
}

Schedule linear_lr(double start_factor, double end_factor, int64_t total_iters) {
  check_factor(start_factor, "start_factor");
  check_factor(end_factor, "end_factor");
  check_count(total_iters, 1, "total_iters");
  return [=](int64_t step) {
    const double progress = static_cast<double>(std::min(step, total_iters)) / static_cast<double>(total_iters);
    return start_factor + (end_factor - start_factor) * progress;
  };
}

Schedule step_lr(int64_t step_size, double gamma) {
  check_count(step_size, 1, "step_size");
  check_factor(gamma, "gamma");
  return [=](int64_t step) { return std::pow(gamma, static_cast<double>(step / step_size)); };
}

Schedule multi_step_lr(std::vector<int64_t> milestones, double gamma) {
  check_milestones(milestones, /*may_repeat=*/true);
  check_factor(gamma, "gamma");
  return [milestones = std::move(milestones), gamma](int64_t step) {
    return std::pow(gamma, static_cast<double>(passed(milestones, step)));
  };
}

Schedule exponential_lr(double gamma) {
  check_factor(gamma, "gamma");
  return [=](int64_t step) { return std::pow(gamma, static_cast<double>(step)); };
}

Schedule polynomial_lr(int64_t total_iters, double power) {
  check_count(total_iters, 1, "total_iters");
  check_factor(power, "power");
  return [=](int64_t step) {
    return std::pow(1 - static_cast<double>(std::min(step, total_iters)) / static_cast<double>(total_iters), power);
  };
}

Schedule cosine_annealing_lr(int64_t t_max, double min_factor) {
  check_count(t_max, 1, "t_max");
  check_factor(min_factor, "min_factor");
  return [=](int64_t step) {
    const double progress = static_cast<double>(step) / static_cast<double>(t_max);
    return min_factor + (1 - min_factor) * decayed(Decay::Cosine, progress);
  };
}

Schedule sequential_lr(std::vector<Schedule> schedules, std::vector<int64_t> milestones) {
  check_schedules(schedules, "sequential_lr");
  FSDP2_CHECK(milestones.size() + 1 == schedules.size(), kInvalidArgument, "[lr_scheduler] sequential_lr got ",
              schedules.size(), " schedules and ", milestones.size(),
              " milestones; there is one milestone between two");
  check_milestones(milestones, /*may_repeat=*/false);
  return [schedules = std::move(schedules), milestones = std::move(milestones)](int64_t step) {
    const size_t now = passed(milestones, step);
    return schedules[now](now == 0 ? step : step - milestones[now - 1]);
  };
}

Schedule chained_lr(std::vector<Schedule> schedules) {
  check_schedules(schedules, "chained_lr");
  return [schedules = std::move(schedules)](int64_t step) {
    double product = 1;
    for (const Schedule& schedule : schedules) product *= schedule(step);
    return product;
  };
}

Schedule warmup_stable_decay(const WarmupStableDecayOptions& options) {
  check_count(options.warmup_steps, 0, "warmup_steps");
  check_count(options.stable_steps, 0, "stable_steps");
  check_count(options.decay_steps, 1, "decay_steps");
  check_factor(options.min_factor, "min_factor");
  decayed(options.decay, 0);
  return [options](int64_t step) {
    if (step < options.warmup_steps)
      return static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps + 1);
    const int64_t decaying = std::max<int64_t>(0, step - options.warmup_steps - options.stable_steps);
    const double progress = std::min(1.0, static_cast<double>(decaying) / static_cast<double>(options.decay_steps));
    return options.min_factor + (1 - options.min_factor) * decayed(options.decay, progress);
  };
}

Schedule warmup_cosine(int64_t warmup_steps, int64_t total_steps, double min_factor) {
  check_count(total_steps, warmup_steps + 1, "total_steps (warm-up included)");
  return warmup_stable_decay({.warmup_steps = warmup_steps,
                              .decay_steps = total_steps - warmup_steps,
                              .decay = Decay::Cosine,
                              .min_factor = min_factor});
}

Schedule warmup_linear(int64_t warmup_steps, int64_t total_steps, double min_factor) {
  check_count(total_steps, warmup_steps + 1, "total_steps (warm-up included)");
  return warmup_stable_decay(
      {.warmup_steps = warmup_steps, .decay_steps = total_steps - warmup_steps, .min_factor = min_factor});
}

}  // namespace fsdp2::lr_schedule
