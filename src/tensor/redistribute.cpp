#include "tensor/redistribute.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

#include <fsdp2/error.h>

#include "process/collectives.h"

namespace fsdp2::detail {
namespace {

/// Bytes, because a gather moves values of any dtype and backends know only some.
Tensor as_bytes(const Tensor& contiguous) { return contiguous.view({-1}).view(at::kByte); }

/// Copies `part`, laid out as the concatenation of `boxes`, to its places in `full`.
void paste(Tensor& full, const Tensor& part, const std::vector<Box>& boxes) {
  std::vector<int64_t> offset(full.dim(), 0);
  for (size_t index = 0; index < boxes.size(); ++index) {
    const Box& box = boxes[index];
    Tensor target = full, source = part;
    for (int64_t dim = 0; dim < full.dim(); ++dim) {
      target = target.narrow(dim, box.offsets[dim], box.sizes[dim]);
      source = source.narrow(dim, offset[dim], box.sizes[dim]);
    }
    target.copy_(source);
    // Boxes come in row-major order of their runs: the next one is beside this one in the last dim that moves.
    if (index + 1 == boxes.size()) break;
    const Box& next = boxes[index + 1];
    for (int64_t dim = 0; dim < full.dim(); ++dim) {
      if (next.offsets[dim] > box.offsets[dim]) offset[dim] += box.sizes[dim];
      if (next.offsets[dim] < box.offsets[dim]) offset[dim] = 0;
    }
  }
}

void reduce_partial(Tensor& value, const DTensorLayout& layout, const std::string& fqn) {
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    const auto* partial = std::get_if<Partial>(&layout.placements[axis]);
    if (partial == nullptr) continue;
    const auto group = layout.mesh.get_group(static_cast<int64_t>(axis));
    // Backends disagree about AVG: sum, then divide here.
    const bool average = partial->op.op_ == c10d::ReduceOp::AVG;
    all_reduce(value, average ? ReduceOp(ReduceOp::SUM) : partial->op, group, {fqn.c_str()}).wait();
    if (average) value.div_(layout.mesh.size(static_cast<int64_t>(axis)));
  }
}

}  // namespace

c10::Device control_device(const DeviceMesh& mesh) {
  return mesh.device_type() == c10::DeviceType::CPU ? c10::Device(c10::DeviceType::CPU) : local_device();
}

std::vector<int64_t> all_axes(const DeviceMesh& mesh) {
  std::vector<int64_t> axes(mesh.ndim());
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) axes[axis] = axis;
  return axes;
}

std::vector<std::vector<int64_t>> coordinates_over_axes(const DeviceMesh& mesh, const std::vector<int64_t>& axes) {
  std::vector<std::vector<int64_t>> result{coordinate_of_this_rank(mesh)};
  for (const int64_t axis : axes) {
    std::vector<std::vector<int64_t>> longer;
    for (auto& coordinate : result) {
      for (coordinate[axis] = 0; coordinate[axis] < mesh.size(axis); ++coordinate[axis]) longer.push_back(coordinate);
    }
    result = std::move(longer);
  }
  return result;
}

Tensor gather_over_axes(const Tensor& mine, const DeviceMesh& mesh, const std::vector<int64_t>& axes,
                        const std::string& what) {
  Tensor gathered = mine.contiguous();
  for (size_t position = axes.size(); position > 0; --position) {
    const int64_t axis = axes[position - 1];
    std::vector<int64_t> shape{mesh.size(axis)};
    shape.insert(shape.end(), gathered.sizes().begin(), gathered.sizes().end());
    Tensor out = at::empty(shape, gathered.options());
    if (out.numel() > 0) {
      Tensor out_bytes = as_bytes(out);
      all_gather(out_bytes, as_bytes(gathered), mesh.get_group(axis), {what.c_str()}).wait();
    }
    gathered = out;
  }
  return gathered;
}

namespace {

/// Writes the parts `boxes` of `full`, as they lie in a local tensor, into `target`.
void cut_into(const Tensor& target, const Tensor& full, const std::vector<Box>& boxes) {
  if (full.device().is_meta()) return;
  std::vector<int64_t> offset(full.dim(), 0);
  for (size_t index = 0; index < boxes.size(); ++index) {
    const Box& box = boxes[index];
    Tensor from = full, to = target;
    for (int64_t dim = 0; dim < full.dim(); ++dim) {
      from = from.narrow(dim, box.offsets[dim], box.sizes[dim]);
      to = to.narrow(dim, offset[dim], box.sizes[dim]);
    }
    to.copy_(from);
    if (index + 1 == boxes.size()) break;
    const Box& next = boxes[index + 1];
    for (int64_t dim = 0; dim < full.dim(); ++dim) {
      if (next.offsets[dim] > box.offsets[dim]) offset[dim] += box.sizes[dim];
      if (next.offsets[dim] < box.offsets[dim]) offset[dim] = 0;
    }
  }
}

}  // namespace

Tensor cut_for_this_rank(const Tensor& full, const DTensorLayout& layout) {
  const auto coordinate = coordinate_of_this_rank(layout.mesh);
  Tensor part = at::empty(layout.local_shape(coordinate), full.options());
  cut_into(part, full, layout.chunks(coordinate));
  return part;
}

void copy_own_part(const Tensor& local, const Tensor& full, const DTensorLayout& layout) {
  cut_into(local, full, layout.chunks(coordinate_of_this_rank(layout.mesh)));
}

