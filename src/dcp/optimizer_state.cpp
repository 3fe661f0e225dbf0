#include "dcp/optimizer_state.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <unordered_set>

#include "dcp/local_parts.h"
#include "dcp/optimizer_forms.h"
#include "dcp/value_rep.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::dcp::detail {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace {

/// State of the parameter's layout: a fresh one filled with `value`.
at::Tensor full_like_param(const at::Tensor& param, double value) {
  const fsdp2::detail::BelowDTensor below;
  const at::Tensor fresh = on_meta(param) ? detached(param) : fresh_like(param);
  const auto* spec = fsdp2::detail::spec_of(fresh);
  at::Tensor data = spec ? spec->local : fresh;
  if (!data.is_meta()) data.fill_(value);
  return fresh;
}

}  // namespace

at::Tensor in_layout_of(const at::Tensor& param, const at::Tensor& value, const std::string& fqn, bool own) {
  const fsdp2::detail::BelowDTensor below;
  const auto* spec = fsdp2::detail::spec_of(param);
  const auto* from = fsdp2::detail::spec_of(value);
  const c10::Device device = spec ? spec->local.device() : param.device();
  if (spec != nullptr && from == nullptr) {
    const at::Tensor like = on_meta(param) ? fresh_like(param) : param;
    const at::Tensor& local = fsdp2::detail::spec_of(like)->local;
    at::Tensor part =
        fsdp2::detail::make_dtensor_like(*spec, at::empty(local.sizes(), value.options().device(local.device())));
    assign_tensor(part, value, fqn, /*may_take_over=*/false);
    return part;
  }
  at::Tensor data = from ? from->local.detach() : value.detach();
  const bool moves = !device.is_meta() && data.device() != device;
  data = moves ? data.to(device) : own ? data : data.clone();
  return from ? fsdp2::detail::make_dtensor_like(*from, data) : data;
}

StateDict read_state(const OptimizerLayout& layout, const OptimizerOptions& options, OptimizerParamState* state,
                     const at::Tensor& param, const std::string& fqn) {
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
    if (!tensor.defined()) {
      result[name] = full_like_param(param, layout.initial_value(options));
      continue;
    }
    // State that was made before its parameter was sharded is whole.
    const bool made_before = fsdp2::detail::is_marked(param) && !fsdp2::detail::is_marked(tensor) && !on_meta(param);
    if (made_before) check_assignable(param, tensor, where);
    result[name] = made_before ? in_layout_of(param, tensor, where, /*own=*/false) : detached(tensor);
  }
  return result;
}

StateDict collect_optimizers(const ModelView& view, const std::vector<Optimizer*>& optimizers, bool flat) {
  StateDict states;
  std::vector<Value> groups;
  std::unordered_set<std::string> seen;
  for (Optimizer* optimizer : optimizers) {
    for (size_t g = 0; g < optimizer->param_groups().size(); ++g) {
      const OptimizerParamGroup& group = optimizer->param_groups()[g];
      const OptimizerLayout& layout = layout_of(group.options());
      std::vector<Value> params;
      for (size_t i = 0; i < group.params().size(); ++i) {
        const at::Tensor& param = group.params()[i];
        const auto* names = view.names(param, c10::str("parameter ", i, " of group ", g, " of the optimizer"));
        if (names == nullptr) continue;
        const std::string& fqn = names->front();
        FSDP2_CHECK(seen.insert(fqn).second, kInvalidArgument, "[dcp] ", fqn,
                    " is twice in the optimizers; a state dict has one state for each parameter");
        params.emplace_back(fqn);
        const auto found = optimizer->state().find(param.unsafeGetTensorImpl());
        OptimizerParamState* state = found == optimizer->state().end() ? nullptr : found->second.get();
        if (state == nullptr && !param.requires_grad()) continue;
        StateDict entry = read_state(layout, group.options(), state, param, fqn);
        if (entry.empty()) continue;
        states[fqn] = std::move(entry);
        ValueAccess::set_absent(states[fqn], Absent::kAllOrNone);
      }
      StateDict saved = layout.hyper_parameters(group.options());
      saved["params"] = std::move(params);
      groups.emplace_back(std::move(saved));
      ValueAccess::set_absent(groups.back(), Absent::kDropEach);
    }
  }
  StateDict nested{{"state", std::move(states)}, {"param_groups", std::move(groups)}};
  return flat ? flat_form(nested) : nested;
}

}  // namespace fsdp2::dcp::detail
