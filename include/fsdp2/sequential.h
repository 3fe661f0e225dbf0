#pragma once

// fsdp2::call and Hooked for torch::nn::Sequential: hooks of the modules inside run too.

#include <torch/nn/modules/container/sequential.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include <fsdp2/error.h>
#include <fsdp2/module.h>

namespace fsdp2::detail {

/// One step of a Sequential. Hooks see the inputs and outputs that are Tensors.
template <class... Args>
torch::nn::AnyValue step_of_sequential(torch::nn::AnyModule& step, Args&&... args) {
  const std::shared_ptr<torch::nn::Module> module = step.ptr();
  ModuleState* state = find_state(*module);
  if (state == nullptr) {
    return step.any_forward(std::forward<Args>(args)...);
  }
  const auto run = [&](auto&... held) {
    TensorPointers inputs;
    const auto add_tensor = [](TensorPointers& found, auto& value) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, torch::nn::AnyValue>) {
        if (at::Tensor* tensor = value.template try_get<at::Tensor>()) found.push_back(tensor);
      } else {
        collect_tensors(value, found);
      }
    };
    (add_tensor(inputs, held), ...);
    pre_forward(*state, *module, inputs);
    try {
      torch::nn::AnyValue result = step.any_forward(std::move(held)...);
      TensorPointers outputs;
      add_tensor(outputs, result);
      post_forward(*state, *module, outputs);
      return result;
    } catch (...) {
      abandon_forward(*state, *module);
      throw;
    }
  };
  std::tuple<std::decay_t<Args>...> held(std::forward<Args>(args)...);
  return std::apply(run, held);
}

template <>
struct ForwardOf<torch::nn::SequentialImpl> {
  /// What the last module returns must be a Tensor, as for Sequential::forward without a type.
  template <class... Args>
  static at::Tensor run(torch::nn::SequentialImpl& sequential, Args&&... args) {
    auto step = sequential.begin();
    FSDP2_CHECK(step != sequential.end(), kUsage, "[fsdp] an empty Sequential was called");
    torch::nn::AnyValue value = step_of_sequential(*step, std::forward<Args>(args)...);
    for (++step; step != sequential.end(); ++step) {
      value = step_of_sequential(*step, std::move(value));
    }
    const at::Tensor* result = value.template try_get<at::Tensor>();
    FSDP2_CHECK(result != nullptr, kUnsupported,
                "[fsdp] the last module of a Sequential returned something other than a "
                "Tensor; call the modules one by one with fsdp2::call");
    return *result;
  }
};

}  // namespace fsdp2::detail
