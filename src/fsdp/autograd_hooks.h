#pragma once

// Where backward calls us.

#include <fsdp2/module.h>

#include <memory>

namespace fsdp2::detail {

class ModuleState;

/// After all gradients of the module backward runs state->post_backward(). Mostly replaces the inputs that require grad
/// by aliases. Before state->context->forwards counts this forward.
void attach_post_backward(const TensorPointers& inputs, const std::shared_ptr<ModuleState>& state);
/// Whether backward can reach any of the outputs.
bool will_run_backward(const TensorPointers& outputs);
/// Backward reaches the module's outputs: state->pre_backward().
void attach_pre_backward(const TensorPointers& outputs, const std::shared_ptr<ModuleState>& state);

}  // namespace fsdp2::detail
