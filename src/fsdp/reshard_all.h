#pragma once

#include <torch/nn/module.h>

namespace fsdp2::detail {

/// Frees the whole parameters of every group under `module`, so that each of its parameters is a DTensor. Local.
void reshard_all(const torch::nn::Module& module);

}  // namespace fsdp2::detail
