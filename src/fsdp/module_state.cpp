#include "fsdp/module_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include <fsdp2/error.h>

#include "fsdp/autograd_hooks.h"
#include "fsdp/debug_level.h"
#include "module/written.h"

namespace fsdp2::detail {

// Note [One step, in the order of time]
// The first module called becomes the root of its tree (become_root). For each module with hooks, in forward:
// gather its group, cast the inputs, put a PostBackward node on them; run forward; free the group, hook the outputs
// for backward, cast them. In backward, the first hook queues the end-of-backward callback; for each group in
// reverse: PreBackward gathers it and starts the gather of the one before; gradients accumulate; PostBackward frees it
// and starts its reduction. The callback at the end does the same for groups whose PostBackward never ran (inputs
// without gradient, unused modules), waits for the reductions, and leaves everything sharded.

ModuleState::ModuleState(const std::shared_ptr<torch::nn::Module>& module, const MixedPrecisionPolicy& policy,
                         const std::string& label)
    : context(std::make_shared<TrainingContext>(label)), module_(module), policy_(policy), label_(label) {
  buffer_cast.set_dtype(policy.buffer_dtype);
}

std::vector<std::shared_ptr<ModuleState>> ModuleState::tree() const {
  const auto alive = module();
  return alive ? states_under(*alive) : std::vector<std::shared_ptr<ModuleState>>{};
}

void ModuleState::become_root() {
  const auto states = tree();
  for (const auto& state : states) {
    FSDP2_CHECK(state.get() == this || !state->is_root_, kUsage, "[fsdp] ", state->label_,
                " ran its forward before its root ", label_, " did, and so was taken for a root itself; run the forward "
                "of the outermost module first");
  }
  check_ranks_agree();
  context->states.clear();
  for (const auto& state : states) {
    state->context = context;
    state->in_tree_ = true;
    if (state->group) {
      state->group->context = context;
    }
    context->states.push_back(state);
  }
  is_root_ = true;
  if (reshard_is_default_) {
    reshard_after_forward_ = false;  // backward needs the root's parameters first
  }
}

namespace {

/// Where two texts begin to differ, the line of `text`.
std::string line_at(const std::string& text, size_t position) {
  const size_t begin = position == 0 ? 0 : text.rfind('\n', position - 1) + 1;
  return begin >= text.size() ? std::string("nothing") : text.substr(begin, text.find('\n', begin) - begin);
}

void check_equal_on_all_ranks(const std::string& mine, const ProcessGroup& group) {
  const std::vector<std::string> all = all_gather_strings(mine, group);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) {
      continue;
    }
    size_t at = 0;
    while (at < all[0].size() && at < all[rank].size() && all[0][at] == all[rank][at]) ++at;
    FSDP2_THROW(kInvalidArgument, "[fsdp] ranks built different sharded models: rank 0 of the mesh has \"",
                line_at(all[0], at), "\" where rank ", rank, " has \"", line_at(all[rank], at),
                "\"; every rank must build the same model and call fully_shard with the same options");
  }
}

}  // namespace

void ModuleState::check_ranks_agree() const {
  const int level = debug_level();
  if (level == 0 || (level < 0 && !device.is_cpu())) {
    return;
  }
  std::vector<std::pair<ProcessGroup, std::string>> texts;  // one per mesh, in the order of the modules
  for (const auto& state : tree()) {
    if (!state->group) {
      continue;
    }
    const ProcessGroup over = state->group->mesh().get_group(0);
    auto text = std::find_if(texts.begin(), texts.end(), [&](const auto& known) { return known.first == over; });
    if (text == texts.end()) {
      text = texts.insert(texts.end(), {over, ""});
    }
    for (const FSDPParam& param : state->group->params()) {
      text->second += c10::str(param.fqn(), " ", at::IntArrayRef(param.sizes()), " ", param.orig_dtype(),
                               param.requires_grad() ? " trainable" : " frozen", " in ", state->module()->name(),
                               state->reshard_after_forward_ ? "" : ", kept after forward", "\n");
    }
  }
  for (const auto& [group, text] : texts) {
    check_equal_on_all_ranks(text, group);
  }
}

void ModuleState::check_written() const {
  if (const auto alive = module()) {
    detail::check_written(*alive);
  }
}

void ModuleState::pre_forward(const TensorPointers& inputs) {
  if (!in_tree_) {
    become_root();
  }
  if (context->iteration_root == nullptr) {
    context->recover_if_interrupted();
    context->iteration_root = this;
  }
  ++depth_;
  if (check_writes_) {
    check_written();
    check_writes_ = false;
  }
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
  if (group) {
    group->wait_for_unshard();
    if (depth_ == 1) {
      attach_post_backward(inputs, group);
    }
  }
  for (const auto& weak : forward_prefetch) {
    if (const auto next = weak.lock()) {
      next->unshard();
    }
  }
  buffer_cast.begin();
}

void ModuleState::post_forward(const TensorPointers& outputs) {
  const bool outermost = --depth_ == 0;
  const bool ends_iteration = outermost && context->iteration_root == this;
  if (ends_iteration) {
    context->iteration_root = nullptr;  // also where something below throws
  }
  if (outermost) {
    buffer_cast.end();
    if (group && reshard_after_forward_) {
      group->reshard();
    }
    const bool has_backward = attach_pre_backward(outputs, shared_from_this());
    if (group && has_backward) {
      context->record_forward(group);
    }
  }
  if (ends_iteration && is_root_) {
    context->drop_pending_gathers();
  }
  if (policy_.output_dtype) {
    for (at::Tensor* tensor : outputs) {
      if (tensor->defined() && tensor->is_floating_point() && tensor->scalar_type() != *policy_.output_dtype) {
        *tensor = tensor->to(*policy_.output_dtype);
      }
    }
  }
}

void ModuleState::abandon_forward() noexcept {
  depth_ = depth_ > 0 ? depth_ - 1 : 0;
  if (depth_ > 0) {
    return;
  }
  try {
    buffer_cast.end();
    if (group && reshard_after_forward_) {
      group->reshard();
    }
  } catch (...) {
    // Forward's own exception is the one to report.
  }
  if (context->iteration_root == this) {
    context->iteration_root = nullptr;
  }
}

void ModuleState::pre_backward() {
  context->enter_backward();
  if (group) {
    group->pre_backward();
  }
}

void pre_forward(ModuleState& state, const TensorPointers& inputs) {
  try {
    state.pre_forward(inputs);
  } catch (...) {
    state.abandon_forward();
    throw;
  }
}

void post_forward(ModuleState& state, const TensorPointers& outputs) { state.post_forward(outputs); }

void abandon_forward(ModuleState& state) noexcept { state.abandon_forward(); }

}  // namespace fsdp2::detail
