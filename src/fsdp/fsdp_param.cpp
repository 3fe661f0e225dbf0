#include "fsdp/fsdp_param.h"

#include <ATen/Functions.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <utility>

#include <fsdp2/error.h>

#include "fsdp/unsharded_memory.h"
#include "process/debug_level.h"

namespace fsdp2::detail {

namespace {

/// Of the bytes, so that writes past the version counter are seen too; 0 without FSDP2_DEBUG=1.
uint64_t hash_for_debug(const Tensor& whole) {
  if (debug_level() < 1 || whole.is_meta() || whole.numel() == 0) return 0;
  const Tensor bytes = whole.variable_data().cpu();
  return XXH3_64bits(bytes.const_data_ptr(), bytes.nbytes());
}

}  // namespace

// Note [One TensorImpl for life]
// The module's member, the registered parameter, the optimizer's entry and autograd's leaf are one TensorImpl, for
// ever. Sharding and gathering swap only its data, with TensorImpl::shallow_copy_from, which leaves autograd meta,
// hooks and the version counter alone (set_data would reset the AccumulateGrad node when dtypes differ).
// The whole data lies over one storage per parameter, whose memory comes and goes: views that autograd saved alias
// that storage and are valid again after the next gather.

FSDPParam::FSDPParam(const Tensor& param, std::string fqn, const DataParallelMesh& mesh, int64_t shard_dim)
    : param_(param.getIntrusivePtr()),
      mesh_(mesh.mesh),
      placements_(sharded_placements(param, fqn, mesh, shard_dim)),
      sizes_(is_marked(param) && mesh.full_mesh ? local_of(param).sizes().vec() : param.sizes().vec()),
      global_sizes_(param.sizes().vec()),
      shard_dim_(shard_dim),
      parts_(mesh.shard_size),
      own_part_(mesh.shard_rank) {
  set_fqn(std::move(fqn));
  partial_sum_placements_ = placements_;
  if (mesh.replicate_axis) partial_sum_placements_[*mesh.replicate_axis] = Partial{};
  unreduced_placements_ = partial_sum_placements_;
  if (mesh.shard_axis) unreduced_placements_[*mesh.shard_axis] = Partial{};
  local_sizes_ = sizes_;
  local_sizes_[static_cast<size_t>(shard_dim)] =
      chunk_range(sizes_[static_cast<size_t>(shard_dim)], parts_, own_part_).length;
  for (int64_t dim = 0; dim < static_cast<int64_t>(sizes_.size()); ++dim) {
    (dim < shard_dim ? geometry_.outer : dim == shard_dim ? geometry_.rows : geometry_.inner) *= sizes_[dim];
  }
}

FSDPParam::~FSDPParam() {
  // What autograd still holds of it must not outlive the mapping.
  if (whole_.defined() && whole_is_borrowed_) release_borrowed(whole_, freed_message_);
}

Tensor FSDPParam::param() const {
  auto impl = param_.lock();
  return impl ? Tensor(std::move(impl)) : Tensor();
}

bool FSDPParam::requires_grad() const {
  const Tensor alive = param();
  return alive.defined() && alive.requires_grad();
}

void FSDPParam::set_fqn(std::string fqn) {
  fqn_ = std::move(fqn);
  freed_message_ = c10::str("[fsdp] the gathered data of parameter ", fqn_,
                            " was used after it was freed: it is resharded now. Use it inside the module's forward, or "
                            "call unshard() first");
  if (sharded_.defined()) {
    spec_->fqn = fqn_;
  }
}

Tensor FSDPParam::own_rows_of(const Tensor& whole) const {
  const ChunkRange own = chunk_range(geometry_.rows, parts_, own_part_);
  return whole.narrow(shard_dim_, own.offset, own.length);
}

Tensor FSDPParam::local_view_of(const Tensor& flat, int64_t offset) const {
  // Not by operators: a version counter of its own, so that edits of one parameter are told from another's.
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()), flat.key_set(), flat.dtype());
  view.unsafeGetTensorImpl()->set_sizes_contiguous(local_sizes_);
  view.unsafeGetTensorImpl()->set_storage_offset(flat.storage_offset() + offset);
  return view;
}

void FSDPParam::set_sharded(Tensor local) {
  sharded_ = make_dtensor(std::move(local), mesh_, placements_, global_sizes_, fqn_);
  spec_ = spec_of(sharded_);
  whole_ = Tensor();
  whole_is_shard_ = false;
  if (const Tensor alive = param(); alive.defined() && shown_ == Shown::kSharded) {
    alive.unsafeGetTensorImpl()->shallow_copy_from(sharded_.getIntrusivePtr());
  }
}

std::optional<Tensor> FSDPParam::foreign_local() const {
  const Tensor alive = param();
  if (!alive.defined() || shown_ != Shown::kSharded) {
    return std::nullopt;
  }
  const DTensorSpec* spec = spec_of(alive);
  FSDP2_CHECK(spec != nullptr, kUsage, "[fsdp] the data of sharded parameter ", fqn_,
              " was replaced by a plain tensor of shape ", alive.sizes(),
              "; load into it with dcp::load or set_model_state_dict, or assign a DTensor of its layout");
  const DTensorSpec& ours = sharded_spec();
  if (spec == &ours || spec->local.is_same(ours.local)) {
    return std::nullopt;
  }
  FSDP2_CHECK(spec->placements == ours.placements && spec->sizes == ours.sizes && spec->mesh == ours.mesh &&
                  spec->local.sizes() == ours.local.sizes(),
              kUsage, "[fsdp] the data of sharded parameter ", fqn_, " was replaced by a DTensor of layout ",
              to_string(spec->placements), " and global shape ", at::IntArrayRef(spec->sizes), "; expected ",
              to_string(ours.placements), " and ", at::IntArrayRef(ours.sizes));
  return spec->local;
}

