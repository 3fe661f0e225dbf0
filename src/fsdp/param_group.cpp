#include "fsdp/param_group.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include <fsdp2/error.h>

#include "fsdp/counting.h"
#include "fsdp/debug_level.h"
#include "fsdp/gradient_reduction.h"
#include "fsdp/training_context.h"

namespace fsdp2::detail {

namespace {

/// Library work on plain tensors, whatever mode the user's code is in.
struct PlainWork {
  c10::InferenceMode normal_tensors{false};
  at::NoGradGuard no_grad;
  BelowDTensor below;
};

}  // namespace

ParamGroup::ParamGroup(const std::vector<Named>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                       c10::Device device)
    : mesh_(mesh), group_(mesh.get_group(0)), size_(mesh.size(0)), rank_(mesh.get_local_rank(0)), policy_(policy) {
  const PlainWork plain;
  params_.reserve(params.size());
  std::vector<Tensor> locals;
  std::vector<std::string> fqns;
  for (const Named& named : params) {
    FSDPParam& param = params_.emplace_back(named.param, named.fqn, mesh);
    fqns.push_back(named.fqn);
    const ChunkRange own = chunk_range(param.num_rows(), size_, rank_);
    locals.push_back(named.param.variable_data().narrow(0, own.offset, own.length));
  }
  build_buffers(locals, device);
  set_fqns(fqns);
}

void ParamGroup::build_buffers(const std::vector<Tensor>& locals, c10::Device device) {
  buffers_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::ScalarType dtype = locals[i].scalar_type();
    auto buffer = std::find_if(buffers_.begin(), buffers_.end(), [&](const ShardBuffer& b) { return b.dtype == dtype; });
    if (buffer == buffers_.end()) {
      buffer = buffers_.insert(buffers_.end(), ShardBuffer{});
      buffer->dtype = dtype;
    }
    const int64_t offset = buffer->members.empty()
                               ? 0
                               : buffer->offsets.back() + params_[buffer->members.back()].padded_numel();
    buffer->members.push_back(i);
    buffer->offsets.push_back(offset);
  }
  for (ShardBuffer& buffer : buffers_) {
    const int64_t numel = buffer.offsets.back() + params_[buffer.members.back()].padded_numel();
    const bool meta = std::any_of(buffer.members.begin(), buffer.members.end(),
                                  [&](size_t i) { return locals[i].is_meta(); });
    buffer.flat = at::empty({numel}, at::TensorOptions(buffer.dtype).device(meta ? c10::Device(at::kMeta) : device));
    for (size_t k = 0; k < buffer.members.size(); ++k) {
      FSDPParam& param = params_[buffer.members[k]];
      const Tensor& from = locals[buffer.members[k]];
      const Tensor slot = buffer.flat.narrow(0, buffer.offsets[k], param.padded_numel());
      Tensor local = param.local_view_of(slot);
      if (!meta) {
        local.copy_(from);
        slot.narrow(0, local.numel(), slot.numel() - local.numel()).zero_();
      }
      param.set_sharded(std::move(local));
    }
  }
  build_gather_buckets();
}

void ParamGroup::build_gather_buckets() {
  gathers_.clear();
  std::vector<std::pair<size_t, int64_t>> home(params_.size());  // buffer and offset
  for (size_t b = 0; b < buffers_.size(); ++b) {
    for (size_t k = 0; k < buffers_[b].members.size(); ++k) {
      home[buffers_[b].members[k]] = {b, buffers_[b].offsets[k]};
    }
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::ScalarType orig = params_[i].orig_dtype();
    const at::ScalarType dtype = policy_.param_dtype && at::isFloatingType(orig) ? *policy_.param_dtype : orig;
    auto bucket = std::find_if(gathers_.begin(), gathers_.end(), [&](const GatherBucket& g) { return g.dtype == dtype; });
    if (bucket == gathers_.end()) {
      bucket = gathers_.insert(gathers_.end(), GatherBucket{});
      bucket->dtype = dtype;
    }
    bucket->members.push_back({i, home[i].first, home[i].second, bucket->numel});
    bucket->numel += params_[i].padded_numel();
  }
}

