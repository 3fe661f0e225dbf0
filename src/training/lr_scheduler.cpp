#include <fsdp2/lr_scheduler.h>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace fsdp2 {
namespace {

// Python's schedulers go from step to step and collect rounding errors, which is no other schedule.
constexpr double kSameRate = 1e-6;

std::vector<torch::optim::OptimizerParamGroup*> groups_of(const std::vector<torch::optim::Optimizer*>& optimizers) {
  std::vector<torch::optim::OptimizerParamGroup*> groups;
  for (torch::optim::Optimizer* optimizer : optimizers) {
    for (auto& group : optimizer->param_groups()) groups.push_back(&group);
  }
  return groups;
}

std::vector<double> numbers(const dcp::Value& list) {
  std::vector<double> result;
  for (const dcp::Value& item : list.list()) result.push_back(item.number());
  return result;
}

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, lr_schedule::Schedule schedule)
    : LRScheduler(std::vector<torch::optim::Optimizer*>{&optimizer}, std::move(schedule)) {}

LRScheduler::LRScheduler(std::vector<torch::optim::Optimizer*> optimizers, lr_schedule::Schedule schedule)
    : optimizers_(std::move(optimizers)), schedule_(std::move(schedule)) {
  FSDP2_CHECK(!optimizers_.empty() && std::count(optimizers_.begin(), optimizers_.end(), nullptr) == 0,
              kInvalidArgument, "[lr_scheduler] a scheduler needs one or more optimizers, and none of them null");
  FSDP2_CHECK(schedule_, kInvalidArgument, "[lr_scheduler] the schedule is empty; pass a function of the step");
  for (const auto* group : groups_of(optimizers_)) base_lrs_.push_back(group->options().get_lr());
  apply(base_lrs_, 0);
}

std::vector<double> LRScheduler::scaled(const std::vector<double>& base_lrs, int64_t step) const {
  const double factor = schedule_(step);
  FSDP2_CHECK(std::isfinite(factor) && factor >= 0, kInvalidArgument, "[lr_scheduler] the schedule gives ", factor,
              " for step ", step, "; a factor is a finite number, 0 or more");
  std::vector<double> rates;
  for (const double base : base_lrs) rates.push_back(base * factor);
  return rates;
}

std::vector<double> LRScheduler::lr_at(int64_t step) const { return scaled(base_lrs_, step); }

void LRScheduler::apply(std::vector<double> base_lrs, int64_t step) {
  const auto groups = groups_of(optimizers_);
  FSDP2_CHECK(groups.size() == base_lrs.size(), kUsage, "[lr_scheduler] the optimizers have ", groups.size(),
              " groups now, the scheduler was made for ", base_lrs.size(), "; make a new one after adding groups");
  std::vector<double> rates = scaled(base_lrs, step);
  for (size_t i = 0; i < groups.size(); ++i) groups[i]->options().set_lr(rates[i]);
  base_lrs_ = std::move(base_lrs);
  last_lr_ = std::move(rates);
  last_epoch_ = step;
}

void LRScheduler::step() { apply(base_lrs_, last_epoch_ + 1); }

void LRScheduler::set_last_epoch(int64_t step) {
  FSDP2_CHECK(step >= 0, kInvalidArgument, "[lr_scheduler] a scheduler cannot go to step ", step,
              "; steps count from 0");
  apply(base_lrs_, step);
}

dcp::StateDict LRScheduler::state_dict() {
  const auto list = [](const std::vector<double>& values) {
    return std::vector<dcp::Value>(values.begin(), values.end());
  };
  return {{"last_epoch", last_epoch_},
          {"base_lrs", list(base_lrs_)},
          {"_last_lr", list(last_lr_)},
          {"_step_count", last_epoch_ + 1}};
}

void LRScheduler::load_state_dict(const dcp::StateDict& state) {
  const int64_t step = state.at("last_epoch").integer();
  std::vector<double> base_lrs = numbers(state.at("base_lrs"));
  const std::vector<double> saved = numbers(state.at("_last_lr"));
  FSDP2_CHECK(step >= 0, kInvalidArgument, "[lr_scheduler] last_epoch is ", step, "; steps count from 0");
  FSDP2_CHECK(base_lrs.size() == base_lrs_.size() && saved.size() == base_lrs_.size(), kInvalidArgument,
              "[lr_scheduler] the state has ", base_lrs.size(), " base_lrs and ", saved.size(),
              " in _last_lr, the optimizers have ", base_lrs_.size(),
              " groups; make them with the groups they were saved with");
  for (const double rate : base_lrs)
    FSDP2_CHECK(std::isfinite(rate) && rate >= 0, kInvalidArgument, "[lr_scheduler] base_lrs hold ", rate,
                "; learning rates are finite numbers from 0 on");
  apply(std::move(base_lrs), step);
  for (size_t i = 0; i < saved.size(); ++i) {
    if (std::abs(saved[i] - last_lr_[i]) <= kSameRate * std::abs(base_lrs_[i])) continue;
    FSDP2_LOG_WARN("[lr_scheduler] group ", i, " was saved at step ", step, " with the learning rate ", saved[i],
                   ", this schedule gives ", last_lr_[i], ": it is not the schedule of the run that saved");
    break;
  }
}

}  // namespace fsdp2
