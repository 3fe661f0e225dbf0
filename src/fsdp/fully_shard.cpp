#include <fsdp2/fully_shard.h>

#include <ATen/Functions.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <atomic>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include <fsdp2/error.h>

#include "fsdp/ignored_params.h"
#include "fsdp/module_state.h"
#include "process/world.h"

namespace fsdp2 {

namespace detail {

namespace {

/// What one fully_shard call takes: parameters and buffers of the subtree that no nested call has taken.
struct Managed {
  std::vector<ParamGroup::Named> params;
  std::vector<std::pair<std::string, Tensor>> buffers;
};

class ManagedCollector {
 public:
  explicit ManagedCollector(const std::vector<Tensor>& ignored) {
    for (const Tensor& tensor : ignored) {
      ignored_.insert(tensor.unsafeGetTensorImpl());
    }
  }

  /// Depth first, children before a module's own parameters.
  void visit(const torch::nn::Module& module, const std::string& prefix) {
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
        managed.buffers.emplace_back(prefix + named.key(), named.value());
      }
    }
  }

  Managed managed;

 private:
  void add(const Tensor& param, const std::string& fqn) {
    if (!param.defined() || ignored_.count(param.unsafeGetTensorImpl()) != 0 ||
        !tensors_.insert(param.unsafeGetTensorImpl()).second) {
      return;
    }
    FSDP2_CHECK(!is_marked(param), kUnsupported, "[fsdp] parameter ", fqn, " is already distributed as ",
                to_string(spec_of(param)->placements), " (named ", spec_of(param)->fqn,
                " there): either it is tied to a parameter of a module that an earlier fully_shard call took, then "
                "shard both users in one call on their common parent; or it was distributed by hand, which fully_shard does "
                "not combine with in this version");
    FSDP2_CHECK(param.dim() > 0, kInvalidArgument, "[fsdp] parameter ", fqn,
                " has no dimensions and cannot be sharded; make it 1-dimensional (shape [1]), or pass it in "
                "ignored_params");
    FSDP2_CHECK(param.is_contiguous(), kInvalidArgument, "[fsdp] parameter ", fqn, " of shape ", param.sizes(),
                " and strides ", param.strides(), " is not contiguous; call .contiguous() on it before fully_shard");
    check_own_memory(param, fqn);
    managed.params.push_back({param, fqn});
  }

