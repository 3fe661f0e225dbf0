#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/state_dict.h>
#include <fsdp2/error.h>

#include "dcp/local_parts.h"
#include "dcp/model_view.h"
#include "dcp/state_dict_options.h"

namespace fsdp2 {

using namespace dcp::detail;

namespace dcp::detail {

void check_options(const StateDictOptions& options) {
  const StateDictOptions defaults;
  const auto check = [](bool value, bool standard, const char* field) {
    FSDP2_CHECK(value == standard, kUnsupported, "[dcp] StateDictOptions::", field, " = ", value ? "true" : "false",
                " is not offered yet; leave it at ", standard ? "true" : "false");
  };
  check(options.full_state_dict, defaults.full_state_dict, "full_state_dict");
  check(options.cpu_offload, defaults.cpu_offload, "cpu_offload");
  check(options.ignore_frozen_params, defaults.ignore_frozen_params, "ignore_frozen_params");
  check(options.keep_submodule_prefixes, defaults.keep_submodule_prefixes, "keep_submodule_prefixes");
  check(options.broadcast_from_rank0, defaults.broadcast_from_rank0, "broadcast_from_rank0");
  check(options.flatten_optimizer_state_dict, defaults.flatten_optimizer_state_dict, "flatten_optimizer_state_dict");
}

}  // namespace dcp::detail

dcp::StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options) {
  check_options(options);
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const std::vector<NamedTensor> tensors = state_tensors(module.get());
  check_fully_sharded(tensors);
  dcp::StateDict state;
  for (const NamedTensor& item : tensors) state[item.fqn] = detached(item.tensor);
  return state;
}

dcp::LoadReport set_model_state_dict(ModuleRef module, const dcp::StateDict& state, const StateDictOptions& options) {
  check_options(options);
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const std::vector<NamedTensor> tensors = state_tensors(module.get());
  dcp::LoadReport report;
  dcp::StateDict known;
  for (const NamedTensor& item : tensors) {
    known[item.fqn];
    if (!state.contains(item.fqn)) {
      report.missing.push_back(item.fqn);
      continue;
    }
    const at::Tensor& value = state.at(item.fqn).tensor();
    check_assignable(item.tensor, value, item.fqn);
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
  for (const NamedTensor& item : tensors) {
    if (state.contains(item.fqn)) assign_tensor(item.tensor, state.at(item.fqn).tensor(), item.fqn);
  }
  return report;
}

}  // namespace fsdp2
