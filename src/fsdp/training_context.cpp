#include "fsdp/training_context.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>

#include <fsdp2/log.h>

#include "fsdp/gradient_reduction.h"
#include "fsdp/module_state.h"
#include "fsdp/param_group.h"

namespace fsdp2::detail {

TrainingContext::TrainingContext(std::string label) : label_(std::move(label)) {}

TrainingContext::~TrainingContext() = default;

void TrainingContext::enter_backward() {
  const int current = torch::autograd::get_current_graph_task_id();
  if (current == graph_task_) {
    return;
  }
  graph_task_ = current;
  warn_of_second_root(current);
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (const auto context = self.lock()) {
      context->finish_backward();
    }
  });
}

void TrainingContext::warn_of_second_root(int graph_task) const {
  static std::mutex mutex;
  static int last_task = -1;
  static std::string last_label;
  static const TrainingContext* last_context = nullptr;
  const std::lock_guard lock(mutex);
  if (last_task == graph_task && last_context != this) {
    FSDP2_LOG_WARN_ONCE("[fsdp] one backward reached two roots, ", last_label, " and ", label_,
                        ": call fully_shard on the module that contains both, last, so that they prefetch and finish "
                        "together");
  }
  last_task = graph_task;
  last_label = label_;
  last_context = this;
}

void TrainingContext::finish_backward() {
  graph_task_ = -1;
  for (const auto& weak : states) {
    if (const auto state = weak.lock(); state && state->group) {
      state->group->post_backward(true);
    }
  }
  drop_pending_gathers();
  if (is_last_backward) {
    finish_reduction();
  }
  clear_forward_order();
}

void TrainingContext::drop_pending_gathers() {
  for (const auto& weak : states) {
    if (const auto state = weak.lock(); state && state->group && state->group->unshard_pending()) {
      state->group->reshard();
    }
  }
}

void TrainingContext::recover_if_interrupted() {
  if (graph_task_ != -1 && torch::autograd::get_current_graph_task_id() == -1) {
    reset();
  }
}

void TrainingContext::record_forward(const std::shared_ptr<ParamGroup>& group) {
  // Forwards that no backward follows would fill memory. Forgetting the order only costs gathering ahead.
  constexpr size_t kLongest = 1 << 16;
  if (forward_order_.size() == kLongest) {
    clear_forward_order();
  }
  group->forward_positions.push_back(forward_order_.size());
  forward_order_.push_back(group);
}

std::shared_ptr<ParamGroup> TrainingContext::forward_before(size_t position) const {
  if (position == 0 || position > forward_order_.size()) {
    return nullptr;
  }
  return forward_order_[position - 1].lock();
}

void TrainingContext::clear_forward_order() {
  for (const auto& weak : forward_order_) {
    if (const auto group = weak.lock()) {
      group->forward_positions.clear();
    }
  }
  forward_order_.clear();
}

void TrainingContext::set_reduction(std::unique_ptr<GradientReduction> reduction) {
  reduction_ = std::move(reduction);
}

void TrainingContext::finish_reduction() {
  if (const auto last = std::move(reduction_)) {
    last->finish();
  }
}

void TrainingContext::reset() {
  graph_task_ = -1;
  iteration_root = nullptr;
  reduction_.reset();
  clear_forward_order();
  for (const auto& weak : states) {
    if (const auto state = weak.lock(); state && state->group) {
      state->group->reset();
    }
  }
}

}  // namespace fsdp2::detail
