#include "fsdp/module_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include <fsdp2/error.h>

#include "diagnose/first_step.h"
#include "fsdp/autograd_hooks.h"
#include "fsdp/profile_range.h"
#include "fsdp/tied_parameters.h"
#include "fsdp/trace.h"
#include "module/written.h"
#include "process/debug_level.h"

namespace fsdp2::detail {

// Note [One step, in the order of time]
// The first module called becomes the root of its tree (become_root). For each module with hooks, in forward:
// gather its group, cast the inputs, have PostBackward run behind them; run forward; free the group, hook the outputs
// for backward, cast them. In backward, the first hook queues the end-of-backward callback; for each group in
// reverse: PreBackward gathers it and starts the gather of the one before; gradients accumulate; PostBackward frees it
// and starts its reduction. The callback at the end does the same for groups whose PostBackward never ran (inputs
// without gradient, unused modules), waits for the reductions, and leaves everything sharded.

ModuleState::ModuleState(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                         const MixedPrecisionPolicy& policy, const std::string& label)
    : context(std::make_shared<TrainingContext>(label)),
      modules_(modules.begin(), modules.end()),
      policy_(policy),
      label_(label) {
  buffer_cast.set_dtype(policy.buffer_dtype);
}

std::vector<std::shared_ptr<torch::nn::Module>> ModuleState::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> alive;
  for (const auto& weak : modules_) {
    if (auto module = weak.lock()) alive.push_back(std::move(module));
  }
  return alive;
}

std::vector<std::shared_ptr<ModuleState>> ModuleState::tree() const { return states_under(modules()); }

void ModuleState::become_root(const torch::nn::Module& module) {
  FSDP2_CHECK(modules_.size() == 1, kUsage, "[fsdp] ", label_, " is a list of ", modules_.size(),
              " modules and has no root "
              "above it; call fully_shard also on the one module that contains them, and run that one's forward");
  const auto states = tree();
  for (const auto& state : states) {
    FSDP2_CHECK(state.get() == this || !state->is_root_, kUsage, "[fsdp] ", state->label_,
                " ran its forward before its root ", label_,
                " did, and so was taken for a root itself; run the forward "
                "of the outermost module first");
  }
  check_parameters_taken(module);
  check_ranks_agree();
  context->states.clear();
  for (const auto& state : states) {
    // What was set on a nested handle before there was a root.
    context->is_last_backward &= state->context->is_last_backward;
    if (state->context->post_optim_event) context->post_optim_event = state->context->post_optim_event;
    state->context = context;
    state->in_tree_ = true;
    for (const auto& group : state->groups) {
      group->context = context;
    }
    context->states.push_back(state);
  }
  context->update_max_input_buffers();
  name_from(module);
  is_root_ = true;
  if (reshard_is_default_) {
    reshard_after_forward_ = false;  // backward needs the root's parameters first
  }
}

void ModuleState::name_from(const torch::nn::Module& root) {
  std::unordered_set<const ModuleState*> named;
  for (const auto& item : root.named_modules()) {
    const auto state = state_of(*item.value());
    if (!state) {
      continue;
    }
    state->fqn_ = named.insert(state.get()).second ? item.key() : state->fqn_ + ", " + item.key();
    for (const auto& group : state->groups) {
      group->module_fqn = state->fqn_;
    }
  }
}

namespace {

/// Where two texts begin to differ, the line of `text`.
std::string line_at(const std::string& text, size_t position) {
  const size_t begin = position == 0 ? 0 : text.rfind('\n', position - 1) + 1;
  return begin >= text.size() ? std::string("nothing") : text.substr(begin, text.find('\n', begin) - begin);
}

/// Empty where all ranks of the group have the same text.
std::string difference_between_ranks(const std::string& mine, const ProcessGroup& group) {
  const std::vector<std::string> all = all_gather_strings(mine, group);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) {
      continue;
    }
    size_t at = 0;
    while (at < all[0].size() && at < all[rank].size() && all[0][at] == all[rank][at]) ++at;
    return c10::str("rank 0 of the mesh has \"", line_at(all[0], at), "\" where rank ", rank, " has \"",
                    line_at(all[rank], at), "\"");
  }
  return "";
}

std::string type_names(const ModuleState& state) {
  std::string names;
  for (const auto& module : state.modules()) {
    names += (names.empty() ? "" : ", ") + module->name();
  }
  return names;
}

}  // namespace

