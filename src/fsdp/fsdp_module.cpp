#include <algorithm>
#include <cmath>

#include <fsdp2/error.h>
#include <fsdp2/fully_shard.h>

#include "fsdp/module_state.h"
#include "process/mesh_groups.h"

namespace fsdp2 {

using detail::ModuleState;
using detail::ParamGroup;

ModuleState& FSDPModule::state() const {
  ModuleState* state = state_.lock().get();  // the registry keeps it while the module lives
  FSDP2_CHECK(state != nullptr, kUsage, "[fsdp] this FSDPModule's module is gone");
  return *state;
}

void UnshardHandle::wait() {
  if (const auto state = state_.lock()) {
    for (const auto& group : state->groups) {
      if (group->unshard_pending()) group->wait_for_unshard();
    }
  }
}

void FSDPModule::unshard() { state().unshard(); }

UnshardHandle FSDPModule::unshard_async() {
  state().start_unshard();
  return UnshardHandle(state_);
}

void FSDPModule::reshard() {
  for (const auto& group : state().groups) group->reshard();
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
    for (const auto& group : each.groups) {
      change(*group);
    }
  });
}

std::vector<std::weak_ptr<ModuleState>> states_of(const std::vector<FSDPModule>& modules) {
  std::vector<std::weak_ptr<ModuleState>> states;
  for (const FSDPModule& module : modules) {
    states.push_back(module.state().weak_from_this());
  }
  return states;
}

/// What belongs to a group cannot be meant for several at once.
void check_one_group(const ModuleState& state, const char* method) {
  FSDP2_CHECK(state.groups.size() <= 1, kUnsupported, "[fsdp] ", method, " of ", state.label(), ": it has ",
              state.groups.size(),
              " groups on different meshes, and this would be used for all; shard what is on another mesh "
              "in a fully_shard call of its own");
}

}  // namespace

void FSDPModule::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  for_groups(state(), recurse, [&](ParamGroup& group) {
    group.settings.reduce_gradients = group.settings.all_reduce_gradients = requires_sync;
  });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_groups(state(), recurse, [&](ParamGroup& group) { group.settings.all_reduce_gradients = requires_all_reduce; });
}

void FSDPModule::set_is_last_backward(bool is_last) { state().context->is_last_backward = is_last; }

void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  for_states(state(), recurse, [&](ModuleState& each) {
    each.set_reshard_after_forward(reshard);
    for (const auto& group : each.groups) group->keep_parts_over(std::nullopt);
  });
}

void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  for_groups(state(), recurse, [&](ParamGroup& group) { group.settings.reshard_after_backward = reshard; });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  state().forward_prefetch = states_of(modules);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  state().backward_prefetch = states_of(modules);
}

void FSDPModule::set_unshard_in_backward(bool unshard) {
  for_groups(state(), false, [&](ParamGroup& group) { group.settings.unshard_in_backward = unshard; });
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  FSDP2_CHECK(std::isfinite(factor) && factor > 0, kInvalidArgument, "[fsdp] set_gradient_divide_factor got ", factor,
              "; expected a positive number: gradients are the sum over all ranks divided by it");
  for_groups(state(), false, [&](ParamGroup& group) {
    const std::string waiting = group.waiting_partial_sum();
    FSDP2_CHECK(waiting.empty() || group.settings.divide_factor == factor, kUsage, "[fsdp] set_gradient_divide_factor(",
                factor, ") while gradients of ", waiting,
                " wait for their sum over the replicas, which one factor divides; call synchronize_gradients() or "
                "zero_grad() first");
  });
  for_groups(state(), false, [&](ParamGroup& group) { group.settings.divide_factor = factor; });
}

void FSDPModule::set_force_sum_reduction_for_comms(bool enable) {
  for_groups(state(), false, [&](ParamGroup& group) { group.settings.force_sum = enable; });
}

void FSDPModule::set_reduce_scatter_unused_params(bool enable, bool recurse) {
  for_groups(state(), recurse, [&](ParamGroup& group) { group.settings.reduce_unused = enable; });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int count, bool recurse) {
  FSDP2_CHECK(count >= 1, kInvalidArgument, "[fsdp] set_reduce_scatter_max_input_buffers got ", count,
              "; expected at least 1");
  for_groups(state(), recurse, [&](ParamGroup& group) { group.settings.max_input_buffers = count; });
  state().context->update_max_input_buffers();
}

