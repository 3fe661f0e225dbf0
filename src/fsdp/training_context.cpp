#include "fsdp/training_context.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include "diagnose/first_step.h"
#include "fsdp/module_state.h"
#include "fsdp/param_group.h"
#include "fsdp/profile_range.h"
#include "process/debug_level.h"

namespace fsdp2::detail {

TrainingContext::TrainingContext(std::string label)
    : reductions(std::make_shared<ReductionQueue>()), label_(std::move(label)) {}

TrainingContext::~TrainingContext() = default;

/// Held by autograd as the callback at the end of a backward. A backward that throws drops it unrun: then gradients
/// that were put aside must be back in their slots before the user can clear them.
class TrainingContext::BackwardEnd {
 public:
  explicit BackwardEnd(std::weak_ptr<TrainingContext> context) : context_(std::move(context)) {}
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;
  ~BackwardEnd() {
    if (const auto context = context_.lock()) {
      context->interrupt_backward();
    }
  }
  void run() {
    if (const auto context = context_.lock()) {
      context->finish_backward();
    }
    context_.reset();
  }

 private:
  std::weak_ptr<TrainingContext> context_;
};

template <class F>
void TrainingContext::for_groups(F&& use) const {
  for (const auto& weak : states) {
    if (const auto state = weak.lock()) {
      for (const auto& group : state->groups) use(*group);
    }
  }
}

namespace {

/// In the order of the first use, which is the same on every rank.
class Barriers {
 public:
  void add(const ProcessGroup& over) {
    if (std::find(groups_.begin(), groups_.end(), over) == groups_.end()) groups_.push_back(over);
  }
  void wait(const char* what) const {
    for (const ProcessGroup& over : groups_) barrier_on(over, {what});
  }

 private:
  c10::SmallVector<ProcessGroup, 2> groups_;
};

}  // namespace

void TrainingContext::begin_in_place(bool only_changed) {
  const ProfileRange range("FSDP::all_gather");
  Barriers barriers;
  for_groups([&](ParamGroup& group) {
    if (const ProcessGroup over = group.publish(only_changed)) barriers.add(over);
  });
  barriers.wait("parameters in shared memory, before they are read");
  for_groups([](ParamGroup& group) { group.begin_in_place(); });
}

void TrainingContext::end_in_place(bool backward_follows) {
  const ProfileRange range("FSDP::all_gather");
  Barriers barriers;
  std::exception_ptr written;  // thrown once nobody waits for this rank
  for_groups([&](ParamGroup& group) {
    group.end_in_place(/*keep_copies=*/!backward_follows);
    if (!group.others_may_read()) return;
    barriers.add(group.mesh().shard_group);
    try {
      group.check_unwritten_in_place();
    } catch (const Error&) {
      if (!written) written = std::current_exception();
    }
  });
  barriers.wait("parameters in shared memory, after they were read");
  for_groups([](ParamGroup& group) { group.note_all_have_read(group.times_shown()); });
  if (written) std::rethrow_exception(written);
}

void TrainingContext::abandon_in_place() noexcept {
  for_groups([](ParamGroup& group) { group.end_in_place(/*keep_copies=*/false); });
}

void TrainingContext::interrupt_backward() noexcept {
  abandon_in_place();
  reductions->abandon(*this);
  reduced_.clear();
  hooks_at_end_.clear();
  for_groups([](ParamGroup& group) { group.interrupt_backward(); });
}

void TrainingContext::enter_backward() {
  const int current = torch::autograd::get_current_graph_task_id();
  if (current == graph_task_) {
    return;
  }
  // A node of the backward under way runs one of its own, as recomputation does: the outer one goes on with modules
  // that are gathered, so its end is the end.
  if (!backward_end_.expired()) {
    return;
  }
  graph_task_ = current;
  reduced_any_ = false;
  warn_of_second_root(current);
  const auto end = std::make_shared<BackwardEnd>(weak_from_this());
  backward_end_ = end;
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });
  begin_in_place(/*only_changed=*/true);
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
  const ProfileRange range("FSDP::hooks");
  for (const auto& weak : states) {
    if (const auto state = weak.lock()) {
      state->finish_backward();
    }
  }
  const bool inside_forward = iteration_root != nullptr && iteration_root->in_forward();
  if (!inside_forward) iteration_root = nullptr;
  if (is_last_backward) {
    drop_pending_gathers();
  }
  finish_reductions();
  if (!inside_forward) end_in_place(/*backward_follows=*/false);
  for (const auto& [weak, param] : std::exchange(hooks_at_end_, {})) {
    if (const auto group = weak.lock()) group->run_post_accumulate_hooks({param});
  }
  if (is_last_backward) {
    clear_forward_order();
  }
  if (!first_step_over_ && reduced_any_) [[unlikely]] {
    first_step_over_ = true;
    note_first_step(shared_from_this());
  }
  graph_task_ = -1;  // last: a backward that threw is cleared up by the next forward
  backward_end_.reset();
}

void TrainingContext::reduce(const std::shared_ptr<ParamGroup>& group,
                             std::vector<std::pair<size_t, at::Tensor>> gradients, bool all_reduce) {
  std::vector<size_t> indices;
  indices.reserve(gradients.size());
  for (const auto& [index, gradient] : gradients) indices.push_back(index);
  reduced_any_ = true;
  const bool compared = reductions->start(group, std::move(gradients), all_reduce, max_input_buffers);
  if (!compared) reduced_.emplace_back(group, std::move(indices));
}

