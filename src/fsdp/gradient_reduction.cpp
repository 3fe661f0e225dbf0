#include "fsdp/gradient_reduction.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <fsdp2/error.h>

#include "fsdp/counting.h"
#include "fsdp/profile_range.h"
#include "fsdp/trace.h"
#include "fsdp/training_context.h"

namespace fsdp2::detail {

namespace {

/// Dtypes of small range are divided in two steps, before and after the sum, so that neither overflows.
bool divides_in_two_steps(at::ScalarType dtype) { return dtype != at::kFloat && dtype != at::kBFloat16; }

double first_divisor(double total) {
  double factor = 1;
  while (std::fmod(total, factor) == 0 && total / factor > factor) {
    factor *= 2;
  }
  return factor;
}

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

/// Whether sums in this dtype can be staged.
bool can_sum(at::ScalarType dtype) { return is_half(dtype) || dtype == at::kFloat || dtype == at::kDouble; }

/// Whether the sum of such gradients, formed in float, is what the reduction dtype asks for.
bool sums_as(at::ScalarType gradient, at::ScalarType reduce) {
  return gradient == reduce || (is_half(gradient) && reduce == at::kFloat);
}

/// The gradients of a bucket's members, which stand in the same order among those of all buckets, with their offsets.
template <class Use>
void for_members(const std::vector<std::pair<size_t, int64_t>>& members,
                 std::vector<std::pair<size_t, Tensor>>& gradients, Use&& use) {
  size_t next = 0;
  for (auto& [index, gradient] : gradients) {
    if (next == members.size() || members[next].first != index) continue;  // of another bucket
    use(index, members[next++].second, gradient);
  }
}

}  // namespace

GradientReduction::GradientReduction(std::shared_ptr<ParamGroup> group,
                                     std::vector<std::pair<size_t, Tensor>> gradients, bool all_reduce)
    : group_(std::move(group)), all_reduce_(all_reduce), times_shown_(group_->times_shown()) {
  const PlainWork plain;
  const ProfileRange range("FSDP::reduce");
  trace("reduce", group_->module_fqn);
  if (group_->mesh_.size() == 1 && !group_->settings.all_reduce_hook) {
    add_alone(gradients);
    return;
  }
  sort_into_buckets(gradients);
  for (Bucket& bucket : buckets_) {
    if (stage(bucket, gradients)) continue;
    copy_in(bucket, gradients);
    start(bucket);
  }
  constexpr size_t kLightBytes = size_t{512} << 10;
  is_light_ = ranks_compared() && std::all_of(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
                return bucket.out.nbytes() * static_cast<size_t>(group_->size_) <= kLightBytes;
              });
}

double GradientReduction::divisor() const {
  return group_->settings.divide_factor.value_or(static_cast<double>(group_->mesh_.size()));
}

void GradientReduction::sort_into_buckets(const std::vector<std::pair<size_t, Tensor>>& gradients) {
  for (const auto& [index, gradient] : gradients) {
    const FSDPParam& param = group_->params_[index];
    at::ScalarType dtype = gradient.defined() ? gradient.scalar_type() : param.orig_dtype();
    if (at::isFloatingType(dtype)) {
      if (!gradient.defined() && group_->policy_.param_dtype) dtype = *group_->policy_.param_dtype;
      dtype = group_->policy_.reduce_dtype.value_or(dtype);
    }
    Bucket* bucket = nullptr;
    for (Bucket& candidate : buckets_) {
      if (candidate.dtype == dtype) bucket = &candidate;
    }
    if (bucket == nullptr) {
      bucket = &buckets_.emplace_back();
      bucket->dtype = dtype;
      bucket->members.reserve(gradients.size());
    }
    bucket->members.emplace_back(index, bucket->numel);
    bucket->numel += param.padded_numel();
  }
}

/// One rank in all: nothing to communicate.
void GradientReduction::add_alone(std::vector<std::pair<size_t, Tensor>>& gradients) {
  for (auto& [index, gradient] : gradients) {
    FSDPParam& param = group_->params_[index];
    Tensor local = gradient.defined() ? gradient.to(param.device(), param.orig_dtype()).contiguous()
                                      : at::zeros(param.local().sizes(), param.local().options().requires_grad(false));
    if (divisor() != 1) {
      local = local.div(divisor());
    }
    gradient = Tensor();
    add_to(param, std::move(local));
    added_.push_back(index);
  }
}

