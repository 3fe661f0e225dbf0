#include "dcp/model_view.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include "dcp/geometry.h"
#include "dcp/local_parts.h"
#include "fsdp/ignored_params.h"
#include "fsdp/reshard_all.h"
#include "module/buffers.h"
#include "module/written.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::dcp::detail {

using fsdp2::detail::DTensorSpec;
using fsdp2::detail::is_marked;
using fsdp2::detail::spec_of;

namespace {

void collect(torch::nn::Module& module, const std::string& prefix, std::vector<NamedTensor>& out) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    out.push_back({prefix + item.key(), item.value(), true});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (fsdp2::detail::is_non_persistent(item.value())) continue;
    out.push_back({prefix + item.key(), item.value(), false});
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", out);
}

at::Tensor window(at::Tensor whole, const Chunk& box) {
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    whole = whole.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  }
  return whole;
}

}  // namespace

std::vector<NamedTensor> state_tensors(torch::nn::Module& module) {
  fsdp2::detail::reshard_all(module);
  std::vector<NamedTensor> result;
  collect(module, "", result);
  return result;
}

void check_fully_sharded(const std::vector<NamedTensor>& tensors) {
  std::string plain, sharded;
  for (const NamedTensor& item : tensors) {
    if (!item.is_parameter) continue;
    if (is_marked(item.tensor)) {
      sharded = item.fqn;
    } else if (item.tensor.requires_grad() && !fsdp2::detail::is_ignored_param(item.tensor)) {
      plain += (plain.empty() ? "" : ", ") + item.fqn;
    }
  }
  FSDP2_CHECK(sharded.empty() || plain.empty(), kUsage, "[dcp] some parameters are sharded (", sharded,
              ") and these trainable ones are not: ", plain,
              "; call fully_shard on the root module too, or pass them in ignored_params");
}

std::unordered_map<const void*, std::vector<std::string>> names_of_parameters(const std::vector<NamedTensor>& tensors) {
  std::unordered_map<const void*, std::vector<std::string>> names;
  for (const NamedTensor& item : tensors) {
    if (item.is_parameter) names[item.tensor.unsafeGetTensorImpl()].push_back(item.fqn);
  }
  return names;
}

void check_assignable(const at::Tensor& target, const at::Tensor& value, const std::string& fqn) {
  const bool one_element = target.numel() == 1 && value.numel() == 1;
  FSDP2_CHECK(target.sizes() == value.sizes() || one_element, kInvalidArgument, "[dcp] ", fqn, " has shape ",
              shape_text(target.sizes().vec()), ", the value for it has shape ", shape_text(value.sizes().vec()));
  FSDP2_CHECK(!on_meta(value), kInvalidArgument, "[dcp] the value for ", fqn, " is on the meta device; load it first");
  const DTensorSpec* to = spec_of(target);
  const DTensorSpec* from = spec_of(value);
  if (from == nullptr) return;
  FSDP2_CHECK(to != nullptr, kInvalidArgument, "[dcp] ", fqn, " is a plain tensor, the value for it is a DTensor with ",
              to_string(from->placements), "; pass full_tensor() of it");
  FSDP2_CHECK(to->same_layout(*from), kInvalidArgument, "[dcp] ", fqn, " is a DTensor with ", to_string(to->placements),
              ", the value for it has ", to_string(from->placements),
              " or another mesh; redistribute it, or load the checkpoint into get_model_state_dict()");
}

namespace {

/// The value itself as new data for a tensor on meta, so that a model never needs its memory twice; undefined where it
/// does not fit as it is, or where another model has already taken it over.
at::Tensor taken_over(const at::Tensor& target, const at::Tensor& value) {
  const DTensorSpec* to = spec_of(target);
  const DTensorSpec* from = spec_of(value);
  const at::Tensor& data = from ? from->local : value;
  const bool fits = (to == nullptr) == (from == nullptr) && target.sizes() == value.sizes() &&
                    target.scalar_type() == value.scalar_type() && data.is_contiguous() &&
                    data.storage().use_count() == 1;
  if (!fits) return {};
  return to ? fsdp2::detail::make_dtensor_like(*to, data.detach()) : data.detach();
}

}  // namespace

void assign_tensor(at::Tensor target, const at::Tensor& value, const std::string& fqn) {
  const fsdp2::detail::BelowDTensor below;
  at::Tensor filled = target;
  if (on_meta(target)) {
    filled = taken_over(target, value);
    const bool taken = filled.defined();
    if (!taken) filled = fresh_like(target);
    target.unsafeGetTensorImpl()->shallow_copy_from(filled.getIntrusivePtr());
    if (taken) return fsdp2::detail::forget_unwritten(target);
  }
  const DTensorSpec* to = spec_of(filled);
  const DTensorSpec* from = spec_of(value);
  if (from != nullptr) {
    if (!to->local.is_same(from->local)) {
      at::Tensor(to->local).copy_(from->local.reshape(to->local.sizes()));
    }
  } else {
    const at::Tensor whole = value.reshape(target.sizes());
    for (const LocalPart& part : local_parts(filled, fqn)) {
      at::Tensor(part.data).copy_(window(whole, part.box));
    }
  }
  fsdp2::detail::forget_unwritten(target);
}

}  // namespace fsdp2::dcp::detail
