#pragma once

// fsdp2::call and Hooked for torch::nn::Sequential: hooks of the modules inside run too.

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <fsdp2/error.h>
#include <fsdp2/module.h>

namespace fsdp2::detail {

inline void add_tensors(TensorPointers& found, torch::nn::AnyValue& value) {
  if (at::Tensor* tensor = value.try_get<at::Tensor>()) found.push_back(tensor);
}
template <class T>
void add_tensors(TensorPointers& found, T& value) {
  collect_tensors(value, found);
}

/// With the hooks of the step's module. Between steps they see the values that are Tensors.
template <class... Args>
torch::nn::AnyValue call_step(torch::nn::AnyModule& step, Args&&... args) {
  const std::shared_ptr<torch::nn::Module> module = step.ptr();
  ModuleState* state = find_state(*module);
  if (state == nullptr) {
    return step.any_forward(std::forward<Args>(args)...);
  }
  std::tuple<std::decay_t<Args>...> held(std::forward<Args>(args)...);
  return std::apply(
      [&](auto&... each) {
        TensorPointers inputs;
        (add_tensors(inputs, each), ...);
        pre_forward(*state, *module, inputs);
        try {
          torch::nn::AnyValue result = step.any_forward(std::move(each)...);
          TensorPointers outputs;
          add_tensors(outputs, result);
          post_forward(*state, *module, outputs);
          return result;
        } catch (...) {
          abandon_forward(*state, *module);
          throw;
        }
      },
      held);
}

template <>
struct ForwardOf<torch::nn::SequentialImpl> {
  /// What the last module returns must be a Tensor, as for Sequential::forward without a type.
  template <class... Args>
  static at::Tensor run(torch::nn::SequentialImpl& sequential, Args&&... args) {
    auto step = sequential.begin();
    FSDP2_CHECK(step != sequential.end(), kUsage, "[fsdp] an empty Sequential was called");
    torch::nn::AnyValue value = call_step(*step, std::forward<Args>(args)...);
    for (++step; step != sequential.end(); ++step) {
      value = call_step(*step, std::move(value));
    }
    const at::Tensor* result = value.try_get<at::Tensor>();
    FSDP2_CHECK(
        result != nullptr, kUnsupported,
        "[fsdp] the last module of a Sequential returned something other than a Tensor; call its modules one by "
        "one with fsdp2::call");
    return *result;
  }
};

}  // namespace fsdp2::detail
