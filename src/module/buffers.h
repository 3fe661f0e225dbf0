#pragma once

#include <torch/nn/module.h>

#include <string>

namespace fsdp2::detail {

/// Registered through fsdp2::register_buffer with persistent = false: stays out of state dicts.
bool is_non_persistent(const at::Tensor& buffer);

}  // namespace fsdp2::detail
