#include "module/buffers.h"

#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <unordered_map>

#include <fsdp2/module.h>

namespace fsdp2 {

namespace {

std::mutex mutex;

// By TensorImpl: a buffer is one TensorImpl for life, to() and to_empty() swap its data only.
std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>>& non_persistent() {
  static auto* buffers = new std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>>();
  return *buffers;
}

}  // namespace

at::Tensor& register_buffer(ModuleRef module, const std::string& name, at::Tensor tensor, bool persistent) {
  at::Tensor& registered = module->register_buffer(name, std::move(tensor));
  if (!persistent && registered.defined()) {
    const std::lock_guard lock(mutex);
    non_persistent().insert_or_assign(registered.unsafeGetTensorImpl(),
                                      c10::weak_intrusive_ptr<c10::TensorImpl>(registered.getIntrusivePtr()));
  }
  return registered;
}

bool detail::is_non_persistent(const at::Tensor& buffer) {
  const std::lock_guard lock(mutex);
  const auto found = non_persistent().find(buffer.unsafeGetTensorImpl());
  return found != non_persistent().end() && !found->second.expired();
}

}  // namespace fsdp2
