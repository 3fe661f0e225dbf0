#pragma once

// What the library refused, for diagnose(): a program may have caught the error. Written where an error is thrown
// anyway, so it costs nothing else.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

/// An operator met a shard as if it were whole, which is how a forward past the hooks ends.
void note_refused_operator(const std::string& op, const DTensorSpec& spec);
/// Its name, where that happened to this sharded parameter; empty where it did not. Of several the first.
std::string refused_operator(const at::Tensor& local);

/// fully_shard was called on `module` after a module that contains it.
void note_refused_shard(const std::shared_ptr<torch::nn::Module>& module);
bool was_refused_shard(const torch::nn::Module& module);

}  // namespace fsdp2::detail
