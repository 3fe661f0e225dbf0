// Whether the optimizers have the model's parameters, and state that fits them.

#include <fsdp2/error.h>

#include <unordered_map>
#include <unordered_set>

#include "dcp/optimizer_layout.h"
#include "diagnose/subject.h"

namespace fsdp2::detail::diagnose {

namespace {

/// Null for an optimizer that is not one of libtorch's kinds.
const dcp::detail::OptimizerLayout* layout_of(const torch::optim::OptimizerParamGroup& group) {
  try {
    return group.has_options() ? &dcp::detail::layout_of(group.options()) : nullptr;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return nullptr;
  }
}

std::string layout_text(const Tensor& tensor) {
  return is_marked(tensor) ? c10::str("a DTensor ", tensor.sizes(), " ", to_string(spec_of(tensor)->placements))
                           : c10::str("a plain tensor ", tensor.sizes());
}

bool fits(const Tensor& state, const SeenParam& param) {
  const DTensorSpec *want = param.spec(), *have = is_marked(state) ? spec_of(state) : nullptr;
  if (want == nullptr || have == nullptr) return want == have && state.sizes() == param.tensor.sizes();
  return have->same_layout(*want);
}

/// The first tensor of state that does not lie like its parameter.
void check_state(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group,
                 const SeenParam& param, Findings& found) {
  const auto* layout = layout_of(group);
  const auto state = optimizer.state().find(param.tensor.unsafeGetTensorImpl());
  if (layout == nullptr || state == optimizer.state().end()) return;
  for (const std::string& name : layout->fields(group.options())) {
    const Tensor& tensor = layout->field(*state->second, name);
    if (!tensor.defined() || fits(tensor, param)) continue;
    found.push_back({"optimizer-state-layout", Severity::kError,
                     c10::str(name, " is ", layout_text(tensor), " where the parameter is ",
                              param.spec() != nullptr ? c10::str("a DTensor ", at::IntArrayRef(param.spec()->sizes),
                                                                 " ", to_string(param.spec()->placements))
                                                      : layout_text(param.tensor)),
                     param.fqn,
                     "make the optimizer, or load its state, after fully_shard; set_optimizer_state_dict puts a whole "
                     "state into the parameters' layout"});
    return;
  }
}

}  // namespace

void check_optimizers(const Subject& subject, Findings& found) {
  if (subject.optimizers.empty()) return;
  std::unordered_map<const c10::TensorImpl*, const SeenParam*> params;
  for (const SeenParam& param : subject.params) params.emplace(param.tensor.unsafeGetTensorImpl(), &param);
  std::unordered_set<const c10::TensorImpl*> held;
  std::vector<std::string> foreign, missing;
  Findings layouts;
  for (torch::optim::Optimizer* optimizer : subject.optimizers) {
    for (const auto& group : optimizer->param_groups()) {
      for (const Tensor& tensor : group.params()) {
        if (!tensor.defined()) continue;
        const auto known = params.find(tensor.unsafeGetTensorImpl());
        if (known == params.end()) {
          // One of another sharded model is somebody's; a plain one is nobody's that we know.
          if (!owner_of(tensor)) foreign.push_back(c10::str("one of shape ", tensor.sizes()));
          continue;
        }
        held.insert(known->first);
        if (layouts.empty()) check_state(*optimizer, group, *known->second, layouts);
      }
    }
  }
  for (const SeenParam& param : subject.params) {
    if (param.trainable() && held.count(param.tensor.unsafeGetTensorImpl()) == 0) missing.push_back(param.fqn);
  }
  if (!foreign.empty()) {
    found.push_back({"optimizer-foreign-parameter", Severity::kWarning,
                     c10::str("the optimizer has parameters that are not the model's: ", list_names(foreign)), "",
                     "make it from model->parameters(); a module that was replaced or copied since has others"});
  }
  if (!missing.empty()) {
    found.push_back({"optimizer-missing-parameter", Severity::kWarning,
                     c10::str("trainable, and in no optimizer: ", list_names(missing)), missing.front(),
                     "make the optimizer from model->parameters() when the model is complete, pass all optimizers to "
                     "diagnose(), or freeze them with set_requires_grad(false)"});
  }
  found.insert(found.end(), layouts.begin(), layouts.end());
}

}  // namespace fsdp2::detail::diagnose
