#pragma once

// One parameter of a group. Note [One TensorImpl for life] in fsdp_param.cpp.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <vector>

#include "fsdp/gradient_slot.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

class FSDPParam {
 public:
  /// `param` is plain, contiguous, of at least one dimension. Cut over `mesh` (1-D) on dim 0.
  FSDPParam(const Tensor& param, std::string fqn, const DeviceMesh& mesh);

  /// The parameter itself; undefined once the module dropped it.
  Tensor param() const;
  const std::string& fqn() const { return fqn_; }
  void set_fqn(std::string fqn);

  // Geometry, in elements of dim-0 chunks.
  int64_t row_numel() const { return row_numel_; }
  int64_t num_rows() const { return sizes_[0]; }
  int64_t padded_rows() const { return padded_rows_; }
  int64_t padded_numel() const { return padded_rows_ * row_numel_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t numel() const { return sizes_[0] * row_numel_; }
  bool requires_grad() const;

  at::ScalarType orig_dtype() const { return sharded_spec().local.scalar_type(); }
  c10::Device device() const { return sharded_spec().local.device(); }
  const DTensorSpec& sharded_spec() const { return *spec_of(sharded_); }
  const Tensor& local() const { return sharded_spec().local; }
  /// The local part of these rows as a view of `slot`, a flat buffer of padded_numel elements.
  Tensor local_view_of(const Tensor& slot) const;

  /// Makes `local` this rank's shard and the parameter a DTensor over it.
  void set_sharded(Tensor local);
  /// The data that a user put there since (module->to(), a load), where it is not ours; nullopt if it is.
  std::optional<Tensor> foreign_local() const;

  bool is_unsharded() const { return unsharded_; }
  /// The whole parameter's tensor in `dtype`, without memory until filled. Its object lives as long as this one.
  const Tensor& whole(at::ScalarType dtype);
  /// Whether the whole parameter is the shard's own memory (one rank, equal dtypes).
  bool whole_is_shard() const { return whole_is_shard_; }
  void alias_whole_to_shard();
  void acquire_whole();
  /// Shows the whole parameter to everybody who holds it.
  void to_unsharded();
  /// Throws kUsage where the whole parameter was written or replaced since: the change would be lost.
  void check_unsharded() const;
  void to_sharded();

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
  c10::weak_intrusive_ptr<c10::TensorImpl> param_;
  std::string fqn_, freed_message_;
  DeviceMesh mesh_;
  std::vector<int64_t> sizes_;
  int64_t row_numel_ = 1, padded_rows_ = 0;
  int64_t own_rows_ = 0;
  Tensor sharded_;  // a DTensor: the data of the parameter while sharded
  Tensor whole_;    // plain: the data of the parameter while unsharded
  bool whole_is_shard_ = false;
  bool unsharded_ = false;
  uint32_t known_version_ = 0;  // of the shard when its gather started, then of the parameter when it became whole
  std::optional<uint32_t> unwritten_version_;
};

}  // namespace fsdp2::detail
