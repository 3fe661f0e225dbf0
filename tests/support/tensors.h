#pragma once

// Small tools of tests that compare sharded with whole models.

#include <torch/torch.h>

#include <fsdp2/fsdp2.h>

#include <string>

namespace fsdp2::testing {

/// Largest absolute difference; infinity where shapes differ. Both plain.
inline double max_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) {
    return std::numeric_limits<double>::infinity();
  }
  return a.numel() == 0 ? 0 : (a.to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

/// The whole value of a tensor that may be a DTensor. Collective.
inline torch::Tensor whole(const torch::Tensor& tensor) {
  torch::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor.detach()).full_tensor() : tensor.detach().clone();
}

/// Copies the parameters and buffers of `from` into `to`, by name. Both unsharded.
inline void copy_state(torch::nn::Module& to, const torch::nn::Module& from) {
  torch::NoGradGuard no_grad;
  const auto source = from.named_parameters();
  for (auto& named : to.named_parameters()) named.value().copy_(source[named.key()]);
  const auto buffers = from.named_buffers();
  for (auto& named : to.named_buffers()) named.value().copy_(buffers[named.key()]);
}

}  // namespace fsdp2::testing
