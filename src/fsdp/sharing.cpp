// Of ParamGroup: whole parameters in shared memory. Note [Parameters in shared memory].

#include <ATen/Functions.h>

#include <cstdlib>
#include <cstring>

#include <fsdp2/error.h>

#include "fsdp/counting.h"
#include "fsdp/param_group.h"
#include "fsdp/profile_range.h"
#include "process/collectives.h"

namespace fsdp2::detail {

namespace {

bool in_place_is_on() {
  static const bool on = [] {
    const char* text = std::getenv("FSDP2_SHM_IN_PLACE");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  return on;
}

}  // namespace

/// Whatever can change later (settings) does not count here: see publish().
bool ParamGroup::can_share() const {
  return size_ > 1 && device_.is_cpu() && !offload_ && in_place_is_on() &&
         shm::shm_backend_of(mesh_.shard_group) != nullptr &&
         std::any_of(params_.begin(), params_.end(), [](const FSDPParam& p) { return p.padded_numel() > 0; }) &&
         std::all_of(params_.begin(), params_.end(), [](const FSDPParam& p) { return p.geometry().outer == 1; });
}

ProcessGroup ParamGroup::publish(bool only_changed) {
  if (size_ == 1) return {};
  const PlainWork plain;
  if (state_ == DataState::kSharded) {
    adopt_foreign_data();
  } else if (shared_ && whole_in_own_memory()) {
    return {};
  }
  if (!shared_) {
    // Whole since before: moved once it is not.
    if (state_ != DataState::kSharded || part_mesh_ || settings.all_gather || !can_share() ||
        !params_.front().device().is_cpu()) {
      return {};
    }
    std::vector<at::ScalarType> dtypes(params_.size());
    for (const GatherBucket& bucket : gathers_) {
      for (const auto& member : bucket.members) dtypes[member.param] = bucket.dtype;
    }
    shared_ = std::make_unique<SharedWholes>(*shm::shm_backend_of(mesh_.shard_group), params_, dtypes, label_);
    for (ShardBuffer& buffer : buffers_) buffer.flat = Tensor();
    only_changed = false;
  }
  shared_->publish(params_, only_changed);
  return mesh_.shard_group;
}

int64_t ParamGroup::bytes_of(const GatherBucket& bucket) const {
  return size_ * bucket.numel * static_cast<int64_t>(c10::elementSize(bucket.dtype));
}

void ParamGroup::show_in_place() {
  shared_->check_unwritten(params_);
  for (const GatherBucket& bucket : gathers_) {
    for (const auto& member : bucket.members) {
      FSDPParam& param = params_[member.param];
      param.whole(bucket.dtype, compute_device());
      param.borrow_whole(shared_->data_of(member.param));
      param.to_unsharded();
    }
    count_collective(CollectiveOp::kAllGather, bytes_of(bucket));
  }
  ++shown_;
}

void ParamGroup::end_in_place(bool keep_copies) {
  in_place_allowed_ = false;
  if (!keep_copies || state_ != DataState::kUnsharded || whole_in_own_memory()) return;
  const PlainWork plain;
  for (FSDPParam& param : params_) param.own_borrowed_whole();
}

void ParamGroup::check_unwritten_in_place() const {
  if (shared_ && others_may_read()) shared_->check_unwritten(params_);
}

/// Outside forward and backward: as an all-gather would.
void ParamGroup::start_copy_from_shared() {
  shared_->publish(params_, false);
  barrier_on(mesh_.shard_group, {label_.c_str()});
}

void ParamGroup::finish_copy_from_shared() {
  const ProfileRange range("FSDP::copies");
  for (const GatherBucket& bucket : gathers_) {
    for (const auto& member : bucket.members) {
      FSDPParam& param = params_[member.param];
      const Tensor& whole = param.whole(bucket.dtype, compute_device());
      param.acquire_whole();
      const Tensor alias = whole.variable_data();
      if (alias.nbytes() > 0) std::memcpy(alias.data_ptr(), shared_->data_of(member.param), alias.nbytes());
      param.to_unsharded();
    }
    count_collective(CollectiveOp::kAllGather, bytes_of(bucket));
  }
  barrier_on(mesh_.shard_group, {label_.c_str()});  // nobody writes before all have read
}

}  // namespace fsdp2::detail
