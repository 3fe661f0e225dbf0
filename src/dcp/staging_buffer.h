#pragma once

// Memory through which tensors travel one after the other.

#include <ATen/Functions.h>

namespace fsdp2::dcp::detail {

/// One buffer instead of one for each tensor: a backend may hold on to memory for a moment after an operation is
/// complete, and two tensors would be alive then.
class StagingBuffer {
 public:
  /// Contiguous, valid until the next call.
  at::Tensor get(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
    const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
    reserve(bytes, device);
    return bytes_.narrow(0, 0, bytes).view(dtype).view(sizes);
  }
  void reserve(int64_t bytes, c10::Device device) {
    if (bytes_.defined() && bytes_.numel() >= bytes && bytes_.device() == device) return;
    bytes_.reset();
    bytes_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  }

 private:
  at::Tensor bytes_;
};

}  // namespace fsdp2::dcp::detail
