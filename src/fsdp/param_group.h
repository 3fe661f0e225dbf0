#pragma once

// Parameters that are gathered together and reduced together: those of one fully_shard call on one mesh.
// param_group.cpp has their storage, gathering.cpp the way to whole and back, sharing.cpp that way in shared memory,
// group_backward.cpp the gradients.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <fsdp2/policy.h>

#include "fsdp/data_parallel_mesh.h"
#include "fsdp/fsdp_param.h"
#include "fsdp/shared_wholes.h"
#include "process/collectives.h"

namespace fsdp2::detail {

class ModuleState;
class TrainingContext;

/// Note [Buckets]
/// The shards of all parameters of one original dtype are views of one flat buffer (each padded to equal size on
/// every rank), so a gather reads it without a copy. A gather is one collective per computation dtype, a reduction
/// one per reduction dtype.
struct ShardBuffer {
  at::ScalarType dtype{};
  int64_t numel = 0;
  Tensor flat;                   // this rank's padded shards, one after another; undefined once they are shared
  std::vector<size_t> members;   // indices of parameters
  std::vector<int64_t> offsets;  // of each member in flat
};

/// One all-gather.
struct GatherBucket {
  at::ScalarType dtype{};  // while whole
  struct Member {
    size_t param, buffer;
    int64_t buffer_offset, offset, part_offset;
  };
  std::vector<Member> members;
  int64_t numel = 0;       // of one rank
  int64_t part_numel = 0;  // of one rank in a gather from parts
  Tensor part;             // this rank's rows while the group is kept in parts
  Tensor gathered;         // (ranks, numel) while in flight
  PendingCollective work;
};

/// Users' choices for one group. FSDPModule's methods say what each does.
struct GroupSettings {
  bool reduce_gradients = true;
  bool all_reduce_gradients = true;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool reduce_unused = false;
  bool force_sum = false;
  bool allocate_from_group = false;
  std::optional<double> divide_factor;
  int max_input_buffers = 1;
  std::function<void(Tensor&)> all_reduce_hook;
  std::optional<c10::Stream> all_reduce_hook_stream;
  std::shared_ptr<AllGather> all_gather;
  std::shared_ptr<ReduceScatter> reduce_scatter;
  ProcessGroup reduce_scatter_group;  // where it is not the mesh's
};

class ParamGroup : public std::enable_shared_from_this<ParamGroup> {
 public:
  /// `local`: of a parameter that another group gave up.
  struct Named {
    Tensor param;
    std::string fqn;
    int64_t shard_dim = 0;
    Tensor local = {};
  };
  /// Takes over the parameters' data: frees the whole, keeps this rank's shard on `device`, or on the CPU with
  /// `offload`. Local.
  ParamGroup(const std::vector<Named>& params, const DataParallelMesh& mesh, const MixedPrecisionPolicy& policy,
             c10::Device device, const std::optional<CPUOffloadPolicy>& offload);
  /// Hooks on the parameters, which also keep `owner_token` alive as long as one parameter lives.
  void install_leaf_hooks(const std::shared_ptr<void>& owner_token);
  /// Lets go of a parameter, for another group. The group must be sharded.
  Named give_up(const Tensor& param);

  std::vector<FSDPParam>& params() { return params_; }
  const DataParallelMesh& mesh() const { return mesh_; }
  bool is_unsharded() const { return state_ == DataState::kUnsharded; }
  bool unshard_pending() const { return state_ == DataState::kGathering; }

  /// Where parameters are whole.
  c10::Device compute_device() const;

  /// Starts the gather where the group is sharded.
  void unshard();
  /// Completes it; afterwards every parameter is whole. Starts it first where nobody did.
  void wait_for_unshard();
  /// Frees the whole parameters. Throws kUsage where a user's write to one would be lost.
  void reshard();
  /// After forward: like reshard(), or keeps parts over fewer ranks where that was asked for and backward follows.
  void reshard_after_forward(bool backward_follows);
  /// Parts over the last axis of `mesh` from the next forward on; nullopt: none. Local.
  void keep_parts_over(std::optional<DeviceMesh> mesh);

  /// Memory for the shards on `device`, values undefined.
  void to_empty(c10::Device device);

  /// Backward reached the group's modules. Returns false where it was there already.
  bool enter_backward();
  /// It did, or gradients accumulate, and post_backward() did not follow yet.
  bool in_backward() const { return in_backward_ || any_accumulating(); }
  /// After the gradients of the group's modules are there (or, with `at_end`, when backward is over). Not `reshards`:
  /// forward is under way.
  void post_backward(bool at_end, bool reshards);
  /// Backward threw: what it began to accumulate is dropped, earlier gradients are back in their slots.
  void interrupt_backward() noexcept;
  /// Users' hooks of these parameters, whose gradients are final. Reshards first: a hook may step an optimizer.
  void run_post_accumulate_hooks(const std::vector<size_t>& indices);
  /// Starts the reduction of what is pending, outside backward; the context finishes it.
  void synchronize_gradients();
  std::vector<Tensor> pending_gradients();
  /// Of the first parameter whose sum over the shards waits for the replicas; empty where none does.
  std::string waiting_partial_sum();
  /// After an exception.
  void reset();