void ModuleState::check_ranks_agree() const {
  const int level = debug_level();
  if (level == 0 || (level < 0 && !device.is_cpu())) {
    return;
  }
  std::vector<std::pair<ProcessGroup, std::string>> texts;  // one per mesh axis, in the order of the modules
  for (const auto& state : tree()) {
    for (const auto& group : state->groups) {
      std::string text;
      const std::string settings = state->policy_text() + group->settings_text();
      for (const FSDPParam& param : group->params()) {
        text += c10::str(settings, param.fqn(), " ", at::IntArrayRef(param.sizes()), " ", param.orig_dtype(),
                         param.requires_grad() ? " trainable" : " frozen", " in ", type_names(*state),
                         state->reshard_after_forward_ ? "" : ", kept after forward", ", ",
                         to_string(param.sharded_spec().placements), "\n");
      }
      for (const ProcessGroup& over : group->mesh().groups()) {
        auto known = std::find_if(texts.begin(), texts.end(), [&](const auto& each) { return each.first == over; });
        if (known == texts.end()) {
          known = texts.insert(texts.end(), {over, ""});
        }
        known->second += text;
      }
    }
  }
  // In an order that no rank's own modules decide.
  std::sort(texts.begin(), texts.end(), [](const auto& a, const auto& b) {
    return get_process_group_ranks(a.first) < get_process_group_ranks(b.first);
  });
  std::string first;  // all groups are asked first: the others wait for this rank there
  for (const auto& [group, text] : texts) {
    const std::string difference = difference_between_ranks(text, group);
    if (first.empty()) first = difference;
  }
  FSDP2_CHECK(first.empty(), kInvalidArgument, "[fsdp] ranks built different sharded models: ", first,
              "; every rank must build the same model and call fully_shard with the same options");
}

/// What else must be the same on every rank.
std::string ModuleState::policy_text() const {
  std::string text;
  const auto add = [&](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype) text += c10::str(name, " ", *dtype, ", ");
  };
  add("param_dtype", policy_.param_dtype);
  add("reduce_dtype", policy_.reduce_dtype);
  return text;
}

void ModuleState::check_written() const {
  for (const auto& module : modules()) {
    detail::check_written(*module);
  }
}

