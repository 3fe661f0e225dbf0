#include "fsdp/managed.h"

#include <fsdp2/error.h>

#include "fsdp/module_state.h"

namespace fsdp2::detail {

ManagedCollector::ManagedCollector(const std::vector<Tensor>& ignored, bool distributed) : distributed_(distributed) {
  for (const Tensor& tensor : ignored) {
    const ParameterOwner owner = owner_of(tensor);
    FSDP2_CHECK(!owner, kInvalidArgument, "[fsdp] ignored_params names ", owner.fqn(), ", which ", owner.state->label(),
                " sharded already; name it in that call");
    ignored_.insert(tensor.unsafeGetTensorImpl());
  }
}

void ManagedCollector::visit(const torch::nn::Module& module, const std::string& prefix) {
  if (!modules_.insert(&module).second) {
    return;
  }
  for (const auto& child : module.named_children()) {
    if (!state_of(*child.value())) {
      visit(*child.value(), prefix + child.key() + ".");
    }
  }
  for (const auto& named : module.named_parameters(/*recurse=*/false)) {
    add(named.value(), prefix + named.key());
  }
  for (const auto& named : module.named_buffers(/*recurse=*/false)) {
    if (named.value().defined() && tensors_.insert(named.value().unsafeGetTensorImpl()).second) {
      buffers.push_back({prefix + named.key(), named.value()});
    }
  }
}

void ManagedCollector::add(const Tensor& param, const std::string& fqn) {
  if (!param.defined() || ignored_.count(param.unsafeGetTensorImpl()) != 0 ||
      !tensors_.insert(param.unsafeGetTensorImpl()).second) {
    return;
  }
  if (const ParameterOwner owner = owner_of(param)) {
    owners.push_back(owner.state);  // Note [Tied parameters]
    return;
  }
  FSDP2_CHECK(distributed_ || !is_marked(param), kUnsupported, "[fsdp] parameter ", fqn, " is already distributed as ",
              is_marked(param) ? to_string(spec_of(param)->placements) : std::string(),
              ", which a mesh of its own cannot be "
              "combined with; pass the mesh that it lies on, with dp_mesh_dims to say which axes are data-parallel");
  FSDP2_CHECK(param.dim() > 0, kInvalidArgument, "[fsdp] parameter ", fqn,
              " has no dimensions and cannot be sharded; make it 1-dimensional (shape [1]), or pass it in "
              "ignored_params");
  if (!is_marked(param)) {
    FSDP2_CHECK(param.is_contiguous(), kInvalidArgument, "[fsdp] parameter ", fqn, " of shape ", param.sizes(),
                " and strides ", param.strides(), " is not contiguous; call .contiguous() on it before fully_shard");
    check_own_memory(param, fqn);
  }
  params.push_back({fqn, param});
}

/// Two tensors over one memory are tied while they are whole; as shards each would go its own way.
void ManagedCollector::check_own_memory(const Tensor& param, const std::string& fqn) {
  if (param.is_meta() || param.numel() == 0) {
    return;
  }
  const auto* begin = static_cast<const char*>(param.const_data_ptr());
  const auto* end = begin + param.nbytes();
  const auto after = memory_.lower_bound(end);
  if (after != memory_.begin()) {
    const auto& [other_end, other_fqn] = std::prev(after)->second;
    FSDP2_CHECK(other_end <= begin, kInvalidArgument, "[fsdp] parameters ", other_fqn, " and ", fqn,
                " are two tensors over one memory (set_data, or a view) and would drift apart as shards; to tie them "
                "register one tensor in both modules: register_parameter(\"weight\", other->weight)");
  }
  memory_.emplace(begin, std::make_pair(end, fqn));
}

}  // namespace fsdp2::detail
