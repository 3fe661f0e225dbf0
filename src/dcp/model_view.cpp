#include "dcp/model_view.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>
#include <fsdp2/process_group.h>

#include <algorithm>

#include "dcp/geometry.h"
#include "dcp/local_parts.h"
#include "fsdp/ignored_params.h"
#include "fsdp/reshard_all.h"
#include "module/buffers.h"
#include "module/written.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::dcp::detail {

using fsdp2::detail::DTensorSpec;
using fsdp2::detail::is_marked;
using fsdp2::detail::spec_of;

namespace {

void collect(torch::nn::Module& module, const std::string& prefix, std::vector<NamedTensor>& out) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    out.push_back({prefix + item.key(), item.value(), true});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (fsdp2::detail::is_non_persistent(item.value())) continue;
    out.push_back({prefix + item.key(), item.value(), false});
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", out);
}

/// All names under which `wanted` is in `module`, each with a dot behind; "" for the module itself.
void find_prefixes(torch::nn::Module& module, const torch::nn::Module& wanted, const std::string& prefix,
                   std::vector<std::string>& out) {
  if (&module == &wanted) out.push_back(prefix);
  for (const auto& child : module.named_children())
    find_prefixes(*child.value(), wanted, prefix + child.key() + ".", out);
}

void keep_submodules(std::vector<NamedTensor>& tensors, torch::nn::Module& module, const StateDictOptions& options) {
  std::vector<std::string> prefixes;
  for (const ModuleRef& submodule : options.submodules) {
    const size_t before = prefixes.size();
    find_prefixes(module, submodule.get(), "", prefixes);
    FSDP2_CHECK(prefixes.size() > before, kInvalidArgument, "[dcp] StateDictOptions::submodules has a ",
                submodule->name(), " that is not inside of the model (a ", module.name(),
                "); pass modules that are registered in it");
  }
  const bool strip = !options.keep_submodule_prefixes;
  if (strip) prefixes.resize(1);  // one module; more names of it would give each key twice
  std::erase_if(tensors, [&](NamedTensor& item) {
    const auto prefix = std::find_if(prefixes.begin(), prefixes.end(),
                                     [&](const std::string& text) { return item.fqn.starts_with(text); });
    if (prefix == prefixes.end()) return true;
    if (strip) item.fqn.erase(0, prefix->size());
    return false;
  });
}

}  // namespace

ModelView::ModelView(torch::nn::Module& module, const StateDictOptions& options) {
  FSDP2_CHECK(!options.broadcast_from_rank0 || options.full_state_dict, kInvalidArgument,
              "[dcp] StateDictOptions::broadcast_from_rank0 is set and full_state_dict is not; what rank 0 sends are "
              "whole tensors: set both");
  FSDP2_CHECK(options.keep_submodule_prefixes || options.submodules.size() == 1, kInvalidArgument,
              "[dcp] StateDictOptions::keep_submodule_prefixes is false with ", options.submodules.size(),
              " submodules; names without prefix need exactly one");
  fsdp2::detail::reshard_all(module);
  collect(module, "", tensors_);
  for (const NamedTensor& item : tensors_) {
    if (item.is_parameter) all_parameters_.insert(item.tensor.unsafeGetTensorImpl());
  }
  if (!options.submodules.empty()) keep_submodules(tensors_, module, options);
  for (const NamedTensor& item : tensors_) {
    if (!item.is_parameter) continue;
    names_[item.tensor.unsafeGetTensorImpl()].push_back(item.fqn);
    fqns_.insert(item.fqn);
  }
}

const std::vector<std::string>* ModelView::names(const at::Tensor& param, const std::string& where) const {
  const void* key = param.unsafeGetTensorImpl();
  FSDP2_CHECK(all_parameters_.count(key) != 0, kInvalidArgument, "[dcp] ", where, " (shape ", param.sizes(),
              ") is not a parameter of the module; make the optimizer from the module's parameters()");
  const auto found = names_.find(key);
  return found == names_.end() ? nullptr : &found->second;
}

