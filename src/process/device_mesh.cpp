#include <fsdp2/device_mesh.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include <fsdp2/error.h>

#include "process/mesh_groups.h"
#include "process/world.h"

namespace fsdp2 {

// Note [Meshes and their groups]
// A mesh holds its global ranks as a row-major array, and one group per axis: the ranks that differ from this one
// in that coordinate only. Groups come from detail::shared_group, keyed by their ranks, so equal meshes share
// communicators. Its members alone make a group, under a name that follows from the ranks, so ranks outside, or whose
// sub-mesh is another one, need not take part.
struct DeviceMesh::Impl {
  c10::DeviceType device_type = c10::DeviceType::CPU;
  std::vector<int64_t> shape;
  std::vector<int> ranks;  // row-major
  std::vector<std::string> names;
  std::vector<ProcessGroup> groups;  // one per axis; null where this rank is outside
  std::optional<std::vector<int64_t>> coordinate;
};

namespace {

int64_t product(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{1}, std::multiplies<>());
}

std::string shape_text(const std::vector<int64_t>& shape) { return c10::str("(", c10::Join(", ", shape), ")"); }

std::vector<int64_t> coordinate_of(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> coordinate(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    coordinate[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return coordinate;
}

int64_t index_of(const std::vector<int64_t>& coordinate, const std::vector<int64_t>& shape) {
  int64_t index = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    index = index * shape[axis] + coordinate[axis];
  }
  return index;
}

/// For each line of the mesh along `axes` (row-major in the rest): its ranks, row-major in `axes`.
std::vector<std::vector<int>> lines_along(const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                                          const std::vector<int64_t>& axes) {
  std::vector<std::vector<int>> lines;
  for (int64_t start = 0; start < static_cast<int64_t>(ranks.size()); ++start) {
    std::vector<int64_t> at = coordinate_of(start, shape);
    if (std::any_of(axes.begin(), axes.end(), [&](int64_t axis) { return at[axis] != 0; })) {
      continue;
    }
    std::vector<int64_t> line_shape;
    for (int64_t axis : axes) {
      line_shape.push_back(shape[axis]);
    }
    std::vector<int> line;
    for (int64_t step = 0; step < product(line_shape); ++step) {
      const std::vector<int64_t> offset = coordinate_of(step, line_shape);
      for (size_t i = 0; i < axes.size(); ++i) {
        at[axes[i]] = offset[i];
      }
      line.push_back(ranks[index_of(at, shape)]);
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

/// Of the line along `axes` that this rank is in; undefined outside.
ProcessGroup own_group(const DeviceMesh::Impl& mesh, const std::vector<int64_t>& axes,
                       const std::string& purpose = "") {
  const int my_rank = detail::require_world("a mesh's group").rank;
  for (const std::vector<int>& line : lines_along(mesh.ranks, mesh.shape, axes)) {
    if (std::find(line.begin(), line.end(), my_rank) != line.end()) {
      return detail::shared_group(line, purpose);
    }
  }
  return {};
}

void check_names(const std::vector<std::string>& names, size_t ndim) {
  FSDP2_CHECK(names.empty() || names.size() == ndim, kInvalidArgument, "[device_mesh] ", names.size(),
              " dim names for ", ndim, " axes; give one per axis, or none");
  const std::set<std::string> distinct(names.begin(), names.end());
  FSDP2_CHECK(distinct.size() == names.size(), kInvalidArgument, "[device_mesh] dim names \"",
              c10::Join("\", \"", names), "\" repeat; each axis needs a name of its own");
  FSDP2_CHECK(distinct.count("") == 0, kInvalidArgument, "[device_mesh] a dim name is empty");
}

std::vector<int> rank_vector(const Tensor& ranks) {
  FSDP2_CHECK(
      ranks.defined() && ranks.scalar_type() == at::kLong && ranks.dim() >= 1 && ranks.numel() >= 1, kInvalidArgument,
      "[device_mesh] ranks must be an int64 tensor of at least one dimension and element; got ",
      ranks.defined() ? c10::str(ranks.scalar_type(), " of ", ranks.dim(), " dims, ", ranks.numel(), " elements")
                      : std::string("an undefined tensor"));
  const Tensor dense = ranks.cpu().contiguous();
  const int64_t* data = dense.const_data_ptr<int64_t>();
  std::vector<int> values;
  for (int64_t i = 0; i < dense.numel(); ++i) {
    values.push_back(static_cast<int>(data[i]));
  }
  return values;
}

std::shared_ptr<DeviceMesh::Impl> describe(c10::DeviceType device_type, std::vector<int> ranks,
                                           std::vector<int64_t> shape, std::vector<std::string> names) {
  const detail::World& world = detail::require_world("a DeviceMesh");
  check_names(names, shape.size());
  const std::set<int> distinct(ranks.begin(), ranks.end());
  FSDP2_CHECK(distinct.size() == ranks.size(), kInvalidArgument, "[device_mesh] ranks ", c10::Join(", ", ranks),
              " repeat; each rank may stand in one place");
  FSDP2_CHECK(*distinct.begin() >= 0 && *distinct.rbegin() < world.world_size, kInvalidArgument,
              "[device_mesh] a mesh of shape ", shape_text(shape), " needs ranks ", *distinct.begin(), " to ",
              *distinct.rbegin(), " but the job has ", world.world_size, " ranks");
  auto impl = std::make_shared<DeviceMesh::Impl>();
  impl->device_type = device_type;
  impl->shape = std::move(shape);
  impl->ranks = std::move(ranks);
  impl->names = std::move(names);
  const auto mine = std::find(impl->ranks.begin(), impl->ranks.end(), world.rank);
  if (mine != impl->ranks.end()) {
    impl->coordinate = coordinate_of(mine - impl->ranks.begin(), impl->shape);
  }
  return impl;
}

std::shared_ptr<const DeviceMesh::Impl> make(c10::DeviceType device_type, std::vector<int> ranks,
                                             std::vector<int64_t> shape, std::vector<std::string> names) {
  auto impl = describe(device_type, std::move(ranks), std::move(shape), std::move(names));
  for (int64_t axis = 0; axis < static_cast<int64_t>(impl->shape.size()); ++axis) {
    impl->groups.push_back(own_group(*impl, {axis}));
  }
  return impl;
}

}  // namespace

ProcessGroup detail::MeshGroups::separate_group(const DeviceMesh& mesh, int64_t axis, const std::string& purpose) {
  mesh.size(axis);  // checks it
  return own_group(*mesh.impl_, {axis}, purpose);
}

DeviceMesh detail::MeshGroups::split(const DeviceMesh& mesh, int64_t part) {
  const int64_t size = mesh.size();
  FSDP2_CHECK(part >= 1 && size % part == 0, kInvalidArgument, "[device_mesh] ", size,
              " ranks cannot be split into parts of ", part);
  return DeviceMesh(make(mesh.device_type(), mesh.impl_->ranks, {size / part, part}, {}));
}

DeviceMesh::DeviceMesh(c10::DeviceType device_type, const Tensor& ranks, std::vector<std::string> dim_names) {
  std::vector<int> values = rank_vector(ranks);
  impl_ = make(device_type, std::move(values), ranks.sizes().vec(), std::move(dim_names));
}

DeviceMesh init_device_mesh(c10::DeviceType device_type, std::vector<int64_t> shape,
                            std::vector<std::string> dim_names) {
  FSDP2_CHECK(!shape.empty(), kInvalidArgument, "[device_mesh] the mesh shape is empty; give one size per axis");
  for (const int64_t extent : shape) {
    FSDP2_CHECK(extent >= 1, kInvalidArgument, "[device_mesh] mesh shape ", shape_text(shape), " has an axis of size ",
                extent, "; every axis needs at least 1");
  }
  // The device is named: a MetaDeviceGuard of the caller's must not reach it.
  const Tensor ranks = at::arange(product(shape), at::TensorOptions(at::kLong).device(at::kCPU));
  return DeviceMesh(device_type, ranks.view(shape), std::move(dim_names));
}

int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(impl_->shape.size()); }
int64_t DeviceMesh::size() const { return static_cast<int64_t>(impl_->ranks.size()); }

int64_t DeviceMesh::size(int64_t axis) const {
  FSDP2_CHECK(axis >= 0 && axis < ndim(), kInvalidArgument, "[device_mesh] axis ", axis, " of a mesh with ", ndim(),
              " axes; allowed are 0 to ", ndim() - 1);
  return impl_->shape[axis];
}

const std::vector<int64_t>& DeviceMesh::shape() const { return impl_->shape; }
const std::vector<std::string>& DeviceMesh::dim_names() const { return impl_->names; }
c10::DeviceType DeviceMesh::device_type() const { return impl_->device_type; }

Tensor DeviceMesh::ranks() const {
  Tensor values = at::empty(impl_->shape, at::TensorOptions(at::kLong).device(at::kCPU));
  std::copy(impl_->ranks.begin(), impl_->ranks.end(), values.mutable_data_ptr<int64_t>());
  return values;
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return impl_ == other.impl_ ||
         (impl_->device_type == other.impl_->device_type && impl_->shape == other.impl_->shape &&
          impl_->ranks == other.impl_->ranks && impl_->names == other.impl_->names);
}

int64_t DeviceMesh::axis_of(const std::string& name) const {
  const auto found = std::find(impl_->names.begin(), impl_->names.end(), name);
  FSDP2_CHECK(found != impl_->names.end(), kNotFound, "[device_mesh] no axis is named \"", name, "\"; ",
              impl_->names.empty() ? std::string("this mesh has no names: pass dim_names when making it")
                                   : c10::str("there are \"", c10::Join("\", \"", impl_->names), "\""));
  return found - impl_->names.begin();
}

DeviceMesh DeviceMesh::submesh(const std::vector<std::string>& names) const {
  FSDP2_CHECK(!names.empty(), kInvalidArgument, "[device_mesh] a sub-mesh needs at least one name");
  std::vector<int64_t> axes;
  for (const std::string& name : names) {
    axes.push_back(axis_of(name));
  }
  FSDP2_CHECK(std::is_sorted(axes.begin(), axes.end()) && std::set(axes.begin(), axes.end()).size() == axes.size(),
              kInvalidArgument, "[device_mesh] sub-mesh names \"", c10::Join("\", \"", names),
              "\" must follow the order of the mesh, each once: \"", c10::Join("\", \"", impl_->names), "\"");
  if (static_cast<int64_t>(axes.size()) == ndim()) {
    return *this;
  }
  std::vector<int64_t> shape;
  for (const int64_t axis : axes) {
    shape.push_back(impl_->shape[axis]);
  }
  const std::vector<std::vector<int>> lines = lines_along(impl_->ranks, impl_->shape, axes);
  const int my_rank = detail::require_world("a sub-mesh").rank;
  const auto mine = std::find_if(lines.begin(), lines.end(), [&](const std::vector<int>& line) {
    return std::find(line.begin(), line.end(), my_rank) != line.end();
  });
  // A rank outside the parent gets the first sub-mesh, in which it has no coordinate.
  auto impl = describe(impl_->device_type, mine != lines.end() ? *mine : lines.front(), shape, names);
  for (const int64_t axis : axes) {
    impl->groups.push_back(impl_->groups[axis]);
  }
  return DeviceMesh(std::move(impl));
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& names, const std::string& new_name) const {
  std::vector<int64_t> axes;
  for (const std::string& name : names) {
    axes.push_back(axis_of(name));
  }
  FSDP2_CHECK(!axes.empty() && std::is_sorted(axes.begin(), axes.end()) &&
                  std::set(axes.begin(), axes.end()).size() == axes.size(),
              kInvalidArgument, "[device_mesh] flatten got \"", c10::Join("\", \"", names),
              "\"; expected names of this mesh in its order, each once: \"", c10::Join("\", \"", impl_->names), "\"");
  const std::vector<std::vector<int>> lines = lines_along(impl_->ranks, impl_->shape, axes);
  const int my_rank = detail::require_world("flatten").rank;
  const auto mine = std::find_if(lines.begin(), lines.end(), [&](const std::vector<int>& line) {
    return std::find(line.begin(), line.end(), my_rank) != line.end();
  });
  const std::vector<int>& line = mine != lines.end() ? *mine : lines.front();
  auto impl = describe(impl_->device_type, line, {static_cast<int64_t>(line.size())}, {new_name});
  impl->groups.push_back(own_group(*impl_, axes));
  return DeviceMesh(std::move(impl));
}

ProcessGroup DeviceMesh::get_group(int64_t axis) const {
  size(axis);  // checks it
  FSDP2_CHECK(impl_->groups[axis].defined(), kUsage, "[device_mesh] this rank is outside the mesh of ranks ",
              c10::Join(", ", impl_->ranks), " and has no group of axis ", axis);
  return impl_->groups[axis];
}

ProcessGroup DeviceMesh::get_group(const std::string& name) const { return get_group(axis_of(name)); }

int64_t DeviceMesh::get_local_rank(int64_t axis) const {
  size(axis);
  FSDP2_CHECK(impl_->coordinate.has_value(), kUsage, "[device_mesh] this rank is outside the mesh of ranks ",
              c10::Join(", ", impl_->ranks), " and has no place in it");
  return (*impl_->coordinate)[axis];
}

int64_t DeviceMesh::get_local_rank(const std::string& name) const { return get_local_rank(axis_of(name)); }

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const { return impl_->coordinate; }

DeviceMesh DeviceMesh::from_group(const ProcessGroup& group, c10::DeviceType device_type,
                                  std::vector<std::string> dim_names) {
  FSDP2_CHECK(group.defined(), kInvalidArgument, "[device_mesh] from_group got an empty group");
  std::vector<int> ranks = get_process_group_ranks(group);
  const auto size = static_cast<int64_t>(ranks.size());
  auto impl = describe(device_type, std::move(ranks), {size}, std::move(dim_names));
  impl->groups.push_back(group);
  return DeviceMesh(std::move(impl));
}

DeviceMesh DeviceMesh::from_group(const std::vector<ProcessGroup>& groups, c10::DeviceType device_type,
                                  const Tensor& ranks, std::vector<std::string> dim_names) {
  std::vector<int> values = rank_vector(ranks);
  FSDP2_CHECK(static_cast<int64_t>(groups.size()) == ranks.dim(), kInvalidArgument, "[device_mesh] from_group got ",
              groups.size(), " groups for a rank tensor of ", ranks.dim(), " dimensions; expected one per axis");
  auto impl = describe(device_type, std::move(values), ranks.sizes().vec(), std::move(dim_names));
  const int my_rank = detail::require_world("from_group").rank;
  for (size_t axis = 0; axis < groups.size(); ++axis) {
    const auto lines = lines_along(impl->ranks, impl->shape, {static_cast<int64_t>(axis)});
    for (const std::vector<int>& line : lines) {
      if (std::find(line.begin(), line.end(), my_rank) != line.end()) {
        FSDP2_CHECK(groups[axis].defined() && get_process_group_ranks(groups[axis]) == line, kInvalidArgument,
                    "[device_mesh] group of axis ", axis, " must hold ranks ", c10::Join(", ", line));
      }
    }
  }
  impl->groups = groups;
  return DeviceMesh(std::move(impl));
}

}  // namespace fsdp2
