#pragma once

// One parameter of a group. Note [One TensorImpl for life] in fsdp_param.cpp.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <vector>

#include "fsdp/data_parallel_mesh.h"
#include "fsdp/gradient_slot.h"
#include "fsdp/shard_copy.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

class FSDPParam {
 public:
  /// `param` is plain and contiguous, or with dp_mesh_dims a DTensor; of at least one dimension. Cut on `shard_dim`.
  FSDPParam(const Tensor& param, std::string fqn, const DataParallelMesh& mesh, int64_t shard_dim);
  ~FSDPParam();
  FSDPParam(FSDPParam&&) = default;
  FSDPParam& operator=(FSDPParam&&) = default;

  /// The parameter itself; undefined once the module dropped it.
  Tensor param() const;
  const std::string& fqn() const { return fqn_; }
  void set_fqn(std::string fqn);

  const ShardGeometry& geometry() const { return geometry_; }
  int64_t shard_dim() const { return shard_dim_; }
  /// Elements of one rank's part, padding included.
  int64_t padded_numel() const { return geometry_.padded_numel(parts_); }
  /// Of the whole parameter as forward sees it.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  bool requires_grad() const;

  at::ScalarType orig_dtype() const { return sharded_spec().local.scalar_type(); }
  /// Where the shard lives.
  c10::Device device() const { return sharded_spec().local.device(); }
  const DTensorSpec& sharded_spec() const { return *spec_; }
  const Tensor& local() const { return sharded_spec().local; }
  /// Of a whole gradient before any reduction, and of one that is summed over the shards only.
  const std::vector<Placement>& unreduced_placements() const { return unreduced_placements_; }
  const std::vector<Placement>& partial_sum_placements() const { return partial_sum_placements_; }
  /// This rank's rows of `whole`, which has sizes().
  Tensor own_rows_of(const Tensor& whole) const;
  /// The local part as a view of a flat buffer, where padded_numel elements from `offset` on are its own.
  Tensor local_view_of(const Tensor& flat, int64_t offset) const;

  /// Makes `local` this rank's shard and the parameter a DTensor over it.
  void set_sharded(Tensor local);
  /// The data that a user put there since (module->to(), a load), where it is not ours; nullopt if it is.
  std::optional<Tensor> foreign_local() const;

  bool is_sharded() const { return shown_ == Shown::kSharded; }
  /// The whole parameter's tensor, without memory until filled. Its object lives as long as this one.
  const Tensor& whole(at::ScalarType dtype, c10::Device device);
  void alias_whole_to_shard();
  void acquire_whole();
  /// The same over memory that all ranks map, and that outlives this object's being whole.
  void borrow_whole(void* data);
  bool whole_is_borrowed() const { return whole_is_borrowed_; }
  /// What is borrowed becomes a copy of this rank's own, under every tensor that aliases it.
  void own_borrowed_whole();
  /// Shows the whole parameter to everybody who holds it.
  void to_unsharded();
  /// Throws kUsage where the whole parameter was written or replaced since: the change would be lost.
  void check_unsharded() const;
  void to_sharded();

  /// Frees the whole parameter and shows `rows`, this rank's part of it over the last axis of `mesh`, in its place.
  void to_part(Tensor rows, const DeviceMesh& mesh);
  /// Throws kUsage where the part was written or replaced since.
  void check_part() const;

  /// A gather reads the shard from now on; throws kUsage in check_gathered() where it was written or replaced since.
  void expect_no_write() { known_version_ = local()._version(); }
  void check_gathered() const;

  void expect_write() { unwritten_version_ = local()._version(); }
  void mark_written() { unwritten_version_.reset(); }
  /// Materialised, and nobody has said yet that it has values. The same on every rank.
  bool awaits_write() const { return unwritten_version_.has_value(); }
  /// Materialised, and nothing was written since.
  bool is_unwritten() const;

  GradientSlot gradient;

 private:
  void release_whole();

  enum class Shown { kSharded, kPart, kWhole };

  c10::weak_intrusive_ptr<c10::TensorImpl> param_;
  std::string fqn_, freed_message_;
  DeviceMesh mesh_;
  std::vector<Placement> placements_, unreduced_placements_, partial_sum_placements_;
  std::vector<int64_t> sizes_, local_sizes_, global_sizes_;  // of the whole parameter here; its shard; the DTensor
  int64_t shard_dim_ = 0, parts_ = 1, own_part_ = 0;
  ShardGeometry geometry_;
  Tensor sharded_;               // a DTensor: the data of the parameter while sharded
  DTensorSpec* spec_ = nullptr;  // of sharded_
  Tensor whole_;                 // plain: the data of the parameter while unsharded
  Tensor part_;  // a DTensor: the data of the parameter between forward and backward with an integer reshard
  bool whole_is_shard_ = false;
  bool whole_is_borrowed_ = false;
  Shown shown_ = Shown::kSharded;
  uint32_t known_version_ = 0;  // of the shard when its gather started, then of what is shown
  uint64_t known_bytes_ = 0;    // FSDP2_DEBUG=1: a hash of the whole
  std::optional<uint32_t> unwritten_version_;
};

}  // namespace fsdp2::detail
