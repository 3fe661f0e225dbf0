#pragma once

// Parameters sharded over ranks, gathered per group around forward and backward.
// Python twin: torch.distributed.fsdp.fully_shard.

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

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
#include <fsdp2/process_group.h>
#include <fsdp2/tensor/placement.h>

namespace fsdp2 {

namespace detail {
class ModuleState;
}

/// Where one parameter is cut. Dim 0 may be uneven; any other must divide evenly. A negative dim counts from the end.
struct ShardPlacement {
  Shard placement = {};
  /// Instead of the call's mesh, e.g. for experts: 1-D, or 2-D (replicate, shard).
  std::optional<DeviceMesh> mesh = {};
};
/// Names of the mesh axes to shard over and to replicate over; several of one kind act as one.
struct DataParallelMeshDims {
  std::vector<std::string> shard = {}, replicate = {};
};

struct FullyShardOptions {
  /// Default: all ranks, 1-D, on this rank's device type. 2-D with names: replicated over the first axis, sharded over
  /// the second (HSDP); replicas are not made equal, so start from equal values.
  std::optional<DeviceMesh> mesh = {};
  ReshardAfterForward reshard_after_forward = std::nullopt;
  /// nullopt means Shard(0) on `mesh`. Called once per parameter, with its name from the module that was passed (for a
  /// list "<index>.<name>"); must return the same on every rank. A
  /// parameter that this call takes over from a nested one (a tied one) stays cut as it is.
  std::function<std::optional<ShardPlacement>(const std::string& fqn, const Tensor&)> shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  /// Shards, their gradients and so the optimizer's state live on the CPU.
  std::optional<CPUOffloadPolicy> offload_policy = {};
  /// Left as they are: not sharded, not reduced.
  std::vector<Tensor> ignored_params = {};
  /// `mesh` is then the full mesh, and every parameter a DTensor on it, Replicate on the axes named here.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
};

/// A user's own all-gather: `out` holds the ranks' `in` one after another. Null work means that it is done.
struct FSDP2_API AllGather {
  virtual ~AllGather() = default;
  /// Contiguous memory for an output.
  virtual Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) = 0;
  virtual c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in, const ProcessGroup& group) = 0;
};
/// A user's own reduce-scatter: `out` is this rank's part of the sum of all ranks' `in`. It is asked for SUM only.
struct FSDP2_API ReduceScatter {
  virtual ~ReduceScatter() = default;
  /// Contiguous memory for an input or an output.
  virtual Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) = 0;
  virtual c10::intrusive_ptr<c10d::Work> operator()(Tensor& out, const Tensor& in, const ProcessGroup& group,
                                                    ReduceOp op) = 0;
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
  /// false, on a 2-D mesh: backward sums over the shards only; the sums over the replicas follow in the next backward
  /// with true. set_requires_gradient_sync sets it too.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// false: more backwards follow for the forwards that ran, so their order is kept for gathering ahead. Of the whole
  /// tree; set it to true before the last one.
  void set_is_last_backward(bool is_last);
  /// Also while training; an explicit value for the root wins over its default.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  /// Their gathers start right after this module's own. An empty list restores the default.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// false: backward does not gather this module again; for modules whose backward needs no weights (embeddings).
  void set_unshard_in_backward(bool unshard);

  /// Gradients are the sum over all ranks divided by `factor`, instead of by the number of ranks. Own groups only.
  void set_gradient_divide_factor(double factor);
  /// The all-reduce hook sees sums, not averages. (Collectives are sums in any case.)
  void set_force_sum_reduction_for_comms(bool enable);
  /// Parameters without a gradient take part with zeros, so that all ranks reduce the same; they then get a zero
  /// gradient instead of none.
  void set_reduce_scatter_unused_params(bool enable, bool recurse = true);
  /// How many reductions may hold their whole-size input at once; the largest number in the tree counts. At least 1.
  void set_reduce_scatter_max_input_buffers(int count, bool recurse = true);
  /// Reductions over connections of their own, shared by all groups over the same ranks. Collective.
  void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);
  /// Runs on the flat reduced buffer before it is cast back; may change it in place. With a `stream` (1-D meshes on
  /// accelerators only) it runs there. An empty function removes it.
  void set_all_reduce_hook(std::function<void(Tensor&)> hook, std::optional<c10::Stream> stream = {});
  /// null restores the library's own. Not used where there is one rank to shard over.
  void set_custom_all_gather(std::shared_ptr<AllGather> all_gather);
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> reduce_scatter);
  /// The next forward of the root waits for it before it gathers. Does nothing on CPU.
  void set_post_optim_event(std::shared_ptr<c10::Event> event);
  /// Buffers of collectives come from the backend's allocator where it has one.
  void set_allocate_memory_from_process_group_for_comm(bool enable);
  /// kUnsupported: symmetric memory needs CUDA and is not offered in this version.
  void set_symm_mem_for_comm(const std::string& backend);

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
/// communication. The same Tensor objects become DTensors, so an optimizer may be made before or after. A parameter
/// with several users belongs to the lowest module sharded here that contains them all.
/// Errors: kUsage (called twice on one module), kInvalidArgument (a 0-dim or non-contiguous parameter, ...),
/// kUnsupported (options that do not go together).
FSDP2_API FSDPModule fully_shard_module(ModuleRef module, const FullyShardOptions& options);

template <class M>
requires std::constructible_from<ModuleRef, M&> FSDPModule fully_shard(M&& module,
                                                                       const FullyShardOptions& options = {}) {
  return fully_shard_module(ModuleRef(module), options);
}

/// Several modules as one group: gathered when the first of them runs, freed after the last. Sharding the module that
/// contains them as well is needed. Elements inside other elements are part of those.
FSDP2_API FSDPModule fully_shard(const std::vector<ModuleRef>& modules, const FullyShardOptions& options = {});

/// The handle again; kUsage for a module that was not given to fully_shard.
FSDP2_API FSDPModule fsdp_module(ModuleRef module);
FSDP2_API bool is_fsdp_module(ModuleRef module);

/// Roots that run one after another in a step (pipeline stages) let their reductions overlap as one queue.
FSDP2_API void share_comm_ctx(const std::vector<FSDPModule>& roots);

/// `hook` runs once per backward when the final gradient of `param` is there: the sharded, reduced one for a parameter
/// of fully_shard, where it may step an optimizer and clear the gradient.
FSDP2_API void register_post_accumulate_grad_hook(const Tensor& param, std::function<void(Tensor& param)> hook);

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
