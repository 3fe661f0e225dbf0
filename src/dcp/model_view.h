#pragma once

// The tensors of a module as a state dict sees them.

#include <torch/nn/module.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace fsdp2::dcp::detail {

struct NamedTensor {
  std::string fqn;
  at::Tensor tensor;
  bool is_parameter;
};

/// Parameters and persistent buffers, in Python's order: of a module before those of its children.
/// Groups that are unsharded at the moment are resharded first. A tied tensor comes once under each
/// of its names.
std::vector<NamedTensor> state_tensors(torch::nn::Module& module);

/// kUsage naming the trainable plain parameters beside DTensors that are not ignored by
/// fully_shard.
void check_fully_sharded(const std::vector<NamedTensor>& tensors);

/// All names of each parameter, the first one first.
std::unordered_map<const void*, std::vector<std::string>> names_of_parameters(const std::vector<NamedTensor>& tensors);

/// Copies `value` into `target`. Both are DTensors of one layout, or `value` is plain and whole.
/// `target` on meta gets real memory. kInvalidArgument naming `fqn` where they do not fit.
void assign_tensor(at::Tensor target, const at::Tensor& value, const std::string& fqn);
/// Throws where assign_tensor() would.
void check_assignable(const at::Tensor& target, const at::Tensor& value, const std::string& fqn);

}  // namespace fsdp2::dcp::detail
