#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/state_dict.h>
#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <algorithm>
#include <unordered_map>

#include "dcp/local_parts.h"
#include "dcp/model_view.h"
#include "dcp/optimizer_layout.h"
#include "dcp/state_dict_options.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2 {
namespace {

using namespace dcp::detail;
using dcp::Kind;
using dcp::StateDict;
using dcp::Value;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

using Names = std::unordered_map<const void*, std::vector<std::string>>;

const std::vector<std::string>& names_in(const Names& names, const at::Tensor& param, size_t group, size_t place) {
  const auto found = names.find(param.unsafeGetTensorImpl());
  FSDP2_CHECK(found != names.end(), kInvalidArgument, "[dcp] parameter ", place, " of group ", group,
              " of the optimizer (shape ", param.sizes(),
              ") is not a parameter of the module; make the optimizer from the module's parameters()");
  return found->second;
}

/// State of the parameter's layout: a fresh one filled with `value`.
at::Tensor full_like_param(const at::Tensor& param, double value) {
  const fsdp2::detail::BelowDTensor below;
  const at::Tensor fresh = on_meta(param) ? detached(param) : fresh_like(param);
  const auto* spec = fsdp2::detail::spec_of(fresh);
  at::Tensor data = spec ? spec->local : fresh;
  if (!data.is_meta()) data.fill_(value);
  return fresh;
}

/// State that was made before its parameter was sharded is whole: this rank's part of it, as a
/// DTensor.
at::Tensor in_layout_of(const at::Tensor& param, const at::Tensor& state, const std::string& fqn) {
  const bool adopt = fsdp2::detail::is_marked(param) && !fsdp2::detail::is_marked(state) && !on_meta(param);
  if (!adopt) return detached(state);
  check_assignable(param, state, fqn);
  const auto* spec = fsdp2::detail::spec_of(param);
  const fsdp2::detail::BelowDTensor below;
  at::Tensor own = fsdp2::detail::make_dtensor_like(
      *spec, at::empty(spec->local.sizes(), state.options().device(spec->local.device())));
  assign_tensor(own, state, fqn);
  return own;
}

/// State of one parameter in Python's words.
StateDict read_state(const OptimizerLayout& layout, const torch::optim::OptimizerOptions& options,
                     OptimizerParamState* state, const at::Tensor& param, const std::string& fqn) {
  StateDict result;
  const std::vector<std::string> fields = layout.fields(options);
  if (fields.empty()) return result;
  const std::unique_ptr<OptimizerParamState> absent = state ? nullptr : layout.make_state();
  OptimizerParamState& source = state ? *state : *absent;
  if (const int64_t* step = layout.step(source))
    result["step"] = at::scalar_tensor(static_cast<double>(*step), at::kFloat);
  for (const std::string& name : fields) {
    const at::Tensor& tensor = layout.field(source, name);
    const std::string where = "state." + fqn + "." + name;
    result[name] =
        tensor.defined() ? in_layout_of(param, tensor, where) : full_like_param(param, layout.initial_value(options));
  }
  return result;
}

int64_t step_of(const Value& value, const std::string& where) {
  const bool tensor = value.kind() == Kind::Tensor;
  FSDP2_CHECK(!tensor || value.tensor().numel() == 1, kInvalidArgument, "[dcp] ", where, " has ",
              value.tensor().numel(), " elements; a step is one number");
  return tensor ? static_cast<int64_t>(value.tensor().item<double>()) : static_cast<int64_t>(value.number());
}

/// Puts the state of one parameter into the optimizer.
void write_state(const OptimizerLayout& layout, const OptimizerParamGroup& group, Optimizer& optimizer,
                 const at::Tensor& param, const std::string& fqn, const StateDict& saved) {
  auto& slot = optimizer.state()[param.unsafeGetTensorImpl()];
  if (!slot) slot = layout.make_state();
  if (int64_t* step = layout.step(*slot)) *step = step_of(saved.at("step"), "state." + fqn + ".step");
  for (const std::string& name : layout.fields(group.options())) {
    const std::string where = "state." + fqn + "." + name;
    const at::Tensor& value = saved.at(name).tensor();
    at::Tensor& target = layout.field(*slot, name);
    const bool keep =
        target.defined() && !on_meta(target) && fsdp2::detail::is_marked(target) == fsdp2::detail::is_marked(param);
    if (keep) {
      assign_tensor(target, value, where);
    } else {
      target = in_layout_of(param, value, where);
    }
  }
}

class OptimizerSetter {
 public:
  OptimizerSetter(const Names& names, const StateDict& state) : names_(names) {
    FSDP2_CHECK(state.contains("state") || state.contains("param_groups"), kInvalidArgument,
                "[dcp] an optimizer state dict has the keys \"state\" and \"param_groups\"; this one has ",
                state.empty() ? "none" : state.keys().front(), " (the flattened form is not offered yet)");
    if (state.contains("state")) state_ = state.at("state").dict();
    FSDP2_CHECK(state.contains("param_groups"), kNotFound, "[dcp] the optimizer state dict has no \"param_groups\"");
    groups_ = state.at("param_groups").list();
    for (size_t i = 0; i < groups_.size(); ++i) {
      for (const Value& fqn : groups_[i].dict().at("params").list()) group_of_.emplace(fqn.str(), i);
    }
  }