void ModuleState::enter_iteration() {
  context->recover_if_interrupted();
  if (context->diagnose_due && !context->in_backward()) [[unlikely]]
    diagnose_first_step(*context);
  context->iteration_root = this;
  if (!context->in_backward()) context->begin_in_place(/*only_changed=*/false);
  if (const auto event = std::move(context->post_optim_event)) {
    if (!device.is_cpu()) {
      event->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }
}

void ModuleState::convert_inputs(const TensorPointers& inputs) const {
  for (at::Tensor* tensor : inputs) {
    if (!tensor->defined() || is_marked(*tensor)) {
      continue;
    }
    if (!device.is_cpu() && context->iteration_root == this && tensor->device().is_cpu()) {
      *tensor = tensor->to(device);
    }
    if (policy_.cast_forward_inputs && policy_.param_dtype && tensor->is_floating_point() &&
        tensor->scalar_type() != *policy_.param_dtype) {
      *tensor = tensor->to(*policy_.param_dtype);
    }
  }
}

void ModuleState::convert_outputs(const TensorPointers& outputs) const {
  if (!policy_.output_dtype) {
    return;
  }
  for (at::Tensor* tensor : outputs) {
    if (tensor->defined() && tensor->is_floating_point() && tensor->scalar_type() != *policy_.output_dtype) {
      *tensor = tensor->to(*policy_.output_dtype);
    }
  }
}

void ModuleState::start_unshard() const {
  for (const auto& group : groups) group->unshard();
}

void ModuleState::unshard() const {
  start_unshard();
  for (const auto& group : groups) group->wait_for_unshard();
}

void ModuleState::pre_forward(const torch::nn::Module& module, const TensorPointers& inputs) {
  const ProfileRange range("FSDP::hooks");
  if (!in_tree_) {
    become_root(module);
  }
  if (context->iteration_root == nullptr) {
    enter_iteration();
  }
  ++depth_;
  ran_forward_ = true;
  const bool begins_pass = !in_pass_;
  in_pass_ = true;
  if (check_writes_) {
    check_written();
    check_writes_ = false;
  }
  convert_inputs(inputs);
  unshard();
  if (begins_pass && !groups.empty()) {
    attach_post_backward(inputs, shared_from_this());
  }
  ++context->forwards;
  if (begins_pass) {
    for (const auto& weak : forward_prefetch) {
      if (const auto next = weak.lock()) next->start_unshard();
    }
  }
  buffer_cast.begin();
  trace("forward", fqn_);
}

/// Whether the forward of all modules is over.
bool ModuleState::note_member_ran(const torch::nn::Module& module) {
  if (modules_.size() == 1) {
    return true;
  }
  ran_.insert(&module);
  return ran_.size() == modules_.size();
}

void ModuleState::forget_pass() noexcept {
  ran_.clear();
  in_pass_ = depth_ > 0;
  backward_follows_ = false;
}

void ModuleState::complete_forward(bool backward_follows) {
  forget_pass();
  if (reshard_after_forward_) {
    for (const auto& group : groups) group->reshard_after_forward(backward_follows);
  }
  // Recomputed in backward, it is no hint for what comes next there.
  if (backward_follows && !groups.empty() && !context->in_backward()) {
    context->record_forward(shared_from_this());
  }
}

void ModuleState::post_forward(const torch::nn::Module& module, const TensorPointers& outputs) {
  const ProfileRange range("FSDP::hooks");
  const bool outermost = --depth_ == 0;
  const bool ends_iteration = outermost && context->iteration_root == this;
  if (ends_iteration) {
    context->iteration_root = nullptr;  // also where something below throws
  }
  if (outermost) {
    buffer_cast.end();
    backward_follows_ |= will_run_backward(outputs);
    // Members of a list that are called on their own, without gradients, have nobody to complete their pass.
    const bool complete = note_member_ran(module) || (ends_iteration && !at::GradMode::is_enabled());
    if (complete) {
      complete_forward(backward_follows_);
    }
    attach_pre_backward(outputs, shared_from_this());
  }
  if (ends_iteration && is_root_) {
    for (auto weak = context->states.rbegin(); weak != context->states.rend(); ++weak) {
      if (const auto state = weak->lock(); state && !state->ran_.empty()) {
        // A list of which some were not called: its backward begins with the root's.
        state->complete_forward(state->backward_follows_);
        attach_pre_backward(outputs, state);
      }
    }
    context->drop_pending_gathers();
  }
  if (ends_iteration && !context->in_backward()) context->end_in_place(at::GradMode::is_enabled());
  convert_outputs(outputs);
}

void ModuleState::abandon_forward() noexcept {
  depth_ = depth_ > 0 ? depth_ - 1 : 0;
  if (depth_ > 0) {
    return;
  }
  try {
    buffer_cast.end();
    forget_pass();
    if (reshard_after_forward_) {
      for (const auto& group : groups) group->reshard();
    }
  } catch (...) {
    // Forward's own exception is the one to report.
  }
  if (context->iteration_root == this) {
    context->iteration_root = nullptr;
    if (!context->in_backward()) context->abandon_in_place();
    for (const auto& weak : context->states) {  // lists that ran in part
      if (const auto state = weak.lock(); state && state->depth_ == 0) state->forget_pass();
    }
  }
}

void ModuleState::pre_backward() {
  const ProfileRange range("FSDP::hooks");
  context->enter_backward();
  bool entered = false;
  for (const auto& group : groups) {
    entered |= group->enter_backward();
  }
  buffer_cast.begin();  // autograd saved the buffers themselves: it must meet the dtype that forward saw
  for (const auto& group : groups) {
    if (group->settings.unshard_in_backward) group->unshard();
  }
  for (const auto& group : groups) {
    if (group->settings.unshard_in_backward) group->wait_for_unshard();
  }
  if (!entered) return;
  prefetch_backward();
  trace("backward", fqn_);
}

void ModuleState::prefetch_backward() {
  const auto start = [](ModuleState& target) {
    for (auto group = target.groups.rbegin(); group != target.groups.rend(); ++group) {
      if ((*group)->settings.unshard_in_backward) (*group)->unshard();
    }
  };
  std::shared_ptr<ModuleState> previous;
  if (!forward_positions.empty()) {
    previous = context->forward_before(forward_positions.back());
    forward_positions.pop_back();
  }
  if (backward_prefetch.empty()) {
    if (previous) start(*previous);
    return;
  }
  for (const auto& weak : backward_prefetch) {
    if (const auto target = weak.lock()) start(*target);
  }
}

void ModuleState::post_backward() {
  const ProfileRange range("FSDP::hooks");
  if (!in_forward()) buffer_cast.end();
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    (*group)->post_backward(/*at_end=*/false, /*reshards=*/!in_forward());
  }
}

bool ModuleState::in_backward() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->in_backward(); });
}

void ModuleState::finish_backward() {
  if (!in_forward()) buffer_cast.end();
  forget_pass();
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    (*group)->post_backward(/*at_end=*/true, /*reshards=*/!in_forward());
  }
}

void ModuleState::reset() {
  buffer_cast.end();
  forget_pass();
  forward_positions.clear();
  for (const auto& group : groups) {
    group->reset();
  }
}

void pre_forward(ModuleState& state, const torch::nn::Module& module, const TensorPointers& inputs) {
  try {
    state.pre_forward(module, inputs);
  } catch (...) {
    state.abandon_forward();
    throw;
  }
}

void post_forward(ModuleState& state, const torch::nn::Module& module, const TensorPointers& outputs) {
  try {
    state.post_forward(module, outputs);
  } catch (...) {
    state.undo_leave();  // abandon_forward follows and leaves again
    throw;
  }
}

void abandon_forward(ModuleState& state) noexcept { state.abandon_forward(); }

}  // namespace fsdp2::detail
