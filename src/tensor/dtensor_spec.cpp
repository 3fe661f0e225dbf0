#include "tensor/dtensor_spec.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <fsdp2/error.h>

namespace fsdp2::detail {

// Note [A DTensor is a marked tensor]
// The TensorImpl of a DTensor has the global sizes and contiguous strides, no storage, the dispatch key kDTensorKey
// above autograd, and a DTensorSpec as its backend meta, which holds the layout and this rank's plain part. Every
// operator that meets the key lands in the boxed fallback (fallback.cpp), so code that was written for plain tensors
// sees right shapes and right values or an error, never a shard taken for the whole. shallow_copy_from copies key
// set, sizes, storage flag and spec along, so a parameter object changes between plain and marked in place.

namespace {

constexpr bool is_shard(const Placement& placement, int64_t dim) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim == dim;
  if (const auto* shard = std::get_if<StridedShard>(&placement)) return shard->dim == dim;
  return false;
}

/// A run of rows of one dimension.
using Range = ChunkRange;

/// Part `index` of `num_chunks` of rows that lie in several runs one after the other.
std::vector<Range> chunk_of_runs(const std::vector<Range>& runs, int64_t num_chunks, int64_t index) {
  int64_t total = 0;
  for (const auto& run : runs) total += run.length;
  const auto wanted = chunk_range(total, num_chunks, index);
  std::vector<Range> result;
  int64_t position = 0;
  for (const auto& run : runs) {
    const int64_t begin = std::max(position, wanted.offset);
    const int64_t end = std::min(position + run.length, wanted.offset + wanted.length);
    if (begin < end) result.push_back({run.offset + begin - position, end - begin});
    position += run.length;
  }
  return result;
}

/// Rows of dimension `dim` that the rank at `coordinate` holds.
std::vector<Range> rows_of(int64_t size, int64_t dim, const DeviceMesh& mesh, const std::vector<Placement>& placements,
                           const std::vector<int64_t>& coordinate) {
  std::vector<size_t> axes;  // in the order in which they cut
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (is_shard(placements[axis], dim)) axes.push_back(axis);
  }
  std::vector<Range> rows;
  if (size > 0) rows.push_back({0, size});
  for (size_t position = 0; position < axes.size(); ++position) {
    const size_t axis = axes[position];
    const int64_t num_chunks = mesh.size(static_cast<int64_t>(axis));
    const auto* strided = std::get_if<StridedShard>(&placements[axis]);
    if (strided == nullptr || strided->split_factor == 1) {
      rows = chunk_of_runs(rows, num_chunks, coordinate[axis]);
      continue;
    }
    int64_t inner = 1;  // what the later axes cut
    bool plain = true;
    for (size_t later = position + 1; later < axes.size(); ++later) {
      inner *= mesh.size(static_cast<int64_t>(axes[later]));
      plain = plain && std::holds_alternative<Shard>(placements[axes[later]]);
    }
    if (inner == strided->split_factor && plain) {
      // The blocks are exactly those of the later axes: they cut first, this axis cuts inside.
      for (size_t later = position + 1; later < axes.size(); ++later) {
        rows = chunk_of_runs(rows, mesh.size(static_cast<int64_t>(axes[later])), coordinate[axes[later]]);
      }
      return chunk_of_runs(rows, num_chunks, coordinate[axis]);
    }
    FSDP2_CHECK(inner == 1, kUnsupported, "[dtensor] placements ", to_string(placements), " on a mesh of shape ",
                c10::IntArrayRef(mesh.shape()), ": the axes after a StridedShard must cut its dimension into exactly ",
                strided->split_factor, " blocks, or not at all");
    std::vector<Range> pieces;
    for (int64_t block = 0; block < strided->split_factor; ++block) {
      const auto block_rows = chunk_of_runs(rows, strided->split_factor, block);
      for (const auto& run : chunk_of_runs(block_rows, num_chunks, coordinate[axis])) pieces.push_back(run);
    }
    rows = std::move(pieces);
  }
  return rows;
}

std::vector<std::vector<Range>> rows_per_dim(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                             const std::vector<Placement>& placements,
                                             const std::vector<int64_t>& coordinate) {
  FSDP2_CHECK(placements.size() == static_cast<size_t>(mesh.ndim()) && coordinate.size() == placements.size(),
              kInvalidArgument, "[dtensor] ", placements.size(), " placements and ", coordinate.size(),
              " coordinates for a mesh of ", mesh.ndim(), " axes: one of each per axis is needed");
  std::vector<std::vector<Range>> rows;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    rows.push_back(rows_of(sizes[dim], static_cast<int64_t>(dim), mesh, placements, coordinate));
  }
  return rows;
}