  /// First everything is looked at, then everything is changed.
  void run(const std::vector<Optimizer*>& optimizers) {
    for (const bool apply : {false, true}) {
      for (Optimizer* optimizer : optimizers) {
        for (size_t g = 0; g < optimizer->param_groups().size(); ++g) set_group(*optimizer, g, apply);
      }
      FSDP2_CHECK(apply || found_ > 0 || state_.empty() || absent_ == 0, kNotFound,
                  "[dcp] the optimizer state dict has state for no parameter of the optimizer; its "
                  "first key is ",
                  state_.empty() ? "" : state_.begin()->first);
    }
    if (absent_ > 0) {
      FSDP2_LOG_WARN("[dcp] ", absent_, " parameters had no optimizer state yet when the checkpoint was saved, e.g. ",
                     first_absent_, "; they start afresh");
    }
  }

 private:
  void set_group(Optimizer& optimizer, size_t index, bool apply) {
    OptimizerParamGroup& group = optimizer.param_groups()[index];
    const OptimizerLayout& layout = layout_of(group.options());
    const StateDict* saved = saved_group(group, index);
    if (apply && saved) set_hyper_parameters(layout, group, *saved);
    for (size_t i = 0; i < group.params().size(); ++i) {
      const at::Tensor& param = group.params()[i];
      set_param(optimizer, group, layout, param, names_in(names_, param, index, i), apply);
    }
  }

  /// The saved group that has this group's parameters.
  const StateDict* saved_group(const OptimizerParamGroup& group, size_t index) const {
    std::optional<size_t> found;
    for (size_t i = 0; i < group.params().size(); ++i) {
      for (const std::string& name : names_in(names_, group.params()[i], index, i)) {
        const auto entry = group_of_.find(name);
        if (entry == group_of_.end()) continue;
        FSDP2_CHECK(!found || *found == entry->second, kInvalidArgument, "[dcp] group ", index,
                    " of the optimizer has parameters of groups ", *found, " and ", entry->second,
                    " of the state dict (", name, "); group the parameters as they were saved");
        found = entry->second;
        break;
      }
    }
    if (found) return &groups_[*found].dict();
    if (!group.params().empty())
      FSDP2_LOG_WARN("[dcp] group ", index,
                     " of the optimizer is in no group of the state dict; it keeps its hyper-parameters");
    return nullptr;
  }

  static void set_hyper_parameters(const OptimizerLayout& layout, OptimizerParamGroup& group, const StateDict& saved) {
    const StateDict defaults = layout.hyper_parameters(group.options());
    for (const auto& [key, value] : saved) {
      if (key == "params") continue;
      // How Python computes, not what.
      const bool without_effect = key == "foreach" || key == "fused" || key == "capturable" || key == "differentiable";
      if (layout.set_hyper_parameter(group.options(), key, value) || without_effect) continue;
      const bool same = defaults.contains(key) && defaults.at(key).kind() == Kind::Bool && value.kind() == Kind::Bool &&
                        defaults.at(key).boolean() == value.boolean();
      if (!same)
        FSDP2_LOG_WARN("[dcp] the saved hyper-parameter ", key,
                       " has no counterpart in this optimizer and is not used");
    }
    for (const auto& [key, value] : defaults) {
      if (!saved.contains(key))
        FSDP2_LOG_INFO("[dcp] the saved group has no hyper-parameter ", key, "; it keeps its value");
    }
  }

