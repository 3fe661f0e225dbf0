#include <fsdp2/tensor/dtensor.h>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include <fsdp2/error.h>

#include "tensor/autograd.h"
#include "tensor/dtensor_spec.h"
#include "tensor/redistribute.h"

namespace fsdp2 {
namespace {

using detail::BelowDTensor;
using detail::DTensorLayout;

void check_plain(const Tensor& tensor, const char* who) {
  FSDP2_CHECK(tensor.defined(), kInvalidArgument, "[dtensor] ", who, ": the tensor is empty");
  FSDP2_CHECK(!is_dtensor(tensor), kInvalidArgument, "[dtensor] ", who, ": ",
              detail::describe(*detail::spec_of(tensor)), " is distributed already; use redistribute()");
}

Tensor on_mesh_device(const Tensor& tensor, const DeviceMesh& mesh) {
  if (tensor.is_meta() || tensor.device().type() == mesh.device_type()) return tensor;
  return tensor.to(detail::control_device(mesh));
}

// Control row: number of dims, dtype, sizes. Fixed length, so that ranks which disagree still meet.
constexpr int64_t kMaxDims = 14;

Tensor shape_row(const Tensor& tensor, const DeviceMesh& mesh) {
  FSDP2_CHECK(tensor.dim() <= kMaxDims, kUnsupported, "[dtensor] a tensor with ", tensor.dim(), " dimensions: at most ",
              kMaxDims, " are supported");
  std::vector<int64_t> row(kMaxDims + 2, -1);
  row[0] = tensor.dim();
  row[1] = static_cast<int64_t>(tensor.scalar_type());
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), row.begin() + 2);
  return at::tensor(row, at::kLong).to(detail::control_device(mesh));
}

/// shape_row of every rank of the mesh in the order of mesh.ranks(). Collective.
std::vector<std::vector<int64_t>> gather_shapes(const Tensor& tensor, const DeviceMesh& mesh, const char* who) {
  const Tensor rows = detail::gather_over_axes(shape_row(tensor, mesh), mesh, detail::all_axes(mesh), who)
                          .view({-1, kMaxDims + 2})
                          .cpu();
  std::vector<std::vector<int64_t>> result;
  const auto* data = rows.const_data_ptr<int64_t>();
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    result.emplace_back(data + rank * (kMaxDims + 2), data + (rank + 1) * (kMaxDims + 2));
  }
  return result;
}

std::string shape_text(const std::vector<int64_t>& row) {
  return c10::str(c10::IntArrayRef(row.data() + 2, static_cast<size_t>(row[0])), " of ",
                  c10::toString(static_cast<c10::ScalarType>(row[1])));
}

std::string ranks_and_shapes(const std::vector<std::vector<int64_t>>& rows, const DeviceMesh& mesh) {
  const Tensor ranks = mesh.ranks().reshape({-1}).contiguous();
  std::string text;
  for (size_t index = 0; index < rows.size(); ++index) {
    text += c10::str(index == 0 ? "" : ", ", "rank ", ranks.const_data_ptr<int64_t>()[index], ": ",
                     shape_text(rows[index]));
  }
  return text;
}

std::vector<int64_t> coordinate_at(int64_t index, const DeviceMesh& mesh) {
  std::vector<int64_t> coordinate(mesh.ndim());
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    coordinate[axis] = index % mesh.size(axis);
    index /= mesh.size(axis);
  }
  return coordinate;
}

