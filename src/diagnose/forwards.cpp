// Parameters without values, and forwards that went past the hooks.

#include <algorithm>

#include "backend/fake.h"
#include "diagnose/refusals.h"
#include "diagnose/subject.h"
#include "module/written.h"

namespace fsdp2::detail::diagnose {

void check_materialised(const Subject& subject, Findings& found) {
  std::vector<std::string> on_meta, unwritten;
  const bool fake = is_initialized() && fake_backend::is_fake(default_group());  // there a model may stay on meta
  for (const SeenParam& param : subject.params) {
    if (param.local().is_meta()) {
      if (!fake) on_meta.push_back(param.fqn);
    } else if (param.owner ? param.owner.group->params()[param.owner.index].is_unwritten()
                           : is_unwritten(param.tensor)) {
      unwritten.push_back(param.fqn);
    }
  }
  for (const auto& [fqn, buffer] : subject.buffers) {
    if (!is_marked(buffer) && buffer.is_meta()) {
      if (!fake) on_meta.push_back(fqn);
    } else if (is_unwritten(buffer)) {
      unwritten.push_back(fqn);
    }
  }
  if (!on_meta.empty()) {
    found.push_back({"parameter-on-meta", Severity::kError,
                     c10::str("still on the meta device, without data: ", list_names(on_meta)), on_meta.front(),
                     "call to_empty(model, device) and reset_parameters(model), or load a checkpoint, before the first "
                     "forward"});
  }
  if (!unwritten.empty()) {
    found.push_back({"parameter-unwritten", Severity::kError,
                     c10::str("given memory by to_empty() and never written: ", list_names(unwritten)),
                     unwritten.front(),
                     "call reset_parameters(model), load a checkpoint, or mark_initialized(module) where values were "
                     "written through raw pointers"});
  }
}

namespace {

void check_refused_operators(const Subject& subject, Findings& found) {
  for (const SeenParam& param : subject.params) {
    const std::string op = param.spec() != nullptr ? refused_operator(param.local()) : "";
    if (op.empty()) continue;
    found.push_back({"forward-refused", Severity::kError,
                     c10::str(op, " met this sharded parameter where it needs the whole one, and was refused"),
                     param.fqn,
                     "call model(x), or fsdp2::call(layer, x), instead of model->forward(x): only that gathers the "
                     "parameters"});
    return;  // one wrong call is refused at its first parameter
  }
}

bool has_gradient(const ModuleState& state) {
  for (const auto& group : state.groups) {
    for (const FSDPParam& param : group->params()) {
      const Tensor alive = param.param();
      if (alive.defined() && alive.grad().defined()) return true;
    }
  }
  return false;
}

/// Without own parameters and without sharded modules below there is nothing that hooks would do.
bool has_work(const SeenState& each) { return !each.state->groups.empty() || each.state->tree().size() > 1; }

}  // namespace

void check_forwards(const Subject& subject, Findings& found) {
  check_refused_operators(subject, found);
  std::vector<std::string> with_gradient, without;
  for (const SeenState& each : subject.states) {
    if (each.state->ran_forward() || !has_work(each)) continue;
    const bool got_gradient = has_gradient(*each.state);
    if (!got_gradient && !subject.ran()) continue;
    (got_gradient ? with_gradient : without).push_back(each.name());
  }
  const char* fix =
      "call it as module(x), with a holder declared with FSDP2_MODULE or Hooked, or with fsdp2::call(module, x) or "
      "call_method, never module->forward(x)";
  if (!with_gradient.empty()) {
    found.push_back({"forward-not-hooked", Severity::kError,
                     c10::str("has gradients, but no forward ever went through the hooks: ", list_names(with_gradient)),
                     with_gradient.front(), fix});
  }
  if (!without.empty()) {
    found.push_back(
        {"forward-not-hooked", Severity::kWarning,
         c10::str("given to fully_shard, but no forward ever went through the hooks: ", list_names(without)),
         without.front(), c10::str(fix, "; or it is not used: then do not shard it by itself")});
  }
}

}  // namespace fsdp2::detail::diagnose
