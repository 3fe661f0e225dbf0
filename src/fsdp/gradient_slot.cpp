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
      FSDP2_CHECK(
          spec != nullptr && spec->placements == layout.placements && spec->sizes == layout.sizes, kUsage,
          "[fsdp] the gradient of parameter ", layout.fqn.text(), " was replaced by ",
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
    if (!pending_.defined()) {
      return whole;
    }
    whole = std::move(pending_);
    shown_ = Tensor();
  }
  pending_ = Tensor();
  slot = std::move(reduced_);
  reduced_ = Tensor();
  if (!whole.defined()) {
    return whole;
  }
  FSDP2_CHECK(!whole.requires_grad(), kUnsupported, "[fsdp] backward(create_graph=true) reached parameter ", fqn,
              ": its reduced gradient would have no graph; take gradients of gradients with torch::autograd::grad with "
              "respect to inputs, and call backward() without create_graph for the parameters");
  return whole.is_sparse() ? whole.to_dense() : whole;
}

void GradientSlot::show(Tensor& param, Tensor pending, const DTensorSpec& layout, std::vector<Placement> placements) {
  pending_ = std::move(pending);
  show_data(param, pending_, std::move(placements), layout);
}

void GradientSlot::show_data(Tensor& param, const Tensor& data, std::vector<Placement> placements,
                             const DTensorSpec& layout) {
  Tensor& slot = param.mutable_grad();
  if (!shown_.defined()) {
    reduced_ = std::move(slot);
  }
  shown_version_ = data._version();
  shown_ = make_dtensor(data, layout.mesh, std::move(placements), layout.sizes, layout.fqn);
  slot = shown_;
}

void GradientSlot::keep_partial_sum(Tensor& param, Tensor local, const DTensorSpec& layout,
                                    std::vector<Placement> placements) {
  reconcile(param, layout.fqn);
  if (partial_sum_.defined()) {
    const at::NoGradGuard no_grad;
    partial_sum_.add_(local);
  } else {
    partial_sum_ = std::move(local);
  }
  if (accumulating_) {
    return;  // the slot is autograd's now; shown once this gradient is reduced
  }
  show_data(param, partial_sum_, std::move(placements), layout);
}

void GradientSlot::show_partial_sum(Tensor& param, const DTensorSpec& layout, std::vector<Placement> placements) {
  if (partial_sum_.defined() && !shown_.defined() && !accumulating_) {
    show_data(param, partial_sum_, std::move(placements), layout);
  }
}

bool GradientSlot::has_partial_sum(Tensor& param, const std::string& fqn) {
  reconcile(param, fqn);
  return partial_sum_.defined();
}

Tensor GradientSlot::take_partial_sum(Tensor& param, const std::string& fqn) {
  reconcile(param, fqn);
  Tensor taken = std::move(partial_sum_);
  partial_sum_ = Tensor();
  if (shown_.defined() && !pending_.defined()) {
    shown_ = Tensor();
    param.mutable_grad() = std::move(reduced_);
    reduced_ = Tensor();
  }
  return taken;
}

void GradientSlot::add_reduced(Tensor& param, const DTensorSpec& layout, Tensor local) {
  // A reduction may end while the next gradient of the parameter accumulates in the slot.
  Tensor& target = accumulating_ ? reduced_ : param.mutable_grad();
  if (target.defined()) {
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    local_of(target).detach().add_(local);
  } else {
    target = make_dtensor_result(layout, std::move(local));
  }
}

void GradientSlot::abandon(Tensor& param, const std::string& fqn) noexcept {
  bool put_back = accumulating_;
  if (!accumulating_ && shown_.defined()) {
    try {
      reconcile(param, fqn);  // drops everything where the user cleared the slot
      put_back = shown_.defined();
    } catch (const std::exception&) {
      put_back = true;  // an edit that cannot be followed; what is pending goes anyway
    }
  }
  if (put_back) {
    param.mutable_grad() = std::move(reduced_);
  }
  accumulating_ = false;
  reduced_ = pending_ = partial_sum_ = shown_ = Tensor();
}

void GradientSlot::reconcile(Tensor& param, const std::string& fqn) {
  if (!shown_.defined()) {
    return;
  }
  const Tensor& slot = param.mutable_grad();
  const Tensor& data = pending_.defined() ? pending_ : partial_sum_;
  // By the data: zero_grad(false) replaces the slot by slot.detach().
  if (is_marked(slot) && local_of(slot).is_same(data)) {
    std::vector<Tensor> behind;
    if (reduced_.defined()) behind.push_back(local_of(reduced_).detach());
    if (pending_.defined() && partial_sum_.defined()) behind.push_back(partial_sum_);
    if (data._version() == shown_version_ || behind.empty()) {
      return;
    }
    // The user edited what is shown; what lies behind it must follow. Zeroing is the edit that is clear.
    const BelowDTensor below;
    const at::NoGradGuard no_grad;
    FSDP2_CHECK(!data.any().item<bool>(), kUsage, "[fsdp] the gradient of parameter ", fqn,
                " was edited while one part of it is reduced and another is pending; call synchronize_gradients() "
                "before editing gradients (zero_grad() is allowed at any time)");
    for (Tensor& each : behind) {
      each.zero_();
    }
    shown_version_ = data._version();
    return;
  }
  // zero_grad() or an assignment: whatever stands in the slot now is all there is.
  pending_ = partial_sum_ = reduced_ = shown_ = Tensor();
}

}  // namespace fsdp2::detail