/// The layout of the one tensor whose parts have these shapes.
std::shared_ptr<const DTensorLayout> layout_of_parts(const std::vector<std::vector<int64_t>>& rows,
                                                     const DeviceMesh& mesh, std::vector<Placement> placements) {
  const auto refuse = [&](const char* why) {
    FSDP2_THROW(kInvalidArgument, "[dtensor] from_local with ", to_string(placements), ": ", why, "; the parts are ",
                ranks_and_shapes(rows, mesh), "; pass parts that are the chunks of one tensor");
  };
  const int64_t dims = rows[0][0];
  for (const auto& row : rows) {
    if (row[0] != dims || row[1] != rows[0][1]) refuse("the ranks disagree on the number of dimensions or the dtype");
  }
  placements = detail::normalize_placements(std::move(placements), mesh, dims);
  // Total length of a cut dim: sum over the line of ranks that share all other positions with the first one.
  std::vector<int64_t> sizes(rows[0].begin() + 2, rows[0].begin() + 2 + dims);
  for (int64_t dim = 0; dim < dims; ++dim) {
    std::vector<bool> cuts(mesh.ndim(), false);
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      const auto* shard = std::get_if<Shard>(&placements[axis]);
      const auto* strided = std::get_if<StridedShard>(&placements[axis]);
      cuts[axis] = (shard != nullptr && shard->dim == dim) || (strided != nullptr && strided->dim == dim);
    }
    int64_t total = 0;
    for (size_t index = 0; index < rows.size(); ++index) {
      const auto coordinate = coordinate_at(static_cast<int64_t>(index), mesh);
      bool on_line = true;
      for (int64_t axis = 0; axis < mesh.ndim(); ++axis) on_line = on_line && (cuts[axis] || coordinate[axis] == 0);
      if (on_line) total += rows[index][2 + dim];
    }
    sizes[dim] = total;
  }
  const auto shape_of = [&](const std::vector<int64_t>& row) {
    return std::vector<int64_t>(row.begin() + 2, row.begin() + 2 + dims);
  };
  auto layout = std::make_shared<const DTensorLayout>(mesh, placements, sizes);
  bool like_chunks = true;
  for (size_t index = 0; index < rows.size(); ++index) {
    like_chunks = like_chunks &&
                  shape_of(rows[index]) == layout->local_shape(coordinate_at(static_cast<int64_t>(index), mesh));
  }
  if (like_chunks) return layout;
  const auto* shard = std::get_if<Shard>(&placements[0]);
  if (mesh.ndim() != 1 || shard == nullptr) refuse("the shapes do not fit together");
  std::vector<int64_t> extents;
  for (const auto& row : rows) {
    auto shape = shape_of(row);
    extents.push_back(shape[shard->dim]);
    shape[shard->dim] = sizes[shard->dim];
    if (shape != sizes) refuse("the ranks disagree on a dimension that is not cut");
  }
  return std::make_shared<const DTensorLayout>(mesh, placements, sizes, extents);
}

Tensor distribute(const Tensor& full, const DeviceMesh& mesh, std::vector<Placement> placements,
                  const std::string& fqn) {
  for (const auto& placement : placements) {
    FSDP2_CHECK(!std::holds_alternative<Partial>(placement), kInvalidArgument, "[dtensor] distribute_tensor with ",
                to_string(placements), ": a whole tensor can be replicated or cut, not turned into terms of a sum");
  }
  const auto layout = std::make_shared<const DTensorLayout>(mesh, std::move(placements), full.sizes().vec());
  const auto rows = gather_shapes(full, mesh, "distribute_tensor");
  FSDP2_CHECK(std::all_of(rows.begin(), rows.end(), [&](const auto& row) { return row == rows[0]; }), kInvalidArgument,
              "[dtensor] distribute_tensor: the ranks pass different tensors (", ranks_and_shapes(rows, mesh),
              "); every rank passes the global shape and the same dtype");
  const Tensor source = on_mesh_device(full, mesh);
  const Tensor values = detail::broadcast_over_mesh(source, mesh, "distribute_tensor");
  return detail::make_dtensor_over(layout, detail::cut_for_this_rank(values, *layout), fqn);
}

}  // namespace

bool is_dtensor(const Tensor& tensor) { return detail::is_marked(tensor); }

DTensor::DTensor(Tensor tensor) : tensor_(std::move(tensor)) { detail::local_of(tensor_); }

const DeviceMesh& DTensor::device_mesh() const { return detail::spec_of(tensor_)->mesh; }

const std::vector<Placement>& DTensor::placements() const { return detail::spec_of(tensor_)->placements; }

Tensor DTensor::to_local() const {
  const auto& spec = *detail::spec_of(tensor_);
  Tensor result;
  {
    BelowDTensor below;
    result = spec.local.detach();
  }
  if (detail::records_grad(tensor_)) detail::attach_to_local(result, tensor_, spec);
  return result;
}

