#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <fsdp2/optim.h>

#include "optim/fused_batch.h"

namespace fsdp2::optim {

Tensor SGD::step(LossClosure closure) {
  using torch::optim::SGDOptions;
  using torch::optim::SGDParamState;
  // The first step sets the momentum to the gradient, without dampening.
  constexpr int64_t kFirst = 1, kLater = 2;
  const at::NoGradGuard no_grad;
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  detail::FusedBatches batches;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    const bool momentum = static_cast<const SGDOptions&>(param_groups_[group].options()).momentum() != 0;
    for (size_t position = 0; position < params.size(); ++position) {
      if (!params[position].grad().defined()) continue;
      const auto update = detail::read_update("SGD", group, position, params[position]);
      if (!momentum) {
        batches.add(update, kLater, {});
        continue;
      }
      auto& slot = state_[update.param.unsafeGetTensorImpl()];
      if (slot == nullptr) slot = std::make_unique<SGDParamState>();
      Tensor& buffer = static_cast<SGDParamState&>(*slot).momentum_buffer();
      const int64_t step = buffer.defined() ? kLater : kFirst;
      const Tensor* part = &batches.state_part(update, buffer, "momentum_buffer");
      batches.add(update, step, part);
    }
  }
  batches.run([&](detail::FusedBatch& batch) {
    const auto& options = static_cast<const SGDOptions&>(param_groups_[batch.group].options());
    // Of short floats the operator's own first step leaves garbage in the last values (libtorch 2.13, CPU). A later
    // step from zeros without dampening is the same.
    const bool first = batch.step == kFirst, from_zeros = first && at::elementSize(batch.dtype) < 4;
    at::_fused_sgd_(batch.params, batch.grads, batch.states[0], options.weight_decay(), options.momentum(),
                    options.lr(), from_zeros ? 0.0 : options.dampening(), options.nesterov(), /*maximize=*/false,
                    /*is_first_step=*/first && !from_zeros);
  });
  return loss;
}

}  // namespace fsdp2::optim
