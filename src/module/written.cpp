#include "module/written.h"

#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <unordered_map>

#include <fsdp2/error.h>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

namespace {

struct Watched {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint32_t version;
};

std::mutex mutex;

std::unordered_map<const c10::TensorImpl*, Watched>& watched() {
  static auto* instance = new std::unordered_map<const c10::TensorImpl*, Watched>();
  return *instance;
}

uint32_t version_of(const at::Tensor& tensor) {
  return is_marked(tensor) ? local_of(tensor)._version() : tensor._version();
}

}  // namespace

void watch_until_written(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex);
  watched().insert_or_assign(
      tensor.unsafeGetTensorImpl(),
      Watched{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), version_of(tensor)});
}

void forget_unwritten(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex);
  watched().erase(tensor.unsafeGetTensorImpl());
}

bool is_unwritten(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex);
  const auto found = watched().find(tensor.unsafeGetTensorImpl());
  if (found == watched().end()) {
    return false;
  }
  const bool same = !found->second.tensor.expired() && version_of(tensor) == found->second.version;
  if (!same) {
    watched().erase(found);  // written, or a tensor that is gone
  }
  return same;
}

void check_written(const torch::nn::Module& module) {
  std::string on_meta, unwritten;
  const auto look = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    if (!is_marked(tensor) && tensor.is_meta()) {
      on_meta += (on_meta.empty() ? "" : ", ") + name;
    } else if (is_unwritten(tensor)) {
      unwritten += (unwritten.empty() ? "" : ", ") + name;
    }
  };
  for (const auto& named : module.named_parameters()) look(named.key(), named.value());
  for (const auto& named : module.named_buffers()) look(named.key(), named.value());
  FSDP2_CHECK(on_meta.empty(), kUsage, "[fsdp] ", on_meta, " of ", module.name(),
              " are still on the meta device and "
              "have no data; call to_empty(model, device) and reset_parameters(model) before the first forward");
  FSDP2_CHECK(unwritten.empty(), kUsage, "[fsdp] ", unwritten, " of ", module.name(),
              " were given memory by to_empty() "
              "but never written; call reset_parameters(model), load a checkpoint, or mark_initialized(module) where "
              "values were written through raw pointers");
}

}  // namespace fsdp2::detail
