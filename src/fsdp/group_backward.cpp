#include "fsdp/param_group.h"

#include <algorithm>

#include <ATen/Functions.h>

#include <fsdp2/error.h>

#include "fsdp/gradient_reduction.h"
#include "fsdp/leaf_slot.h"
#include "fsdp/training_context.h"

namespace fsdp2::detail {

void ParamGroup::on_leaf_gradient(size_t index, const Tensor& gradient) {
  context->enter_backward();
  FSDPParam& param = params_[index];
  Tensor alive = param.param();
  if (is_marked(gradient)) {
    // From to_local() or full_tensor() in the loss: this rank's part already, it adds to the reduced gradient.
    FSDP2_CHECK(!param.gradient.accumulating() && !param.gradient.has_pending(alive, param.fqn()), kUsage,
                "[fsdp] parameter ", param.fqn(),
                " got a sharded gradient (from to_local() or full_tensor() in the "
                "loss) beside an unreduced one; call backward on that part of the loss alone, after "
                "synchronize_gradients()");
    if (has_post_accumulate_hooks(alive)) {
      context->note_hooks(shared_from_this(), index);
    }
    return;
  }
  param.gradient.begin(alive, param.sharded_spec());
}

bool ParamGroup::enter_backward() {
  const bool entered = !in_backward_;
  in_backward_ = true;
  return entered;
}

bool ParamGroup::any_accumulating() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const FSDPParam& param) { return param.gradient.accumulating(); });
}

void ParamGroup::post_backward(bool at_end, bool reshards) {
  in_backward_ = false;
  const bool any = any_accumulating();
  if (!settings.reduce_gradients) {
    if (any) {
      keep_pending();
    }
    if (reshards) reshard_after_backward();
    return;
  }
  // Without a new gradient the module is frozen, or is used once more further on in this backward.
  if (any || at_end) {
    reduce_all(settings.all_reduce_gradients, reshards);
    reduced_unused_ &= !at_end;
  } else if (reshards) {
    reshard_after_backward();
  }
}

void ParamGroup::reshard_after_backward() {
  if (settings.reshard_after_backward && !unshard_pending()) reshard();
}

void ParamGroup::keep_pending() {
  const PlainWork plain;
  for (FSDPParam& param : params_) {
    if (!param.gradient.accumulating()) {
      continue;
    }
    Tensor alive = param.param();
    Tensor whole = param.gradient.take(alive, param.fqn());
    if (!whole.defined()) {
      param.gradient.show_partial_sum(alive, param.sharded_spec(), param.partial_sum_placements());
      continue;
    }
    if (policy_.reduce_dtype && whole.is_floating_point() && whole.scalar_type() != *policy_.reduce_dtype) {
      whole = whole.to(*policy_.reduce_dtype);
    }
    param.gradient.show(alive, std::move(whole), param.sharded_spec(), param.unreduced_placements());
  }
}

void ParamGroup::reduce_all(bool all_reduce, bool reshards) {
  const bool several_replicas = mesh_.replicate_size > 1;
  std::vector<std::pair<size_t, Tensor>> gradients;
  gradients.reserve(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    Tensor alive = param.param();
    if (!alive.defined()) {
      continue;
    }
    Tensor whole = param.gradient.take(alive, param.fqn());
    // An undefined one stands for zero: unused, or nothing but a sum that waits for the other replicas.
    const bool stands_in =
        !whole.defined() && ((settings.reduce_unused && !reduced_unused_ && ever_unsharded_ && alive.requires_grad()) ||
                             (several_replicas && all_reduce && param.gradient.has_partial_sum(alive, param.fqn())));
    if (whole.defined() || stands_in) {
      gradients.emplace_back(i, std::move(whole));
    } else {
      param.gradient.show_partial_sum(alive, param.sharded_spec(), param.partial_sum_placements());
    }
  }
  if (reshards) reshard_after_backward();
  if (!gradients.empty()) {
    reduced_unused_ = true;
    context->reduce(shared_from_this(), std::move(gradients), all_reduce);
  }
}

void ParamGroup::interrupt_backward() noexcept {
  for (FSDPParam& param : params_) {
    if (Tensor alive = param.param(); alive.defined() && param.gradient.accumulating()) {
      param.gradient.abandon(alive, param.fqn());
    }
  }
}

void ParamGroup::run_post_accumulate_hooks(const std::vector<size_t>& indices) {
  if (in_backward_) {  // gathered for another use in this backward: a hook that steps must wait
    for (const size_t index : indices) {
      context->note_hooks(shared_from_this(), index);
    }
    return;
  }
  bool resharded = false;
  for (const size_t index : indices) {
    Tensor alive = params_[index].param();
    if (!alive.defined() || !has_post_accumulate_hooks(alive)) {
      continue;
    }
    if (!resharded) {
      reshard();  // on the shard, not on the gathered copy
      resharded = true;
    }
    const at::NoGradGuard as_in_backward;
    detail::run_post_accumulate_hooks(alive);
  }
}

void ParamGroup::synchronize_gradients() {
  reduce_all(true, true);
  reduced_unused_ = false;
}

std::vector<Tensor> ParamGroup::pending_gradients() {
  std::vector<Tensor> found;
  for (FSDPParam& param : params_) {
    Tensor alive = param.param();
    if (alive.defined() && param.gradient.has_pending(alive, param.fqn()) && param.gradient.pending().defined()) {
      found.push_back(param.gradient.pending());
    }
  }
  return found;
}

std::string ParamGroup::waiting_partial_sum() {
  for (FSDPParam& param : params_) {
    Tensor alive = param.param();
    if (alive.defined() && param.gradient.has_partial_sum(alive, param.fqn())) {
      return param.fqn();
    }
  }
  return "";
}

void ParamGroup::reset() {
  drop_gather();
  for (FSDPParam& param : params_) {
    if (Tensor alive = param.param(); alive.defined()) {
      param.gradient.abandon(alive, param.fqn());
    }
  }
  in_backward_ = reduced_unused_ = false;
}

}  // namespace fsdp2::detail
