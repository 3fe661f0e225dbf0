// AdamW and Adam differ in where weight decay enters, which the operators know.

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <fsdp2/optim.h>

#include "optim/fused_batch.h"

namespace fsdp2::optim {
namespace {

template <class Options, class State, class Operator>
Tensor adam_step(const char* name, torch::optim::Optimizer& optimizer,
                 const torch::optim::Optimizer::LossClosure& closure, Operator&& fused_operator) {
  const at::NoGradGuard no_grad;
  Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  auto& groups = optimizer.param_groups();
  detail::FusedBatches batches(optimizer.state());
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& params = groups[group].params();
    const bool amsgrad = static_cast<const Options&>(groups[group].options()).amsgrad();
    for (size_t position = 0; position < params.size(); ++position) {
      if (!params[position].grad().defined()) continue;
      const auto update = detail::read_update(name, group, position, params[position]);
      auto& state = batches.state_of<State>(update);
      std::array<const Tensor*, 3> parts{&batches.state_part(update, state.exp_avg(), "exp_avg"),
                                         &batches.state_part(update, state.exp_avg_sq(), "exp_avg_sq"), nullptr};
      if (amsgrad) parts[2] = &batches.state_part(update, state.max_exp_avg_sq(), "max_exp_avg_sq");
      batches.add(update, batches.count(state.step()), {parts.data(), amsgrad ? 3U : 2U});
    }
  }
  batches.run([&](detail::FusedBatch& batch) {
    const auto& options = static_cast<const Options&>(groups[batch.group].options());
    const auto [beta1, beta2] = options.betas();
    const std::vector<Tensor> steps(
        batch.params.size(),
        at::scalar_tensor(static_cast<double>(batch.step), at::TensorOptions(at::kFloat).device(batch.device)));
    fused_operator(batch.params, batch.grads, batch.states[0], batch.states[1], batch.states[2], steps, options.lr(),
                   beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false);
  });
  return loss;
}

}  // namespace

Tensor AdamW::step(LossClosure closure) {
  return adam_step<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(
      "AdamW", *this, closure, [](auto&&... arguments) { at::_fused_adamw_(arguments...); });
}

Tensor Adam::step(LossClosure closure) {
  return adam_step<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      "Adam", *this, closure, [](auto&&... arguments) { at::_fused_adam_(arguments...); });
}

}  // namespace fsdp2::optim