void ParamGroup::install_leaf_hooks(const std::shared_ptr<void>& owner_token) {
  for (size_t i = 0; i < params_.size(); ++i) {
    Tensor param = params_[i].param();
    if (!at::isFloatingType(param.scalar_type()) && !at::isComplexType(param.scalar_type())) {
      continue;  // can never require a gradient
    }
    const bool trainable = param.requires_grad();
    param.unsafeGetTensorImpl()->set_requires_grad(true);  // a frozen parameter may be unfrozen later
    param.register_hook([self = weak_from_this(), i, owner_token](const Tensor& gradient) {
      if (const auto group = self.lock()) {
        group->on_leaf_gradient(i, gradient);
      }
      return Tensor();
    });
    param.unsafeGetTensorImpl()->set_requires_grad(trainable);
  }
}

void ParamGroup::set_fqns(const std::vector<std::string>& fqns) {
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_fqn(fqns[i]);
  }
  label_ = c10::str("parameter ", fqns.empty() ? "" : fqns.front(),
                    fqns.size() > 1 ? c10::str(" and ", fqns.size() - 1, " more") : std::string());
}

void ParamGroup::check_ready() {
  std::string on_meta, unwritten;
  for (const FSDPParam& param : params_) {
    if (param.local().is_meta()) {
      on_meta += (on_meta.empty() ? "" : ", ") + param.fqn();
    } else if (param.is_unwritten()) {
      unwritten += (unwritten.empty() ? "" : ", ") + param.fqn();
    }
  }
  if (ask_ranks_for_unwritten_ && size_ > 1 && debug_level() != 0) {
    // A rank without rows cannot tell; it must not wait in a gather that the others refuse.
    for (const std::string& names : all_gather_strings(unwritten, group_)) {
      if (unwritten.empty()) unwritten = names;
    }
  }
  ask_ranks_for_unwritten_ &= !unwritten.empty();
  FSDP2_CHECK(on_meta.empty(), kUsage, "[fsdp] parameters ", on_meta, " are still on the meta device and have no data; "
              "call to_empty(model, device) and reset_parameters(model), or load a checkpoint, before the first forward");
  FSDP2_CHECK(unwritten.empty(), kUsage, "[fsdp] parameters ", unwritten, " were given memory by to_empty() but never "
              "written; call reset_parameters(model), load a checkpoint, or mark_initialized(module) where values were "
              "written through raw pointers");
  for (FSDPParam& param : params_) {
    param.mark_written();
  }
  ready_ = true;
}

void ParamGroup::adopt_foreign_data() {
  bool foreign = false;
  for (const FSDPParam& param : params_) {
    foreign |= param.foreign_local().has_value();
  }
  if (!foreign) {
    return;
  }
  std::vector<Tensor> locals;
  for (const FSDPParam& param : params_) {
    locals.push_back(param.foreign_local().value_or(param.local()));
  }
  const c10::Device device = locals.front().device();
  build_buffers(locals, device);
  ready_ = false;
}

void ParamGroup::unshard() {
  if (state_ != DataState::kSharded) {
    return;
  }
  const PlainWork plain;
  adopt_foreign_data();
  if (!ready_) {
    check_ready();
  }
  state_ = DataState::kGathering;
  for (FSDPParam& param : params_) {
    param.expect_no_write();
  }
  try {
    for (GatherBucket& bucket : gathers_) {
      start_gather(bucket);
    }
  } catch (...) {
    reset();
    throw;
  }
}

void ParamGroup::start_gather(GatherBucket& bucket) {
  if (size_ == 1) {
    return;
  }
  const ShardBuffer& first = buffers_[bucket.members.front().buffer];
  bucket.gathered = at::empty({size_, bucket.numel}, first.flat.options().dtype(bucket.dtype));
  Tensor in;
  const bool whole_buffer = first.members.size() == bucket.members.size();  // one original dtype in the bucket
  if (whole_buffer && first.dtype == bucket.dtype) {
    in = first.flat;
  } else {
    in = bucket.gathered[rank_];
    if (whole_buffer) {
      in.copy_(first.flat);
    } else {
      for (const auto& member : bucket.members) {
        const int64_t numel = params_[member.param].padded_numel();
        in.narrow(0, member.offset, numel)
            .copy_(buffers_[member.buffer].flat.narrow(0, member.buffer_offset, numel));
      }
    }
  }
  count_collective(CollectiveOp::kAllGather, static_cast<int64_t>(bucket.gathered.nbytes()));
  Tensor out = bucket.gathered.view({-1});
  bucket.work = all_gather(out, in, group_, {label_.c_str()});
}