/// Starts a reduction out of the gradients themselves, where the backend can and nobody wants the buffer. Whether it
/// does follows from what is equal on all ranks; the dtypes of gradients are not, since one that was accumulated
/// without a reduction has the reduction's already.
bool GradientReduction::stage(Bucket& bucket, std::vector<std::pair<size_t, Tensor>>& gradients) {
  const GroupSettings& settings = group_->settings;
  if (group_->size_ == 1 || settings.reduce_scatter || settings.allocate_from_group || !can_sum(bucket.dtype) ||
      !group_->compute_device().is_cpu()) {
    return false;
  }
  bool can = true;
  for (const auto& [index, offset] : bucket.members) can &= group_->params_[index].geometry().outer == 1;
  if (!can) return false;
  auto ring = staging_ring_of(group_->reduce_scatter_group());
  if (!ring) return false;
  std::optional<at::ScalarType> dtype;
  bool as_they_are = true;
  std::vector<StagedReduction::Piece> pieces;
  pieces.reserve(bucket.members.size());
  uint64_t fingerprint = static_cast<uint64_t>(bucket.numel) ^ (static_cast<uint64_t>(bucket.dtype) << 56);
  for_members(bucket.members, gradients, [&](size_t index, int64_t, const Tensor& gradient) {
    if (gradient.defined()) {
      as_they_are &= dtype.value_or(gradient.scalar_type()) == gradient.scalar_type();
      dtype = gradient.scalar_type();
    }
    fingerprint = (fingerprint ^ (index + 1)) * 0xff51afd7ed558ccd + (fingerprint >> 29);
    pieces.push_back({gradient, group_->params_[index].padded_numel()});
  });
  if (!dtype || !as_they_are || !sums_as(*dtype, bucket.dtype)) dtype = bucket.dtype;
  for (StagedReduction::Piece& piece : pieces) {
    if (!piece.gradient.defined() || (piece.gradient.scalar_type() == *dtype && piece.gradient.is_contiguous()))
      continue;
    piece.gradient = piece.gradient.to(*dtype).contiguous();
  }
  // The pieces hold them now.
  for_members(bucket.members, gradients, [](size_t, int64_t, Tensor& gradient) { gradient = Tensor(); });
  bucket.out = at::empty({bucket.numel}, at::TensorOptions(bucket.dtype));
  const bool two_steps = divides_in_two_steps(bucket.dtype);
  bucket.divided = group_->mesh_.replicate_size == 1 && !settings.force_sum && !(two_steps && settings.all_reduce_hook);
  const double now = bucket.divided ? divisor() : two_steps ? first_divisor(divisor()) : 1;
  const auto hash = std::hash<std::string>()(group_->label());
  count_collective(CollectiveOp::kReduceScatter, group_->size_ * static_cast<int64_t>(bucket.out.nbytes()));
  bucket.staged = std::make_unique<StagedReduction>(std::move(ring), std::move(pieces), *dtype, bucket.out, now,
                                                    fingerprint ^ hash, group_->label());
  return true;
}

void GradientReduction::copy_in(Bucket& bucket, std::vector<std::pair<size_t, Tensor>>& gradients) {
  const ProfileRange range("FSDP::copies");
  const int64_t size = group_->size_;
  const auto options = at::TensorOptions(bucket.dtype).device(group_->compute_device());
  const auto& custom = group_->settings.reduce_scatter;
  if (custom && size > 1) {
    bucket.in = custom->allocate({size * bucket.numel}, options);
    check_custom_buffer(bucket.in, size * bucket.numel, bucket.dtype, "reduce-scatter's allocate() returned",
                        group_->label());
  } else if (size > 1) {
    bucket.in = group_->communication_buffer(size * bucket.numel, options, group_->reduce_scatter_group());
  } else {
    bucket.in = at::empty({bucket.numel}, options);
  }
  bucket.in = bucket.in.view({size, bucket.numel});
  for_members(bucket.members, gradients, [&](size_t index, int64_t offset, Tensor& gradient) {
    const FSDPParam& param = group_->params_[index];
    const Tensor slots = bucket.in.narrow(1, offset, param.padded_numel());
    if (gradient.defined()) {
      split_into_parts(gradient.reshape({-1}), slots, param.geometry());
    } else {
      slots.zero_();
    }
    gradient = Tensor();
  });
}