  void set_param(Optimizer& optimizer, const OptimizerParamGroup& group, const OptimizerLayout& layout,
                 const at::Tensor& param, const std::vector<std::string>& names, bool apply) {
    const std::vector<std::string> fields = layout.fields(group.options());
    const auto name =
        std::find_if(names.begin(), names.end(), [&](const std::string& fqn) { return state_.contains(fqn); });
    const bool present = name != names.end() && !state_.at(*name).dict().empty();
    if (fields.empty() || (!present && !param.requires_grad())) return;
    if (!present) {
      if (!apply) return note_absent(names[0]);
      optimizer.state().erase(param.unsafeGetTensorImpl());
      if (layout.needs_state()) {
        write_state(layout, group, optimizer, param, names[0],
                    read_state(layout, group.options(), nullptr, param, names[0]));
      }
      return;
    }
    const StateDict& saved = state_.at(*name).dict();
    if (apply) return write_state(layout, group, optimizer, param, *name, saved);
    ++found_;
    const std::unique_ptr<OptimizerParamState> example = layout.make_state();
    FSDP2_CHECK(layout.step(*example) == nullptr || saved.contains("step"), kNotFound, "[dcp] the optimizer state of ",
                *name, " has no step; the state dict is incomplete");
    for (const std::string& field : fields) {
      FSDP2_CHECK(saved.contains(field), kNotFound, "[dcp] the optimizer state of ", *name, " has no ", field,
                  "; the state dict is incomplete or of an optimizer with other options");
      check_assignable(param, saved.at(field).tensor(), "state." + *name + "." + field);
    }
  }

  void note_absent(const std::string& fqn) {
    if (absent_++ == 0) first_absent_ = fqn;
  }

  const Names& names_;
  StateDict state_;
  std::vector<Value> groups_;
  std::unordered_map<std::string, size_t> group_of_;
  size_t found_ = 0, absent_ = 0;
  std::string first_absent_;
};

}  // namespace

StateDict get_optimizer_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers,
                                   const StateDictOptions& options) {
  check_options(options);
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const Names names = names_of_parameters(state_tensors(module.get()));
  StateDict states;
  std::vector<Value> groups;
  for (Optimizer* optimizer : optimizers) {
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const OptimizerParamGroup& group = optimizer->param_groups()[g];
      const OptimizerLayout& layout = layout_of(group.options());
      std::vector<Value> params;
      for (size_t i = 0; i < group.params().size(); ++i) {
        const at::Tensor& param = group.params()[i];
        const std::string& fqn = names_in(names, param, g, i).front();
        params.emplace_back(fqn);
        const auto found = optimizer->state().find(param.unsafeGetTensorImpl());
        OptimizerParamState* state = found == optimizer->state().end() ? nullptr : found->second.get();
        if (state == nullptr && !param.requires_grad()) continue;
        StateDict entry = read_state(layout, group.options(), state, param, fqn);
        if (!entry.empty()) states[fqn] = std::move(entry);
      }
      StateDict saved = layout.hyper_parameters(group.options());
      saved["params"] = std::move(params);
      groups.emplace_back(std::move(saved));
    }
  }
  return StateDict{{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

StateDict get_optimizer_state_dict(ModuleRef module, Optimizer& optimizer, const StateDictOptions& options) {
  return get_optimizer_state_dict(module, std::vector<Optimizer*>{&optimizer}, options);
}

void set_optimizer_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers, const StateDict& state,
                              const StateDictOptions& options) {
  check_options(options);
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const Names names = names_of_parameters(state_tensors(module.get()));
  OptimizerSetter(names, state).run(optimizers);
}

void set_optimizer_state_dict(ModuleRef module, Optimizer& optimizer, const StateDict& state,
                              const StateDictOptions& options) {
  set_optimizer_state_dict(module, std::vector<Optimizer*>{&optimizer}, state, options);
}

std::pair<StateDict, StateDict> get_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers,
                                               const StateDictOptions& options) {
  return {get_model_state_dict(module, options), get_optimizer_state_dict(module, optimizers, options)};
}
std::pair<StateDict, StateDict> get_state_dict(ModuleRef module, Optimizer& optimizer,
                                               const StateDictOptions& options) {
  return get_state_dict(module, std::vector<Optimizer*>{&optimizer}, options);
}
void set_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers, const StateDict& model,
                    const StateDict& optim, const StateDictOptions& options) {
  set_model_state_dict(module, model, options);
  set_optimizer_state_dict(module, optimizers, optim, options);
}
void set_state_dict(ModuleRef module, Optimizer& optimizer, const StateDict& model, const StateDict& optim,
                    const StateDictOptions& options) {
  set_state_dict(module, std::vector<Optimizer*>{&optimizer}, model, optim, options);
}

}  // namespace fsdp2
