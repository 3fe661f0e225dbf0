#pragma once

// State dicts of models and optimizers. Python twin: torch.distributed.checkpoint.state_dict.

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>
#include <fsdp2/process_group.h>

namespace fsdp2 {

struct StateDictOptions {
  /// get_*: every DTensor becomes its whole tensor (new memory). Collective: every rank of `group` calls, and what one
  /// holds of a mesh, the others hold too; kInvalidArgument names the first tensor where they differ.
  /// set_*: the values are whole and stay the caller's: they are copied, never taken over.
  bool full_state_dict = false;
  /// get_*: tensors on the CPU (those that are there already are shared); DTensors stay DTensors. With full_state_dict
  /// only rank 0 of `group` gets entries, the others an empty dict and never more than one whole tensor at a time.
  bool cpu_offload = false;
  /// get_model_state_dict leaves parameters out that do not require gradients; set_model_state_dict lets them keep
  /// their values where the dict lacks them. Optimizers are not concerned.
  bool ignore_frozen_params = false;
  /// With `submodules` (exactly one then): false leaves its prefix out of the names.
  bool keep_submodule_prefixes = true;
  /// false: set_* accept missing and unexpected keys (they are in the report); an optimizer's parameter with
  /// incomplete state starts afresh.
  bool strict = true;
  /// set_*: rank 0 of `group` has the dict, the others may pass anything. Needs full_state_dict. Collective, whatever
  /// the dicts hold; an error on any rank reaches all. Tensors travel one by one: at most one is held beyond the
  /// destination.
  bool broadcast_from_rank0 = false;
  /// get_optimizer_state_dict gives one level of keys, `state.<fqn>.exp_avg` and `param_groups.<fqn>.lr`, that do not
  /// depend on how parameters are grouped. set_* tell the forms apart by themselves.
  bool flatten_optimizer_state_dict = false;
  /// Only the parameters (and buffers) of these modules inside of the model; {} = all. Others are neither missing nor
  /// changed.
  std::vector<ModuleRef> submodules = {};
  /// Ranks that take part where a call is collective; {} = the default group, or this process alone without one.
  ProcessGroup group = {};
};

/// Parameters and persistent buffers by FQN. Without full_state_dict not collective and sharing memory with the model:
/// sharded ones are DTensors (a group that is unsharded at the moment is resharded first). Plain tensors share memory
/// in any case. A tied parameter is under each of its names. kUsage: a trainable plain parameter beside DTensors that
/// is not in ignored_params (a forgotten fully_shard). kInvalidArgument: options that contradict each other, a
/// submodule that is not in the model.
FSDP2_API dcp::StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options = {});

/// Copies values into the model. A value is a DTensor of the parameter's layout or a plain tensor of its full shape,
/// of which each rank takes its part; collective only with broadcast_from_rank0. `state` is not changed. Parameters on
/// meta are materialised; without full_state_dict they take the values over where they fit as they are (so that a
/// dict that dcp::load has filled becomes the model). kNotFound: missing keys (strict); kInvalidArgument: unexpected
/// keys (strict), other sizes or layout, a value that is no tensor or on meta. Nothing is changed then.
FSDP2_API dcp::LoadReport set_model_state_dict(ModuleRef module, const dcp::StateDict& state,
                                               const StateDictOptions& options = {});

/// {"state": {fqn: {"step": float32 scalar, "exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [fqn, ...]}]}
/// with PyTorch's keys for SGD, Adam, AdamW, Adagrad and RMSprop, or flat. Several optimizers become one dict. State
/// that does not exist yet appears as zeros (no step is taken, the optimizer is not changed); a frozen parameter has
/// state only where the optimizer has. Tensors share memory with the optimizer unless full_state_dict makes them whole.
/// A strict dcp::load into the nested form forgives what it should: hyper-parameters that the checkpoint lacks keep
/// their value, and a parameter without any state in it comes back without (both with a note); a part of the state of
/// a parameter is kNotFound. kUnsupported: another optimizer. kInvalidArgument: a parameter that is not the module's,
/// or in two optimizers.
FSDP2_API dcp::StateDict get_optimizer_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer,
                                                  const StateDictOptions& options = {});
FSDP2_API dcp::StateDict get_optimizer_state_dict(ModuleRef module,
                                                  const std::vector<torch::optim::Optimizer*>& optimizers,
                                                  const StateDictOptions& options = {});

/// The reverse, of any of the forms: nested, flat, or what torch.optim's own state_dict() gives (parameters by number,
/// for one optimizer with as many). `state` is not changed and may hold more parameters than the optimizers. Groups
/// are matched by the parameters in them, empty ones by their order where both sides have as many. Hyper-parameters
/// that the dict lacks or that libtorch does not have keep their constructed value, a parameter without any state
/// starts afresh (frozen: keeps its state); both with a note in the log. Call it before backward or after step. Without
/// full_state_dict, tensors of state that the optimizer lacks are taken over, not copied. kNotFound: the state of a
/// parameter is incomplete, or the dict has state for none of them (both strict). kInvalidArgument: another shape or
/// layout; a group whose parameters come from groups with other hyper-parameters; none of the forms. Nothing is
/// changed then.
FSDP2_API void set_optimizer_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer,
                                        const dcp::StateDict& state, const StateDictOptions& options = {});
FSDP2_API void set_optimizer_state_dict(ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers,
                                        const dcp::StateDict& state, const StateDictOptions& options = {});

/// Model and optimizer at once: what each of the two calls gives.
FSDP2_API std::pair<dcp::StateDict, dcp::StateDict> get_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer,
                                                                   const StateDictOptions& options = {});
FSDP2_API std::pair<dcp::StateDict, dcp::StateDict> get_state_dict(
    ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers, const StateDictOptions& options = {});
/// Both dicts are looked at before either is used: after an error neither model nor optimizer has changed.
FSDP2_API void set_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer, const dcp::StateDict& model,
                              const dcp::StateDict& optim, const StateDictOptions& options = {});
FSDP2_API void set_state_dict(ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers,
                              const dcp::StateDict& model, const dcp::StateDict& optim,
                              const StateDictOptions& options = {});

}  // namespace fsdp2