Tensor DTensor::full_tensor() const {
  const auto& spec = *detail::spec_of(tensor_);
  Tensor result;
  {
    BelowDTensor below;
    at::NoGradGuard no_grad;
    result = detail::gather_full(*spec.layout, spec.local, spec.fqn);
  }
  if (detail::records_grad(tensor_)) detail::attach_full_tensor(result, tensor_, spec);
  return result;
}

DTensor DTensor::redistribute(std::vector<Placement> placements) const {
  const auto& spec = *detail::spec_of(tensor_);
  Tensor result;
  {
    BelowDTensor below;
    at::NoGradGuard no_grad;
    const auto target = std::make_shared<const DTensorLayout>(spec.mesh, std::move(placements), spec.sizes);
    result = detail::make_dtensor_over(target, detail::redistribute_local(*spec.layout, spec.local, *target, spec.fqn),
                                       spec.fqn);
  }
  if (detail::records_grad(tensor_)) detail::attach_redistribute(result, tensor_, spec);
  return DTensor(std::move(result));
}

DTensor distribute_tensor(const Tensor& full, const DeviceMesh& mesh, std::vector<Placement> placements) {
  check_plain(full, "distribute_tensor");
  FSDP2_CHECK(full.is_leaf(), kInvalidArgument, "[dtensor] distribute_tensor of a tensor of shape ", full.sizes(),
              " that was computed with grad: the result is a leaf, so the gradient would be lost; pass detach()");
  c10::InferenceMode off(false);
  BelowDTensor below;
  at::NoGradGuard no_grad;
  Tensor result = distribute(full, mesh, std::move(placements), "");
  result.set_requires_grad(full.requires_grad());
  return DTensor(std::move(result));
}

DTensor from_local(const Tensor& local, const DeviceMesh& mesh, std::vector<Placement> placements,
                   std::optional<std::vector<int64_t>> sizes) {
  check_plain(local, "from_local");
  const bool records = detail::records_grad(local);
  Tensor result;
  {
    c10::InferenceMode off(false);
    BelowDTensor below;
    at::NoGradGuard no_grad;
    std::shared_ptr<const DTensorLayout> layout;
    if (sizes.has_value()) {
      layout = std::make_shared<const DTensorLayout>(mesh, std::move(placements), *std::move(sizes));
      const auto wanted = layout->local_shape(detail::coordinate_of_this_rank(mesh));
      FSDP2_CHECK(local.sizes() == c10::IntArrayRef(wanted), kInvalidArgument, "[dtensor] from_local of a tensor [",
                  c10::IntArrayRef(layout->sizes), "] with ", to_string(layout->placements),
                  ": this rank passed a part of shape ", local.sizes(), ", it holds ", c10::IntArrayRef(wanted),
                  "; without sizes, parts of other lengths are allowed");
    } else {
      layout = layout_of_parts(gather_shapes(local, mesh, "from_local"), mesh, std::move(placements));
    }
    result = detail::make_dtensor_over(std::move(layout), on_mesh_device(local, mesh).detach(), "");
    if (!records) result.set_requires_grad(local.requires_grad() && local.is_leaf());
  }
  if (records) detail::attach_from_local(result, local);
  return DTensor(std::move(result));
}

void distribute_parameter(ModuleRef module, const std::string& fqn, const DeviceMesh& mesh,
                          std::vector<Placement> placements) {
  const auto parameters = module->named_parameters();
  const Tensor* found = parameters.find(fqn);
  if (found == nullptr) {
    std::string names;
    for (const auto& item : parameters) names += (names.empty() ? "" : ", ") + item.key();
    FSDP2_THROW(kNotFound, "[dtensor] distribute_parameter: the module has no parameter '", fqn, "'; it has ",
                names.empty() ? "none" : names);
  }
  const Tensor parameter = *found;  // shares the TensorImpl with the module's member
  check_plain(parameter, "distribute_parameter");
  FSDP2_CHECK(!parameter.grad().defined(), kUsage, "[dtensor] distribute_parameter of '", fqn,
              "': it has a gradient, which would stay whole; call zero_grad() first");
  c10::InferenceMode off(false);
  BelowDTensor below;
  at::NoGradGuard no_grad;
  const Tensor sharded = distribute(parameter.detach(), mesh, std::move(placements), fqn);
  parameter.unsafeGetTensorImpl()->shallow_copy_from(sharded.getIntrusivePtr());
}

}  // namespace fsdp2
