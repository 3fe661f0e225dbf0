#include "fsdp/gradient_slot.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <fsdp2/error.h>

namespace fsdp2::detail {

void GradientSlot::begin(Tensor& param, const DTensorSpec& layout) {
  if (accumulating_) {
    return;
  }
  reconcile(param, layout.fqn);
  Tensor& slot = param.mutable_grad();
  if (shown_.defined()) {
    slot = std::move(pending_);
    pending_ = Tensor();
    shown_ = Tensor();
  } else {
    if (slot.defined()) {
      const DTensorSpec* spec = spec_of(slot);
      FSDP2_CHECK(spec != nullptr && spec->placements == layout.placements && spec->sizes == layout.sizes, kUsage,
                  "[fsdp] the gradient of parameter ", layout.fqn, " was replaced by ",
                  spec == nullptr ? std::string("a plain tensor") : "a DTensor of layout " + to_string(spec->placements),
                  "; expected none, or a DTensor laid out as the parameter, ", to_string(layout.placements),
                  ": call zero_grad() first, or assign a DTensor of that layout");
    }
    reduced_ = std::move(slot);
    slot = Tensor();
  }
  accumulating_ = true;
}

bool GradientSlot::has_pending(Tensor& param, const std::string& fqn) {
  reconcile(param, fqn);
  return shown_.defined();
}

Tensor GradientSlot::take(Tensor& param, const std::string& fqn) {
  Tensor& slot = param.mutable_grad();
  Tensor whole;
  if (accumulating_) {
    accumulating_ = false;
    whole = std::move(slot);
  } else {
    reconcile(param, fqn);
    if (!shown_.defined()) {
      return whole;
    }
    whole = std::move(pending_);
    shown_ = Tensor();
  }
  pending_ = Tensor();
  slot = std::move(reduced_);
  reduced_ = Tensor();
  return whole;
}

void GradientSlot::show(Tensor& param, Tensor pending, const DTensorSpec& layout) {
  Tensor& slot = param.mutable_grad();
  reduced_ = std::move(slot);
  pending_ = std::move(pending);
  pending_version_ = pending_._version();
  std::vector<Placement> partial(layout.placements.size(), Partial{});
  shown_ = make_dtensor(pending_, layout.mesh, std::move(partial), layout.sizes, layout.fqn);
  slot = shown_;
}

void GradientSlot::add_reduced(Tensor& param, const DTensorSpec& layout, Tensor local) {
  Tensor& slot = param.mutable_grad();
  if (slot.defined()) {
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    local_of(slot).detach().add_(local);
  } else {
    slot = make_dtensor_like(layout, std::move(local));
  }
}

void GradientSlot::abandon(Tensor& param) {
  if (accumulating_ || shown_.defined()) {
    param.mutable_grad() = std::move(reduced_);
  }
  accumulating_ = false;
  reduced_ = pending_ = shown_ = Tensor();
}

void GradientSlot::reconcile(Tensor& param, const std::string& fqn) {
  if (!shown_.defined()) {
    return;
  }
  const Tensor& slot = param.mutable_grad();
  // By the data: zero_grad(false) replaces the slot by slot.detach().
  if (is_marked(slot) && local_of(slot).is_same(pending_)) {
    if (pending_._version() == pending_version_ || !reduced_.defined()) {
      return;
    }
    // The user edited what is shown; the reduced part behind it must follow. Zeroing is the edit that is clear.
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    FSDP2_CHECK(!pending_.any().item<bool>(), kUsage, "[fsdp] the gradient of parameter ", fqn,
                " was edited while one part of it is reduced and another is pending; call synchronize_gradients() "
                "before editing gradients (zero_grad() is allowed at any time)");
    local_of(reduced_).detach().zero_();
    pending_version_ = pending_._version();
    return;
  }
  // zero_grad() or an assignment: whatever stands in the slot now is all there is.
  pending_ = reduced_ = shown_ = Tensor();
}

}  // namespace fsdp2::detail
