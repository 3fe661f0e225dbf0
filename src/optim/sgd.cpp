#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <fsdp2/optim.h>

#include "optim/fused_batch.h"

namespace fsdp2::optim {
namespace {

/// On the CPU the fused operator leaves garbage in the momentum of bfloat16 and float16 (libtorch 2.13).
void step_in_float(detail::FusedBatch& batch, const torch::optim::SGDOptions& options, bool first) {
  for (size_t index = 0; index < batch.params.size(); ++index) {
    const Tensor& param = batch.params[index];
    const Tensor& buffer = batch.states[0][index];
    const Tensor values = param.to(at::kFloat);
    const Tensor grad = batch.grads[index].to(at::kFloat).add(values, options.weight_decay());
    const Tensor momentum =
        first ? grad : buffer.to(at::kFloat).mul(options.momentum()).add(grad, 1 - options.dampening());
    buffer.copy_(momentum);
    param.copy_(values.sub(options.nesterov() ? grad.add(momentum, options.momentum()) : momentum, options.lr()));
  }
}

}  // namespace

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
  detail::FusedBatches batches(state_);
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
      Tensor& buffer = batches.state_of<SGDParamState>(update).momentum_buffer();
      const int64_t step = buffer.defined() ? kLater : kFirst;
      const Tensor* part = &batches.state_part(update, buffer, "momentum_buffer");
      batches.add(update, step, part);
    }
  }
  batches.run([&](detail::FusedBatch& batch) {
    const auto& options = static_cast<const SGDOptions&>(param_groups_[batch.group].options());
    const bool first = batch.step == kFirst;
    if (options.momentum() != 0 && at::elementSize(batch.dtype) < 4 && batch.device.is_cpu()) {
      step_in_float(batch, options, first);
      return;
    }
    at::_fused_sgd_(batch.params, batch.grads, batch.states[0], options.weight_decay(), options.momentum(),
                    options.lr(), options.dampening(), options.nesterov(), /*maximize=*/false, first);
  });
  return loss;
}

}  // namespace fsdp2::optim
