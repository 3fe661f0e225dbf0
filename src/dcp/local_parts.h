#pragma once

// The data that this rank holds of a tensor, plain or distributed.

#include <fsdp2/dcp/dcp.h>

#include <string>
#include <vector>

namespace fsdp2::dcp::detail {

struct LocalPart {
  Chunk box;        // in the global tensor
  at::Tensor data;  // plain view of this rank's memory, shaped like the box
};

/// Non-empty parts; one part without elements if the global tensor has none. kInvalidArgument for
/// Partial placements.
std::vector<LocalPart> local_parts(const at::Tensor& tensor, const std::string& fqn);

/// The same shape and layout with fresh, uninitialised memory on a real device in place of meta.
at::Tensor fresh_like(const at::Tensor& tensor);
bool on_meta(const at::Tensor& tensor);

/// The tensor without autograd history; a DTensor stays one and shares its local data.
at::Tensor detached(const at::Tensor& tensor);

}  // namespace fsdp2::dcp::detail