const Tensor& FSDPParam::whole(at::ScalarType dtype, c10::Device device) {
  if (!whole_.defined() || whole_.scalar_type() != dtype || whole_is_shard_) {
    whole_ = make_released(sizes_, at::TensorOptions(dtype).device(device), freed_message_);
    whole_is_shard_ = false;
  }
  return whole_;
}

void FSDPParam::alias_whole_to_shard() {
  if (!whole_is_shard_) {
    const LeaveInferenceMode normal_tensors;
    whole_ = local().variable_data();
    whole_is_shard_ = true;
  }
}

void FSDPParam::acquire_whole() { acquire_unsharded(whole_); }

void FSDPParam::borrow_whole(void* data) {
  borrow_unsharded(whole_, data);
  whole_is_borrowed_ = true;
}

void FSDPParam::own_borrowed_whole() {
  const void* shared = whole_.const_data_ptr();
  release_whole();
  acquire_whole();
  if (whole_.nbytes() > 0) std::memcpy(whole_.data_ptr(), shared, whole_.nbytes());
}

void FSDPParam::to_unsharded() {
  shown_ = Shown::kWhole;
  part_ = Tensor();
  if (const Tensor alive = param(); alive.defined()) {
    alive.unsafeGetTensorImpl()->shallow_copy_from(whole_.getIntrusivePtr());
    known_version_ = alive._version();
    known_bytes_ = hash_for_debug(whole_);
  }
}

void FSDPParam::check_unsharded() const {
  const Tensor alive = param();
  if (shown_ != Shown::kWhole || !alive.defined()) {
    return;
  }
  const bool same_data = !is_marked(alive) &&
                         alive.storage().unsafeGetStorageImpl() == whole_.storage().unsafeGetStorageImpl() &&
                         alive.scalar_type() == whole_.scalar_type() && alive.sizes() == whole_.sizes();
  FSDP2_CHECK(
      same_data, kUsage, "[fsdp] the data of parameter ", fqn_, " was replaced while it was unsharded (now ",
      alive.scalar_type(), " ", alive.sizes(), " on ", alive.device(),
      "), e.g. by module->to(): the change cannot be kept. Drop it with reset_iter_state() on the root; next time "
      "call reshard() on its module first, then convert");
  FSDP2_CHECK(alive._version() == known_version_ && hash_for_debug(whole_) == known_bytes_, kUsage, "[fsdp] parameter ",
              fqn_, " was written in place while it was unsharded: ",
              whole_is_borrowed_
                  ? "it was shown from shared memory, so the write has reached the shards of all ranks. Load a "
                    "checkpoint after reset_iter_state() on the root"
                  : "the write cannot be kept. Drop it with reset_iter_state() on the root",
              "; next time call reshard() on its module first, then write into the sharded parameter");
}

void FSDPParam::check_gathered() const {
  FSDP2_CHECK(
      !foreign_local() && local()._version() == known_version_, kUsage, "[fsdp] sharded parameter ", fqn_,
      " was written while its gather was under way, so the gathered values are old: wait for the gather, or call "
      "reshard() on its module, before the write");
}

void FSDPParam::to_sharded() {
  const bool was_whole = shown_ == Shown::kWhole;
  shown_ = Shown::kSharded;
  part_ = Tensor();
  if (const Tensor alive = param(); alive.defined()) {
    alive.unsafeGetTensorImpl()->shallow_copy_from(sharded_.getIntrusivePtr());
  }
  if (was_whole && !whole_is_shard_) {
    release_whole();
  }
}

void FSDPParam::release_whole() {
  if (std::exchange(whole_is_borrowed_, false)) {
    release_borrowed(whole_, freed_message_);
  } else {
    release_unsharded(whole_, freed_message_);
  }
}

void FSDPParam::to_part(Tensor rows, const DeviceMesh& mesh) {
  part_ = make_dtensor(std::move(rows), mesh, {Replicate{}, Shard{0}}, sizes_, fqn_);
  shown_ = Shown::kPart;
  known_version_ = local_of(part_)._version();
  if (const Tensor alive = param(); alive.defined()) {
    alive.unsafeGetTensorImpl()->shallow_copy_from(part_.getIntrusivePtr());
  }
  release_whole();
}

void FSDPParam::check_part() const {
  const Tensor alive = param();
  if (shown_ != Shown::kPart || !alive.defined()) {
    return;
  }
  const bool same =
      is_marked(alive) && local_of(alive).is_same(local_of(part_)) && local_of(part_)._version() == known_version_;
  FSDP2_CHECK(same, kUsage, "[fsdp] parameter ", fqn_,
              " was written or replaced between forward and backward, while "
              "reshard_after_forward = ",
              spec_of(part_)->mesh.size(1),
              " keeps a temporary copy of it: the write cannot be kept. "
              "Drop it with reset_iter_state() on the root; next time call reshard() on its module first");
}

bool FSDPParam::is_unwritten() const {
  return unwritten_version_ && local().numel() > 0 && local()._version() == *unwritten_version_;
}

}  // namespace fsdp2::detail