  /// Two tensors over one memory are tied while they are whole; as shards each would go its own way.
  void check_own_memory(const Tensor& param, const std::string& fqn) {
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

  std::unordered_set<const torch::nn::Module*> modules_;
  std::unordered_set<const c10::TensorImpl*> tensors_, ignored_;
  std::map<const char*, std::pair<const char*, std::string>> memory_;  // begin; end and name
};

std::optional<bool> resolve_reshard(const ReshardAfterForward& wanted, int64_t shard_size) {
  if (!wanted) {
    return std::nullopt;
  }
  if (const bool* flag = std::get_if<bool>(&*wanted)) {
    return *flag;
  }
  const int ranks = std::get<int>(*wanted);
  FSDP2_CHECK(ranks >= 1 && ranks <= shard_size && shard_size % ranks == 0, kInvalidArgument,
              "[fsdp] reshard_after_forward is ", ranks, "; an integer must divide the shard size ", shard_size,
              " (1 means false, ", shard_size, " means true)");
  FSDP2_CHECK(ranks == 1 || ranks == shard_size, kUnsupported, "[fsdp] reshard_after_forward = ", ranks,
              " (a shard over fewer ranks) is not offered in this version; use true, false, 1 or ", shard_size);
  return ranks == shard_size && shard_size > 1;
}

void check_options(const FullyShardOptions& options) {
  FSDP2_CHECK(!options.shard_placement_fn, kUnsupported,
              "[fsdp] shard_placement_fn is not offered in this version; parameters are sharded on dim 0");
  FSDP2_CHECK(!options.offload_policy, kUnsupported, "[fsdp] offload_policy is not offered in this version");
  FSDP2_CHECK(!options.dp_mesh_dims, kUnsupported,
              "[fsdp] dp_mesh_dims is not offered in this version; pass a 1-D mesh");
  const auto floating = [](const char* field, const std::optional<at::ScalarType>& dtype) {
    FSDP2_CHECK(!dtype || at::isFloatingType(*dtype), kInvalidArgument, "[fsdp] mp_policy.", field, " is ", *dtype,
                "; expected a floating-point dtype");
  };
  floating("param_dtype", options.mp_policy.param_dtype);
  floating("reduce_dtype", options.mp_policy.reduce_dtype);
  floating("output_dtype", options.mp_policy.output_dtype);
  floating("buffer_dtype", options.mp_policy.buffer_dtype);
  for (const Tensor& tensor : options.ignored_params) {
    FSDP2_CHECK(tensor.defined(), kInvalidArgument, "[fsdp] ignored_params holds an undefined tensor");
  }
}

DeviceMesh resolve_mesh(const std::optional<DeviceMesh>& mesh) {
  if (mesh) {
    FSDP2_CHECK(mesh->ndim() <= 2, kInvalidArgument, "[fsdp] the mesh has ", mesh->ndim(),
                " axes; expected a 1-D mesh: pick an axis by name, mesh[\"dp\"]");
    FSDP2_CHECK(mesh->ndim() == 1, kUnsupported, "[fsdp] a 2-D mesh (replicate and shard) is not offered in this "
                "version; pass a 1-D mesh");
    FSDP2_CHECK(mesh->get_coordinate().has_value(), kUsage, "[fsdp] this rank is outside the mesh of ranks ",
                mesh->ranks(), "; only ranks inside it call fully_shard");
    return *mesh;
  }
  const World& world = require_world("fully_shard()");
  return init_device_mesh(local_device().type(), {world.world_size});
}

/// Names as seen from `module` for every parameter below it, also those of nested calls.
void rename_from(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& named : module.named_parameters()) {
    names.emplace(named.value().unsafeGetTensorImpl(), named.key());
  }
  for (const auto& state : states_under(module)) {
    if (!state->group) {
      continue;
    }
    std::vector<std::string> fqns;
    for (FSDPParam& param : state->group->params()) {
      const auto found = names.find(param.param().unsafeGetTensorImpl());
      fqns.push_back(found != names.end() ? found->second : param.fqn());
    }
    state->group->set_fqns(fqns);
  }
}

/// Its destruction, with the last parameter, lets the state of the module go.
struct OwnerToken {
  OwnerToken() = default;
  OwnerToken(const OwnerToken&) = delete;
  OwnerToken& operator=(const OwnerToken&) = delete;
  ~OwnerToken() { purge_states(); }
};

}  // namespace

}  // namespace detail

using detail::ModuleState;

FSDPModule fully_shard_module(ModuleRef module_ref, const FullyShardOptions& options) {
  torch::nn::Module& module = *module_ref;
  const std::string name = module.name();
  FSDP2_CHECK(!module.weak_from_this().expired(), kUsage, "[fsdp] ", name,
              " is not held by a shared_ptr; make it through its holder or std::make_shared");
  const std::shared_ptr<torch::nn::Module> shared = module.shared_from_this();
  FSDP2_CHECK(!detail::state_of(module), kUsage, "[fsdp] fully_shard was called twice on one ", name,
              "; call it once per module (a module used in two places is one module)");
  FSDP2_CHECK(!dynamic_cast<torch::nn::ModuleListImpl*>(&module) && !dynamic_cast<torch::nn::ModuleDictImpl*>(&module),
              kInvalidArgument, "[fsdp] ", name, " has no forward of its own, so its hooks would never run; call "
              "fully_shard on each of its elements, and then on the module that holds it");
  detail::check_options(options);
  const DeviceMesh mesh = detail::resolve_mesh(options.mesh);
  const std::optional<bool> reshard = detail::resolve_reshard(options.reshard_after_forward, mesh.size(0));
  const c10::Device device = mesh.device_type() == at::kCPU ? c10::Device(at::kCPU) : local_device();

  detail::ManagedCollector collector(options.ignored_params);
  collector.visit(module, "");
  detail::Managed& managed = collector.managed;

  static std::atomic<int> calls{0};
  const std::string label = c10::str(name, " (fully_shard call ", ++calls, ")");
  auto state = std::make_shared<ModuleState>(shared, options.mp_policy, label);
  state->context->states.push_back(state);
  state->device = device;
  if (reshard) {
    state->set_reshard_after_forward(*reshard);
  } else {
    state->set_default_reshard();
  }
  for (const auto& [fqn, buffer] : managed.buffers) {
    if (!buffer.is_meta() && buffer.device() != device) {
      at::Tensor(buffer).set_data(buffer.to(device));
    }
    state->buffer_cast.add(buffer);
  }
  for (const Tensor& tensor : options.ignored_params) {
    detail::add_ignored_param(tensor);
  }
  if (!managed.params.empty()) {
    state->group = std::make_shared<detail::ParamGroup>(managed.params, mesh, options.mp_policy, device);
    state->group->context = state->context;
    state->group->install_leaf_hooks(std::make_shared<detail::OwnerToken>());
  }
  detail::register_state(shared, state);
  detail::rename_from(module);
  return FSDPModule(state);
}

