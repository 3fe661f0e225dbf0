#pragma once

// Parameters sharded over ranks, gathered per group around forward and backward.
// Python twin: torch.distributed.fsdp.fully_shard.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp2/device_mesh.h>
#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>
#include <fsdp2/policy.h>
#include <fsdp2/tensor/placement.h>

namespace fsdp2 {

namespace detail {
class ModuleState;
}

struct ShardPlacement {
  Shard placement = {};
  std::optional<DeviceMesh> mesh = {};
};
struct DataParallelMeshDims {
  std::vector<std::string> shard = {}, replicate = {};
};

struct FullyShardOptions {
  /// Default: all ranks, 1-D, on this rank's device type.
  std::optional<DeviceMesh> mesh = {};
  ReshardAfterForward reshard_after_forward = std::nullopt;
  /// nullopt means Shard(0); kUnsupported in this version when set.
  std::function<std::optional<ShardPlacement>(const std::string& fqn, const Tensor&)> shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  /// kUnsupported in this version when set.
  std::optional<CPUOffloadPolicy> offload_policy = {};
  /// Left as they are: not sharded, not reduced.
  std::vector<Tensor> ignored_params = {};
  /// kUnsupported in this version when set.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
};

/// A gather that was started; wait() makes the parameters usable. Move-only.
class FSDP2_API UnshardHandle {
 public:
  explicit UnshardHandle(std::weak_ptr<detail::ModuleState> state) : state_(std::move(state)) {}
  UnshardHandle(UnshardHandle&&) = default;
  UnshardHandle& operator=(UnshardHandle&&) = default;
  /// A second wait does nothing.
  void wait();

 private:
  std::weak_ptr<detail::ModuleState> state_;
};

/// Cheap handle to a module given to fully_shard; every method throws kUsage once the module is gone.
/// "This module" means its own group, without those of nested fully_shard calls, unless `recurse` says otherwise.
class FSDP2_API FSDPModule {
 public:
  explicit FSDPModule(std::weak_ptr<detail::ModuleState> state) : state_(std::move(state)) {}

  /// Gathers this module's parameters now. Collective. Nothing happens where they are whole already.
  void unshard();
  /// Starts the gather and returns; the next forward waits where nobody else did. Collective.
  UnshardHandle unshard_async();
  /// Frees the gathered parameters. Local.
  void reshard();

  /// false: backward keeps unreduced gradients on this rank (gradient accumulation without communication).
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);
  /// false: more backwards follow for the forwards that ran, so their order is kept for gathering ahead. Of the whole
  /// tree; set it to true before the last one.
  void set_is_last_backward(bool is_last);
  /// Also while training; an explicit value for the root wins over its default.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  /// Their gathers start right after this module's own. An empty list restores the default.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);

  /// After an exception in forward or backward: resharded, without pending gradients. Root only.
  void reset_iter_state();
  /// Unsharded gradients of this rank that were not reduced yet, of this module and the modules below it.
  std::vector<Tensor> pending_gradients();
  /// Reduces them now. Collective.
  void synchronize_gradients();
  /// Clears gradients, pending ones too, of this module and the modules below it.
  void zero_grad(bool set_to_none = true);

  /// Names of this module's own parameters, from the root once that is known.
  std::vector<std::string> param_fqns();
  /// Whether this module was the first called of its tree. False before the first forward.
  bool is_root();
  bool is_unsharded();

  detail::ModuleState& state() const;

 private:
  std::weak_ptr<detail::ModuleState> state_;
};

/// Shards the parameters of `module` that no nested call has taken, as one group. Call it bottom-up: blocks, then the
/// root. All ranks call it with equal arguments; the slices are cut from each rank's own values, without
/// communication. The same Tensor objects become DTensors, so an optimizer may be made before or after.
/// Errors: kUsage (called twice on one module), kInvalidArgument (a 0-dim or non-contiguous parameter, ...),
/// kUnsupported (an option of a later version).
FSDP2_API FSDPModule fully_shard_module(ModuleRef module, const FullyShardOptions& options);

template <class M>
  requires std::constructible_from<ModuleRef, M&>
FSDPModule fully_shard(M&& module, const FullyShardOptions& options = {}) {
  return fully_shard_module(ModuleRef(module), options);
}

/// The handle again; kUsage for a module that was not given to fully_shard.
FSDP2_API FSDPModule fsdp_module(ModuleRef module);
FSDP2_API bool is_fsdp_module(ModuleRef module);

/// What fully_shard's groups did since reset_counters(), on this rank.
struct Counters {
  int64_t all_gathers = 0, reduce_scatters = 0, all_reduces = 0, broadcasts = 0;
  int64_t bytes = 0;                 // of the gathered or unreduced side, padding included
  int64_t unsharded_bytes = 0;       // whole parameters alive now
  int64_t unsharded_bytes_peak = 0;  // most at once
};
FSDP2_API Counters counters();
/// Zeroes the counts and sets the peak to what is alive now.
FSDP2_API void reset_counters();

/// Global number of elements, a tied parameter counted once.
FSDP2_API int64_t num_parameters(ModuleRef module);

}  // namespace fsdp2
