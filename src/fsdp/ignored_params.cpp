#include "fsdp/ignored_params.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <unordered_map>

namespace fsdp2::detail {
namespace {

using WeakImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// By address, held weakly: an address that a dead parameter left does not make a new tensor ignored.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, WeakImpl> params;
};

Registry& registry() {
  static auto* leaked = new Registry();  // tensors may outlive static destruction
  return *leaked;
}

}  // namespace

void add_ignored_param(const at::Tensor& param) {
  auto& known = registry();
  std::scoped_lock lock(known.mutex);
  for (auto item = known.params.begin(); item != known.params.end();) {
    item = item->second.expired() ? known.params.erase(item) : std::next(item);
  }
  known.params.insert_or_assign(param.unsafeGetTensorImpl(), WeakImpl(param.getIntrusivePtr()));
}

bool is_ignored_param(const at::Tensor& param) {
  auto& known = registry();
  std::scoped_lock lock(known.mutex);
  const auto found = known.params.find(param.unsafeGetTensorImpl());
  return found != known.params.end() && !found->second.expired();
}

}  // namespace fsdp2::detail
