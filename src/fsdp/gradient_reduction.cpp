#include "fsdp/gradient_reduction.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <fsdp2/error.h>

#include "fsdp/counting.h"

namespace fsdp2::detail {

namespace {

/// Dtypes of small range are divided in two steps, before and after the sum, so that neither overflows.
bool divides_in_two_steps(at::ScalarType dtype) { return dtype != at::kFloat && dtype != at::kBFloat16; }

double first_divisor(int64_t total) {
  int64_t factor = 1;
  while (total % factor == 0 && total / factor > factor) {
    factor *= 2;
  }
  return static_cast<double>(factor);
}

}  // namespace

GradientReduction::GradientReduction(std::shared_ptr<ParamGroup> group,
                                     std::vector<std::pair<size_t, Tensor>> gradients)
    : group_(std::move(group)) {
  const c10::InferenceMode normal_tensors(false);
  const BelowDTensor below;
  const at::NoGradGuard no_grad;
  if (group_->size_ == 1) {
    reduce_alone(gradients);
    return;
  }
  for (const auto& [index, gradient] : gradients) {
    const auto wanted = group_->policy_.reduce_dtype;
    const at::ScalarType dtype = wanted && gradient.is_floating_point() ? *wanted : gradient.scalar_type();
    Bucket* bucket = nullptr;
    for (Bucket& candidate : buckets_) {
      if (candidate.dtype == dtype) bucket = &candidate;
    }
    if (bucket == nullptr) {
      bucket = &buckets_.emplace_back();
      bucket->dtype = dtype;
    }
    bucket->members.emplace_back(index, bucket->numel);
    bucket->numel += group_->params_[index].padded_numel();
  }
  for (Bucket& bucket : buckets_) {
    copy_in(bucket, gradients);
    start(bucket);
  }
}

void GradientReduction::reduce_alone(std::vector<std::pair<size_t, Tensor>>& gradients) {
  for (auto& [index, gradient] : gradients) {
    FSDPParam& param = group_->params_[index];
    Tensor alive = param.param();
    if (alive.defined()) {
      GradientSlot::add_reduced(alive, param.sharded_spec(), gradient.to(param.orig_dtype()).contiguous());
    }
    gradient = Tensor();
  }
}

void GradientReduction::copy_in(Bucket& bucket, std::vector<std::pair<size_t, Tensor>>& gradients) {
  const int64_t size = group_->size_;
  const c10::Device device = group_->params_[bucket.members.front().first].device();
  bucket.in = at::empty({size, bucket.numel}, at::TensorOptions(bucket.dtype).device(device));
  size_t next = 0;
  for (auto& [index, gradient] : gradients) {
    if (next == bucket.members.size() || bucket.members[next].first != index) {
      continue;  // of another bucket
    }
    const FSDPParam& param = group_->params_[index];
    const int64_t chunk = param.padded_numel();
    Tensor slots = bucket.in.narrow(1, bucket.members[next++].second, chunk);  // (size, chunk)
    const Tensor flat = gradient.reshape({-1});
    const int64_t full_ranks = chunk == 0 ? 0 : flat.numel() / chunk;
    if (full_ranks > 0) {
      slots.narrow(0, 0, full_ranks).copy_(flat.narrow(0, 0, full_ranks * chunk).view({full_ranks, chunk}));
    }
    if (full_ranks < size) {
      Tensor rest = slots.narrow(0, full_ranks, size - full_ranks);
      rest.zero_();
      const int64_t left = flat.numel() - full_ranks * chunk;
      rest[0].narrow(0, 0, left).copy_(flat.narrow(0, full_ranks * chunk, left));
    }
    gradient = Tensor();
  }
}

void GradientReduction::start(Bucket& bucket) {
  const auto ranks = static_cast<double>(group_->size_);
  bucket.divide_after = ranks;
  if (divides_in_two_steps(bucket.dtype)) {
    const double before = first_divisor(group_->size_);
    bucket.in.div_(before);
    bucket.divide_after = ranks / before;
  }
  bucket.out = at::empty({bucket.numel}, bucket.in.options());
  count_collective(CollectiveOp::kReduceScatter, static_cast<int64_t>(bucket.in.nbytes()));
  bucket.work = reduce_scatter(bucket.out, bucket.in, ReduceOp::SUM, group_->group_, {group_->label().c_str()});
}

void GradientReduction::finish() {
  const c10::InferenceMode normal_tensors(false);
  const BelowDTensor below;
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    bucket.work.wait();
    bucket.in = Tensor();
    if (bucket.divide_after != 1) {
      bucket.out.div_(bucket.divide_after);
    }
    add_to_gradients(bucket);
    bucket.out = Tensor();
  }
  buckets_.clear();
}

void GradientReduction::add_to_gradients(Bucket& bucket) {
  Tensor cast = bucket.out;
  for (const auto& [index, offset] : bucket.members) {
    FSDPParam& param = group_->params_[index];
    Tensor alive = param.param();
    if (!alive.defined()) {
      continue;
    }
    if (cast.scalar_type() != param.orig_dtype()) {
      cast = bucket.out.to(param.orig_dtype());
    }
    GradientSlot::add_reduced(alive, param.sharded_spec(),
                              param.local_view_of(cast.narrow(0, offset, param.padded_numel())));
  }
}

}  // namespace fsdp2::detail
