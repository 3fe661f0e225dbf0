#include "optim/fused_batch.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <string>

#include <fsdp2/error.h>

namespace fsdp2::detail {
namespace {

std::string name_of(const ParamUpdate& update) {
  if (update.spec != nullptr) return describe(*update.spec);
  return c10::str("parameter ", update.position, " of group ", update.group, " of shape ", update.param.sizes());
}

constexpr const char* kWhole =
    ": the parameter is whole at the moment (a forward or unshard() without a backward left it so): call reshard() on "
    "its module first";

/// `spec`: of `what`, null where it is plain.
[[noreturn]] void throw_mixed(const ParamUpdate& update, const DTensorSpec* spec, const Tensor& value,
                              const std::string& what) {
  if (update.spec == nullptr) {
    FSDP2_THROW(kUsage, "[optim] ", update.optimizer, ": ", what, " of ", name_of(update), ", which is plain, is ",
                describe(*spec), kWhole);
  }
  FSDP2_THROW(kUsage, "[optim] ", update.optimizer, ": ", what, " of ", name_of(update), " is a plain tensor of shape ",
              value.sizes(),
              what == "the gradient" ? ": it must be a DTensor like its parameter"
                                     : ": it was made before sharding; make the optimizer, or load its state, after "
                                       "fully_shard");
}

[[noreturn]] void throw_layout(const ParamUpdate& update, const DTensorSpec& spec, const std::string& what) {
  FSDP2_THROW(kUsage, "[optim] ", update.optimizer, ": ", what, " of ", name_of(update),
              " has another layout: ", describe(spec),
              "; it needs the mesh, shape and placements of its parameter: redistribute() it");
}

void check_layout(const ParamUpdate& update, const DTensorSpec* spec, const Tensor& value, const char* what) {
  if ((spec == nullptr) != (update.spec == nullptr)) [[unlikely]]
    throw_mixed(update, spec, value, what);
  if (spec == nullptr || spec->layout == update.spec->layout) return;
  if (!spec->same_layout(*update.spec)) [[unlikely]]
    throw_layout(update, *spec, what);
}

void check_values(const ParamUpdate& update, const Tensor& value, const char* what) {
  const Tensor& local = update.local;
  FSDP2_CHECK(
      value.scalar_type() == local.scalar_type() && value.device() == local.device() && value.sizes() == local.sizes(),
      kInvalidArgument, "[optim] ", update.optimizer, ": ", what, " of ", name_of(update), " is ", value.scalar_type(),
      " ", value.sizes(), " on ", value.device(), " where ", local.scalar_type(), " ", local.sizes(), " on ",
      local.device(), " is needed, as of the parameter");
}

Tensor zeros_like_param(const ParamUpdate& update) {
  const BelowDTensor below;
  Tensor zeros = at::zeros_like(update.local.detach(), at::MemoryFormat::Preserve);
  return update.spec != nullptr ? make_dtensor_like(*update.spec, std::move(zeros)) : zeros;
}

bool all_contiguous(const ParamUpdate& update, c10::ArrayRef<const Tensor*> state) {
  return update.local.is_contiguous() && update.grad.is_contiguous() &&
         std::all_of(state.begin(), state.end(), [](const Tensor* tensor) { return tensor->is_contiguous(); });
}

}  // namespace

ParamUpdate read_update(const char* optimizer, size_t group, size_t position, const Tensor& param) {
  const Tensor& grad = param.grad();
  const DTensorSpec* spec = spec_of(param);
  const DTensorSpec* grad_spec = spec_of(grad);
  const ParamUpdate update{optimizer,
                           group,
                           position,
                           param,
                           spec,
                           spec != nullptr ? spec->local : param,
                           grad_spec != nullptr ? grad_spec->local : grad};
  if (grad_spec != nullptr && grad_spec->has_partial()) [[unlikely]] {
    FSDP2_THROW(kUsage, "[optim] ", optimizer, ": the gradient ", describe(*grad_spec), " of ", name_of(update),
                " holds terms that are not summed over the ranks yet: call synchronize_gradients() first");
  }
  check_layout(update, grad_spec, grad, "the gradient");
  FSDP2_CHECK(update.grad.layout() == at::kStrided, kUnsupported, "[optim] ", optimizer, ": the gradient of ",
              name_of(update), " is of layout ", update.grad.layout(),
              "; only dense gradients are offered: make it dense, or use torch::optim::SGD without momentum");
  check_values(update, update.grad, "the gradient");
  return update;
}

void FusedBatch::add(const ParamUpdate& update, c10::ArrayRef<const Tensor*> state) {
  if (all_contiguous(update, state)) {
    params.push_back(update.local);
    grads.push_back(update.grad);
    for (size_t index = 0; index < state.size(); ++index) states[index].push_back(*state[index]);
    return;
  }
  // The operators go through memory in order: a flat view where all lie alike and without holes, else copies.
  const Tensor local = update.local.detach();
  const bool alike = local.is_non_overlapping_and_dense() && update.grad.strides() == local.strides() &&
                     std::all_of(state.begin(), state.end(),
                                 [&](const Tensor* tensor) { return tensor->strides() == local.strides(); });
  const auto flat = [](const Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); };
  const auto stand_in = [&](const Tensor& tensor) {
    if (alike) {
      behind.push_back(tensor);
      return flat(tensor);
    }
    Tensor copy = tensor.contiguous();
    if (!copy.is_same(tensor)) copies.emplace_back(tensor, copy);
    return copy;
  };
  params.push_back(stand_in(local));
  grads.push_back(alike ? flat(update.grad) : update.grad.contiguous());
  for (size_t index = 0; index < state.size(); ++index) states[index].push_back(stand_in(*state[index]));
}

