#pragma once

// MixedPrecisionPolicy::buffer_dtype.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <vector>

namespace fsdp2::detail {

/// Shows floating-point buffers in another dtype for the time of a forward, and of the backward that uses them.
class BufferCast {
 public:
  void set_dtype(std::optional<at::ScalarType> dtype) { dtype_ = dtype; }
  void add(const at::Tensor& buffer);
  void begin();
  /// Buffers have their own data again; what forward wrote in place is cast back into it.
  void end();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> buffer;
    at::Tensor own;   // the registered data while cast
    at::Tensor cast;  // what forward sees
  };
  std::optional<at::ScalarType> dtype_;
  std::vector<Entry> entries_;
  bool active_ = false;
};

}  // namespace fsdp2::detail
