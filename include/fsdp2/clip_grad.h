#pragma once

// Clipping by the global norm. Python twin: torch.nn.utils.clip_grad_norm_.

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp2/export.h>

namespace fsdp2 {

using at::Tensor;

/// Scales the gradients of `params` in place so that the norm of all their distinct elements together is at most
/// `max_norm`, and returns the norm before that: plain, 0-dim, the same on every rank. DTensors and plain tensors on
/// any mesh; every element is counted once, however it is replicated. One collective per mesh, the smallest first;
/// every rank of those meshes calls it with its parameters in the same order.
///
/// `norm_type`: any order but NaN, infinity included; 0 counts the elements that are not zero.
/// `error_if_nonfinite`: kInvalidArgument where the norm is NaN or infinite, before anything is scaled.
///
/// Errors: kUsage where a gradient is Partial (synchronize_gradients() first), where the ranks of a mesh saw different
/// sums over smaller meshes (experts of their own in each place: clip those in a call of their own), or where a
/// trainable plain parameter with a gradient stands beside DTensors (a forgotten fully_shard: its gradient differs
/// between the ranks), unless it is one of the ignored_params. Those must have the same gradient on every rank and are
/// counted once.
FSDP2_API Tensor clip_grad_norm_(const std::vector<Tensor>& params, double max_norm, double norm_type = 2.0,
                                 bool error_if_nonfinite = false);

}  // namespace fsdp2
