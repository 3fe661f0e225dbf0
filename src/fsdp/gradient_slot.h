#pragma once

// Note [The gradient slot]
// Outside backward param.grad() is the reduced gradient, a sharded DTensor, even while the parameter is whole.
// Autograd accumulates into the same slot, but whole. So a hook on the leaf, which runs just before AccumulateGrad,
// puts the reduced gradient aside and the whole one accumulated so far (or nothing) into the slot: begin().
// After the group's backward, finish() takes the whole gradient out and puts the reduced one back.
//
// Gradients accumulated without sync are shown in the slot between backwards, as a DTensor with Partial
// placement: show(). So both forms of zero_grad reach them, and an optimizer or a clip that meets one throws. What
// the user did to the slot meanwhile is seen at the next look at it: reconcile(). The same goes for gradients that
// are summed over the shards but not over the replicas yet: keep_partial_sum().

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

class GradientSlot {
 public:
  /// Before autograd accumulates a whole gradient into `param`. `layout` is the sharded parameter's.
  void begin(Tensor& param, const DTensorSpec& layout);
  bool accumulating() const { return accumulating_; }
  /// Whether gradients wait for their reduction, after what the user did to the slot is taken into account.
  bool has_pending(Tensor& param, const std::string& fqn);
  /// Takes the whole gradient (accumulated in this backward or pending), dense; the slot holds the reduced one again.
  Tensor take(Tensor& param, const std::string& fqn);
  /// Leaves `pending` (whole, unreduced) for later and shows it in the slot.
  void show(Tensor& param, Tensor pending, const DTensorSpec& layout, std::vector<Placement> placements);
  /// The whole pending gradient; undefined where none is.
  const Tensor& pending() const { return pending_; }
  /// Adds to the sum over the shards that waits for its all-reduce. `local` is laid out as the parameter's.
  void keep_partial_sum(Tensor& param, Tensor local, const DTensorSpec& layout, std::vector<Placement> placements);
  bool has_partial_sum(Tensor& param, const std::string& fqn);
  /// Where nothing was accumulated after all: in the slot again.
  void show_partial_sum(Tensor& param, const DTensorSpec& layout, std::vector<Placement> placements);
  /// Undefined where none waits.
  Tensor take_partial_sum(Tensor& param, const std::string& fqn);
  /// Adds a reduced local gradient.
  void add_reduced(Tensor& param, const DTensorSpec& layout, Tensor local);
  /// Drops what is pending or half accumulated, after an exception; the reduced gradient stays.
  void abandon(Tensor& param, const std::string& fqn) noexcept;

 private:
  void reconcile(Tensor& param, const std::string& fqn);
  void show_data(Tensor& param, const Tensor& data, std::vector<Placement> placements, const DTensorSpec& layout);

  bool accumulating_ = false;
  Tensor reduced_;      // put aside while accumulating or showing
  Tensor pending_;      // plain, whole
  Tensor partial_sum_;  // plain, this rank's part, summed over the shards only
  Tensor shown_;        // what we left in the slot, over pending_ or partial_sum_
  uint32_t shown_version_ = 0;
};

}  // namespace fsdp2::detail
