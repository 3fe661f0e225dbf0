#pragma once

// Hooks around a module's forward. libtorch calls forward statically, so they run where the call goes through
// operator() of a holder made with FSDP2_MODULE or Hooked, or through fsdp2::call.
// Python twin: torch.nn.Module.__call__.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <typeindex>
#include <utility>

#include <fsdp2/detail/hooks.h>
#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>

/// In place of TORCH_MODULE(Name): still a ModuleHolder<NameImpl>, and Name{...}(x) runs the hooks.
#define FSDP2_MODULE(Name)                                                                            \
  class Name : public ::fsdp2::detail::HookedHolder<Name##Impl> {                                     \
   public:                                                                                            \
    using ::fsdp2::detail::HookedHolder<Name##Impl>::HookedHolder;                                    \
    using Impl = Name##Impl;                                                                          \
   private:                                                                                           \
    inline static const bool fsdp2_registered_ = ::fsdp2::detail::register_module_type<Name##Impl>(); \
  }

namespace torch::nn {
class SequentialImpl;
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

FSDP2_API void register_reset(std::type_index type, void (*reset)(torch::nn::Module&));

template <class Impl>
bool register_module_type() {
  if constexpr (requires(Impl& module) { module.reset_parameters(); }) {
    register_reset(typeid(Impl), [](torch::nn::Module& module) { dynamic_cast<Impl&>(module).reset_parameters(); });
  }
  return true;
}

template <class M>
auto& module_of(M&& module) {
  if constexpr (std::derived_from<std::remove_cvref_t<M>, torch::nn::Module>) {
    return module;
  } else {
    return *module;  // a holder or a smart pointer
  }
}

/// How call() runs a module.
template <class Impl>
struct ForwardOf {
  template <class Self, class... Args>
  static decltype(auto) run(Self& impl, Args&&... args) {
    return impl.forward(std::forward<Args>(args)...);
  }
};
template <>
struct ForwardOf<torch::nn::SequentialImpl>;  // include <fsdp2/sequential.h>

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