void GradientReduction::start(Bucket& bucket) {
  const double first = divides_in_two_steps(bucket.dtype) ? first_divisor(divisor()) : 1;
  if (first != 1) {
    bucket.in.div_(first);
  }
  if (group_->size_ == 1) {
    bucket.out = bucket.in.view({-1});
    return;
  }
  const GroupSettings& settings = group_->settings;
  const ProcessGroup group = group_->reduce_scatter_group();
  Tensor in = bucket.in.view({-1});
  bucket.out = settings.reduce_scatter ? settings.reduce_scatter->allocate({bucket.numel}, in.options())
                                       : group_->communication_buffer(bucket.numel, in.options(), group);
  if (settings.reduce_scatter) {
    check_custom_buffer(bucket.out, bucket.numel, bucket.dtype, "reduce-scatter's allocate() returned",
                        group_->label());
  }
  const auto bytes = static_cast<int64_t>(in.nbytes());
  count_collective(CollectiveOp::kReduceScatter, bytes);
  if (settings.reduce_scatter) {
    bucket.work = custom_collective(CollectiveOp::kReduceScatter, group, {bucket.out, in}, bytes,
                                    [&] { return (*settings.reduce_scatter)(bucket.out, in, group, ReduceOp::SUM); },
                                    {group_->label().c_str()});
    check_custom_buffer(bucket.out, bucket.numel, bucket.dtype, "reduce-scatter left in `out`", group_->label());
  } else {
    bucket.work = reduce_scatter(bucket.out, in, ReduceOp::SUM, group, {group_->label().c_str()});
  }
}

void GradientReduction::finish_reduce_scatter() {
  holds_input_ = false;
  if (buckets_.empty()) return;  // one rank
  const ProfileRange range("FSDP::reduce");
  const PlainWork plain;
  for (Bucket& bucket : buckets_) {
    if (bucket.staged) {
      if (!bucket.staged->finish()) throw_ranks_differ(bucket);
      bucket.staged.reset();
    }
    bucket.work.wait();
    bucket.in = Tensor();
    if (all_reduce_ && group_->mesh_.replicate_size > 1) {
      start_all_reduce(bucket);
    }
  }
  // Every rank sent its gradients, and so was done with the parameters.
  if (group_->settings.reduce_scatter) return;
  if (times_shown_ == group_->times_shown()) group_->check_unwritten_in_place();
  group_->note_all_have_read(times_shown_);
}

/// On all ranks of the shard axis.
void GradientReduction::throw_ranks_differ(const Bucket& bucket) const {
  std::string names;
  for (const auto& [index, offset] : bucket.members) {
    names += (names.empty() ? "" : ", ") + group_->params_[index].fqn();
  }
  throw_different_reductions(names, group_->mesh_.shard_group);
}

bool GradientReduction::ranks_compared() const {
  return group_->mesh_.replicate_size == 1 &&
         std::all_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.staged != nullptr; });
}

void GradientReduction::start_all_reduce(Bucket& bucket) {
  // What earlier backwards summed over the shards only joins before the sum over the replicas.
  for (const auto& [index, offset] : bucket.members) {
    FSDPParam& param = group_->params_[index];
    if (Tensor alive = param.param(); alive.defined()) {
      if (const Tensor earlier = param.gradient.take_partial_sum(alive, param.fqn()); earlier.defined()) {
        param.local_view_of(bucket.out, offset).add_(earlier);
      }
    }
  }
  count_collective(CollectiveOp::kAllReduce, static_cast<int64_t>(bucket.out.nbytes()));
  bucket.work = all_reduce(bucket.out, ReduceOp::SUM, group_->mesh_.replicate_group, {group_->label().c_str()});
}

