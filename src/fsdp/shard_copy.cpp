#include "fsdp/shard_copy.h"

#include <ATen/Functions.h>

namespace fsdp2::detail {

using at::Tensor;

namespace {

/// Both sides as (part, outer, elements of a part in one outer).
std::pair<Tensor, Tensor> interleaved(const Tensor& parts, const Tensor& flat, const ShardGeometry& geometry) {
  const int64_t size = parts.size(0), run = geometry.rows / size * geometry.inner;
  return {parts.view({size, geometry.outer, run}), flat.view({geometry.outer, size, run}).transpose(0, 1)};
}

}  // namespace

void join_parts(const Tensor& parts, const Tensor& flat, const ShardGeometry& geometry) {
  if (geometry.outer > 1) {
    const auto [from, to] = interleaved(parts, flat, geometry);
    to.copy_(from);
    return;
  }
  const int64_t chunk = parts.size(1);
  const int64_t full_parts = chunk == 0 ? 0 : flat.numel() / chunk;
  if (full_parts > 0) {
    flat.narrow(0, 0, full_parts * chunk).view({full_parts, chunk}).copy_(parts.narrow(0, 0, full_parts));
  }
  if (const int64_t left = flat.numel() - full_parts * chunk; left > 0) {
    flat.narrow(0, full_parts * chunk, left).copy_(parts[full_parts].narrow(0, 0, left));
  }
}

void split_into_parts(const Tensor& flat, const Tensor& parts, const ShardGeometry& geometry) {
  if (geometry.outer > 1) {
    const auto [to, from] = interleaved(parts, flat, geometry);
    to.copy_(from);
    return;
  }
  const int64_t size = parts.size(0), chunk = parts.size(1);
  const int64_t full_parts = chunk == 0 ? 0 : flat.numel() / chunk;
  if (full_parts > 0) {
    parts.narrow(0, 0, full_parts).copy_(flat.narrow(0, 0, full_parts * chunk).view({full_parts, chunk}));
  }
  if (full_parts < size) {
    const Tensor rest = parts.narrow(0, full_parts, size - full_parts);
    rest.zero_();
    const int64_t left = flat.numel() - full_parts * chunk;
    rest[0].narrow(0, 0, left).copy_(flat.narrow(0, full_parts * chunk, left));
  }
}

}  // namespace fsdp2::detail
