#pragma once

// Groups and meshes that are cut anew from a mesh. All calls are collective over the default group, with equal
// arguments.

#include <fsdp2/device_mesh.h>

#include <string>

namespace fsdp2::detail {

/// The ranks of `axis` once more, with connections that only `purpose` uses; equal calls share it.
ProcessGroup separate_group(const DeviceMesh& mesh, int64_t axis, const std::string& purpose);
/// The mesh's ranks, row-major, as rows of `part` (which divides their number): shape (size / part, part).
DeviceMesh split_mesh(const DeviceMesh& mesh, int64_t part);
/// Whether it was made as it is, not cut from a larger one.
bool is_root_mesh(const DeviceMesh& mesh);

}  // namespace fsdp2::detail
