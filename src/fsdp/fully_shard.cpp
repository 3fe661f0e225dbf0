#include <fsdp2/fully_shard.h>

#include <ATen/Functions.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include "diagnose/refusals.h"
#include "fsdp/ignored_params.h"
#include "fsdp/managed.h"
#include "fsdp/module_state.h"
#include "fsdp/tied_parameters.h"
#include "process/mesh_groups.h"
#include "process/world.h"

namespace fsdp2 {

namespace detail {

namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// Parameters that share a mesh.
struct MeshParams {
  DataParallelMesh mesh;
  std::vector<ParamGroup::Named> params;
};

void check_options(const FullyShardOptions& options) {
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
  const auto* ranks = options.reshard_after_forward ? std::get_if<int>(&*options.reshard_after_forward) : nullptr;
  FSDP2_CHECK(!options.dp_mesh_dims || ranks == nullptr, kUnsupported,
              "[fsdp] an integer reshard_after_forward is not "
              "offered together with dp_mesh_dims; use true or false");
}

void check_module(const torch::nn::Module& module) {
  const std::string name = module.name();
  FSDP2_CHECK(!module.weak_from_this().expired(), kUsage, "[fsdp] ", name,
              " is not held by a shared_ptr; make it through its holder or std::make_shared");
  FSDP2_CHECK(!state_of(module), kUsage, "[fsdp] fully_shard was called twice on one ", name,
              "; call it once per module (a module used in two places is one module)");
  FSDP2_CHECK(dynamic_cast<const torch::nn::ModuleListImpl*>(&module) == nullptr &&
                  dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) == nullptr,
              kInvalidArgument, "[fsdp] ", name,
              " has no forward of its own, so its hooks would never run; call "
              "fully_shard on each of its elements, and then on the module that holds it");
}

/// Of a list, those that no other element contains.
Modules roots_of(const std::vector<ModuleRef>& refs) {
  FSDP2_CHECK(!refs.empty(), kInvalidArgument,
              "[fsdp] fully_shard got an empty list of modules; expected at least one");
  Modules all;
  for (const ModuleRef& ref : refs) {
    check_module(*ref);
    auto shared = ref->shared_from_this();
    FSDP2_CHECK(std::find(all.begin(), all.end(), shared) == all.end(), kUsage, "[fsdp] fully_shard got one ",
                ref->name(), " twice in its list; name each module once");
    all.push_back(std::move(shared));
  }
  Modules roots;
  for (const auto& candidate : all) {
    const bool nested = std::any_of(all.begin(), all.end(), [&](const auto& other) {
      const auto below = other->modules(/*include_self=*/false);
      return std::find(below.begin(), below.end(), candidate) != below.end();
    });
    if (!nested) roots.push_back(candidate);
  }
  return roots;
}

/// Where the parameter is to be cut, and over which mesh.
std::pair<int64_t, DataParallelMesh> placement_of(const NamedTensor& named, const FullyShardOptions& options,
                                                  const DataParallelMesh& default_mesh) {
  const auto chosen = options.shard_placement_fn ? options.shard_placement_fn(named.fqn, named.tensor) : std::nullopt;
  if (!chosen) {
    sharded_placements(named.tensor, named.fqn, default_mesh, 0);  // checks what dp_mesh_dims needs
    return {0, default_mesh};
  }
  const int64_t dims = named.tensor.dim();
  int64_t dim = chosen->placement.dim;
  FSDP2_CHECK(dim >= -dims && dim < dims, kInvalidArgument, "[fsdp] shard_placement_fn returned Shard(", dim, ") for ",
              named.fqn, " of shape ", named.tensor.sizes(), "; the dim must lie in [", -dims, ", ", dims, ")");
  if (dim < 0) dim += dims;
  FSDP2_CHECK(!chosen->mesh || !options.dp_mesh_dims, kInvalidArgument,
              "[fsdp] shard_placement_fn returned a mesh for ", named.fqn,
              ", which does not go together with dp_mesh_dims; return a placement only");
  DataParallelMesh mesh = chosen->mesh ? data_parallel_mesh(*chosen->mesh) : default_mesh;
  FSDP2_CHECK(mesh.mesh.device_type() == default_mesh.mesh.device_type(), kInvalidArgument,
              "[fsdp] shard_placement_fn "
              "returned a mesh of ",
              mesh.mesh.device_type(), " devices for ", named.fqn, "; the module is sharded over ",
              default_mesh.mesh.device_type(), " devices");
  const int64_t rows = is_marked(named.tensor) ? local_of(named.tensor).size(dim) : named.tensor.size(dim);
  FSDP2_CHECK(dim == 0 || rows % mesh.shard_size == 0, kUnsupported, "[fsdp] Shard(", dim, ") of ", named.fqn,
              " of shape ", named.tensor.sizes(), " over ", mesh.shard_size,
              " ranks is uneven; only dim 0 may be: choose "
              "another dim, or pad the parameter");
  sharded_placements(named.tensor, named.fqn, mesh, dim);  // checks what dp_mesh_dims needs
  return {dim, std::move(mesh)};
}

/// One group per mesh, in the order of its first parameter.
std::vector<MeshParams> sort_by_mesh(const std::vector<NamedTensor>& params, const FullyShardOptions& options,
                                     const DataParallelMesh& default_mesh) {
  std::vector<MeshParams> sorted;
  for (const NamedTensor& named : params) {
    auto [dim, mesh] = placement_of(named, options, default_mesh);
    auto group =
        std::find_if(sorted.begin(), sorted.end(), [&mesh = mesh](const auto& each) { return each.mesh == mesh; });
    if (group == sorted.end()) {
      group = sorted.insert(sorted.end(), MeshParams{mesh, {}});
    }
    group->params.push_back({named.tensor, named.fqn, dim});
  }
  return sorted;
}

/// Note [Tied parameters]. Adds them to `sorted`, without touching the groups that have them.
void plan_tied(const std::vector<MisplacedParameter>& tied, std::vector<MeshParams>& sorted,
               const FullyShardOptions& options, const DataParallelMesh& default_mesh) {
  for (const auto& [param, owner] : tied) {
    const std::string& label = owner.state->label();
    FSDP2_CHECK(!options.dp_mesh_dims, kUnsupported, "[fsdp] parameters are tied across ", label,
                " and this call, which dp_mesh_dims does not go together with; shard all their users in one call");
    const DataParallelMesh& mesh = owner.group->mesh();
    FSDP2_CHECK(options.shard_placement_fn || mesh == default_mesh, kInvalidArgument,
                "[fsdp] parameters that are tied across ", label, " and this call are sharded over a mesh of shape ",
                at::IntArrayRef(mesh.mesh.shape()), " there and ", at::IntArrayRef(default_mesh.mesh.shape()),
                " here; use one mesh for all modules that share a parameter");
    FSDPParam& held = owner.group->params()[owner.index];
    Tensor alive = param;
    FSDP2_CHECK(!held.gradient.has_pending(alive, held.fqn()), kUsage, "[fsdp] parameter ", held.fqn(),
                " is tied across ", label,
                " and this call, and has gradients that wait for their reduction; call synchronize_gradients() or "
                "zero_grad() first");
    owner.group->reshard();
    auto target = std::find_if(sorted.begin(), sorted.end(), [&](const auto& each) { return each.mesh == mesh; });
    if (target == sorted.end()) {
      target = sorted.insert(sorted.end(), MeshParams{mesh, {}});
    }
    target->params.push_back({param, held.fqn(), held.shard_dim()});
  }
}

void take_over(const std::vector<MisplacedParameter>& tied, std::vector<MeshParams>& sorted) {
  for (const auto& [param, owner] : tied) {
    const ParamGroup::Named given = owner.group->give_up(param);
    for (MeshParams& each : sorted) {
      for (ParamGroup::Named& named : each.params) {
        if (named.param.is_same(param)) named = given;
      }
    }
    if (owner.group->params().empty()) {
      std::erase(owner.state->groups, owner.group);
    }
  }
}

/// Over how many ranks parameters stay after forward; nullopt: reshard or not, as a bool says.
std::optional<int64_t> parts_wanted(const FullyShardOptions& options, const std::vector<MeshParams>& sorted) {
  const auto* ranks = options.reshard_after_forward ? std::get_if<int>(&*options.reshard_after_forward) : nullptr;
  if (ranks == nullptr) {
    return std::nullopt;
  }
  for (const MeshParams& group : sorted) {
    const int64_t size = group.mesh.shard_size;
    FSDP2_CHECK(*ranks >= 1 && *ranks <= size && size % *ranks == 0, kInvalidArgument,
                "[fsdp] reshard_after_forward is ", *ranks, "; an integer must divide the shard size ", size,
                " (1 means false, ", size, " means true)");
    if (*ranks == 1 || *ranks == size) {
      continue;
    }
    for (const auto& named : group.params) {
      FSDP2_CHECK(named.shard_dim == 0, kUnsupported, "[fsdp] reshard_after_forward = ", *ranks, " with ", named.fqn,
                  " sharded on dim ", named.shard_dim, "; an integer needs all parameters sharded on dim 0");
    }
  }
  return *ranks;
}

void set_reshard(ModuleState& state, const FullyShardOptions& options, std::optional<int64_t> parts,
                 const std::vector<std::optional<DeviceMesh>>& part_meshes) {
  if (!options.reshard_after_forward) {
    state.set_default_reshard();
    return;
  }
  if (const bool* flag = std::get_if<bool>(&*options.reshard_after_forward)) {
    state.set_reshard_after_forward(*flag);
    return;
  }
  if (*parts == 1) {
    FSDP2_LOG_WARN_ONCE(
        "[fsdp] reshard_after_forward = 1 keeps whole parameters on every rank, as false does; false "
        "says it better");
  }
  state.set_reshard_after_forward(*parts > 1);
  state.asked_reshard = options.reshard_after_forward;
  for (size_t i = 0; i < state.groups.size(); ++i) {
    if (part_meshes[i]) state.groups[i]->keep_parts_over(part_meshes[i]);
  }
}

/// Names as seen from `module` for every parameter below it, also those of nested calls.
void rename_from(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& named : module.named_parameters()) {
    if (named.value().defined()) names.emplace(named.value().unsafeGetTensorImpl(), named.key());
  }
  for (const auto& state : states_under(module)) {
    for (const auto& group : state->groups) {
      std::vector<std::string> fqns;
      for (const FSDPParam& param : group->params()) {
        const Tensor alive = param.param();
        const auto found = names.find(alive.unsafeGetTensorImpl());
        fqns.push_back(alive.defined() && found != names.end() ? found->second : param.fqn());
      }
      group->set_fqns(fqns);
    }
  }
}