  // Note [Parameters in shared memory]
  /// Lets other ranks read this one's shards, after a barrier over the returned group; undefined where the group is
  /// not in shared memory, or whole already in memory of this rank's own. Moves it to shared memory first where it can
  /// be. `only_changed`: see SharedWholes. Collective.
  ProcessGroup publish(bool only_changed);
  /// Parameters are shown in place from now on.
  void begin_in_place() { in_place_allowed_ = shared_ && !whole_in_own_memory(); }
  /// With `keep_copies`, parameters that stay whole become copies, which no other rank's writes reach.
  void end_in_place(bool keep_copies);
  /// Throws kUsage where a shard was written that other ranks may have read before or after.
  void check_unwritten_in_place() const;
  /// Whether a rank may still read in place what this one would write: until a barrier, or a reduction over the same
  /// ranks that began after the parameters were shown `times_shown()` times.
  bool others_may_read() const { return shown_ > read_by_all_; }
  uint64_t times_shown() const { return shown_; }
  void note_all_have_read(uint64_t times_shown) { read_by_all_ = std::max(read_by_all_, times_shown); }

  /// Names the group in texts: its first parameter and how many more.
  const std::string& label() const { return label_; }
  /// Settings that must be the same on every rank, where they are not the defaults.
  std::string settings_text() const;
  void set_fqns(const std::vector<std::string>& fqns);
  /// The caller knows that values were written through raw pointers.
  void mark_written();
  /// Only those among `handled`.
  void mark_written(const std::unordered_set<const c10::TensorImpl*>& handled);

  std::weak_ptr<ModuleState> owner;
  std::shared_ptr<TrainingContext> context;  // of the tree
  GroupSettings settings;
  std::string module_fqn;  // from the root, those of a list joined

 private:
  friend class GradientReduction;
  enum class GatherWay { kCollective, kInPlace, kCopyFromShared };
  enum class DataState { kSharded, kGathering, kUnsharded, kInParts };

  // param_group.cpp
  void build_buffers(const std::vector<Tensor>& locals, c10::Device device);
  Tensor shard_memory(int64_t numel, at::ScalarType dtype, c10::Device device) const;
  Tensor lay_out(const ShardBuffer& buffer, size_t member) const;
  void adopt_foreign_data();
  void build_gather_buckets();
  void check_ready();
  ProcessGroup reduce_scatter_group() const {
    return settings.reduce_scatter_group ? settings.reduce_scatter_group : mesh_.shard_group;
  }
  // gathering.cpp
  void drop_gather() noexcept;
  void on_buckets(void (ParamGroup::*step)(GatherBucket&));
  void start_gather(GatherBucket& bucket);
  Tensor gather_input(const GatherBucket& bucket) const;
  void finish_gather(GatherBucket& bucket);
  void copy_alone(const GatherBucket& bucket);
  bool can_share() const;
  bool whole_in_own_memory() const { return state_ == DataState::kUnsharded && !params_.front().whole_is_borrowed(); }
  int64_t bytes_of(const GatherBucket& bucket) const;
  void show_in_place();
  void start_copy_from_shared();
  void finish_copy_from_shared();
  void to_parts();
  Tensor communication_buffer(int64_t numel, const at::TensorOptions& options, const ProcessGroup& group) const;
  // group_backward.cpp
  bool any_accumulating() const;
  void on_leaf_gradient(size_t index, const Tensor& gradient);
  void keep_pending();
  void reshard_after_backward();
  void reduce_all(bool all_reduce, bool reshards);

  DataParallelMesh mesh_;
  int64_t size_ = 1, rank_ = 0;  // of the shard axis
  MixedPrecisionPolicy policy_;
  c10::Device device_;  // that forward runs on
  std::optional<CPUOffloadPolicy> offload_;
  std::optional<DeviceMesh> part_mesh_;
  bool gather_from_parts_ = false;          // of the gather under way
  GatherWay way_ = GatherWay::kCollective;  // the same
  std::unique_ptr<SharedWholes> shared_;
  bool in_place_allowed_ = false;
  uint64_t shown_ = 0, read_by_all_ = 0;
  std::vector<FSDPParam> params_;
  std::vector<ShardBuffer> buffers_;
  std::vector<GatherBucket> gathers_;
  DataState state_ = DataState::kSharded;
  std::string label_;
  bool ready_ = false;  // no parameter is on meta or unwritten
  bool ask_ranks_for_unwritten_ = false;
  bool in_backward_ = false;
  bool ever_unsharded_ = false;
  bool reduced_unused_ = false;  // zeros stood in for unused parameters in this backward
};

/// kInvalidArgument where memory of a user's own collective is not what was asked for.
void check_custom_buffer(const Tensor& buffer, int64_t numel, at::ScalarType dtype, const char* what,
                         const std::string& label);

/// Library work on plain tensors, whatever mode the user's code is in.
struct PlainWork {
  LeaveInferenceMode normal_tensors;
  at::NoGradGuard no_grad;
  BelowDTensor below;
};

}  // namespace fsdp2::detail
