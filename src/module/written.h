#pragma once

// Tensors that to_empty() gave memory to, until somebody writes them. Parameters in groups keep their own note.

#include <torch/nn/module.h>

#include <string>

namespace fsdp2::detail {

/// Remembers `tensor` with its version counter as it is now.
void watch_until_written(const at::Tensor& tensor);
void forget_unwritten(const at::Tensor& tensor);
bool is_unwritten(const at::Tensor& tensor);
/// kUsage naming the parameters and buffers under `module` that are on meta or were never written.
void check_written(const torch::nn::Module& module);

}  // namespace fsdp2::detail