std::vector<Box> boxes_of_rows(const std::vector<std::vector<Range>>& rows) {
  for (const auto& runs : rows) {
    if (runs.empty()) return {};
  }
  std::vector<Box> boxes(1);
  for (const auto& runs : rows) {
    std::vector<Box> longer;
    for (const auto& box : boxes) {
      for (const auto& run : runs) {
        longer.push_back(box);
        longer.back().offsets.push_back(run.offset);
        longer.back().sizes.push_back(run.length);
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

std::vector<int64_t> shape_of_rows(const std::vector<std::vector<Range>>& rows) {
  std::vector<int64_t> shape;
  for (const auto& runs : rows) {
    int64_t length = 0;
    for (const auto& run : runs) length += run.length;
    shape.push_back(length);
  }
  return shape;
}

Tensor checked_local(const DTensorLayout& layout, Tensor local, const std::string& fqn) {
  FSDP2_CHECK(local.defined() && !is_marked(local), kInvalidArgument, "[dtensor] the local part of '", fqn,
              "' must be a plain tensor");
  FSDP2_CHECK(local.dim() == static_cast<int64_t>(layout.sizes.size()), kInvalidArgument,
              "[dtensor] the local part of '", fqn, "' has shape ", local.sizes(), ", the whole ",
              c10::IntArrayRef(layout.sizes), ": both need the same number of dimensions");
  if (!local.requires_grad()) return local;
  BelowDTensor below;
  return local.detach();
}

Tensor new_marked_tensor(c10::intrusive_ptr<DTensorSpec> spec) {
  const Tensor& local = spec->local;
  auto result =
      at::detail::make_tensor<c10::TensorImpl>(local.key_set().add(kDTensorKey), local.dtype(), local.device());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(spec->sizes);
  impl->set_storage_access_should_throw();
  impl->set_backend_meta(std::move(spec));
  return result;
}

}  // namespace

int64_t Box::numel() const {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

ChunkRange chunk_range(int64_t size, int64_t num_chunks, int64_t index) {
  const int64_t chunk = (size + num_chunks - 1) / num_chunks;
  const int64_t offset = std::min(size, chunk * index);
  return {offset, std::min(chunk, size - offset)};
}

std::vector<Box> chunks_at(at::IntArrayRef sizes, const DeviceMesh& mesh, const std::vector<Placement>& placements,
                           const std::vector<int64_t>& coordinate) {
  return boxes_of_rows(rows_per_dim(sizes, mesh, placements, coordinate));
}

std::vector<int64_t> local_shape_at(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                    const std::vector<Placement>& placements, const std::vector<int64_t>& coordinate) {
  return shape_of_rows(rows_per_dim(sizes, mesh, placements, coordinate));
}

std::vector<Placement> normalize_placements(std::vector<Placement> placements, const DeviceMesh& mesh,
                                            int64_t tensor_dims) {
  FSDP2_CHECK(placements.size() == static_cast<size_t>(mesh.ndim()), kInvalidArgument, "[dtensor] placements ",
              to_string(placements), " for a mesh of ", mesh.ndim(), " axes: give one placement per axis");
  const auto normalize = [&](int64_t& dim, const Placement& placement) {
    FSDP2_CHECK(dim >= -tensor_dims && dim < tensor_dims, kInvalidArgument, "[dtensor] ", to_string(placement),
                " of a tensor with ", tensor_dims, " dimensions: dim must lie in [", -tensor_dims, ", ", tensor_dims,
                ")");
    if (dim < 0) dim += tensor_dims;
  };
  for (auto& placement : placements) {
    if (auto* shard = std::get_if<Shard>(&placement)) normalize(shard->dim, placement);
    if (auto* shard = std::get_if<StridedShard>(&placement)) {
      normalize(shard->dim, placement);
      FSDP2_CHECK(shard->split_factor >= 1, kInvalidArgument, "[dtensor] ", to_string(placement),
                  ": split_factor must be at least 1");
    }
  }
  return placements;
}

DTensorLayout::DTensorLayout(DeviceMesh mesh_in, std::vector<Placement> placements_in, std::vector<int64_t> sizes_in,
                             std::vector<int64_t> extents_in)
    : mesh(std::move(mesh_in)),
      placements(normalize_placements(std::move(placements_in), mesh, static_cast<int64_t>(sizes_in.size()))),
      sizes(std::move(sizes_in)),
      extents(std::move(extents_in)),
      partial(std::any_of(placements.begin(), placements.end(),
                          [](const Placement& placement) { return std::holds_alternative<Partial>(placement); })) {}

bool DTensorLayout::equals(const DTensorLayout& other) const {
  return this == &other ||
         (sizes == other.sizes && placements == other.placements && extents == other.extents && mesh == other.mesh);
}

std::vector<Box> DTensorLayout::chunks(const std::vector<int64_t>& coordinate) const {
  if (extents.empty()) return chunks_at(sizes, mesh, placements, coordinate);
  const auto shape = local_shape(coordinate);
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return {};
  Box box{std::vector<int64_t>(sizes.size(), 0), shape};
  for (int64_t before = 0; before < coordinate[0]; ++before) {
    box.offsets[std::get<Shard>(placements[0]).dim] += extents[before];
  }
  return {box};
}

std::vector<int64_t> DTensorLayout::local_shape(const std::vector<int64_t>& coordinate) const {
  if (extents.empty()) return local_shape_at(sizes, mesh, placements, coordinate);
  auto shape = sizes;
  shape[std::get<Shard>(placements[0]).dim] = extents[coordinate[0]];
  return shape;
}

std::vector<int64_t> DTensorLayout::sharded_axes() const {
  std::vector<int64_t> axes;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (std::holds_alternative<Shard>(placements[axis]) || std::holds_alternative<StridedShard>(placements[axis])) {
      axes.push_back(static_cast<int64_t>(axis));
    }
  }
  return axes;
}

DTensorSpec::DTensorSpec(DeviceMesh mesh_in, std::vector<Placement> placements_in, std::vector<int64_t> sizes_in,
                         Tensor local_in, std::string fqn_in)
    : DTensorSpec(
          std::make_shared<const DTensorLayout>(std::move(mesh_in), std::move(placements_in), std::move(sizes_in)),
          std::move(local_in), std::move(fqn_in)) {}

DTensorSpec::DTensorSpec(std::shared_ptr<const DTensorLayout> layout_in, Tensor local_in, SharedName fqn_in)
    : layout(std::move(layout_in)),
      mesh(layout->mesh),
      placements(layout->placements),
      sizes(layout->sizes),
      local(std::move(local_in)),
      fqn(std::move(fqn_in)) {}

bool DTensorSpec::same_layout(const DTensorSpec& other) const { return layout->equals(*other.layout); }

std::vector<Box> DTensorSpec::local_chunks() const { return layout->chunks(coordinate_of_this_rank(mesh)); }

DTensorSpec* spec_of(const Tensor& tensor) {
  if (!is_marked(tensor)) return nullptr;
  auto* meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  FSDP2_CHECK(meta != nullptr, kUsage, "[dtensor] a tensor of shape ", tensor.sizes(),
              " carries the DTensor key without a layout: it was made from a DTensor by code that ran below the "
              "DTensor dispatch; this is a fault of the library, please report it");
  return static_cast<DTensorSpec*>(meta);
}

const Tensor& local_of(const Tensor& tensor) {
  const auto* spec = spec_of(tensor);
  FSDP2_CHECK(spec != nullptr, kInvalidArgument, "[dtensor] ",
              tensor.defined() ? c10::str("a plain tensor of shape ", tensor.sizes()) : std::string("an empty tensor"),
              " where a DTensor is needed: make one with distribute_tensor or from_local");
  return spec->local;
}

Tensor make_dtensor_result(const DTensorSpec& like, Tensor local) {
  const LeaveInferenceMode off;
  return new_marked_tensor(c10::make_intrusive<DTensorSpec>(like.layout, std::move(local), like.fqn));
}

Tensor make_dtensor_over(std::shared_ptr<const DTensorLayout> layout, Tensor local, SharedName fqn) {
  const LeaveInferenceMode off;
  local = checked_local(*layout, std::move(local), fqn);
  auto spec = c10::make_intrusive<DTensorSpec>(std::move(layout), std::move(local), std::move(fqn));
  Tensor result = new_marked_tensor(spec);
  // Sizes and storage are not operators, so nothing but libtorch itself can stop torch::save or data_ptr().
  result.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(
      c10::str("[dtensor] the storage of ", describe(*spec),
               " was asked for (data_ptr(), accessor, torch::save): a "
               "DTensor has none; use to_local() or full_tensor(), and fsdp2::dcp::save to save"));
  return result;
}

Tensor make_dtensor(Tensor local, DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes,
                    std::string fqn) {
  return make_dtensor_over(
      std::make_shared<const DTensorLayout>(std::move(mesh), std::move(placements), std::move(sizes)), std::move(local),
      std::move(fqn));
}

Tensor make_dtensor_like(const DTensorSpec& layout, Tensor local) {
  const LeaveInferenceMode off;
  return make_dtensor_result(layout, checked_local(*layout.layout, std::move(local), layout.fqn));
}

Tensor make_dtensor_alias(const Tensor& marked) {
  auto* impl = marked.unsafeGetTensorImpl();
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

std::vector<int64_t> coordinate_of_this_rank(const DeviceMesh& mesh) {
  auto coordinate = mesh.get_coordinate();
  FSDP2_CHECK(coordinate.has_value(), kUsage, "[dtensor] this rank is not in the mesh of shape ",
              c10::IntArrayRef(mesh.shape()), ": only its ranks may make or use DTensors on it");
  return *std::move(coordinate);
}

std::string describe(const DTensorSpec& spec) {
  return c10::str(spec.fqn.empty() ? std::string("an unnamed DTensor") : "'" + spec.fqn.text() + "'", " (DTensor ",
                  c10::IntArrayRef(spec.sizes), ", ", to_string(spec.placements), ")");
}

}  // namespace fsdp2::detail
