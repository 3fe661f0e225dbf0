#include "fsdp/param_group.h"

#include <ATen/Functions.h>

#include <fsdp2/error.h>

#include "fsdp/counting.h"
#include "fsdp/profile_range.h"
#include "fsdp/trace.h"

namespace fsdp2::detail {

// Note [Parts between forward and backward]
// With an integer reshard_after_forward of k, forward leaves each parameter's rows spread over k neighbouring ranks,
// in the computation dtype, so that backward gathers over those k only. The parameter is then a DTensor over
// (all / k, k) ranks. The parts are a temporary copy: the shards stay what optimizers and checkpoints see after
// reshard(), and where no backward follows there are no parts.

void ParamGroup::unshard() {
  if (state_ == DataState::kGathering || state_ == DataState::kUnsharded) {
    return;
  }
  const PlainWork plain;
  gather_from_parts_ = state_ == DataState::kInParts;
  if (gather_from_parts_) {
    for (const FSDPParam& param : params_) {
      param.check_part();
    }
  } else {
    adopt_foreign_data();
    if (!ready_) {
      check_ready();
    }
    for (FSDPParam& param : params_) {
      param.expect_no_write();
    }
  }
  state_ = DataState::kGathering;
  trace("unshard", module_fqn);
  way_ = !shared_ || part_mesh_ || settings.all_gather ? GatherWay::kCollective
         : in_place_allowed_                           ? GatherWay::kInPlace
                                                       : GatherWay::kCopyFromShared;
  if (way_ == GatherWay::kCopyFromShared) {
    start_copy_from_shared();
  } else if (way_ == GatherWay::kCollective) {
    on_buckets(&ParamGroup::start_gather);
  }
}

/// Whatever a bucket throws, the group is sharded then.
void ParamGroup::on_buckets(void (ParamGroup::*step)(GatherBucket&)) {
  try {
    for (GatherBucket& bucket : gathers_) {
      (this->*step)(bucket);
    }
  } catch (...) {
    drop_gather();
    throw;
  }
}

Tensor ParamGroup::communication_buffer(int64_t numel, const at::TensorOptions& options,
                                        const ProcessGroup& group) const {
  if (settings.allocate_from_group) {
    const auto backend = group->getBackend(options.device().type());
    if (backend->supportsTensorAlloc(options.device().index())) {
      return backend->allocateTensor(numel, options);
    }
  }
  return at::empty({numel}, options);
}

/// What this rank gives to the gather: the flat buffer itself where it is all that, else a copy in its place of
/// the output.
Tensor ParamGroup::gather_input(const GatherBucket& bucket) const {
  const ShardBuffer& first = buffers_[bucket.members.front().buffer];
  // One original dtype in the bucket.
  const bool whole_buffer = first.members.size() == bucket.members.size() && first.flat.defined();
  if (whole_buffer && first.dtype == bucket.dtype && first.flat.device() == bucket.gathered.device()) {
    return first.flat;
  }
  Tensor in = bucket.gathered[rank_];
  if (whole_buffer) {
    in.copy_(first.flat, /*non_blocking=*/true);
    return in;
  }
  for (const auto& member : bucket.members) {
    const FSDPParam& param = params_[member.param];
    const Tensor local = param.local().reshape({-1});
    in.narrow(0, member.offset, local.numel()).copy_(local, /*non_blocking=*/true);
    in.narrow(0, member.offset + local.numel(), param.padded_numel() - local.numel()).zero_();
  }
  return in;
}

void check_custom_buffer(const Tensor& buffer, int64_t numel, at::ScalarType dtype, const char* what,
                         const std::string& label) {
  FSDP2_CHECK(buffer.defined() && buffer.numel() == numel && buffer.scalar_type() == dtype && buffer.is_contiguous(),
              kInvalidArgument, "[fsdp] what the custom ", what, " for ", label, " is ",
              buffer.defined() ? c10::str(buffer.sizes(), " of ", buffer.scalar_type()) : std::string("no tensor"),
              "; expected ", numel, " contiguous elements of ", dtype);
}

void ParamGroup::start_gather(GatherBucket& bucket) {
  if (size_ == 1) {
    return;
  }
  const ProfileRange range("FSDP::all_gather");
  const ProcessGroup group = gather_from_parts_ ? part_mesh_->get_group(1) : mesh_.shard_group;
  const int64_t ranks = group->getSize(), numel = gather_from_parts_ ? bucket.part_numel : bucket.numel;
  const auto options = at::TensorOptions(bucket.dtype).device(compute_device());
  Tensor out;
  if (settings.all_gather) {
    out = settings.all_gather->allocate({ranks * numel}, options);
    check_custom_buffer(out, ranks * numel, bucket.dtype, "all-gather's allocate() returned", label_);
    out = out.view({-1});
  } else {
    out = communication_buffer(ranks * numel, options, group);
  }
  bucket.gathered = out.view({ranks, numel});
  Tensor in = gather_from_parts_ ? bucket.part : gather_input(bucket);
  const auto bytes = static_cast<int64_t>(out.nbytes());
  count_collective(CollectiveOp::kAllGather, bytes);
  if (settings.all_gather) {
    bucket.work = custom_collective(CollectiveOp::kAllGather, group, {out, in}, bytes,
                                    [&] { return (*settings.all_gather)(out, in, group); }, {label_.c_str()});
    check_custom_buffer(out, ranks * numel, bucket.dtype, "all-gather left in `out`", label_);
    bucket.gathered = out.view({ranks, numel});  // it may have put another tensor there
  } else {
    bucket.work = all_gather(out, in, group, {label_.c_str()});
  }
}

void ParamGroup::drop_gather() noexcept {
  for (GatherBucket& bucket : gathers_) {
    bucket.work.abandon();
    bucket.gathered = bucket.part = Tensor();
  }
  for (FSDPParam& param : params_) {
    if (!param.is_sharded()) {
      param.to_sharded();
    }
  }
  state_ = DataState::kSharded;
}

void ParamGroup::wait_for_unshard() {
  if (state_ == DataState::kUnsharded) {
    return;
  }
  unshard();
  const PlainWork plain;
  try {
    for (const FSDPParam& param : params_) {
      if (gather_from_parts_) {
        param.check_part();
      } else {
        param.check_gathered();
      }
    }
  } catch (...) {
    reshard();
    throw;
  }
  switch (way_) {
    case GatherWay::kCollective:
      on_buckets(&ParamGroup::finish_gather);
      break;
    case GatherWay::kInPlace:
      show_in_place();
      break;
    case GatherWay::kCopyFromShared:
      finish_copy_from_shared();
      break;
  }
  state_ = DataState::kUnsharded;
  ever_unsharded_ = true;
}

/// One rank holds the whole shard: no collective.
void ParamGroup::copy_alone(const GatherBucket& bucket) {
  for (const auto& member : bucket.members) {
    FSDPParam& param = params_[member.param];
    if (bucket.dtype == param.orig_dtype() && param.device() == compute_device()) {
      param.alias_whole_to_shard();
    } else {
      const Tensor& whole = param.whole(bucket.dtype, compute_device());
      param.acquire_whole();
      whole.variable_data().copy_(param.local());
    }
    param.to_unsharded();
  }
}

void ParamGroup::finish_gather(GatherBucket& bucket) {
  {
    const ProfileRange range("FSDP::all_gather");
    bucket.work.wait();
  }
  const ProfileRange range("FSDP::copies");
  if (size_ == 1) {
    copy_alone(bucket);
    return;
  }
  for (const auto& member : bucket.members) {
    FSDPParam& param = params_[member.param];
    const Tensor& whole = param.whole(bucket.dtype, compute_device());
    param.acquire_whole();
    const ShardGeometry& geometry = param.geometry();
    const int64_t chunk = geometry.padded_numel(bucket.gathered.size(0));
    const int64_t offset = gather_from_parts_ ? member.part_offset : member.offset;
    // Through an alias: the leaf's version counter must not move when autograd's saved weight is filled again.
    join_parts(bucket.gathered.narrow(1, offset, chunk), whole.variable_data().view({-1}), geometry);
    param.to_unsharded();
  }
  bucket.gathered = Tensor();
  bucket.part = Tensor();
}

void ParamGroup::reshard() {
  if (state_ == DataState::kSharded) {
    return;
  }
  const bool was_whole = state_ == DataState::kUnsharded;
  if (state_ == DataState::kGathering) {  // gathered ahead, and not needed after all
    state_ = gather_from_parts_ ? DataState::kInParts : DataState::kSharded;
    for (GatherBucket& bucket : gathers_) {
      bucket.work.wait();
      bucket.gathered = Tensor();
    }
  }
  if (was_whole) {
    for (const FSDPParam& param : params_) {
      param.check_unsharded();
    }
  }
  if (state_ == DataState::kInParts) {
    for (const FSDPParam& param : params_) {
      param.check_part();
    }
    for (GatherBucket& bucket : gathers_) {
      bucket.part = Tensor();
    }
  }
  if (state_ != DataState::kSharded) {
    for (FSDPParam& param : params_) {
      param.to_sharded();
    }
  }
  state_ = DataState::kSharded;
  if (was_whole) {
    trace("reshard", module_fqn);
  }
}

void ParamGroup::reshard_after_forward(bool backward_follows) {
  if (state_ == DataState::kUnsharded && part_mesh_ && backward_follows) {
    to_parts();
  } else {
    reshard();
  }
}

void ParamGroup::to_parts() {
  const ProfileRange range("FSDP::copies");
  const PlainWork plain;
  for (const FSDPParam& param : params_) {
    param.check_unsharded();
  }
  const int64_t parts = part_mesh_->size(1), own = part_mesh_->get_local_rank(1);
  for (GatherBucket& bucket : gathers_) {
    bucket.part = at::empty({bucket.part_numel}, at::TensorOptions(bucket.dtype).device(compute_device()));
    for (const auto& member : bucket.members) {
      FSDPParam& param = params_[member.param];
      const ShardGeometry& geometry = param.geometry();
      const ChunkRange range = chunk_range(geometry.rows, parts, own);
      const Tensor slot = bucket.part.narrow(0, member.part_offset, geometry.padded_numel(parts));
      const int64_t numel = range.length * geometry.inner;
      std::vector<int64_t> shape = param.sizes();
      shape[0] = range.length;
      Tensor rows = slot.narrow(0, 0, numel).view(shape).variable_data();
      rows.copy_(param.whole(bucket.dtype, compute_device()).variable_data().narrow(0, range.offset, range.length));
      slot.narrow(0, numel, slot.numel() - numel).zero_();
      param.to_part(std::move(rows), *part_mesh_);
    }
  }
  state_ = DataState::kInParts;
  trace("reshard", module_fqn);
}

}  // namespace fsdp2::detail
