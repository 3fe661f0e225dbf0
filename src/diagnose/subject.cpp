#include "diagnose/subject.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace fsdp2::detail::diagnose {

const DTensorSpec* SeenParam::spec() const {
  if (owner) return &owner.group->params()[owner.index].sharded_spec();
  return is_marked(tensor) ? spec_of(tensor) : nullptr;
}

const Tensor& SeenParam::local() const { return spec() != nullptr ? spec()->local : tensor; }

int64_t whole_bytes(const FSDPParam& param, const MixedPrecisionPolicy& policy) {
  const at::ScalarType orig = param.orig_dtype();
  const at::ScalarType dtype = policy.param_dtype && at::isFloatingType(orig) ? *policy.param_dtype : orig;
  return c10::multiply_integers(param.sizes()) * static_cast<int64_t>(at::elementSize(dtype));
}

int64_t SeenState::whole_bytes() const {
  int64_t bytes = 0;
  for (const auto& group : state->groups) {
    for (const FSDPParam& param : group->params()) bytes += diagnose::whole_bytes(param, state->policy());
  }
  return bytes;
}

Subject::Subject(torch::nn::Module& model, const std::vector<torch::optim::Optimizer*>& optimizers,
                 const DiagnoseOptions& options)
    : model(model), optimizers(optimizers), options(options) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& named : model.named_parameters()) {
    if (named.value().defined() && seen.insert(named.value().unsafeGetTensorImpl()).second) {
      params.push_back({named.key(), named.value(), owner_of(named.value())});
    }
  }
  for (const auto& named : model.named_buffers()) {
    if (named.value().defined() && seen.insert(named.value().unsafeGetTensorImpl()).second) {
      buffers.emplace_back(named.key(), named.value());
    }
  }
  std::unordered_map<const torch::nn::Module*, std::string> fqns;
  for (const auto& named : model.named_modules()) fqns.emplace(named.value().get(), named.key());
  for (const auto& state : states_under(model)) {
    const auto modules = state->modules();
    states.push_back({state, modules.empty() ? "" : fqns[modules.front().get()]});
  }
  for (const SeenState& above : states) {
    const auto below = above.state->tree();
    for (SeenState& each : states) {
      if (each.state != above.state && std::find(below.begin(), below.end(), each.state) != below.end()) {
        each.has_state_above = true;
      }
    }
  }
  constexpr int64_t kKiB = 1024;
  small_group_bytes = options.small_group_bytes.value_or(device().is_cpu() ? 32 * kKiB : 512 * kKiB);
}

bool Subject::ran() const {
  return std::any_of(states.begin(), states.end(), [](const SeenState& each) { return each.state->ran_forward(); });
}

c10::Device Subject::device() const {
  if (!states.empty()) return states.front().state->device;
  return params.empty() ? c10::Device(at::kCPU) : params.front().tensor.device();
}

std::string list_names(const std::vector<std::string>& names, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(most, names.size()); ++i) text += (i > 0 ? ", " : "") + names[i];
  return names.size() > most ? c10::str(text, " and ", names.size() - most, " more") : text;
}

std::string bytes_text(int64_t bytes) {
  const auto with_tenth = [&](int64_t unit, const char* name) {
    const int64_t tenths = (10 * bytes + unit / 2) / unit;
    return c10::str(tenths / 10, ".", tenths % 10, " ", name);
  };
  if (bytes >= int64_t{1} << 30) return with_tenth(int64_t{1} << 30, "GiB");
  if (bytes >= 1 << 20) return with_tenth(1 << 20, "MiB");
  if (bytes >= 1 << 10) return with_tenth(1 << 10, "KiB");
  return c10::str(bytes, " bytes");
}

}  // namespace fsdp2::detail::diagnose
