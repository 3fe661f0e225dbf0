#pragma once

// Ranks arranged as an N-dimensional array. Python twin: torch.distributed.device_mesh.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp2/export.h>
#include <fsdp2/process_group.h>

namespace fsdp2 {

namespace detail {
struct MeshGroups;
}

/// A cheap handle. Making the same mesh twice shares its process groups. Every constructor is collective: all ranks of
/// the mesh call it with equal arguments; others may.
class FSDP2_API DeviceMesh {
 public:
  /// `ranks`: int64 tensor of distinct global ranks, any number of dimensions.
  DeviceMesh(c10::DeviceType device_type, const Tensor& ranks, std::vector<std::string> dim_names = {});

  int64_t ndim() const;
  int64_t size() const;
  int64_t size(int64_t axis) const;
  const std::vector<int64_t>& shape() const;
  const std::vector<std::string>& dim_names() const;
  c10::DeviceType device_type() const;
  /// int64 tensor on CPU, of the mesh's shape.
  Tensor ranks() const;
  /// Same device type, ranks, shape and names.
  bool operator==(const DeviceMesh& other) const;

  /// Sub-mesh through this rank. Names keep the order of the parent. An unknown name is kNotFound and lists
  /// those there are.
  template <class N>
    requires std::convertible_to<const N&, std::string_view>
  DeviceMesh operator[](const N& name) const {
    return submesh({std::string(std::string_view(name))});
  }
  DeviceMesh operator[](const std::vector<std::string>& names) const { return submesh(names); }
  /// The named axes as one axis `new_name`. Collective.
  DeviceMesh flatten(const std::vector<std::string>& names, const std::string& new_name) const;

  ProcessGroup get_group(int64_t axis) const;
  ProcessGroup get_group(const std::string& name) const;
  int64_t get_local_rank(int64_t axis) const;
  int64_t get_local_rank(const std::string& name) const;
  /// Position of this rank, one number per axis; nullopt where this rank is outside.
  std::optional<std::vector<int64_t>> get_coordinate() const;

  static DeviceMesh from_group(const ProcessGroup& group, c10::DeviceType device_type,
                               std::vector<std::string> dim_names = {});
  static DeviceMesh from_group(const std::vector<ProcessGroup>& groups, c10::DeviceType device_type,
                               const Tensor& ranks, std::vector<std::string> dim_names = {});

  struct Impl;

 private:
  friend struct detail::MeshGroups;
  explicit DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  DeviceMesh submesh(const std::vector<std::string>& names) const;
  int64_t axis_of(const std::string& name) const;

  std::shared_ptr<const Impl> impl_;
};

/// Ranks 0..prod(shape)-1 in row-major order. Every rank of the default group calls it.
FSDP2_API DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                                      std::vector<std::string> dim_names = {});

}  // namespace fsdp2
