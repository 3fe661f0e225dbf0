#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <unordered_set>

#include <fsdp2/error.h>
#include <fsdp2/meta_init.h>

#include "fsdp/module_state.h"
#include "module/written.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2 {

namespace {

/// New memory under the same TensorImpl.
void materialise(const at::Tensor& tensor, c10::Device device) {
  at::Tensor fresh;
  if (detail::is_marked(tensor)) {
    const detail::DTensorSpec& spec = *detail::spec_of(tensor);
    fresh = detail::make_dtensor_like(spec, at::empty(spec.local.sizes(), spec.local.options().device(device)));
  } else {
    fresh = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).requires_grad(false));
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(fresh.getIntrusivePtr());
  detail::watch_until_written(tensor);
}

}  // namespace

void to_empty(ModuleRef module, c10::Device device) {
  FSDP2_CHECK(!device.is_meta(), kInvalidArgument,
              "[meta] to_empty got the meta device; pass the device that the model "
              "runs on, e.g. fsdp2::local_device()");
  const c10::InferenceMode normal_tensors(false);
  const detail::BelowDTensor below;
  std::unordered_set<const c10::TensorImpl*> done;
  for (const auto& state : detail::states_under(*module)) {
    state->expect_writes();
    for (const auto& group : state->groups) {
      group->to_empty(device);
      for (const detail::FSDPParam& param : group->params()) {
        done.insert(param.param().unsafeGetTensorImpl());
      }
    }
  }
  const auto once = [&](const at::Tensor& tensor) {
    if (tensor.defined() && done.insert(tensor.unsafeGetTensorImpl()).second) {
      materialise(tensor, device);
    }
  };
  for (const at::Tensor& param : module->parameters()) once(param);
  for (const at::Tensor& buffer : module->buffers()) once(buffer);
}

void mark_initialized(ModuleRef module) {
  for (const auto& state : detail::states_under(*module)) {
    for (const auto& group : state->groups) {
      group->mark_written();
    }
  }
  for (const at::Tensor& param : module->parameters()) detail::forget_unwritten(param);
  for (const at::Tensor& buffer : module->buffers()) detail::forget_unwritten(buffer);
}

}  // namespace fsdp2
