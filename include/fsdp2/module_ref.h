#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <type_traits>

namespace fsdp2 {

/// Parameter type for "a module": converts from any holder (torch::nn's and ours), from
/// std::shared_ptr<M> and from torch::nn::Module&. Does not extend the module's life beyond the call.
class ModuleRef {
 public:
  ModuleRef(torch::nn::Module& module) : module_(&module) {}
  template <class M>
    requires std::derived_from<M, torch::nn::Module>
  ModuleRef(const std::shared_ptr<M>& module) : module_(module.get()) {}
  template <class H>
    requires requires(const std::remove_cvref_t<H>& holder) {
      { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
    }
  ModuleRef(H&& holder) : module_(holder.ptr().get()) {}

  torch::nn::Module& get() const { return *module_; }
  torch::nn::Module* operator->() const { return module_; }
  torch::nn::Module& operator*() const { return *module_; }

 private:
  torch::nn::Module* module_;
};

}  // namespace fsdp2
