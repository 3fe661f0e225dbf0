#include "fsdp/param_group.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include "backend/fake.h"
#include "fsdp/leaf_slot.h"
#include "module/written.h"
#include "process/debug_level.h"

namespace fsdp2::detail {

ParamGroup::ParamGroup(const std::vector<Named>& params, const DataParallelMesh& mesh,
                       const MixedPrecisionPolicy& policy, c10::Device device,
                       const std::optional<CPUOffloadPolicy>& offload)
    : mesh_(mesh), size_(mesh.shard_size), rank_(mesh.shard_rank), policy_(policy), device_(device), offload_(offload) {
  const PlainWork plain;
  params_.reserve(params.size());
  std::vector<Tensor> locals;
  std::vector<std::string> fqns;
  std::vector<size_t> unwritten;
  for (const Named& named : params) {
    // The watch is by version, and the shard begins with a new one.
    if (detail::is_unwritten(named.param)) unwritten.push_back(params_.size());
    forget_unwritten(named.param);
    const FSDPParam& param = params_.emplace_back(named.param, named.fqn, mesh, named.shard_dim);
    const Tensor whole = is_marked(named.param) ? local_of(named.param) : named.param.variable_data();
    locals.push_back(named.local.defined() ? named.local : param.own_rows_of(whole));
    fqns.push_back(named.fqn);
  }
  if (offload_ && offload_->pin_memory && device.is_cpu()) {
    FSDP2_LOG_WARN_ONCE("[fsdp] CPUOffloadPolicy::pin_memory has no effect without an accelerator");
  }
  build_buffers(locals, offload_ ? c10::Device(at::kCPU) : device);
  set_fqns(fqns);
  for (const size_t index : unwritten) params_[index].expect_write();
  ask_ranks_for_unwritten_ = !unwritten.empty();
}

void ParamGroup::build_buffers(const std::vector<Tensor>& locals, c10::Device device) {
  buffers_.clear();
  shared_.reset();
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::ScalarType dtype = locals[i].scalar_type();
    auto buffer =
        std::find_if(buffers_.begin(), buffers_.end(), [&](const ShardBuffer& b) { return b.dtype == dtype; });
    if (buffer == buffers_.end()) {
      buffer = buffers_.insert(buffers_.end(), ShardBuffer{});
      buffer->dtype = dtype;
    }
    const int64_t offset =
        buffer->members.empty() ? 0 : buffer->offsets.back() + params_[buffer->members.back()].padded_numel();
    buffer->members.push_back(i);
    buffer->offsets.push_back(offset);
  }
  for (ShardBuffer& buffer : buffers_) {
    buffer.numel = buffer.offsets.back() + params_[buffer.members.back()].padded_numel();
    const bool meta =
        std::any_of(buffer.members.begin(), buffer.members.end(), [&](size_t i) { return locals[i].is_meta(); });
    buffer.flat = shard_memory(buffer.numel, buffer.dtype, meta ? c10::Device(at::kMeta) : device);
    for (size_t k = 0; k < buffer.members.size(); ++k) {
      Tensor local = lay_out(buffer, k);
      if (!meta) {
        local.copy_(locals[buffer.members[k]]);
      }
      params_[buffer.members[k]].set_sharded(std::move(local));
    }
  }
  build_gather_buckets();
}

Tensor ParamGroup::shard_memory(int64_t numel, at::ScalarType dtype, c10::Device device) const {
  const bool pinned = offload_ && offload_->pin_memory && device.is_cpu() && !device_.is_cpu();
  return at::empty({numel}, at::TensorOptions(dtype).device(device).pinned_memory(pinned));
}

/// The member's rows in the buffer; the padding behind them becomes zero.
Tensor ParamGroup::lay_out(const ShardBuffer& buffer, size_t member) const {
  const FSDPParam& param = params_[buffer.members[member]];
  const Tensor slot = buffer.flat.narrow(0, buffer.offsets[member], param.padded_numel());
  Tensor local = param.local_view_of(slot, 0);
  slot.narrow(0, local.numel(), slot.numel() - local.numel()).zero_();
  return can_share() && !local.is_meta() ? own_storage(local) : local;
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
    auto bucket =
        std::find_if(gathers_.begin(), gathers_.end(), [&](const GatherBucket& g) { return g.dtype == dtype; });
    if (bucket == gathers_.end()) {
      bucket = gathers_.insert(gathers_.end(), GatherBucket{});
      bucket->dtype = dtype;
    }
    bucket->members.push_back({i, home[i].first, home[i].second, bucket->numel, bucket->part_numel});
    bucket->numel += params_[i].padded_numel();
    bucket->part_numel += part_mesh_ ? params_[i].geometry().padded_numel(part_mesh_->size(1)) : 0;
  }
}

