#pragma once

// Hooks around a module's forward. libtorch calls forward statically, so they run where the call goes through
// operator() of a holder made with FSDP2_MODULE or Hooked, or through fsdp2::call.
// Python twin: torch.nn.Module.__call__.

#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>

#include <fsdp2/detail/tensor_tree.h>
#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>

/// In place of TORCH_MODULE(Name): still a ModuleHolder<NameImpl>, and Name{...}(x) runs the hooks.
#define FSDP2_MODULE(Name)                                                                            \
  class Name : public ::fsdp2::detail::HookedHolder<Name##Impl> {                                     \
   public:                                                                                            \
    using ::fsdp2::detail::HookedHolder<Name##Impl>::HookedHolder;                                    \
    using Impl = Name##Impl;                                                                          \
                                                                                                      \
   private:                                                                                           \
    inline static const bool fsdp2_registered_ = ::fsdp2::detail::register_module_type<Name##Impl>(); \
  }

namespace fsdp2 {

/// A module type that can write its own parameters and buffers anew; see reset_parameters in meta_init.h.
struct FSDP2_API ResetParameters {
  virtual ~ResetParameters() = default;
  virtual void reset_parameters() = 0;
};

/// Like torch::nn::Module::register_buffer. A buffer that is not persistent stays out of state dicts.
/// Returns the module's own tensor.
FSDP2_API at::Tensor& register_buffer(ModuleRef module, const std::string& name, at::Tensor tensor,
                                      bool persistent = true);

namespace detail {

class ModuleState;  // of a module given to fully_shard
using TensorPointers = c10::SmallVector<at::Tensor*, 8>;

/// Null for a module without hooks.
FSDP2_API ModuleState* find_state(const torch::nn::Module& module);
/// Runs around one forward of a module with hooks; the pointers are to the tensors among its inputs and outputs.
FSDP2_API void pre_forward(ModuleState& state, const torch::nn::Module& module, const TensorPointers& inputs);
FSDP2_API void post_forward(ModuleState& state, const torch::nn::Module& module, const TensorPointers& outputs);
/// Instead of post_forward when forward threw.
FSDP2_API void abandon_forward(ModuleState& state, const torch::nn::Module& module) noexcept;

FSDP2_API void register_reset(std::type_index type, void (*reset)(torch::nn::Module&));

template <class Impl>
bool register_module_type() {
  if constexpr (requires(Impl & module) { module.reset_parameters(); }) {
    register_reset(typeid(Impl), [](torch::nn::Module& module) { dynamic_cast<Impl&>(module).reset_parameters(); });
  }
  return true;
}

template <class T>
void collect_tensors(T& value, TensorPointers& found) {
  auto add = [&found](at::Tensor& tensor) { found.push_back(&tensor); };
  visit_tensors(value, add);
}

template <class M>
auto& module_of(M&& module) {
  if constexpr (std::derived_from<std::remove_cvref_t<M>, torch::nn::Module>) {
    return module;
  } else {
    return *module;  // a holder or a smart pointer
  }
}

/// How call() runs a module. Containers that call other modules have their own (sequential.h).
template <class Impl>
struct ForwardOf {
  template <class Self, class... Args>
  static decltype(auto) run(Self& impl, Args&&... args) {
    return impl.forward(std::forward<Args>(args)...);
  }
};

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
    abandon_forward(state, module);
    throw;
  }
}

}  // namespace detail

/// Hooks, then forward(args...). `module`: a holder, a shared_ptr to an Impl, or an Impl&. Returns what forward
/// returns, by value when the module has hooks.
template <class M, class... Args>
auto call(M&& module, Args&&... args) {
  auto& impl = detail::module_of(module);
  using Forward = detail::ForwardOf<std::remove_cvref_t<decltype(impl)>>;
  if (detail::ModuleState* state = detail::find_state(impl)) {
    return detail::call_with_hooks(
        *state, impl,
        [&impl](auto&&... each) -> decltype(auto) { return Forward::run(impl, std::forward<decltype(each)>(each)...); },
        std::forward<Args>(args)...);
  }
  return Forward::run(impl, std::forward<Args>(args)...);
}

/// Any other member function as an entry, e.g. call_method(model, &LlamaImpl::encode, tokens).
template <class M, class F, class C, class... Args>
auto call_method(M&& module, F C::*method, Args&&... args) {
  auto& impl = detail::module_of(module);
  if (detail::ModuleState* state = detail::find_state(impl)) {
    return detail::call_with_hooks(
        *state, impl,
        [&impl, method](auto&&... each) -> decltype(auto) {
          return (impl.*method)(std::forward<decltype(each)>(each)...);
        },
        std::forward<Args>(args)...);
  }
  return (impl.*method)(std::forward<Args>(args)...);
}

namespace detail {

template <class Impl>
class HookedHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  template <class... Args>
  auto operator()(Args&&... args) {
    return call(**this, std::forward<Args>(args)...);
  }
};

}  // namespace detail

/// A stock holder whose call runs the hooks, e.g. Hooked<torch::nn::Linear>.
template <class Holder>
class Hooked : public Holder {
 public:
  using Holder::Holder;
  Hooked(Holder holder) : Holder(std::move(holder)) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return call(**this, std::forward<Args>(args)...);
  }
};

}  // namespace fsdp2
