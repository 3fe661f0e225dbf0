#pragma once

// What fully_shard hangs on a module: hooks, policy, groups. Note [One step, in the order of time] in module_state.cpp.

#include <fsdp2/module.h>
#include <fsdp2/policy.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "fsdp/buffer_cast.h"
#include "fsdp/param_group.h"
#include "fsdp/training_context.h"

namespace fsdp2::detail {

class ModuleState : public std::enable_shared_from_this<ModuleState> {
 public:
  /// Several modules are those of one list.
  ModuleState(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const MixedPrecisionPolicy& policy,
              const std::string& label);

  void pre_forward(const torch::nn::Module& module, const TensorPointers& inputs);
  void post_forward(const torch::nn::Module& module, const TensorPointers& outputs);
  void abandon_forward() noexcept;
  void undo_leave() noexcept { ++depth_; }
  void pre_backward();
  /// Gradients of the modules' inputs are there.
  void post_backward();
  /// Backward reached the modules or their parameters, and post_backward() did not follow yet.
  bool in_backward() const;
  /// Backward is over, perhaps one inside of a forward.
  void finish_backward();
  bool in_forward() const { return depth_ > 0; }
  /// After an exception.
  void reset();

  void start_unshard() const;
  /// Starts every group's gather before it waits for the first.
  void unshard() const;

  /// Those that are alive.
  std::vector<std::shared_ptr<torch::nn::Module>> modules() const;
  const std::string& label() const { return label_; }
  /// From the root ("" is the root, and any module before the first forward), those of a list joined.
  const std::string& fqn() const { return fqn_; }
  bool is_root() const { return is_root_; }
  /// This state and those of modules below it, in module order.
  std::vector<std::shared_ptr<ModuleState>> tree() const;

  void set_reshard_after_forward(bool reshard) {
    reshard_after_forward_ = reshard;
    reshard_is_default_ = false;
    asked_reshard = reshard;
  }
  void set_default_reshard() { reshard_is_default_ = true; }
  /// Look at the tensors that to_empty() made again, at the next forward.
  void expect_writes() { check_writes_ = true; }

  std::vector<std::shared_ptr<ParamGroup>> groups;  // one per mesh; empty where nothing is left to manage
  std::shared_ptr<TrainingContext> context;
  std::vector<std::weak_ptr<ModuleState>> forward_prefetch, backward_prefetch;
  std::vector<size_t> forward_positions;  // in the context's forward order; the last is used first in backward
  BufferCast buffer_cast;
  c10::Device device = at::kCPU;

  // For diagnose().
  const MixedPrecisionPolicy& policy() const { return policy_; }
  bool ran_forward() const { return ran_forward_; }
  bool reshards_after_forward() const { return reshard_after_forward_; }
  ReshardAfterForward asked_reshard;  // as the user wrote it last

 private:
  void become_root(const torch::nn::Module& module);
  void name_from(const torch::nn::Module& root);
  void check_written() const;
  void check_ranks_agree() const;
  std::string policy_text() const;
  void enter_iteration();
  void convert_inputs(const TensorPointers& inputs) const;
  void convert_outputs(const TensorPointers& outputs) const;
  bool note_member_ran(const torch::nn::Module& module);
  void complete_forward(bool backward_follows);
  void forget_pass() noexcept;
  void prefetch_backward();

  std::vector<std::weak_ptr<torch::nn::Module>> modules_;
  MixedPrecisionPolicy policy_;
  std::string label_, fqn_;
  bool reshard_after_forward_ = true;
  bool reshard_is_default_ = false;
  bool is_root_ = false;
  bool in_tree_ = false;  // a root was found, this one or one above
  bool check_writes_ = true;
  bool ran_forward_ = false;  // through the hooks, ever
  int depth_ = 0;             // entries of forward that are running
  // Of a list: members that ran in the forward under way; it is over when all did.
  std::unordered_set<const torch::nn::Module*> ran_;
  bool in_pass_ = false;
  bool backward_follows_ = false;
};

// The registry: states are found from their module in O(1) and go with it.
std::shared_ptr<ModuleState> state_of(const torch::nn::Module& module);
void register_state(const std::shared_ptr<torch::nn::Module>& module, std::shared_ptr<ModuleState> state);
/// Drops the states of modules that are gone.
void purge_states() noexcept;
/// States of `module` and everything below it, in module order, each once.
std::vector<std::shared_ptr<ModuleState>> states_under(const torch::nn::Module& module);
std::vector<std::shared_ptr<ModuleState>> states_under(const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

/// Who has a parameter. Null members where nobody does, or its module is gone.
struct ParameterOwner {
  std::shared_ptr<ModuleState> state;
  std::shared_ptr<ParamGroup> group;
  size_t index = 0;  // in the group
  explicit operator bool() const { return state != nullptr; }
  /// The owner's name for the parameter.
  const std::string& fqn() const;
};
ParameterOwner owner_of(const Tensor& param);

}  // namespace fsdp2::detail
