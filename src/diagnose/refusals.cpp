#include "diagnose/refusals.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace fsdp2::detail {

namespace {

// By the shard's tensor and by the module, held weakly: what is gone is forgotten.
struct Refusals {
  std::mutex mutex;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::TensorImpl>, std::string>> operators;
  std::vector<std::weak_ptr<torch::nn::Module>> modules;
};

Refusals& refusals() {
  static auto* leaked = new Refusals();  // tensors may outlive static destruction
  return *leaked;
}

}  // namespace

void note_refused_operator(const std::string& op, const DTensorSpec& spec) {
  Refusals& all = refusals();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.operators, [](const auto& each) { return each.first.expired(); });
  const bool known = std::any_of(all.operators.begin(), all.operators.end(), [&](const auto& each) {
    return each.first._unsafe_get_target() == spec.local.unsafeGetTensorImpl();
  });
  if (!known) {
    all.operators.emplace_back(c10::weak_intrusive_ptr<c10::TensorImpl>(spec.local.getIntrusivePtr()), op);
  }
}

std::string refused_operator(const at::Tensor& local) {
  Refusals& all = refusals();
  const std::lock_guard lock(all.mutex);
  for (const auto& [tensor, op] : all.operators) {
    if (!tensor.expired() && tensor._unsafe_get_target() == local.unsafeGetTensorImpl()) return op;
  }
  return "";
}

void note_refused_shard(const std::shared_ptr<torch::nn::Module>& module) {
  Refusals& all = refusals();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.modules, [](const auto& each) { return each.expired(); });
  all.modules.push_back(module);
}

bool was_refused_shard(const torch::nn::Module& module) {
  Refusals& all = refusals();
  const std::lock_guard lock(all.mutex);
  return std::any_of(all.modules.begin(), all.modules.end(),
                     [&](const auto& each) { return each.lock().get() == &module; });
}

}  // namespace fsdp2::detail
