#include "fsdp/buffer_cast.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace fsdp2::detail {

using at::Tensor;

void BufferCast::add(const Tensor& buffer) {
  if (dtype_ && buffer.defined() && buffer.is_floating_point()) {
    entries_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(buffer.getIntrusivePtr()), {}, {}});
  }
}

void BufferCast::begin() {
  if (!dtype_ || active_) {
    return;
  }
  const c10::InferenceMode normal_tensors(false);
  const at::NoGradGuard no_grad;
  active_ = true;
  for (Entry& entry : entries_) {
    auto impl = entry.buffer.lock();
    if (!impl) {
      continue;
    }
    const Tensor buffer(std::move(impl));
    if (!buffer.is_floating_point() || buffer.scalar_type() == *dtype_) {
      continue;
    }
    entry.own = buffer.variable_data();
    entry.cast = buffer.to(*dtype_);
    buffer.unsafeGetTensorImpl()->shallow_copy_from(entry.cast.getIntrusivePtr());
  }
}

void BufferCast::end() {
  if (!active_) {
    return;
  }
  const c10::InferenceMode normal_tensors(false);
  const at::NoGradGuard no_grad;
  active_ = false;
  for (Entry& entry : entries_) {
    if (!entry.own.defined()) {
      continue;
    }
    if (auto impl = entry.buffer.lock()) {
      const Tensor buffer(std::move(impl));
      // By value, element by element: batch normalisation writes its statistics past the version counter, and what
      // nobody wrote must not lose precision.
      const Tensor now = buffer.variable_data();
      entry.own.copy_(at::where(now.eq(entry.own.to(*dtype_)), entry.own, now.to(entry.own.scalar_type())));
      buffer.unsafeGetTensorImpl()->shallow_copy_from(entry.own.getIntrusivePtr());
    }
    entry.own = entry.cast = Tensor();
  }
}

}  // namespace fsdp2::detail
