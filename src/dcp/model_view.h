#pragma once

// The tensors of a module as a state dict sees them.

#include <fsdp2/dcp/state_dict.h>
#include <torch/nn/module.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fsdp2::dcp::detail {

struct NamedTensor {
  std::string fqn;
  at::Tensor tensor;
  bool is_parameter;
};

/// The part of a module that the options select, under its names in a state dict. Groups that are unsharded at the
/// moment are resharded first.
class ModelView {
 public:
  /// kInvalidArgument: options that contradict each other; a submodule that is not in the module.
  ModelView(torch::nn::Module& module, const StateDictOptions& options);

  /// Parameters and persistent buffers, in Python's order: of a module before those of its children. A tied tensor
  /// comes once under each of its names.
  const std::vector<NamedTensor>& tensors() const { return tensors_; }
  /// All names of a parameter, the first one first; null where the options leave it out. kInvalidArgument if it is not
  /// a parameter of the module; `where` says whose it is.
  const std::vector<std::string>* names(const at::Tensor& param, const std::string& where) const;
  bool has_parameter(const std::string& fqn) const { return fqns_.count(fqn) != 0; }
  /// kUsage naming the trainable plain parameters beside DTensors that are not ignored by fully_shard.
  void check_fully_sharded() const;

 private:
  std::vector<NamedTensor> tensors_;
  std::unordered_map<const void*, std::vector<std::string>> names_;
  std::unordered_set<std::string> fqns_;            // of parameters
  std::unordered_set<const void*> all_parameters_;  // of the module, left out or not
};

/// Copies `value` into `target`. Both are DTensors of one layout, or `value` is plain and whole. `target` on meta gets
/// real memory: that of `value` where `may_take_over` and it fits as it is.
void assign_tensor(at::Tensor target, const at::Tensor& value, const std::string& fqn, bool may_take_over);
/// kInvalidArgument naming `fqn` where they do not fit.
void check_assignable(const at::Tensor& target, const at::Tensor& value, const std::string& fqn);

}  // namespace fsdp2::dcp::detail
