#pragma once

// What runs around a module's forward. Part of module.h.

#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include <fsdp2/detail/tensor_tree.h>
#include <fsdp2/export.h>

namespace fsdp2 {

namespace detail {

class ModuleState;  // of a module given to fully_shard
using TensorPointers = c10::SmallVector<at::Tensor*, 8>;

/// Null for a module without hooks.
FSDP2_API ModuleState* find_state(const torch::nn::Module& module);
/// Runs around one forward of a module with hooks; the pointers are to the tensors among its inputs and outputs.
FSDP2_API void pre_forward(ModuleState& state, const torch::nn::Module& module, const TensorPointers& inputs);
FSDP2_API void post_forward(ModuleState& state, const torch::nn::Module& module, const TensorPointers& outputs);
/// Instead of post_forward when forward threw.
FSDP2_API void abandon_forward(ModuleState& state) noexcept;

template <class T>
void collect_tensors(T& value, TensorPointers& found) {
  auto add = [&found](at::Tensor& tensor) { found.push_back(&tensor); };
  visit_tensors(value, add);
}

/// A module's argument while hooks look at it: a copy (tensors are handles), so that hooks may replace tensors. What
/// holds no tensors and was passed as an lvalue is passed on as it is: forward may write to it.
template <class T>
using HeldArgument =
    std::conditional_t<std::is_lvalue_reference_v<T> && IsOpaque<std::remove_cvref_t<T>>::value, T, std::decay_t<T>>;

/// What hooks may have replaced in one argument: the tensors as given, and what forward got in their place.
struct HookedTensors {
  c10::SmallVector<at::Tensor, 4> given;
  c10::SmallVector<c10::TensorImpl*, 4> seen;
};

/// Forward may take an argument by non-const reference and write to it: hand the new value on, with the caller's own
/// tensors where only hooks replaced them.
template <class Given, class Held>
void return_if_assigned(Given& given, Held& held, const HookedTensors& before) {
  if constexpr (!IsOpaque<Held>::value && std::is_assignable_v<Given&, Held&>) {
    TensorPointers after;
    collect_tensors(held, after);
    bool changed = !std::is_same_v<Held, at::Tensor>;  // anything else may hold more than the tensors that we see
    for (at::Tensor* tensor : after) {
      const auto found = std::find(before.seen.begin(), before.seen.end(), tensor->unsafeGetTensorImpl());
      if (found != before.seen.end()) {
        *tensor = before.given[found - before.seen.begin()];
      } else {
        changed = true;
      }
    }
    if (changed) {
      given = held;
    }
  }
}

/// Runs `forward(arguments...)` between the hooks of `state`.
template <class Forward, class... Args>
auto call_with_hooks(ModuleState& state, const torch::nn::Module& module, Forward&& forward, Args&&... args) {
  std::tuple<HeldArgument<Args>...> held(std::forward<Args>(args)...);
  std::array<HookedTensors, sizeof...(Args)> before;
  const auto for_each_held = [&]([[maybe_unused]] auto&& look) {
    [[maybe_unused]] size_t index = 0;
    std::apply([&](auto&... each) { (look(each, before[index++]), ...); }, held);
  };
  TensorPointers inputs;
  for_each_held([&](auto& each, HookedTensors& own) {
    TensorPointers found;
    collect_tensors(each, found);
    for (at::Tensor* tensor : found) {
      own.given.push_back(*tensor);
      inputs.push_back(tensor);
    }
  });
  pre_forward(state, module, inputs);
  size_t next = 0;
  for (HookedTensors& own : before) {
    for (size_t i = 0; i < own.given.size(); ++i) {
      own.seen.push_back(inputs[next++]->unsafeGetTensorImpl());
    }
  }
  const auto run = [&]() -> decltype(auto) {
    return std::apply(
        [&](auto&... each) -> decltype(auto) {
          return forward(static_cast<std::conditional_t<std::is_lvalue_reference_v<Args>, decltype(each),
                                                        std::remove_reference_t<decltype(each)>&&>>(each)...);
        },
        held);
  };
  using Result = std::remove_cvref_t<decltype(run())>;
  const auto hand_back = [&] {
    [[maybe_unused]] size_t index = 0;
    [[maybe_unused]] const auto one = [&]<class Arg>(std::type_identity<Arg>, [[maybe_unused]] auto& given,
                                                     [[maybe_unused]] auto& each) {
      [[maybe_unused]] const HookedTensors& own = before[index++];
      if constexpr (std::is_lvalue_reference_v<Arg> && !std::is_const_v<std::remove_reference_t<Arg>>) {
        return_if_assigned(given, each, own);
      }
    };
    std::apply([&](auto&... each) { (one(std::type_identity<Args>{}, args, each), ...); }, held);
  };
  try {
    if constexpr (std::is_void_v<Result>) {
      run();
      hand_back();
      post_forward(state, module, TensorPointers{});
    } else {
      Result result = run();
      hand_back();
      TensorPointers outputs;
      collect_tensors(result, outputs);
      post_forward(state, module, outputs);
      return result;
    }
  } catch (...) {
    abandon_forward(state);
    throw;
  }
}

}  // namespace detail

}  // namespace fsdp2
