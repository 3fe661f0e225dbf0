#pragma once

// Note [Tied parameters]
// A parameter under several names is one TensorImpl, so it is in one group, and whoever uses it must run while that
// group is whole: inside the forward of the group's module. Calls go bottom-up, so the first user's group has it until
// a call on a module that contains all users takes it over.

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "fsdp/module_state.h"

namespace fsdp2::detail {

struct MisplacedParameter {
  at::Tensor param;
  ParameterOwner owner;
};

/// Parameters below `roots` that a state below them owns, though a module outside that state's uses them too.
std::vector<MisplacedParameter> misplaced_parameters(const std::vector<std::shared_ptr<torch::nn::Module>>& roots);
/// Throws kUsage for a parameter below `root` that is used outside its owner, and for a trainable one that no group has
/// and nobody asked to ignore.
void check_parameters_taken(const torch::nn::Module& root);

}  // namespace fsdp2::detail
