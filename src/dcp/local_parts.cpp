#include "dcp/local_parts.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include "tensor/dtensor_spec.h"

namespace fsdp2::dcp::detail {

using fsdp2::detail::BelowDTensor;
using fsdp2::detail::Box;
using fsdp2::detail::DTensorSpec;
using fsdp2::detail::spec_of;

namespace {

/// The dimension along which several boxes lie one after the other in the local tensor.
size_t stacking_dim(const std::vector<Box>& boxes, const at::Tensor& local, const std::string& fqn) {
  for (size_t d = 0; d < boxes[0].sizes.size(); ++d) {
    int64_t total = 0;
    bool same = true;
    for (const Box& box : boxes) {
      total += box.sizes[d];
      for (size_t other = 0; other < box.sizes.size(); ++other) {
        same &= other == d || box.sizes[other] == local.size(static_cast<int64_t>(other));
      }
    }
    if (same && total == local.size(static_cast<int64_t>(d))) return d;
  }
  FSDP2_THROW(kUnsupported, "[dcp] ", fqn,
              ": the parts that this rank holds do not lie in a row; redistribute the tensor to "
              "Shard or Replicate");
}

}  // namespace

std::vector<LocalPart> local_parts(const at::Tensor& tensor, const std::string& fqn) {
  const BelowDTensor below;
  const std::vector<int64_t> sizes = tensor.sizes().vec();
  const std::vector<int64_t> zeros(sizes.size(), 0);
  const DTensorSpec* spec = spec_of(tensor);
  if (spec == nullptr) return {{{zeros, sizes}, tensor.detach()}};
  FSDP2_CHECK(!spec->has_partial(), kInvalidArgument, "[dcp] ", fqn, " has the placements ",
              to_string(spec->placements), ": its values are not summed up yet; redistribute it first");
  const at::Tensor local = spec->local.detach();
  if (tensor.numel() == 0) return {{{zeros, sizes}, at::empty(sizes, local.options())}};
  if (!spec->mesh.get_coordinate()) return {};
  const std::vector<Box> boxes = spec->local_chunks();
  std::vector<LocalPart> parts;
  if (boxes.size() == 1) {
    if (boxes[0].numel() > 0) parts.push_back({{boxes[0].offsets, boxes[0].sizes}, local});
    return parts;
  }
  if (boxes.empty()) return parts;
  const size_t dim = stacking_dim(boxes, local, fqn);
  int64_t at = 0;
  for (const Box& box : boxes) {
    const int64_t length = box.sizes[dim];
    if (box.numel() > 0)
      parts.push_back({{box.offsets, box.sizes}, local.narrow(static_cast<int64_t>(dim), at, length)});
    at += length;
  }
  return parts;
}

bool on_meta(const at::Tensor& tensor) {
  const DTensorSpec* spec = spec_of(tensor);
  return (spec ? spec->local : tensor).is_meta();
}

at::Tensor fresh_like(const at::Tensor& tensor) {
  const BelowDTensor below;
  const DTensorSpec* spec = spec_of(tensor);
  const at::Tensor& data = spec ? spec->local : tensor;
  c10::Device device = is_initialized() ? local_device() : c10::Device(c10::kCPU);
  if (spec && spec->mesh.device_type() != device.type()) device = c10::Device(spec->mesh.device_type());
  const at::Tensor fresh = at::empty(data.sizes(), data.options().device(device));
  return spec ? fsdp2::detail::make_dtensor_like(*spec, fresh) : fresh;
}

at::Tensor detached(const at::Tensor& tensor) {
  const BelowDTensor below;
  const DTensorSpec* spec = spec_of(tensor);
  return spec ? fsdp2::detail::make_dtensor_like(*spec, spec->local) : tensor.detach();
}

}  // namespace fsdp2::dcp::detail
