#pragma once

// Where backward calls us.

#include <fsdp2/module.h>

#include <memory>

namespace fsdp2::detail {

class ModuleState;
class ParamGroup;

/// Replaces the inputs that require grad by aliases whose backward, after all gradients of the module, runs
/// group->post_backward().
void attach_post_backward(const TensorPointers& inputs, const std::shared_ptr<ParamGroup>& group);
/// Backward reaches the module's outputs: state->pre_backward(). Returns whether any output requires grad.
bool attach_pre_backward(const TensorPointers& outputs, const std::shared_ptr<ModuleState>& state);

}  // namespace fsdp2::detail
