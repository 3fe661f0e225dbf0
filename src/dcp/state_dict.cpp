#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/state_dict.h>

#include <optional>

#include "dcp/model_state.h"
#include "dcp/optimizer_forms.h"
#include "dcp/optimizer_state.h"
#include "dcp/whole_tensors.h"

namespace fsdp2 {
namespace {

using namespace dcp::detail;
using dcp::StateDict;
using torch::optim::Optimizer;

/// State is data, whatever mode the caller is in.
struct DataMode {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode{false};
};

/// Model, optimizers or both, as the one dict {"model": ..., "optim": ...}.
StateDict get(ModuleRef module, const std::vector<Optimizer*>* optimizers, bool with_model,
              const StateDictOptions& options) {
  const DataMode mode;
  return in_requested_form(options, [&] {
    const ModelView view(module.get(), options);
    StateDict state;
    if (with_model) state["model"] = collect_model(view, options);
    if (optimizers != nullptr) {
      state["optim"] = collect_optimizers(view, *optimizers, options.flatten_optimizer_state_dict);
    }
    return state;
  });
}

/// Empty on ranks that get no entries.
StateDict part(const StateDict& state, const char* key) {
  return state.contains(key) ? state.at(key).dict() : StateDict();
}

dcp::LoadReport set(ModuleRef module, const std::vector<Optimizer*>* optimizers, const StateDict* model,
                    const StateDict* optim, const StateDictOptions& options) {
  const DataMode mode;
  std::optional<ModelView> view;
  ValueSource source(options, [&] {
    view.emplace(module.get(), options);
    StateDict state;
    if (model != nullptr) state["model"] = *model;
    if (optim != nullptr) state["optim"] = nested_form(*optim, *optimizers, *view, options.strict);
    return state;
  });
  dcp::LoadReport report;
  std::optional<OptimizerSetter> setter;
  source.agree([&] {
    if (!view) view.emplace(module.get(), options);
    if (model != nullptr) report = plan_model(*view, source.dict().at("model").dict(), options, source);
    if (optim == nullptr) return;
    setter.emplace(*view, *optimizers, options);
    setter->plan(source.dict().at("optim").dict(), source);
  });
  source.deliver();
  if (setter) setter->apply();
  return report;
}

std::vector<Optimizer*> one(Optimizer& optimizer) { return {&optimizer}; }

}  // namespace

StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options) {
  return part(get(module, nullptr, true, options), "model");
}
StateDict get_optimizer_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers,
                                   const StateDictOptions& options) {
  return part(get(module, &optimizers, false, options), "optim");
}
StateDict get_optimizer_state_dict(ModuleRef module, Optimizer& optimizer, const StateDictOptions& options) {
  return get_optimizer_state_dict(module, one(optimizer), options);
}
std::pair<StateDict, StateDict> get_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers,
                                               const StateDictOptions& options) {
  const StateDict state = get(module, &optimizers, true, options);
  return {part(state, "model"), part(state, "optim")};
}
std::pair<StateDict, StateDict> get_state_dict(ModuleRef module, Optimizer& optimizer,
                                               const StateDictOptions& options) {
  return get_state_dict(module, one(optimizer), options);
}

dcp::LoadReport set_model_state_dict(ModuleRef module, const StateDict& state, const StateDictOptions& options) {
  return set(module, nullptr, &state, nullptr, options);
}
void set_optimizer_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers, const StateDict& state,
                              const StateDictOptions& options) {
  set(module, &optimizers, nullptr, &state, options);
}
void set_optimizer_state_dict(ModuleRef module, Optimizer& optimizer, const StateDict& state,
                              const StateDictOptions& options) {
  set_optimizer_state_dict(module, one(optimizer), state, options);
}
void set_state_dict(ModuleRef module, const std::vector<Optimizer*>& optimizers, const StateDict& model,
                    const StateDict& optim, const StateDictOptions& options) {
  set(module, &optimizers, &model, &optim, options);
}
void set_state_dict(ModuleRef module, Optimizer& optimizer, const StateDict& model, const StateDict& optim,
                    const StateDictOptions& options) {
  set_state_dict(module, one(optimizer), model, optim, options);
}

}  // namespace fsdp2
