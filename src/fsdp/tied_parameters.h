#pragma once

// Note [Tied parameters]
// A parameter under several names is one TensorImpl, so it is in one group, and whoever uses it must run while that
// group is whole: inside the forward of the group's module. Calls go bottom-up, so the first user's group has it until
// a call on a module that contains all users takes it over.

#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace fsdp2::detail {

class ModuleState;

struct MisplacedParameter {
  at::Tensor param;
  std::shared_ptr<ModuleState> owner;  // its group has the parameter now
};

/// Parameters below `roots` that a state below them owns, though a module outside that state's uses them too.
std::vector<MisplacedParameter> misplaced_parameters(const std::vector<std::shared_ptr<torch::nn::Module>>& roots);
/// Throws kUsage for a parameter below `root` that is used outside its owner.
void check_tied_parameters(const torch::nn::Module& root);
/// Throws kUsage for a trainable parameter below `root` that no group has and nobody asked to ignore.
void check_all_parameters_taken(const torch::nn::Module& root);

}  // namespace fsdp2::detail