FSDPModule fsdp_module(ModuleRef module) {
  auto state = detail::state_of(*module);
  FSDP2_CHECK(state != nullptr, kUsage, "[fsdp] ", module->name(), " was not given to fully_shard");
  return FSDPModule(state);
}

bool is_fsdp_module(ModuleRef module) { return detail::state_of(*module) != nullptr; }

int64_t num_parameters(ModuleRef module) {
  std::unordered_set<const c10::TensorImpl*> seen;
  int64_t total = 0;
  for (const Tensor& param : module->parameters()) {
    if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) {
      total += param.numel();
    }
  }
  return total;
}

ModuleState& FSDPModule::state() const {
  ModuleState* state = state_.lock().get();  // the registry keeps it while the module lives
  FSDP2_CHECK(state != nullptr, kUsage, "[fsdp] this FSDPModule's module is gone");
  return *state;
}

void UnshardHandle::wait() {
  if (const auto state = state_.lock(); state && state->group && state->group->unshard_pending()) {
    state->group->wait_for_unshard();
  }
}

void FSDPModule::unshard() {
  if (state().group) {
    state().group->wait_for_unshard();
  }
}

UnshardHandle FSDPModule::unshard_async() {
  if (state().group) {
    state().group->unshard();
  }
  return UnshardHandle(state_);
}

void FSDPModule::reshard() {
  if (state().group) {
    state().group->reshard();
  }
}

namespace {

template <class F>
void for_states(ModuleState& state, bool recurse, F&& change) {
  if (!recurse) {
    change(state);
    return;
  }
  for (const auto& each : state.tree()) {
    change(*each);
  }
}

template <class F>
void for_groups(ModuleState& state, bool recurse, F&& change) {
  for_states(state, recurse, [&](ModuleState& each) {
    if (each.group) {
      change(*each.group);
    }
  });
}

std::vector<std::weak_ptr<detail::ParamGroup>> groups_of(const std::vector<FSDPModule>& modules) {
  std::vector<std::weak_ptr<detail::ParamGroup>> groups;
  for (const FSDPModule& module : modules) {
    if (module.state().group) {
      groups.push_back(module.state().group);
    }
  }
  return groups;
}

}  // namespace

void FSDPModule::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  for_groups(state(), recurse, [&](detail::ParamGroup& group) { group.reduce_gradients = requires_sync; });
}

void FSDPModule::set_is_last_backward(bool is_last) { state().context->is_last_backward = is_last; }

void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  for_states(state(), recurse, [&](ModuleState& each) { each.set_reshard_after_forward(reshard); });
}

void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  for_groups(state(), recurse, [&](detail::ParamGroup& group) { group.reshard_after_backward = reshard; });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  state().forward_prefetch = groups_of(modules);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  if (state().group) {
    state().group->backward_prefetch = groups_of(modules);
  }
}

void FSDPModule::reset_iter_state() {
  FSDP2_CHECK(state().is_root() || state().context->states.size() == 1, kUsage, "[fsdp] reset_iter_state() was called "
              "on ", state().label(), ", which is not a root; call it on the outermost module");
  state().context->reset();
}

std::vector<Tensor> FSDPModule::pending_gradients() {
  std::vector<Tensor> all;
  for_groups(state(), true, [&](detail::ParamGroup& group) {
    for (Tensor& gradient : group.pending_gradients()) {
      all.push_back(std::move(gradient));
    }
  });
  return all;
}

void FSDPModule::synchronize_gradients() {
  for_groups(state(), true, [](detail::ParamGroup& group) { group.synchronize_gradients(); });
}

void FSDPModule::zero_grad(bool set_to_none) {
  if (const auto module = state().module()) {
    module->zero_grad(set_to_none);
  }
}

std::vector<std::string> FSDPModule::param_fqns() {
  std::vector<std::string> fqns;
  for_groups(state(), false, [&](detail::ParamGroup& group) {
    for (const detail::FSDPParam& param : group.params()) {
      fqns.push_back(param.fqn());
    }
  });
  return fqns;
}

bool FSDPModule::is_root() { return state().is_root(); }

bool FSDPModule::is_unsharded() { return state().group && state().group->is_unsharded(); }

}  // namespace fsdp2
