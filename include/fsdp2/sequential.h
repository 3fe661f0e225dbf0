#pragma once

// fsdp2::call and Hooked for torch::nn::Sequential: the hooks of the modules inside run too.

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <utility>

#include <fsdp2/error.h>
#include <fsdp2/module.h>

namespace torch::nn {

/// What passes from one module of a Sequential to the next: hooks see it where it is a Tensor.
template <class Visitor>
void fsdp2_visit_fields(AnyValue& value, Visitor&& visitor) {
  if (at::Tensor* tensor = value.try_get<at::Tensor>()) visitor(*tensor);
}

}  // namespace torch::nn

namespace fsdp2::detail {

template <class... Args>
torch::nn::AnyValue call_step(torch::nn::AnyModule& step, Args&&... args) {
  const std::shared_ptr<torch::nn::Module> module = step.ptr();
  const auto forward = [&](auto&&... each) { return step.any_forward(std::forward<decltype(each)>(each)...); };
  ModuleState* state = find_state(*module);
  return state != nullptr ? call_with_hooks(*state, *module, forward, std::forward<Args>(args)...)
                          : forward(std::forward<Args>(args)...);
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
    FSDP2_CHECK(result != nullptr, kUnsupported,
                "[fsdp] the last module of a Sequential returned something other than a "
                "Tensor; call its modules one by one with fsdp2::call");
    return *result;
  }
};

}  // namespace fsdp2::detail
