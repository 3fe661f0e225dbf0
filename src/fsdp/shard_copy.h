#pragma once

// Between a whole tensor and its equal (padded) parts along one dimension.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp2::detail {

/// A contiguous tensor seen as (outer, rows, inner), cut along its rows. With outer > 1 the parts must be even.
struct ShardGeometry {
  int64_t outer = 1, rows = 1, inner = 1;

  int64_t padded_rows(int64_t parts) const { return (rows + parts - 1) / parts; }
  /// Elements of one part, padding included.
  int64_t padded_numel(int64_t parts) const { return outer * padded_rows(parts) * inner; }
};

/// Puts the rows of `parts`, of shape (number of parts, padded numel), together in `flat`, the whole.
void join_parts(const at::Tensor& parts, const at::Tensor& flat, const ShardGeometry& geometry);
/// The other way round; the padding becomes zero.
void split_into_parts(const at::Tensor& flat, const at::Tensor& parts, const ShardGeometry& geometry);

}  // namespace fsdp2::detail