std::shared_ptr<const DTensorLayout> without_partial(const std::shared_ptr<const DTensorLayout>& layout) {
  if (!layout->partial) return layout;
  auto placements = layout->placements;
  for (auto& placement : placements) {
    if (std::holds_alternative<Partial>(placement)) placement = Replicate{};
  }
  return std::make_shared<const DTensorLayout>(layout->mesh, std::move(placements), layout->sizes, layout->extents);
}

Tensor gather_full(const DTensorLayout& layout, const Tensor& local, const std::string& fqn) {
  const auto options = local.options().requires_grad(false);
  const int64_t numel = c10::multiply_integers(layout.sizes);
  if (local.is_meta() || numel == 0) return at::empty(layout.sizes, options);
  Tensor mine = local;
  if (layout.partial) {
    mine = local.clone(at::MemoryFormat::Contiguous);
    reduce_partial(mine, layout, fqn);
  }
  const auto axes = layout.sharded_axes();
  if (axes.empty()) return layout.partial ? mine : local.clone(at::MemoryFormat::Contiguous);

  int64_t longest = 0;
  const auto coordinates = coordinates_over_axes(layout.mesh, axes);
  for (const auto& coordinate : coordinates) {
    longest = std::max(longest, c10::multiply_integers(layout.local_shape(coordinate)));
  }
  Tensor padded = mine.contiguous().view({-1});
  if (padded.numel() < longest) {
    padded = at::empty({longest}, options);
    padded.narrow(0, 0, mine.numel()).copy_(mine.reshape({-1}));
  }
  const Tensor parts = gather_over_axes(padded, layout.mesh, axes, fqn).view({-1, longest});

  // Rows cut like torch.chunk lie one after the other in the gathered buffer, the padding behind them: no second
  // copy of the whole, unless the padding would keep much more memory alive.
  const bool rows = axes.size() == 1 && layout.extents.empty() &&
                    layout.placements[axes[0]] == Placement(Shard{0});
  if (rows && parts.numel() <= numel + numel / 4) return parts.view({-1}).narrow(0, 0, numel).view(layout.sizes);

  Tensor full = at::empty(layout.sizes, options);
  for (size_t index = 0; index < coordinates.size(); ++index) {
    const auto shape = layout.local_shape(coordinates[index]);
    const int64_t count = c10::multiply_integers(shape);
    if (count == 0) continue;
    const Tensor part = parts[static_cast<int64_t>(index)].narrow(0, 0, count).view(shape);
    paste(full, part, layout.chunks(coordinates[index]));
  }
  return full;
}

Tensor redistribute_local(const DTensorLayout& source, const Tensor& local, const DTensorLayout& target,
                          const std::string& fqn) {
  if (source.equals(target)) return local;
  for (size_t axis = 0; axis < target.placements.size(); ++axis) {
    FSDP2_CHECK(!std::holds_alternative<Partial>(target.placements[axis]) ||
                    source.placements[axis] == target.placements[axis],
                kUnsupported, "[dtensor] redistribute '", fqn, "' from ", to_string(source.placements), " to ",
                to_string(target.placements), ": a value cannot be turned into terms of a sum; allowed targets are "
                "Replicate, Shard and StridedShard");
  }
  FSDP2_CHECK(!target.partial, kUnsupported, "[dtensor] redistribute '", fqn, "' from ", to_string(source.placements),
              " to ", to_string(target.placements), ": a Partial axis cannot stay while another one changes; reduce it "
              "in the same call");
  const auto same_size = [](int64_t size, int64_t parts) { return size % parts == 0; };
  const auto* partial = std::get_if<Partial>(&source.placements[0]);
  const auto* shard = std::get_if<Shard>(&target.placements[0]);
  // One reduce-scatter instead of an all-reduce and a cut, where the parts are equal rows.
  if (source.mesh.ndim() == 1 && partial != nullptr && shard != nullptr && shard->dim == 0 && !local.is_meta() &&
      same_size(source.sizes[0], source.mesh.size()) && local.numel() > 0 &&
      (partial->op.op_ == ReduceOp::SUM || partial->op.op_ == ReduceOp::AVG)) {
    auto shape = source.sizes;
    shape[0] /= source.mesh.size();
    Tensor out = at::empty(shape, local.options().requires_grad(false));
    reduce_scatter(out, local.contiguous(), ReduceOp::SUM, source.mesh.get_group(0), {fqn.c_str()}).wait();
    return partial->op.op_ == ReduceOp::AVG ? out.div_(source.mesh.size()) : out;
  }
  if (source.sharded_axes().empty() && !source.partial) return cut_for_this_rank(local, target);
  const Tensor full = gather_full(source, local, fqn);
  return target.sharded_axes().empty() ? full : cut_for_this_rank(full, target);
}

Tensor broadcast_over_mesh(const Tensor& full, const DeviceMesh& mesh, const std::string& what) {
  if (full.is_meta() || full.numel() == 0) return full;
  const auto coordinate = coordinate_of_this_rank(mesh);
  const bool first = std::all_of(coordinate.begin(), coordinate.end(), [](int64_t index) { return index == 0; });
  Tensor values = first ? full.contiguous() : at::empty(full.sizes(), full.options().requires_grad(false));
  Tensor bytes = as_bytes(values);
  // The last axis first: then the first rank of every line of an earlier axis has the values already.
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    broadcast_from(bytes, 0, mesh.get_group(axis), {what.c_str()}).wait();
  }
  return values;
}

}  // namespace fsdp2::detail
