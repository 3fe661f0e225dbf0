#include "fsdp/data_parallel_mesh.h"

#include <algorithm>

#include <fsdp2/error.h>

#include "process/world.h"

namespace fsdp2::detail {

namespace {

/// Fills in what follows from the axes.
DataParallelMesh with_groups(DataParallelMesh made) {
  if (made.shard_axis) {
    made.shard_group = made.mesh.get_group(*made.shard_axis);
    made.shard_size = made.mesh.size(*made.shard_axis);
    made.shard_rank = made.mesh.get_local_rank(*made.shard_axis);
  }
  if (made.replicate_axis) {
    made.replicate_group = made.mesh.get_group(*made.replicate_axis);
    made.replicate_size = made.mesh.size(*made.replicate_axis);
  }
  return made;
}

void check_inside(const DeviceMesh& mesh) {
  FSDP2_CHECK(mesh.device_type() == at::kCPU || mesh.device_type() == local_device().type(), kInvalidArgument,
              "[fsdp] the mesh is one of ", c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true),
              " devices; this rank has ", local_device(), ": make the mesh with fsdp2::local_device().type()");
  FSDP2_CHECK(mesh.get_coordinate().has_value(), kUsage, "[fsdp] this rank is outside the mesh of ranks ", mesh.ranks(),
              "; only ranks inside it call fully_shard");
}

std::vector<int64_t> named_axes(const DeviceMesh& mesh, const std::vector<std::string>& names, const char* field) {
  std::vector<int64_t> axes;
  for (const std::string& name : names) {
    const auto& known = mesh.dim_names();
    const auto found = std::find(known.begin(), known.end(), name);
    FSDP2_CHECK(found != known.end(), kInvalidArgument, "[fsdp] dp_mesh_dims.", field, " names \"", name,
                "\"; the mesh has \"", c10::Join("\", \"", known), "\"");
    axes.push_back(found - known.begin());
  }
  FSDP2_CHECK(std::is_sorted(axes.begin(), axes.end()), kInvalidArgument, "[fsdp] dp_mesh_dims.", field,
              " must name axes in the order of the mesh, \"", c10::Join("\", \"", mesh.dim_names()), "\"");
  return axes;
}

/// With dp_mesh_dims: several axes of one kind become one, all others stay.
DataParallelMesh from_full_mesh(const DeviceMesh& full, const DataParallelMeshDims& dims) {
  FSDP2_CHECK(!dims.shard.empty() || !dims.replicate.empty(), kInvalidArgument,
              "[fsdp] dp_mesh_dims names no axis; "
              "name the axes to shard over, to replicate over, or both");
  FSDP2_CHECK(!full.dim_names().empty(), kInvalidArgument, "[fsdp] dp_mesh_dims names axes, but the mesh of shape ",
              at::IntArrayRef(full.shape()), " has no names; pass dim_names when making it");
  const auto shard = named_axes(full, dims.shard, "shard"), replicate = named_axes(full, dims.replicate, "replicate");
  std::vector<int64_t> uses(static_cast<size_t>(full.ndim()));
  for (const auto* axes : {&shard, &replicate}) {
    for (const int64_t axis : *axes) {
      FSDP2_CHECK(++uses[axis] == 1, kInvalidArgument, "[fsdp] dp_mesh_dims names axis \"", full.dim_names()[axis],
                  "\" twice");
    }
  }
  DataParallelMesh made{.mesh = full, .full_mesh = full};
  if (shard.size() <= 1 && replicate.size() <= 1) {
    for (int64_t axis = 0; axis < full.ndim(); ++axis) made.full_axes.push_back({axis});
    if (!shard.empty()) made.shard_axis = shard.front();
    if (!replicate.empty()) made.replicate_axis = replicate.front();
    return with_groups(std::move(made));
  }
  // Joined axes stand where the first of them stood.
  for (int64_t axis = 0; axis < full.ndim(); ++axis) {
    const auto of_kind = [&](const std::vector<int64_t>& kind, std::optional<int64_t>& joined) {
      if (std::find(kind.begin(), kind.end(), axis) == kind.end()) return false;
      if (!joined) {
        joined = static_cast<int64_t>(made.full_axes.size());
        made.full_axes.push_back(kind);
      }
      return true;
    };
    if (!of_kind(shard, made.shard_axis) && !of_kind(replicate, made.replicate_axis)) {
      made.full_axes.push_back({axis});
    }
  }
  std::vector<int64_t> order, shape;
  std::vector<std::string> names;
  for (const auto& axes : made.full_axes) {
    int64_t size = 1;
    std::string name;
    for (const int64_t axis : axes) {
      order.push_back(axis);
      size *= full.size(axis);
      name += (name.empty() ? "" : "_") + full.dim_names()[axis];
    }
    shape.push_back(size);
    names.push_back(name);
  }
  made.mesh = DeviceMesh(full.device_type(), full.ranks().permute(order).reshape(shape), names);
  return with_groups(std::move(made));
}

}  // namespace