namespace {

std::string difference_of(const std::string& names, const ProcessGroup& over) {
  const std::vector<std::string> of_ranks = all_gather_strings(names, over);
  size_t other = 1;
  while (other + 1 < of_ranks.size() && of_ranks[other] == of_ranks[0]) ++other;
  return c10::str("rank 0 of the mesh those of ", of_ranks[0], "; rank ", other, " those of ", of_ranks[other]);
}

[[noreturn]] void throw_different(const std::string& difference) {
  FSDP2_THROW(
      kUsage, "[fsdp] ranks reduced gradients of different parameters in one backward, so the gradients are wrong: ",
      difference, ". Every rank must use the same parameters in each step; call zero_grad() and mend the forward");
}

/// What this rank reduced over one process group.
struct ReducedOver {
  ProcessGroup over;
  c10::Device device;
  uint64_t hash = 0x9e3779b97f4a7c15;
  std::string names = {};

  void add(ParamGroup& group, const std::vector<size_t>& params) {
    const auto mix = [this](uint64_t value) { hash = (hash ^ value) * 0xff51afd7ed558ccd + (hash >> 29); };
    mix(std::hash<std::string>()(group.label()));
    for (const size_t index : params) {
      mix(index + 1);
      names += (names.empty() ? "" : ", ") + group.params()[index].fqn();
    }
  }

  /// Empty where all ranks of the group reduced the same.
  std::string difference() const {
    const c10::InferenceMode normal_tensors(false);
    const at::NoGradGuard no_grad;
    const auto options = at::TensorOptions(at::kLong).device(device);
    at::Tensor mine = at::full({1}, static_cast<int64_t>(hash), options);
    at::Tensor all = at::empty({over->getSize()}, options);
    all_gather(all, mine, over, {"the check that ranks reduced the same gradients"}).wait();
    if (all.eq(mine).all().item<bool>()) {
      return "";
    }
    return difference_of(names, over);
  }
};

}  // namespace

// Ranks that used different parameters of a group would add the gradients of one to another's wherever the sizes
// happen to agree. One small exchange a backward and process group tells.
void TrainingContext::check_reductions_agree() {
  const int level = debug_level();
  std::vector<ReducedOver> all;
  for (const auto& [weak, params] : std::exchange(reduced_, {})) {
    const auto group = weak.lock();
    if (!group || level == 0 || (level < 0 && !group->compute_device().is_cpu())) {
      continue;
    }
    for (const ProcessGroup& over : group->mesh().groups()) {
      auto known = std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.over == over; });
      if (known == all.end()) {
        known = all.insert(all.end(), ReducedOver{over, group->compute_device()});
      }
      known->add(*group, params);
    }
  }
  std::string first;  // all groups are asked first: the others wait for this rank there
  for (const ReducedOver& each : all) {
    const std::string difference = each.difference();
    if (first.empty()) first = difference;
  }
  if (!first.empty()) throw_different(first);
}

void throw_different_reductions(const std::string& names, const ProcessGroup& over) {
  throw_different(difference_of(names, over));
}

void TrainingContext::drop_pending_gathers() {
  for_groups([](ParamGroup& group) {
    if (group.unshard_pending()) group.reshard();
  });
}

void TrainingContext::recover_if_interrupted() {
  if (graph_task_ != -1 && torch::autograd::get_current_graph_task_id() == -1) {
    FSDP2_LOG_WARN("[fsdp] the backward before this forward of ", label_,
                   " ended with an exception: gradients that it or "
                   "earlier micro-batches left unreduced are dropped; call zero_grad() and begin the step again");
    reset();
  }
}

void TrainingContext::record_forward(const std::shared_ptr<ModuleState>& state) {
  // Forwards that no backward follows would fill memory. Forgetting the order only costs gathering ahead.
  constexpr size_t kLongest = 1 << 16;
  if (forward_order_.size() == kLongest) {
    clear_forward_order();
  }
  state->forward_positions.push_back(forward_order_.size());
  forward_order_.push_back(state);
}

std::shared_ptr<ModuleState> TrainingContext::forward_before(size_t position) const {
  if (position == 0 || position > forward_order_.size()) {
    return nullptr;
  }
  return forward_order_[position - 1].lock();
}

void TrainingContext::clear_forward_order() {
  for (const auto& weak : forward_order_) {
    if (const auto state = weak.lock()) {
      state->forward_positions.clear();
    }
  }
  forward_order_.clear();
}

void TrainingContext::finish_reductions() {
  reductions->finish_all();
  check_reductions_agree();
}

void TrainingContext::update_max_input_buffers() {
  max_input_buffers = 1;
  for_groups([&](const ParamGroup& group) {
    max_input_buffers = std::max(max_input_buffers, static_cast<size_t>(group.settings.max_input_buffers));
  });
}

void TrainingContext::note_hooks(const std::shared_ptr<ParamGroup>& group, size_t param) {
  hooks_at_end_.emplace_back(group, param);
}

void TrainingContext::reset() {
  graph_task_ = -1;
  backward_end_.reset();
  abandon_in_place();
  reduced_.clear();
  hooks_at_end_.clear();
  iteration_root = nullptr;
  reductions->abandon(*this);
  clear_forward_order();
  for (const auto& weak : states) {
    if (const auto state = weak.lock()) {
      state->reset();
    }
  }
}

}  // namespace fsdp2::detail
