#pragma once

// Parameters that the user excluded from sharding (FullyShardOptions::ignored_params): plain on purpose.

#include <ATen/core/Tensor.h>

namespace fsdp2::detail {

/// Remembered for as long as the parameter lives.
void add_ignored_param(const at::Tensor& param);
bool is_ignored_param(const at::Tensor& param);

}  // namespace fsdp2::detail
