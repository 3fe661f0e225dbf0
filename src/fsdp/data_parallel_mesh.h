#pragma once

// The ranks that a group's parameters are sharded over, and those that hold the same shard.

#include <optional>
#include <string>
#include <vector>

#include <fsdp2/fully_shard.h>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

struct DataParallelMesh {
  DeviceMesh mesh;  // of the sharded parameters' DTensors
  std::optional<int64_t> shard_axis = {}, replicate_axis = {};
  ProcessGroup shard_group = {}, replicate_group = {};  // undefined where there is no such axis
  int64_t shard_size = 1, shard_rank = 0, replicate_size = 1;
  /// With dp_mesh_dims: the mesh that the parameters come on, and for each axis of `mesh` its axes there.
  std::optional<DeviceMesh> full_mesh = {};
  std::vector<std::vector<int64_t>> full_axes = {};

  /// All ranks that take part in a reduction.
  int64_t size() const { return shard_size * replicate_size; }
  /// Groups whose members must do the same, one after the other.
  std::vector<ProcessGroup> groups() const;
  bool operator==(const DataParallelMesh& other) const;
};

/// A 1-D mesh shards, a 2-D mesh replicates over its first axis and shards over its second.
DataParallelMesh data_parallel_mesh(const DeviceMesh& mesh);
/// What `options` ask for; without a mesh all ranks, 1-D. Collective where axes must be flattened.
DataParallelMesh resolve_mesh(const FullyShardOptions& options);

/// The placements of a parameter that is sharded on `dim`. `param` is plain, or with dp_mesh_dims a DTensor on the
/// full mesh.
std::vector<Placement> sharded_placements(const Tensor& param, const std::string& fqn, const DataParallelMesh& mesh,
                                          int64_t dim);

}  // namespace fsdp2::detail
