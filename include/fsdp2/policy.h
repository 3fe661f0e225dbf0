#pragma once

// Options of fully_shard. Python twin: torch.distributed.fsdp.

#include <c10/core/ScalarType.h>

#include <optional>
#include <variant>

namespace fsdp2 {

/// Dtypes during forward and backward. Parameters, their gradients and optimizer state keep the original dtype.
struct MixedPrecisionPolicy {
  /// Of the gathered parameters, and so of the computation. nullopt: the original dtype.
  std::optional<at::ScalarType> param_dtype = {};
  /// Of gradient reduction and of gradients accumulated without sync. nullopt: the computation's.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Floating-point outputs of forward are cast to it.
  std::optional<at::ScalarType> output_dtype = {};
  /// Whether floating-point inputs are cast to param_dtype.
  bool cast_forward_inputs = true;
  /// Floating-point buffers of the group's modules are seen in it during forward; the registered buffer keeps its
  /// own dtype, in-place updates reach it, state dicts hold it.
  std::optional<at::ScalarType> buffer_dtype = {};
};

/// Parameters, gradients and optimizer state on the CPU, gathered parameters on the device.
struct CPUOffloadPolicy {
  bool pin_memory = true;
};

/// After forward: nullopt and true free the gathered parameters (nullopt keeps those of the root), false keeps them
/// until backward has used them, n keeps a shard over n ranks.
using ReshardAfterForward = std::optional<std::variant<bool, int>>;

}  // namespace fsdp2
