#pragma once

// The hooks of one module given to fully_shard. Note [One step, in the order of time] in module_state.cpp.

#include <fsdp2/module.h>
#include <fsdp2/policy.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/buffer_cast.h"
#include "fsdp/param_group.h"
#include "fsdp/training_context.h"

namespace fsdp2::detail {

class ModuleState : public std::enable_shared_from_this<ModuleState> {
 public:
  ModuleState(const std::shared_ptr<torch::nn::Module>& module, const MixedPrecisionPolicy& policy,
              const std::string& label);

  void pre_forward(const TensorPointers& inputs);
  void post_forward(const TensorPointers& outputs);
  void abandon_forward() noexcept;
  void pre_backward();

  std::shared_ptr<torch::nn::Module> module() const { return module_.lock(); }
  const std::string& label() const { return label_; }
  bool is_root() const { return is_root_; }
  /// This state and those of modules below it, in module order.
  std::vector<std::shared_ptr<ModuleState>> tree() const;

  void set_reshard_after_forward(bool reshard) {
    reshard_after_forward_ = reshard;
    reshard_is_default_ = false;
  }
  void set_default_reshard() { reshard_is_default_ = true; }
  /// Look at the tensors that to_empty() made again, at the next forward.
  void expect_writes() { check_writes_ = true; }

  std::shared_ptr<ParamGroup> group;  // null where nothing is left to manage
  std::shared_ptr<TrainingContext> context;
  std::vector<std::weak_ptr<ParamGroup>> forward_prefetch;
  BufferCast buffer_cast;
  c10::Device device = at::kCPU;

 private:
  void become_root();
  void check_written() const;
  void check_ranks_agree() const;

  std::weak_ptr<torch::nn::Module> module_;
  MixedPrecisionPolicy policy_;
  std::string label_;
  bool reshard_after_forward_ = true;
  bool reshard_is_default_ = false;
  bool is_root_ = false;
  bool in_tree_ = false;       // a root was found, this one or one above
  bool check_writes_ = true;
  int depth_ = 0;              // entries of forward that are running
};

// The registry: states are found from their module in O(1) and go with it.
std::shared_ptr<ModuleState> state_of(const torch::nn::Module& module);
void register_state(const std::shared_ptr<torch::nn::Module>& module, std::shared_ptr<ModuleState> state);
/// Drops the states of modules that are gone.
void purge_states() noexcept;
/// States of `module` and everything below it, in module order, each once.
std::vector<std::shared_ptr<ModuleState>> states_under(const torch::nn::Module& module);

}  // namespace fsdp2::detail