void FSDPModule::set_separate_reduce_scatter_group(bool enable, bool recurse) {
  for_groups(state(), recurse, [&](ParamGroup& group) {
    const detail::DataParallelMesh& mesh = group.mesh();
    group.settings.reduce_scatter_group =
        enable && mesh.shard_axis && mesh.shard_size > 1
            ? detail::MeshGroups::separate_group(mesh.mesh, *mesh.shard_axis, "reduce_scatter")
            : ProcessGroup();
  });
}

void FSDPModule::set_all_reduce_hook(std::function<void(Tensor&)> hook, std::optional<c10::Stream> stream) {
  check_one_group(state(), "set_all_reduce_hook");
  FSDP2_CHECK(!stream || hook, kInvalidArgument, "[fsdp] set_all_reduce_hook got a stream and no hook to run there");
  for_groups(state(), false, [&](ParamGroup& group) {
    FSDP2_CHECK(!stream || group.mesh().replicate_size == 1, kInvalidArgument,
                "[fsdp] set_all_reduce_hook got a stream for ", group.label(),
                ", which a 2-D mesh already all-reduces on one of its own; pass none");
    group.settings.all_reduce_hook = hook;
    group.settings.all_reduce_hook_stream = stream;
  });
}

void FSDPModule::set_custom_all_gather(std::shared_ptr<AllGather> all_gather) {
  check_one_group(state(), "set_custom_all_gather");
  for_groups(state(), false, [&](ParamGroup& group) { group.settings.all_gather = all_gather; });
}

void FSDPModule::set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> reduce_scatter) {
  check_one_group(state(), "set_custom_reduce_scatter");
  for_groups(state(), false, [&](ParamGroup& group) { group.settings.reduce_scatter = reduce_scatter; });
}

void FSDPModule::set_post_optim_event(std::shared_ptr<c10::Event> event) {
  state().context->post_optim_event = std::move(event);
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable) {
  for_groups(state(), false, [&](ParamGroup& group) {
    FSDP2_CHECK(!group.settings.all_gather && !group.settings.reduce_scatter, kUsage,
                "[fsdp] "
                "set_allocate_memory_from_process_group_for_comm: ",
                group.label(),
                " has a custom collective, which allocates "
                "for itself; remove it first");
    group.settings.allocate_from_group = enable;
  });
}

void FSDPModule::set_symm_mem_for_comm(const std::string& backend) {
  FSDP2_THROW(kUnsupported, "[fsdp] set_symm_mem_for_comm(\"", backend, "\") for ", state().label(), " on ",
              state().device, ": symmetric memory needs CUDA and is not offered in this version; leave the call out");
}

void FSDPModule::reset_iter_state() {
  FSDP2_CHECK(state().is_root() || state().context->states.size() == 1, kUsage,
              "[fsdp] reset_iter_state() was called "
              "on ",
              state().label(), ", which is not a root; call it on the outermost module");
  state().context->reset();
}

std::vector<Tensor> FSDPModule::pending_gradients() {
  std::vector<Tensor> all;
  for_groups(state(), true, [&](ParamGroup& group) {
    for (Tensor& gradient : group.pending_gradients()) {
      all.push_back(std::move(gradient));
    }
  });
  return all;
}

void FSDPModule::synchronize_gradients() {
  for_groups(state(), true, [](ParamGroup& group) { group.synchronize_gradients(); });
  state().context->finish_reductions();
}

void FSDPModule::zero_grad(bool set_to_none) {
  for (const auto& module : state().modules()) {
    module->zero_grad(set_to_none);
  }
}

std::vector<std::string> FSDPModule::param_fqns() {
  std::vector<std::string> fqns;
  for_groups(state(), false, [&](ParamGroup& group) {
    for (const detail::FSDPParam& param : group.params()) {
      fqns.push_back(param.fqn());
    }
  });
  return fqns;
}

bool FSDPModule::is_root() { return state().is_root(); }

bool FSDPModule::is_unsharded() {
  const auto& groups = state().groups;
  return !groups.empty() &&
         std::all_of(groups.begin(), groups.end(), [](const auto& group) { return group->is_unsharded(); });
}

void share_comm_ctx(const std::vector<FSDPModule>& roots) {
  for (const FSDPModule& root : roots) {
    root.state().context->reductions->finish_all();
    root.state().context->reductions = roots.front().state().context->reductions;
  }
}

}  // namespace fsdp2
