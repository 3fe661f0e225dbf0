#pragma once

// State dicts of models and optimizers. Python twin: torch.distributed.checkpoint.state_dict.

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>

namespace fsdp2 {

struct StateDictOptions {
  bool full_state_dict = false;
  bool cpu_offload = false;
  bool ignore_frozen_params = false;
  bool keep_submodule_prefixes = true;
  /// false: set_* accept missing and unexpected keys (they are in the report).
  bool strict = true;
  bool broadcast_from_rank0 = false;
  bool flatten_optimizer_state_dict = false;
};
// Options that are not offered yet throw kUnsupported naming the field when set to another value
// than the default: all but `strict`.

/// Parameters and persistent buffers by FQN, sharing memory with the model (sharded ones are
/// DTensors; a group that is unsharded at the moment is resharded first). A tied parameter is under
/// each of its names. kUsage: a trainable plain parameter beside DTensors that is not in
/// ignored_params (a forgotten fully_shard).
FSDP2_API dcp::StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options = {});

/// Copies values into the model. A value is a DTensor of the parameter's layout or a plain tensor
/// of its full shape (the same on every rank). Parameters on meta are materialised: they take the
/// values over where they fit as they are. Not collective. kNotFound: missing keys (strict);
/// kInvalidArgument: unexpected keys (strict), other sizes or layout.
FSDP2_API dcp::LoadReport set_model_state_dict(ModuleRef module, const dcp::StateDict& state,
                                               const StateDictOptions& options = {});

/// {"state": {fqn: {"step": float32 scalar, "exp_avg": ...}}, "param_groups": [{"lr": ...,
/// "params": [fqn, ...]}]} with PyTorch's keys for SGD, Adam, AdamW, Adagrad and RMSprop. State
/// that does not exist yet appears as zeros (no step is taken, the optimizer is not changed).
/// Tensors share memory with the optimizer.
FSDP2_API dcp::StateDict get_optimizer_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer,
                                                  const StateDictOptions& options = {});
FSDP2_API dcp::StateDict get_optimizer_state_dict(ModuleRef module,
                                                  const std::vector<torch::optim::Optimizer*>& optimizers,
                                                  const StateDictOptions& options = {});

/// The reverse: state by FQN, groups matched by the parameters in them; hyper-parameters that the
/// dict lacks or that libtorch does not have keep their constructed value, with a note in the log.
/// A parameter without any state in the dict starts afresh, with a note. Call it before backward or
/// after step. Tensors of state that the optimizer lacks are taken over, not copied. kNotFound: the
/// state of a parameter is incomplete, or the dict has state for none of them.
FSDP2_API void set_optimizer_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer,
                                        const dcp::StateDict& state, const StateDictOptions& options = {});
FSDP2_API void set_optimizer_state_dict(ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers,
                                        const dcp::StateDict& state, const StateDictOptions& options = {});

/// Model and optimizer at once.
FSDP2_API std::pair<dcp::StateDict, dcp::StateDict> get_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer,
                                                                   const StateDictOptions& options = {});
FSDP2_API std::pair<dcp::StateDict, dcp::StateDict> get_state_dict(
    ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers, const StateDictOptions& options = {});
FSDP2_API void set_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer, const dcp::StateDict& model,
                              const dcp::StateDict& optim, const StateDictOptions& options = {});
FSDP2_API void set_state_dict(ModuleRef module, const std::vector<torch::optim::Optimizer*>& optimizers,
                              const dcp::StateDict& model, const dcp::StateDict& optim,
                              const StateDictOptions& options = {});

}  // namespace fsdp2