void ParamGroup::wait_for_unshard() {
  if (state_ == DataState::kUnsharded) {
    return;
  }
  unshard();
  const PlainWork plain;
  try {
    for (const FSDPParam& param : params_) {
      param.check_gathered();
    }
  } catch (...) {
    reshard();
    throw;
  }
  try {
    for (GatherBucket& bucket : gathers_) {
      finish_gather(bucket);
    }
  } catch (...) {
    reset();
    throw;
  }
  state_ = DataState::kUnsharded;
}

void ParamGroup::finish_gather(GatherBucket& bucket) {
  bucket.work.wait();
  for (const auto& member : bucket.members) {
    FSDPParam& param = params_[member.param];
    if (size_ == 1) {
      if (bucket.dtype == param.orig_dtype()) {
        param.alias_whole_to_shard();
      } else {
        const Tensor& whole = param.whole(bucket.dtype);
        param.acquire_whole();
        whole.variable_data().copy_(param.local());
      }
      param.to_unsharded();
      continue;
    }
    const Tensor& whole = param.whole(bucket.dtype);
    param.acquire_whole();
    // Through an alias: the leaf's version counter must not move when autograd's saved weight is filled again.
    const Tensor flat = whole.variable_data().view({-1});
    const int64_t chunk = param.padded_numel();
    const Tensor parts = bucket.gathered.narrow(1, member.offset, chunk);
    const int64_t full_ranks = chunk == 0 ? 0 : flat.numel() / chunk;
    if (full_ranks > 0) {
      flat.narrow(0, 0, full_ranks * chunk).view({full_ranks, chunk}).copy_(parts.narrow(0, 0, full_ranks));
    }
    if (const int64_t left = flat.numel() - full_ranks * chunk; left > 0) {
      flat.narrow(0, full_ranks * chunk, left).copy_(parts[full_ranks].narrow(0, 0, left));
    }
    param.to_unsharded();
  }
  bucket.gathered = Tensor();
}

void ParamGroup::reshard() {
  if (state_ == DataState::kSharded) {
    return;
  }
  if (state_ == DataState::kGathering) {  // gathered ahead, and not needed after all
    state_ = DataState::kSharded;
    for (GatherBucket& bucket : gathers_) {
      bucket.work.wait();
      bucket.gathered = Tensor();
    }
    return;
  }
  for (const FSDPParam& param : params_) {
    param.check_unsharded();
  }
  for (FSDPParam& param : params_) {
    param.to_sharded();
  }
  state_ = DataState::kSharded;
}

void ParamGroup::to_empty(c10::Device device) {
  reshard();
  const PlainWork plain;
  adopt_foreign_data();
  for (ShardBuffer& buffer : buffers_) {
    buffer.flat = at::empty(buffer.flat.sizes(), at::TensorOptions(buffer.dtype).device(device));
    for (size_t k = 0; k < buffer.members.size(); ++k) {
      FSDPParam& param = params_[buffer.members[k]];
      const Tensor slot = buffer.flat.narrow(0, buffer.offsets[k], param.padded_numel());
      Tensor local = param.local_view_of(slot);
      slot.narrow(0, local.numel(), slot.numel() - local.numel()).zero_();
      param.set_sharded(std::move(local));
      param.expect_write();
    }
  }
  ready_ = false;
  ask_ranks_for_unwritten_ = true;
}

void ParamGroup::mark_written() {
  for (FSDPParam& param : params_) {
    param.mark_written();
  }
}

void ParamGroup::mark_written(const std::unordered_set<const c10::TensorImpl*>& handled) {
  for (FSDPParam& param : params_) {
    if (handled.count(param.param().unsafeGetTensorImpl()) != 0) {
      param.mark_written();
    }
  }
}

