#pragma once

// Passes over all gradients of a CPU at once. The results do not depend on the number of threads.

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp2::detail {

/// Whether the functions below take it: dense, float32, float64 or bfloat16, on the CPU.
bool has_gradient_kernels(const at::Tensor& tensor);

/// Added up in double.
double sum_of_squares(const std::vector<at::Tensor>& tensors);

/// Each times `scale`, rounded as mul_ does. Counts as a write.
void scale_gradients(const std::vector<at::Tensor>& tensors, double scale);

/// Lists that foreach operators run in one go.
std::vector<std::vector<at::Tensor>> by_device_and_dtype(const std::vector<at::Tensor>& tensors);

}  // namespace fsdp2::detail
