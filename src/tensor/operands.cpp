#include "tensor/operands.h"

#include <algorithm>
#include <utility>
#include <variant>

#include <fsdp2/error.h>

#include "diagnose/refusals.h"
#include "tensor/autograd.h"

namespace fsdp2::detail {

void throw_mixed(const c10::OperatorHandle& op, const DTensorSpec& spec, at::IntArrayRef plain) {
  const bool whole = plain == c10::IntArrayRef(spec.sizes);
  if (!whole) note_refused_operator(operator_text(op), spec);  // else an optimizer's
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " mixes ", describe(spec), " with a plain tensor of shape ",
              plain, ". ", kCallRule,
              whole ? "If it came from an optimizer, either the parameter is whole at the moment (a forward or "
                      "unshard() without a backward left it so): call reshard() on its module first; or the "
                      "optimizer's state was made before sharding: make the optimizer after fully_shard. "
                    : "",
              "Else make both DTensors of one layout (distribute_tensor) or both plain (full_tensor, to_local)");
}

void throw_records_grad(const c10::OperatorHandle& op, const DTensorSpec& spec) {
  note_refused_operator(operator_text(op), spec);
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " on ", describe(spec),
              ", which requires grad, with grad mode on: its gradient would be lost. ", kCallRule,
              "Else use to_local(), full_tensor() or redistribute(), which are differentiable, or detach(), or "
              "torch::NoGradGuard");
}

void throw_layouts(const c10::OperatorHandle& op, const DTensorSpec& first, const DTensorSpec& second) {
  if (first.has_partial()) throw_partial(op, first);
  if (second.has_partial()) throw_partial(op, second);
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " on two layouts: ", describe(first), " and ", describe(second),
              "; element-wise operators need one mesh, shape and list of placements: redistribute() "
              "one of them");
}

void check_grad(const c10::OperatorHandle& op, const Tensor& tensor, const DTensorSpec& spec) {
  if (records_grad(tensor)) [[unlikely]]
    throw_records_grad(op, spec);
}

Tensor wrap_result(const c10::OperatorHandle& op, const DTensorSpec& like, Tensor local) {
  FSDP2_CHECK(local.sizes() == like.local.sizes() && local.layout() == at::kStrided, kUnsupported, "[dtensor] ",
              operator_text(op), " on ", describe(like), " gave a part of shape ", local.sizes(), ", ", local.layout(),
              " where ", like.local.sizes(), " was due: the result has no such layout");
  return make_dtensor_result(like, std::move(local));
}

// ---- Single tensors

DTensorSpec* Operands::add(const Tensor& tensor, uint16_t index, bool written) {
  if (!is_marked(tensor)) {
    if (!tensor.defined()) return nullptr;
    // A 0-dim plain tensor is a number, as long as nothing is written to it and it needs no gradient.
    if (tensor.dim() != 0 || written || records_grad(tensor)) plain_ = &tensor;
    ++num_plain_;
    return nullptr;
  }
  DTensorSpec* spec = spec_of(tensor);
  if (layout_ == nullptr) {
    layout_ = spec;
    first_index_ = index;
  } else if (spec->layout != layout_->layout && !spec->same_layout(*layout_)) [[unlikely]] {
    throw_layouts(op_, *layout_, *spec);
  }
  check_grad(op_, tensor, *spec);
  ++num_marked_;
  return spec;
}

void Operands::finish() const {
  FSDP2_CHECK(layout_ != nullptr, kUsage, "[dtensor] ", operator_text(op_),
              " reached the DTensor dispatch without a DTensor: the key was included by hand");
  if (plain_ != nullptr) [[unlikely]]
    throw_mixed(op_, *layout_, plain_->sizes());
  if (layout_->has_partial() && !is_right_on_partial()) [[unlikely]]
    throw_partial(op_, *layout_);
}

bool Operands::is_right_on_partial() const {
  const bool summed =
      at::isFloatingType(layout_->local.scalar_type()) &&
      std::all_of(layout_->placements.begin(), layout_->placements.end(), [](const Placement& placement) {
        const auto* partial = std::get_if<Partial>(&placement);
        return partial == nullptr || partial->op.op_ == ReduceOp::SUM || partial->op.op_ == ReduceOp::AVG;
      });
  switch (info_.on_partial) {
    case OnPartial::kThrow:
      return false;
    case OnPartial::kIdentity:
      return num_plain_ == 0;
    case OnPartial::kAdditive:
      return num_plain_ == 0 && summed;
    case OnPartial::kScale:
      return num_marked_ == 1 && summed;
    case OnPartial::kScaleFirst:
      return num_marked_ == 1 && first_index_ == 0 && summed;
  }
  return false;
}

// ---- Lists

DTensorSpec* ListOperands::add(const Tensor& tensor, size_t position, bool written) {
  if (!is_marked(tensor)) {
    if (tensor.defined() && (tensor.dim() != 0 || (written && records_grad(tensor)))) plain_ = tensor;
    return nullptr;
  }
  DTensorSpec* spec = spec_of(tensor);
  if (specs_.size() <= position) specs_.resize(position + 1, nullptr);
  const DTensorSpec*& first = specs_[position];
  if (first == nullptr) {
    first = spec;
    some_ = spec;
  } else if (spec->layout != first->layout && !spec->same_layout(*first)) [[unlikely]] {
    throw_layouts(op_, *first, *spec);
  }
  check_grad(op_, tensor, *spec);
  if (spec->has_partial() && info_.on_partial != OnPartial::kIdentity) [[unlikely]]
    throw_partial(op_, *spec);
  return spec;
}

void ListOperands::add_single(const Tensor& tensor, bool written) {
  FSDP2_CHECK(!is_marked(tensor), kUnsupported, "[dtensor] ", operator_text(op_),
              " with a DTensor outside its lists: pass a number or a plain 0-dim tensor");
  if (tensor.dim() != 0 || written || records_grad(tensor)) plain_ = tensor;
}

void ListOperands::finish() const {
  FSDP2_CHECK(some_ != nullptr, kUnsupported, "[dtensor] ", operator_text(op_), " with a DTensor outside its lists");
  if (plain_.defined()) [[unlikely]]
    throw_mixed(op_, *some_, plain_.sizes());
}

Tensor ListOperands::wrap(size_t position, Tensor local) const {
  const DTensorSpec* spec = position < specs_.size() ? specs_[position] : nullptr;
  return spec != nullptr ? wrap_result(op_, *spec, std::move(local)) : local;
}

}  // namespace fsdp2::detail