/// Its destruction, with the last parameter, lets the state of the module go.
struct OwnerToken {
  OwnerToken() = default;
  OwnerToken(const OwnerToken&) = delete;
  OwnerToken& operator=(const OwnerToken&) = delete;
  ~OwnerToken() { purge_states(); }
};

/// Parameters that a call on a module above took cannot be taken again.
void check_not_below_owner(const Modules& modules, const ManagedCollector& managed) {
  for (const auto& owner : managed.owners) {
    for (const auto& above : owner->modules()) {
      const auto below = above->modules(/*include_self=*/false);
      for (const auto& module : modules) {
        const bool above_first = std::find(below.begin(), below.end(), module) != below.end();
        if (above_first) note_refused_shard(module);
        FSDP2_CHECK(!above_first, kUsage,
                    "[fsdp] fully_shard was called on ", module->name(), " after ", owner->label(),
                    ", which contains it and has its parameters; shard the modules "
                    "inside first, then the one around them");
      }
    }
  }
}

FSDPModule shard(const Modules& modules, const ManagedCollector& managed, const FullyShardOptions& options) {
  check_options(options);
  check_not_below_owner(modules, managed);
  const DataParallelMesh mesh = resolve_mesh(options);
  const c10::Device device = mesh.mesh.device_type() == at::kCPU ? c10::Device(at::kCPU) : local_device();
  std::vector<MeshParams> sorted = sort_by_mesh(managed.params, options, mesh);
  const std::vector<MisplacedParameter> tied = misplaced_parameters(modules);
  plan_tied(tied, sorted, options, mesh);
  if (sorted.empty() && options.reshard_after_forward) {
    parts_wanted(options, {MeshParams{mesh, {}}});  // a wrong number is said also where nothing is left to shard
  }
  const std::optional<int64_t> parts = parts_wanted(options, sorted);

  std::vector<std::optional<DeviceMesh>> part_meshes;  // one per group
  for (const MeshParams& group : sorted) {
    const bool in_parts = parts && *parts > 1 && *parts < group.mesh.shard_size;
    part_meshes.push_back(in_parts ? std::optional(MeshGroups::split(group.mesh.mesh, *parts)) : std::nullopt);
  }

  // Nothing was changed so far, and nothing is refused from here on.
  static std::atomic<int> calls{0};
  std::string names;
  for (const auto& module : modules) names += (names.empty() ? "" : ", ") + module->name();
  auto state =
      std::make_shared<ModuleState>(modules, options.mp_policy, c10::str(names, " (fully_shard call ", ++calls, ")"));
  state->context->states.push_back(state);
  state->device = device;
  for (const auto& [fqn, buffer] : managed.buffers) {
    if (!buffer.is_meta() && buffer.device() != device) {
      at::Tensor(buffer).set_data(buffer.to(device));
    }
    state->buffer_cast.add(buffer);
  }
  for (const Tensor& tensor : options.ignored_params) {
    add_ignored_param(tensor);
  }
  take_over(tied, sorted);
  const auto token = std::make_shared<OwnerToken>();
  for (const auto& [group_mesh, params] : sorted) {
    auto group = std::make_shared<ParamGroup>(params, group_mesh, options.mp_policy, device, options.offload_policy);
    group->owner = state;
    group->context = state->context;
    group->install_leaf_hooks(token);
    state->groups.push_back(std::move(group));
  }
  set_reshard(*state, options, parts, part_meshes);
  for (const auto& module : modules) {
    register_state(module, state);
  }
  if (modules.size() == 1) {
    rename_from(*modules.front());  // of a list, names begin with the index until the root is known
  }
  return FSDPModule(state);
}

}  // namespace

}  // namespace detail

FSDPModule fully_shard_module(ModuleRef module, const FullyShardOptions& options) {
  detail::check_module(*module);
  detail::ManagedCollector managed(options.ignored_params, options.dp_mesh_dims.has_value());
  managed.visit(*module, "");
  return detail::shard({module->shared_from_this()}, managed, options);
}

FSDPModule fully_shard(const std::vector<ModuleRef>& modules, const FullyShardOptions& options) {
  const detail::Modules roots = detail::roots_of(modules);
  detail::ManagedCollector managed(options.ignored_params, options.dp_mesh_dims.has_value());
  for (size_t index = 0; index < modules.size(); ++index) {
    managed.visit(*modules[index], c10::str(index, "."));
  }
  return detail::shard(roots, managed, options);
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

}  // namespace fsdp2