void GradientReduction::run_user_hook(Tensor& reduced) const {
  const auto& hook = group_->settings.all_reduce_hook;
  const auto& stream = group_->settings.all_reduce_hook_stream;
  if (!hook) {
    return;
  }
  const Tensor given = reduced;
  if (!stream || stream->device().is_cpu()) {
    hook(reduced);
  } else {
    const c10::impl::VirtualGuardImpl device(stream->device_type());
    const c10::Stream current = device.getStream(stream->device());
    c10::Event before(stream->device_type()), after(stream->device_type());
    before.record(current);
    before.block(*stream);
    {
      const c10::StreamGuard guard(*stream);
      hook(reduced);
    }
    after.record(*stream);
    after.block(current);
  }
  FSDP2_CHECK(reduced.defined() && reduced.sizes() == given.sizes() && reduced.scalar_type() == given.scalar_type() &&
                  reduced.is_contiguous(),
              kInvalidArgument, "[fsdp] the all-reduce hook for ", group_->label(), " got ", given.sizes(), " of ",
              given.scalar_type(), " and left ",
              reduced.defined()
                  ? c10::str(reduced.sizes(), " of ", reduced.scalar_type(), ", strides ", reduced.strides())
                  : std::string("no tensor"),
              "; it may change values only");
}

void GradientReduction::abandon() noexcept {
  try {
    for (Bucket& bucket : buckets_) {
      if (bucket.staged) bucket.staged->finish();  // the others wait for this rank's part
    }
  } catch (const std::exception&) {
    // Another error is being reported; what failed once is not waited for again.
  }
  for (Bucket& bucket : buckets_) bucket.work.abandon();
  buckets_.clear();
}

void GradientReduction::finish() {
  if (holds_input_) {
    finish_reduce_scatter();
  }
  finish_buckets();
  group_->run_post_accumulate_hooks(std::exchange(added_, {}));
}

void GradientReduction::finish_buckets() {
  if (buckets_.empty()) return;
  const ProfileRange range("FSDP::reduce");
  const PlainWork plain;
  const bool one_replica = group_->mesh_.replicate_size == 1;
  for (Bucket& bucket : buckets_) {
    bucket.work.wait();
    if (!all_reduce_ && !one_replica) {
      keep_partial_sums(bucket);
      bucket.out = Tensor();
      continue;
    }
    const bool two_steps = divides_in_two_steps(bucket.dtype);
    const double rest = bucket.divided ? 1 : two_steps ? divisor() / first_divisor(divisor()) : divisor();
    // As in Python, the hook sees averages where the backend could average.
    const bool hook_sees_average = !two_steps && !group_->settings.force_sum;
    if (rest != 1 && hook_sees_average) bucket.out.div_(rest);
    run_user_hook(bucket.out);
    if (rest != 1 && !hook_sees_average) bucket.out.div_(rest);
    add_to_gradients(bucket);
    bucket.out = Tensor();
  }
  buckets_.clear();
}

void GradientReduction::keep_partial_sums(Bucket& bucket) {
  for (const auto& [index, offset] : bucket.members) {
    FSDPParam& param = group_->params_[index];
    if (Tensor alive = param.param(); alive.defined()) {
      param.gradient.keep_partial_sum(alive, param.local_view_of(bucket.out, offset), param.sharded_spec(),
                                      param.partial_sum_placements());
    }
  }
}

void GradientReduction::add_to_gradients(Bucket& bucket) {
  Tensor cast = bucket.out;
  added_.reserve(added_.size() + bucket.members.size());
  for (const auto& [index, offset] : bucket.members) {
    FSDPParam& param = group_->params_[index];
    if (cast.scalar_type() != param.orig_dtype() || cast.device() != param.device()) {
      cast = bucket.out.to(param.device(), param.orig_dtype());
    }
    add_to(param, param.local_view_of(cast, offset));
    added_.push_back(index);
  }
}

void GradientReduction::add_to(FSDPParam& param, Tensor local) {
  if (Tensor alive = param.param(); alive.defined()) {
    param.gradient.add_reduced(alive, param.sharded_spec(), std::move(local));
  }
}

}  // namespace fsdp2::detail
