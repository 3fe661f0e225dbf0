#include "dcp/model_state.h"

#include <fsdp2/error.h>

#include "dcp/local_parts.h"

namespace fsdp2::dcp::detail {

StateDict collect_model(const ModelView& view, const StateDictOptions& options) {
  view.check_fully_sharded();
  StateDict state;
  for (const NamedTensor& item : view.tensors()) {
    const bool frozen = item.is_parameter && !item.tensor.requires_grad();
    if (!frozen || !options.ignore_frozen_params) state[item.fqn] = detached(item.tensor);
  }
  return state;
}

LoadReport plan_model(const ModelView& view, const StateDict& state, const StateDictOptions& options,
                      ValueSource& source) {
  LoadReport report;
  StateDict known;
  for (const NamedTensor& item : view.tensors()) {
    known[item.fqn];
    if (!state.contains(item.fqn)) {
      const bool frozen = item.is_parameter && !item.tensor.requires_grad();
      if (!frozen || !options.ignore_frozen_params) report.missing.push_back(item.fqn);
      continue;
    }
    const Value& saved = state.at(item.fqn);
    FSDP2_CHECK(saved.kind() == Kind::Tensor, kInvalidArgument, "[dcp] the value for ", item.fqn, " is of kind ",
                to_string(saved.kind()), "; a model takes tensors");
    const at::Tensor& value = saved.tensor();
    check_assignable(item.tensor, value, item.fqn);
    source.check_has_data(value, item.fqn);
    source.want(value,
                [item](const at::Tensor& arrived, bool own) { assign_tensor(item.tensor, arrived, item.fqn, own); });
    report.loaded.push_back(item.fqn);
    if (value.scalar_type() != item.tensor.scalar_type()) report.cast.push_back(item.fqn);
    if (value.sizes() != item.tensor.sizes()) report.reshaped.push_back(item.fqn);
  }
  for (const auto& [key, value] : state) {
    if (!known.contains(key)) report.unexpected.push_back(key);
  }
  if (options.strict) {
    FSDP2_CHECK(report.missing.empty(), kNotFound,
                "[dcp] the state dict lacks keys of the model: ", c10::Join(", ", report.missing),
                "; set strict = false to keep their present values");
    FSDP2_CHECK(report.unexpected.empty(), kInvalidArgument,
                "[dcp] the state dict has keys that the model lacks: ", c10::Join(", ", report.unexpected),
                "; set strict = false to ignore them");
  }
  return report;
}

}  // namespace fsdp2::dcp::detail
