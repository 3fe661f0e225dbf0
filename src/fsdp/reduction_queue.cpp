#include "fsdp/reduction_queue.h"

#include <algorithm>

#include "fsdp/gradient_reduction.h"

namespace fsdp2::detail {

ReductionQueue::ReductionQueue() = default;
ReductionQueue::~ReductionQueue() = default;

bool ReductionQueue::start(std::shared_ptr<ParamGroup> group, std::vector<std::pair<size_t, at::Tensor>> gradients,
                           bool all_reduce, size_t max_inputs) {
  // An input is the size of whole parameters: freed first. What then waits for its all-reduce is the size of shards.
  auto holding = static_cast<size_t>(
      std::count_if(running_.begin(), running_.end(), [](const auto& each) { return each->holds_input(); }));
  constexpr size_t kLightOnes = 4;
  max_inputs +=
      std::min(kLightOnes, static_cast<size_t>(std::count_if(running_.begin(), running_.end(), [](const auto& each) {
                 return each->holds_input() && each->is_light();
               })));
  for (const auto& each : running_) {
    if (holding < max_inputs) break;
    if (each->holds_input()) {
      each->finish_reduce_scatter();
      --holding;
    }
  }
  while (running_.size() > max_inputs ||
         (!running_.empty() && group->mesh().replicate_size == 1 && !running_.front()->holds_input())) {
    finish_oldest();
  }
  running_.push_back(std::make_unique<GradientReduction>(std::move(group), std::move(gradients), all_reduce));
  return running_.back()->ranks_compared();
}

void ReductionQueue::finish_all() {
  while (!running_.empty()) {
    finish_oldest();
  }
}

void ReductionQueue::finish_oldest() {
  const auto oldest = std::move(running_.front());
  running_.pop_front();
  oldest->finish();
}

void ReductionQueue::abandon(const TrainingContext& context) noexcept {
  std::erase_if(running_, [&](const auto& each) {
    const bool ours = each->group().context.get() == &context;
    if (ours) each->abandon();
    return ours;
  });
}

}  // namespace fsdp2::detail
