#pragma once

// Moving data between layouts. Everything here works on plain locals, below autograd and the DTensor dispatch.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

/// One row per rank of the mesh: `mine` (plain, contiguous, the same shape and dtype everywhere) of every rank,
/// gathered along `axes`; shape [size of axes[0], size of axes[1], …, shape of mine…]. Collective.
Tensor gather_over_axes(const Tensor& mine, const DeviceMesh& mesh, const std::vector<int64_t>& axes,
                        const std::string& what);
/// The device on which the mesh's backend takes small control tensors.
c10::Device control_device(const DeviceMesh& mesh);
std::vector<int64_t> all_axes(const DeviceMesh& mesh);
/// Every combination of positions on `axes`, in the order of gather_over_axes; the other axes stay at this rank's.
std::vector<std::vector<int64_t>> coordinates_over_axes(const DeviceMesh& mesh, const std::vector<int64_t>& axes);

/// This rank's part of `full` under `layout`, new and contiguous.
Tensor cut_for_this_rank(const Tensor& full, const DTensorLayout& layout);
/// The same, written into `local` without another copy.
void copy_own_part(const Tensor& local, const Tensor& full, const DTensorLayout& layout);
/// `layout` with every Partial placement turned into Replicate.
std::shared_ptr<const DTensorLayout> without_partial(const std::shared_ptr<const DTensorLayout>& layout);

/// The whole tensor, new memory on every rank; Partial placements are reduced. Collective.
Tensor gather_full(const DTensorLayout& layout, const Tensor& local, const std::string& fqn);
/// This rank's part under `target` (same mesh and sizes); new memory, or `local` itself where nothing changes.
/// Collective.
Tensor redistribute_local(const DTensorLayout& source, const Tensor& local, const DTensorLayout& target,
                          const std::string& fqn);
/// Gives every rank the values of the first rank of the mesh: that rank's `full` itself, elsewhere new memory.
/// Collective.
Tensor broadcast_over_mesh(const Tensor& full, const DeviceMesh& mesh, const std::string& what);

}  // namespace fsdp2::detail
