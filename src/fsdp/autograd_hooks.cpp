#include "fsdp/autograd_hooks.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "fsdp/module_state.h"
#include "torch_compat.h"

namespace fsdp2::detail {

namespace {

using torch::autograd::variable_list;

/// Identity over the module's inputs. Autograd runs AccumulateGrad nodes first whenever they are ready, so when this
/// one runs, the gradients of the parameters are there.
struct PostBackward : torch::autograd::Node {
  PostBackward(torch::autograd::edge_list&& edges, std::weak_ptr<ModuleState> state)
      : Node(std::move(edges)), state_(std::move(state)) {}
  variable_list apply(variable_list&& gradients) override {
    if (const auto state = state_.lock()) {
      state->post_backward();
    }
    return std::move(gradients);
  }
  std::string name() const override { return "fsdp2::PostBackward"; }

 private:
  std::weak_ptr<ModuleState> state_;
};

struct PreBackward : torch::autograd::FunctionPreHook {
  PreBackward(std::weak_ptr<ModuleState> state, const TrainingContext& context, torch::autograd::Node* owner)
      : state_(std::move(state)), context_(&context), forwards_(context.forwards), owner_(owner) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto next = next_.lock(); next && next->in_backward()) {
      next->post_backward();
    }
    if (const auto state = state_.lock(); state && owner_will_run()) {
      state->pre_backward();
    }
    return gradients;
  }
  /// Whether no forward of a module began since this was made.
  bool is_newest_of(const TrainingContext& context) const {
    return &context == context_ && context.forwards == forwards_;
  }
  void set_next(std::weak_ptr<ModuleState> next) { next_ = std::move(next); }
  bool is_next(const std::shared_ptr<ModuleState>& state) const { return next_.lock() == state; }

 private:
  /// Not where autograd only wants the gradient of this tensor, as for torch::autograd::grad with respect to it.
  bool owner_will_run() const {
    const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
    if (chosen == nullptr || chosen->empty()) return true;
    const auto found = chosen->find(owner_);
    return found != chosen->end() && found->second.needed_;
  }

  std::weak_ptr<ModuleState> state_, next_;
  const TrainingContext* context_;  // to compare only
  uint64_t forwards_;
  torch::autograd::Node* owner_;  // it owns this hook
};

bool takes_part(const at::Tensor* tensor) {
  return tensor->defined() && tensor->requires_grad() && !is_marked(*tensor);
}

/// The first of this library's hooks on the node that `fits`; null where none does.
template <class Fits>
PreBackward* find_hook(torch::autograd::Node& node, Fits&& fits) {
  for (const auto& hook : node.tensor_pre_hooks()) {
    auto* ours = dynamic_cast<PreBackward*>(hook.get());
    if (ours != nullptr && fits(*ours)) return ours;
  }
  return nullptr;
}

// Note [Post-backward without a node]
// A node of its own costs autograd a third of what all hooks of a module do. Where a module takes the output of the
// one before as it is, that module's PreBackward runs at the right moment already: then the gradient of this tensor is
// complete, so every node of the next module is done, and AccumulateGrad nodes that were ready ran first. Only the
// first module to take the tensor, with no other in between: in backward its gradient is the last to come, so nothing
// is kept longer. Not for a view: in-place operators on the input would move the hook away from it.
bool leave_it_to_pre_backward(const at::Tensor& input, const std::shared_ptr<ModuleState>& state) {
  const auto& node = input.grad_fn();
  if (!node || input.is_view()) {
    return false;
  }
  PreBackward* before = find_hook(*node, [&](const PreBackward& each) { return each.is_newest_of(*state->context); });
  if (before != nullptr) before->set_next(state);
  return before != nullptr;
}

}  // namespace

void attach_post_backward(const TensorPointers& inputs, const std::shared_ptr<ModuleState>& state) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  c10::SmallVector<at::Tensor*, 4> taking_part;
  for (at::Tensor* tensor : inputs) {
    if (takes_part(tensor)) taking_part.push_back(tensor);
  }
  if (taking_part.empty() || (taking_part.size() == 1 && leave_it_to_pre_backward(*taking_part[0], state))) {
    return;
  }
  torch::autograd::edge_list edges;
  for (const at::Tensor* tensor : taking_part) {
    edges.push_back(torch::autograd::impl::gradient_edge(*tensor));
  }
  const auto node = make_node<PostBackward>(std::move(edges), state);
  for (at::Tensor* tensor : taking_part) {
    // A view made without grad mode: an in-place operator on it inside forward throws, where a detached alias would
    // silently give a wrong gradient.
    at::Tensor alias;
    {
      const at::NoGradGuard no_grad;
      alias = tensor->view_as(*tensor);
    }
    torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
    *tensor = std::move(alias);
  }
}

bool will_run_backward(const TensorPointers& outputs) {
  return at::GradMode::is_enabled() && std::any_of(outputs.begin(), outputs.end(), takes_part);
}

void attach_pre_backward(const TensorPointers& outputs, const std::shared_ptr<ModuleState>& state) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  c10::SmallVector<torch::autograd::Node*, 4> hooked;
  for (at::Tensor* tensor : outputs) {
    if (!takes_part(tensor)) {
      continue;
    }
    if (!tensor->grad_fn()) {
      *tensor = tensor->view_as(*tensor);  // a leaf would keep the hook for ever
    }
    torch::autograd::Node* node = tensor->grad_fn().get();
    // The input itself, handed through: backward is done with the module there.
    const bool is_input = find_hook(*node, [&](const PreBackward& each) { return each.is_next(state); }) != nullptr;
    if (!is_input && std::find(hooked.begin(), hooked.end(), node) == hooked.end()) {
      node->add_tensor_pre_hook(std::make_unique<PreBackward>(state, *state->context, node));
      hooked.push_back(node);
    }
  }
}

}  // namespace fsdp2::detail
