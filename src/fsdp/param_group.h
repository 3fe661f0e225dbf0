#pragma once

// The parameters of one fully_shard call: gathered together, reduced together.

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <fsdp2/policy.h>

#include "fsdp/fsdp_param.h"
#include "process/collectives.h"

namespace fsdp2::detail {

class TrainingContext;

/// Note [Buckets]
/// The shards of all parameters of one original dtype are views of one flat buffer (each padded to equal size on
/// every rank), so a gather reads it without a copy. A gather is one collective per computation dtype, a reduction
/// one per reduction dtype.
struct ShardBuffer {
  at::ScalarType dtype{};
  Tensor flat;                   // this rank's padded shards, one after another
  std::vector<size_t> members;   // indices of parameters
  std::vector<int64_t> offsets;  // of each member in flat
};

/// One all-gather.
struct GatherBucket {
  at::ScalarType dtype{};  // while whole
  struct Member {
    size_t param, buffer;
    int64_t buffer_offset, offset;
  };
  std::vector<Member> members;
  int64_t numel = 0;     // of one rank
  Tensor gathered;       // (world size, numel) while in flight
  PendingCollective work;
};

class ParamGroup : public std::enable_shared_from_this<ParamGroup> {
 public:
  struct Named {
    Tensor param;
    std::string fqn;
  };
  /// Takes over the parameters' data: frees the whole, keeps this rank's shard on `device`. Local.
  ParamGroup(const std::vector<Named>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
             c10::Device device);
  /// Hooks on the parameters, which also keep `owner_token` alive as long as one parameter lives.
  void install_leaf_hooks(const std::shared_ptr<void>& owner_token);

  std::vector<FSDPParam>& params() { return params_; }
  const DeviceMesh& mesh() const { return mesh_; }
  bool is_unsharded() const { return state_ == DataState::kUnsharded; }
  bool unshard_pending() const { return state_ == DataState::kGathering; }

  /// Starts the gather where the group is sharded.
  void unshard();
  /// Completes it; afterwards every parameter is whole. Starts it first where nobody did.
  void wait_for_unshard();
  /// Frees the whole parameters. Throws kUsage where a user's write to one would be lost.
  void reshard();

  /// Memory for the shards on `device`, values undefined.
  void to_empty(c10::Device device);

  void pre_backward();
  /// After the gradients of the group's modules are there (or, with `at_end`, when backward is over).
  void post_backward(bool at_end);
  /// Reduces what is pending, outside backward.
  void synchronize_gradients();
  std::vector<Tensor> pending_gradients();
  /// After an exception.
  void reset();

  /// Names the group in texts: its first parameter and how many more.
  const std::string& label() const { return label_; }
  void set_fqns(const std::vector<std::string>& fqns);
  /// The caller knows that values were written through raw pointers.
  void mark_written();
  /// Only those among `handled`.
  void mark_written(const std::unordered_set<const c10::TensorImpl*>& handled);

  std::shared_ptr<TrainingContext> context;  // of the tree
  bool reduce_gradients = true;
  bool reshard_after_backward = true;
  bool in_pre_backward = false;
  std::vector<size_t> forward_positions;  // in the context's forward order; the last is used first in backward
  std::vector<std::weak_ptr<ParamGroup>> backward_prefetch;

 private:
  friend class GradientReduction;
  enum class DataState { kSharded, kGathering, kUnsharded };

  void build_buffers(const std::vector<Tensor>& locals, c10::Device device);
  void adopt_foreign_data();
  void build_gather_buckets();
  void check_ready();
  void start_gather(GatherBucket& bucket);
  void finish_gather(GatherBucket& bucket);
  void on_leaf_gradient(size_t index, const Tensor& gradient);
  void keep_pending();
  void reduce_all();

  DeviceMesh mesh_;
  ProcessGroup group_;
  int64_t size_ = 1, rank_ = 0;
  MixedPrecisionPolicy policy_;
  std::vector<FSDPParam> params_;
  std::vector<ShardBuffer> buffers_;
  std::vector<GatherBucket> gathers_;
  DataState state_ = DataState::kSharded;
  std::string label_;
  bool ready_ = false;  // no parameter is on meta or unwritten
  bool ask_ranks_for_unwritten_ = false;
};

}  // namespace fsdp2::detail