void ModelView::check_fully_sharded() const {
  std::string plain, sharded;
  for (const NamedTensor& item : tensors_) {
    if (!item.is_parameter) continue;
    if (is_marked(item.tensor)) {
      sharded = item.fqn;
    } else if (item.tensor.requires_grad() && !fsdp2::detail::is_ignored_param(item.tensor)) {
      plain += (plain.empty() ? "" : ", ") + item.fqn;
    }
  }
  FSDP2_CHECK(sharded.empty() || plain.empty(), kUsage, "[dcp] some parameters are sharded (", sharded,
              ") and these trainable ones are not: ", plain,
              "; call fully_shard on the root module too, or pass them in ignored_params");
}

void check_assignable(const at::Tensor& target, const at::Tensor& value, const std::string& fqn) {
  const bool one_element = target.numel() == 1 && value.numel() == 1;
  FSDP2_CHECK(target.sizes() == value.sizes() || one_element, kInvalidArgument, "[dcp] ", fqn, " has shape ",
              shape_text(target.sizes().vec()), ", the value for it has shape ", shape_text(value.sizes().vec()));
  const DTensorSpec* to = spec_of(target);
  const DTensorSpec* from = spec_of(value);
  if (from == nullptr) return;
  FSDP2_CHECK(to != nullptr, kInvalidArgument, "[dcp] ", fqn, " is a plain tensor, the value for it is a DTensor with ",
              to_string(from->placements), "; pass full_tensor() of it");
  FSDP2_CHECK(to->same_layout(*from), kInvalidArgument, "[dcp] ", fqn, " is a DTensor with ", to_string(to->placements),
              ", the value for it has ", to_string(from->placements),
              " or another mesh; redistribute it, or load the checkpoint into get_model_state_dict()");
}

namespace {

/// The value itself as new data for a tensor on meta, so that a model never needs its memory twice; undefined where it
/// does not fit as it is, or where another model has already taken it over.
at::Tensor taken_over(const at::Tensor& target, const at::Tensor& value) {
  const DTensorSpec* to = spec_of(target);
  const DTensorSpec* from = spec_of(value);
  const at::Tensor& data = from ? from->local : value;
  const bool right_device = to || !is_initialized() || data.device().type() == local_device().type();
  const bool fits = right_device && (to == nullptr) == (from == nullptr) && target.sizes() == value.sizes() &&
                    target.scalar_type() == value.scalar_type() && data.is_contiguous() &&
                    data.storage().use_count() == 1;
  if (!fits) return {};
  return to ? fsdp2::detail::make_dtensor_like(*to, data.detach()) : data.detach();
}

}  // namespace

void assign_tensor(at::Tensor target, const at::Tensor& value, const std::string& fqn, bool may_take_over) {
  const fsdp2::detail::BelowDTensor below;
  at::Tensor filled = target;
  if (on_meta(target)) {
    filled = may_take_over ? taken_over(target, value) : at::Tensor();
    const bool taken = filled.defined();
    if (!taken) filled = fresh_like(target);
    target.unsafeGetTensorImpl()->shallow_copy_from(filled.getIntrusivePtr());
    if (taken) return fsdp2::detail::forget_unwritten(target);
  }
  const DTensorSpec* to = spec_of(filled);
  const DTensorSpec* from = spec_of(value);
  if (from != nullptr) {
    if (!to->local.is_same(from->local)) {
      at::Tensor(to->local).copy_(from->local.reshape(to->local.sizes()));
    }
  } else {
    const at::Tensor whole = value.reshape(target.sizes());
    for (const LocalPart& part : local_parts(filled, fqn)) {
      at::Tensor(part.data).copy_(part_of(whole, part.box));
    }
  }
  fsdp2::detail::forget_unwritten(target);
}

}  // namespace fsdp2::dcp::detail