std::vector<ProcessGroup> DataParallelMesh::groups() const {
  std::vector<ProcessGroup> found;
  if (shard_size > 1) found.push_back(shard_group);
  if (replicate_size > 1) found.push_back(replicate_group);
  return found;
}

bool DataParallelMesh::operator==(const DataParallelMesh& other) const {
  return mesh == other.mesh && shard_axis == other.shard_axis && replicate_axis == other.replicate_axis;
}

DataParallelMesh data_parallel_mesh(const DeviceMesh& mesh) {
  FSDP2_CHECK(mesh.ndim() <= 2, kInvalidArgument, "[fsdp] the mesh has ", mesh.ndim(),
              " axes; expected 1 (shard) or 2 "
              "(replicate, shard): pick axes by name, mesh[\"dp\"], or say which is which with dp_mesh_dims");
  FSDP2_CHECK(mesh.ndim() == 1 || !mesh.dim_names().empty(), kInvalidArgument, "[fsdp] the 2-D mesh of shape ",
              at::IntArrayRef(mesh.shape()),
              " has no names; pass dim_names, e.g. {\"replicate\", \"shard\"}, so that it is "
              "clear which axis does what");
  check_inside(mesh);
  DataParallelMesh made{.mesh = mesh};
  if (mesh.ndim() == 2) {
    made.replicate_axis = 0;
  }
  made.shard_axis = mesh.ndim() - 1;
  return with_groups(std::move(made));
}

DataParallelMesh resolve_mesh(const FullyShardOptions& options) {
  if (options.dp_mesh_dims) {
    FSDP2_CHECK(options.mesh.has_value(), kInvalidArgument, "[fsdp] dp_mesh_dims needs the mesh whose axes it names");
    check_inside(*options.mesh);
    return from_full_mesh(*options.mesh, *options.dp_mesh_dims);
  }
  if (options.mesh) {
    return data_parallel_mesh(*options.mesh);
  }
  const World& world = require_world("fully_shard()");
  return data_parallel_mesh(init_device_mesh(local_device().type(), {world.world_size}));
}

std::vector<Placement> sharded_placements(const Tensor& param, const std::string& fqn, const DataParallelMesh& mesh,
                                          int64_t dim) {
  std::vector<Placement> placements(static_cast<size_t>(mesh.mesh.ndim()), Replicate{});
  int64_t split = 1;  // what later axes cut the same dimension into
  if (mesh.full_mesh) {
    FSDP2_CHECK(
        is_marked(param), kInvalidArgument, "[fsdp] parameter ", fqn,
        " is a plain tensor; with dp_mesh_dims every "
        "parameter must be a DTensor on the mesh, Replicate on the data-parallel axes: use distribute_parameter");
    const DTensorSpec& spec = *spec_of(param);
    FSDP2_CHECK(spec.mesh == *mesh.full_mesh, kInvalidArgument, "[fsdp] parameter ", fqn, " lies on a mesh of shape ",
                at::IntArrayRef(spec.mesh.shape()), " and names \"", c10::Join("\", \"", spec.mesh.dim_names()),
                "\"; with dp_mesh_dims it must lie on the mesh that was passed");
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      const bool data_parallel = static_cast<int64_t>(axis) == mesh.shard_axis.value_or(-1) ||
                                 static_cast<int64_t>(axis) == mesh.replicate_axis.value_or(-1);
      for (const int64_t from : mesh.full_axes[axis]) {
        const Placement& placement = spec.placements[from];
        if (!data_parallel) {
          placements[axis] = placement;
          continue;
        }
        FSDP2_CHECK(std::holds_alternative<Replicate>(placement), kInvalidArgument, "[fsdp] parameter ", fqn, " is ",
                    to_string(placement), " on data-parallel axis \"", mesh.full_mesh->dim_names()[from],
                    "\"; expected Replicate there: fully_shard shards that axis itself");
      }
    }
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      const auto* shard = std::get_if<Shard>(&placements[axis]);
      if (shard != nullptr && shard->dim == dim && static_cast<int64_t>(axis) > mesh.shard_axis.value_or(-1)) {
        split *= mesh.mesh.size(static_cast<int64_t>(axis));
      }
    }
  }
  if (mesh.shard_axis) {
    if (split > 1) {
      placements[*mesh.shard_axis] = StridedShard{dim, split};
    } else {
      placements[*mesh.shard_axis] = Shard{dim};
    }
  }
  return placements;
}

}  // namespace fsdp2::detail