void ParamGroup::on_leaf_gradient(size_t index, const Tensor& gradient) {
  context->enter_backward();
  FSDPParam& param = params_[index];
  Tensor alive = param.param();
  if (is_marked(gradient)) {
    // From to_local() or full_tensor() in the loss: this rank's part already, it adds to the reduced gradient.
    FSDP2_CHECK(!param.gradient.accumulating() && !param.gradient.has_pending(alive, param.fqn()), kUsage,
                "[fsdp] parameter ", param.fqn(), " got a sharded gradient (from to_local() or full_tensor() in the "
                "loss) beside an unreduced one; call backward on that part of the loss alone, after "
                "synchronize_gradients()");
    return;
  }
  param.gradient.begin(alive, param.sharded_spec());
}

void ParamGroup::pre_backward() {
  if (in_pre_backward) {
    return;
  }
  in_pre_backward = true;
  wait_for_unshard();
  if (!backward_prefetch.empty()) {
    for (const auto& target : backward_prefetch) {
      if (const auto group = target.lock()) group->unshard();
    }
    return;
  }
  if (!forward_positions.empty()) {
    const size_t position = forward_positions.back();
    forward_positions.pop_back();
    if (const auto previous = context->forward_before(position)) {
      previous->unshard();
    }
  }
}

void ParamGroup::post_backward(bool at_end) {
  in_pre_backward = false;
  const bool any = std::any_of(params_.begin(), params_.end(),
                               [](const FSDPParam& param) { return param.gradient.accumulating(); });
  if (!reduce_gradients) {
    if (any) {
      keep_pending();
    }
    if (reshard_after_backward) {
      reshard();
    }
    return;
  }
  // Without a new gradient the module is frozen, or is used once more further on in this backward.
  if (any || at_end) {
    reduce_all();
  } else if (reshard_after_backward) {
    reshard();
  }
}

void ParamGroup::keep_pending() {
  const PlainWork plain;
  for (FSDPParam& param : params_) {
    if (!param.gradient.accumulating()) {
      continue;
    }
    Tensor alive = param.param();
    Tensor whole = param.gradient.take(alive, param.fqn());
    if (!whole.defined()) {
      continue;
    }
    if (policy_.reduce_dtype && whole.is_floating_point() && whole.scalar_type() != *policy_.reduce_dtype) {
      whole = whole.to(*policy_.reduce_dtype);
    }
    param.gradient.show(alive, std::move(whole), param.sharded_spec());
  }
}

void ParamGroup::reduce_all() {
  std::vector<std::pair<size_t, Tensor>> gradients;
  for (size_t i = 0; i < params_.size(); ++i) {
    FSDPParam& param = params_[i];
    Tensor alive = param.param();
    if (!alive.defined()) {
      continue;
    }
    Tensor whole = param.gradient.take(alive, param.fqn());
    if (whole.defined()) {
      gradients.emplace_back(i, std::move(whole));
    }
  }
  if (reshard_after_backward) {
    reshard();
  }
  if (!gradients.empty()) {
    context->finish_reduction();
    std::vector<size_t> indices;
    for (const auto& [index, gradient] : gradients) indices.push_back(index);
    context->note_reduction(shared_from_this(), std::move(indices));
    context->set_reduction(std::make_unique<GradientReduction>(shared_from_this(), std::move(gradients)));
  }
}

void ParamGroup::synchronize_gradients() {
  reduce_all();
  context->finish_reduction();
}

std::vector<Tensor> ParamGroup::pending_gradients() {
  std::vector<Tensor> found;
  for (FSDPParam& param : params_) {
    Tensor alive = param.param();
    if (alive.defined() && param.gradient.has_pending(alive, param.fqn())) {
      found.push_back(param.gradient.pending());
    }
  }
  return found;
}

void ParamGroup::reset() {
  for (GatherBucket& bucket : gathers_) {
    try {
      bucket.work.wait();
    } catch (const std::exception&) {
      // The error that brought us here is the one to report.
    }
    bucket.gathered = Tensor();
  }
  for (FSDPParam& param : params_) {
    if (param.is_unsharded()) {
      param.to_sharded();
    }
    if (Tensor alive = param.param(); alive.defined()) {
      param.gradient.abandon(alive);
    }
  }
  state_ = DataState::kSharded;
  in_pre_backward = false;
  forward_positions.clear();
}

}  // namespace fsdp2::detail
