#pragma once

// The autograd nodes of DTensors. Note [Gradients of DTensors]
// Autograd lies below the DTensor key and never sees these operators. The few that are differentiable attach a node of
// our own to their result; everything else refuses inputs that require grad while grad mode is on (fallback.cpp), so
// that no gradient is lost in silence.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

/// Grad mode is on and `tensor` takes part in it.
bool records_grad(const Tensor& tensor);

// Each attaches a node to `result` whose input edge is that of `source`.

/// DTensor -> its local part.
void attach_to_local(Tensor& result, const Tensor& source, const DTensorSpec& spec);
/// DTensor -> the whole, plain.
void attach_full_tensor(Tensor& result, const Tensor& source, const DTensorSpec& spec);
/// DTensor -> DTensor of another layout.
void attach_redistribute(Tensor& result, const Tensor& source, const DTensorSpec& spec);
/// Plain local part -> DTensor.
void attach_from_local(Tensor& result, const Tensor& source);
/// DTensor -> DTensor of the same layout in another dtype or on another device.
void attach_cast(Tensor& result, const Tensor& source);

}  // namespace fsdp2::detail
