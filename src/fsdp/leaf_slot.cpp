#include "fsdp/leaf_slot.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <fsdp2/error.h>
#include <fsdp2/fully_shard.h>

namespace fsdp2 {

namespace detail {
namespace {

struct Hooks : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& param) override {
    if (!target) {
      at::Tensor alive = param;
      run(alive);
    }
  }
  void run(at::Tensor& param) {
    const auto now = hooks;  // a hook may register another
    for (const auto& hook : now) {
      hook(param);
    }
  }
  std::vector<std::function<void(at::Tensor&)>> hooks;
  std::shared_ptr<LeafTarget> target;  // hooks wait for its group's reduction
  std::shared_ptr<void> token;
};

torch::autograd::PostAccumulateGradHook* slot_of(const at::Tensor& param) {
  return torch::autograd::impl::get_autograd_meta(param) == nullptr
             ? nullptr
             : torch::autograd::impl::post_acc_grad_hooks(param).get();
}

Hooks* find(const at::Tensor& param) { return dynamic_cast<Hooks*>(slot_of(param)); }

Hooks& find_or_make(const at::Tensor& param) {
  if (Hooks* found = find(param)) {
    return *found;
  }
  FSDP2_CHECK(slot_of(param) == nullptr, kUsage, "[fsdp] a parameter of shape ", param.sizes(),
              " has a post-accumulate hook that was put there past this library; use "
              "register_post_accumulate_grad_hook for all of them");
  auto made = std::make_unique<Hooks>();
  Hooks& hooks = *made;
  torch::autograd::impl::set_post_acc_grad_hooks(param, std::move(made));
  return hooks;
}

}  // namespace

std::shared_ptr<LeafTarget> leaf_target_of(const at::Tensor& param) {
  const Hooks* found = param.defined() ? find(param) : nullptr;
  return found != nullptr ? found->target : nullptr;
}

void set_leaf_target(const at::Tensor& param, std::shared_ptr<LeafTarget> target, std::shared_ptr<void> token) {
  Hooks& slot = find_or_make(param);
  slot.target = std::move(target);
  slot.token = std::move(token);
}

bool has_post_accumulate_hooks(const at::Tensor& param) {
  const Hooks* found = find(param);
  return found != nullptr && !found->hooks.empty();
}

void run_post_accumulate_hooks(at::Tensor& param) {
  if (Hooks* found = find(param)) {
    found->run(param);
  }
}

}  // namespace detail

void register_post_accumulate_grad_hook(const Tensor& param, std::function<void(Tensor& param)> hook) {
  FSDP2_CHECK(param.defined() && param.is_leaf() && hook != nullptr, kInvalidArgument,
              "[fsdp] "
              "register_post_accumulate_grad_hook needs a parameter (a leaf tensor) and a function");
  detail::find_or_make(param).hooks.push_back(std::move(hook));
}

}  // namespace fsdp2
