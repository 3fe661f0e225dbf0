#pragma once

// What one fully_shard call takes.

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp2::detail {

class ModuleState;

struct NamedTensor {
  std::string fqn;
  at::Tensor tensor;
};

/// Collects parameters and buffers of modules and everything below them that no nested call has taken.
class ManagedCollector {
 public:
  /// `distributed`: parameters come as DTensors (dp_mesh_dims).
  ManagedCollector(const std::vector<at::Tensor>& ignored, bool distributed);
  /// Depth first, children before a module's own parameters.
  void visit(const torch::nn::Module& module, const std::string& prefix);

  std::vector<NamedTensor> params, buffers;
  /// Those that have parameters below already, from earlier calls.
  std::vector<std::shared_ptr<ModuleState>> owners;

 private:
  void add(const at::Tensor& param, const std::string& fqn);
  void check_own_memory(const at::Tensor& param, const std::string& fqn);

  bool distributed_;
  std::unordered_set<const torch::nn::Module*> modules_;
  std::unordered_set<const c10::TensorImpl*> tensors_, ignored_;
  std::map<const char*, std::pair<const char*, std::string>> memory_;  // begin; end and name
};

}  // namespace fsdp2::detail