void FusedBatch::count_writes() {
  const auto bump = [](const Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  };
  for (const Tensor& tensor : params) bump(tensor);
  for (const auto& list : states) {
    for (const Tensor& tensor : list) bump(tensor);
  }
  for (const Tensor& tensor : behind) bump(tensor);
  for (const auto& [tensor, copy] : copies) bump(tensor);
}

void FusedBatch::copy_back() {
  for (const auto& [tensor, copy] : copies) tensor.copy_(copy);
}

FusedBatches::~FusedBatches() {
  if (taken_) return;
  for (int64_t* step : counted_) --*step;
  for (Tensor* state : made_) *state = Tensor();
  // An entry without tensors would be saved, and stock optimizers that load it cannot step.
  for (void* key : keys_made_) states_.erase(key);
}

const Tensor& FusedBatches::state_part(const ParamUpdate& update, Tensor& state, const char* name) {
  if (!state.defined()) {
    state = zeros_like_param(update);
    made_.push_back(&state);
  }
  const DTensorSpec* spec = spec_of(state);
  check_layout(update, spec, state, name);
  const Tensor& part = spec != nullptr ? spec->local : state;
  check_values(update, part, name);
  return part;
}

int64_t FusedBatches::count(int64_t& step) {
  counted_.push_back(&step);
  return ++step;
}

void FusedBatches::add(const ParamUpdate& update, int64_t step, c10::ArrayRef<const Tensor*> state) {
  if (update.local.numel() != 0) batch_of(update, step).add(update, state);
}

FusedBatch& FusedBatches::batch_of(const ParamUpdate& update, int64_t step) {
  const auto dtype = update.local.scalar_type();
  const auto device = update.local.device();
  for (auto batch = batches_.rbegin(); batch != batches_.rend() && batch->group == update.group; ++batch) {
    if (batch->dtype == dtype && batch->device == device && batch->step == step) return *batch;
  }
  FSDP2_CHECK(at::isFloatingType(dtype) && at::elementSize(dtype) > 1 && !device.is_meta(), kUnsupported, "[optim] ",
              update.optimizer, ": ", name_of(update), " is ", dtype, " on ", device,
              "; float32, float64, bfloat16 and float16 with data are offered");
  return batches_.emplace_back(FusedBatch{update.group, dtype, device, step, {}, {}, {}, {}, {}});
}

}  // namespace fsdp2::detail