void ParamGroup::install_leaf_hooks(const std::shared_ptr<void>& owner_token) {
  for (size_t i = 0; i < params_.size(); ++i) {
    Tensor param = params_[i].param();
    if (const auto target = leaf_target_of(param)) {  // of another group before, and hooked
      *target = {weak_from_this(), i};
      set_leaf_target(param, target, owner_token);
      continue;
    }
    const auto target = std::make_shared<LeafTarget>(LeafTarget{weak_from_this(), i});
    set_leaf_target(param, target, owner_token);
    if (!at::isFloatingType(param.scalar_type()) && !at::isComplexType(param.scalar_type())) {
      continue;  // can never require a gradient
    }
    const bool trainable = param.requires_grad();
    param.unsafeGetTensorImpl()->set_requires_grad(true);  // a frozen parameter may be unfrozen later
    param.register_hook([target](const Tensor& gradient) {
      if (const auto group = target->group.lock()) {
        group->on_leaf_gradient(target->index, gradient);
      }
      return Tensor();
    });
    param.unsafeGetTensorImpl()->set_requires_grad(trainable);
  }
}

ParamGroup::Named ParamGroup::give_up(const Tensor& param) {
  const PlainWork plain;
  adopt_foreign_data();
  Named given;
  std::vector<Tensor> locals;
  std::vector<FSDPParam> rest;
  std::vector<std::string> fqns;
  for (FSDPParam& each : params_) {
    const Tensor alive = each.param();
    if (alive.is_same(param)) {
      given = {param, each.fqn(), each.shard_dim(), each.local()};
      continue;
    }
    if (const auto target = leaf_target_of(alive)) {
      target->index = rest.size();
    }
    locals.push_back(each.local());
    fqns.push_back(each.fqn());
    rest.push_back(std::move(each));
  }
  params_ = std::move(rest);
  build_buffers(locals, given.local.device());
  set_fqns(fqns);
  return given;
}

void ParamGroup::keep_parts_over(std::optional<DeviceMesh> mesh) {
  if (state_ != DataState::kUnsharded) {
    reshard();  // parts, or a gather of them, need the mesh that made them
  }
  part_mesh_ = std::move(mesh);
  build_gather_buckets();
}

c10::Device ParamGroup::compute_device() const { return offload_ ? device_ : params_.front().device(); }

std::string ParamGroup::settings_text() const {
  std::string text;
  if (part_mesh_) text += c10::str("kept over ", part_mesh_->size(1), " ranks, ");
  if (settings.divide_factor) text += c10::str("divide factor ", *settings.divide_factor, ", ");
  if (settings.reduce_unused) text += "unused parameters reduced, ";
  if (!settings.unshard_in_backward) text += "not gathered in backward, ";
  return text;
}

void ParamGroup::set_fqns(const std::vector<std::string>& fqns) {
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].set_fqn(fqns[i]);
  }
  label_ = c10::str("parameter ", fqns.empty() ? "" : fqns.front(),
                    fqns.size() > 1 ? c10::str(" and ", fqns.size() - 1, " more") : std::string());
}

void ParamGroup::check_ready() {
  std::string on_meta, unwritten, off_cpu;
  for (const FSDPParam& param : params_) {
    if (offload_ && !param.local().is_meta() && !param.device().is_cpu()) {
      off_cpu += c10::str(off_cpu.empty() ? "" : ", ", param.fqn(), " (on ", param.device(), ")");
    }
    if (param.local().is_meta()) {
      if (fake_backend::is_fake(mesh_.shard_group)) continue;  // it stays there
      on_meta += (on_meta.empty() ? "" : ", ") + param.fqn();
    } else if (param.is_unwritten()) {
      unwritten += (unwritten.empty() ? "" : ", ") + param.fqn();
    }
  }
  if (ask_ranks_for_unwritten_ && size_ > 1 && debug_level() != 0) {
    // A rank without rows cannot tell; it must not wait in a gather that the others refuse.
    for (const std::string& names : all_gather_strings(unwritten, mesh_.shard_group)) {
      if (unwritten.empty()) unwritten = names;
    }
  }
  ask_ranks_for_unwritten_ &= !unwritten.empty();
  FSDP2_CHECK(
      on_meta.empty(), kUsage, "[fsdp] parameters ", on_meta,
      " are still on the meta device and have no data; "
      "call to_empty(model, device) and reset_parameters(model), or load a checkpoint, before the first forward");
  FSDP2_CHECK(unwritten.empty(), kUsage, "[fsdp] parameters ", unwritten,
              " were given memory by to_empty() but never "
              "written; call reset_parameters(model), load a checkpoint, or mark_initialized(module) where values were "
              "written through raw pointers");
  FSDP2_CHECK(off_cpu.empty(), kUsage,
              "[fsdp] with offload_policy the shards must be on the CPU, but these are not: ", off_cpu,
              "; call to_empty(model, torch::kCPU), or model->to(torch::kCPU)");
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

void ParamGroup::to_empty(c10::Device device) {
  reshard();
  const PlainWork plain;
  adopt_foreign_data();
  if (offload_) {
    device = at::kCPU;
  }
  shared_.reset();
  for (ShardBuffer& buffer : buffers_) {
    buffer.flat = shard_memory(buffer.numel, buffer.dtype, device);
    for (size_t k = 0; k < buffer.members.size(); ++k) {
      FSDPParam& param = params_[buffer.members[k]];
      param.set_sharded(lay_out(buffer, k));
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

}  // namespace fsdp2::detail
