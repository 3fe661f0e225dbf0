#pragma once

// Groups and meshes that are cut anew from a mesh. The ranks of the mesh call them together, with equal arguments.

#include <fsdp2/device_mesh.h>

#include <string>

namespace fsdp2::detail {

struct MeshGroups {
  /// The ranks of `axis` once more, with connections that only `purpose` uses; equal calls share it.
  static ProcessGroup separate_group(const DeviceMesh& mesh, int64_t axis, const std::string& purpose);
  /// The mesh's ranks, row-major, as rows of `part` (which divides their number): shape (size / part, part).
  static DeviceMesh split(const DeviceMesh& mesh, int64_t part);
};

}  // namespace fsdp2::detail
