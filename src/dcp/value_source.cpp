#include "dcp/value_source.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>

#include "dcp/local_parts.h"
#include "dcp/staging_buffer.h"
#include "process/collectives.h"
#include "torch_compat.h"

namespace fsdp2::dcp::detail {

namespace {

constexpr char kWanted = 1;

/// On which tensors of a model on this rank's device travel fastest.
c10::Device wire_device(const ProcessGroup& group) {
  const c10::Device device = local_device();
  return fsdp2::detail::has_backend(*group, device.type()) ? device : c10::Device(c10::kCPU);
}

}  // namespace

ValueSource::ValueSource(const StateDictOptions& options, const std::function<StateDict()>& make)
    : may_take_over_(!options.full_state_dict) {
  const bool alone = !options.group && !is_initialized();
  if (options.broadcast_from_rank0 && !alone) {
    exchange_.emplace(options.group);
    group_ = fsdp2::detail::group_or_default(options.group);
    receive(make);
  } else {
    dict_ = make();
  }
}

void ValueSource::receive(const std::function<StateDict()>& make) {
  std::string bytes;
  const std::vector<std::string> sizes = exchange_->gather("reading the state dict of rank 0", [&] {
    if (exchange_->rank() == 0) bytes = encode(make(), real_);
    return std::to_string(bytes.size());
  });
  bytes.resize(std::stoull(sizes[0]));
  const auto plain = at::TensorOptions(at::kByte);
  const at::Tensor here = at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, plain);
  at::Tensor travelling = here.to(wire_device(group_));
  fsdp2::detail::broadcast_from(travelling, 0, group_, {"the keys of a state dict"}).wait();
  if (!travelling.is_same(here)) here.copy_(travelling);
  dict_ = decode(bytes, stand_ins_);
}

void ValueSource::check_has_data(const at::Tensor& value, const std::string& fqn) const {
  FSDP2_CHECK(exchange_ || !on_meta(value), kInvalidArgument, "[dcp] the value for ", fqn,
              " is on the meta device; load it first");
}

void ValueSource::agree(const std::function<void()>& plan) {
  if (!exchange_) return plan();
  std::unordered_map<const void*, size_t> place;
  for (size_t i = 0; i < stand_ins_.size(); ++i) place[stand_ins_[i].unsafeGetTensorImpl()] = i;
  const std::vector<std::string> answers = exchange_->gather("checking a state dict", [&] {
    plan();
    std::string wants(stand_ins_.size(), 0);
    for (const auto& [value, put] : wanted_) {
      const auto found = place.find(value.unsafeGetTensorImpl());
      if (found != place.end()) wants[found->second] = kWanted;
    }
    return wants;
  });
  needed_.assign(stand_ins_.size(), 0);
  for (const std::string& wants : answers) {
    for (size_t i = 0; i < wants.size(); ++i) needed_[i] |= wants[i];
  }
}

void ValueSource::deliver() {
  if (!exchange_) {
    for (const auto& [value, put] : wanted_) put(value, may_take_over_);
    return;
  }
  std::unordered_map<const void*, std::vector<const PutTensor*>> places;
  for (const auto& [value, put] : wanted_) {
    if (on_meta(value)) {
      places[value.unsafeGetTensorImpl()].push_back(&put);
    } else {
      put(value, /*own=*/false);  // came with the dict
    }
  }
  const bool sends = exchange_->rank() == 0;
  const c10::Device device = wire_device(group_);
  StagingBuffer staging;
  int64_t largest = 0;
  for (size_t i = 0; i < stand_ins_.size(); ++i) {
    if (needed_[i]) largest = std::max(largest, static_cast<int64_t>(stand_ins_[i].nbytes()));
  }
  if (!sends) staging.reserve(largest, device);
  for (size_t i = 0; i < stand_ins_.size(); ++i) {
    if (!needed_[i]) continue;
    const at::Tensor& like = stand_ins_[i];
    const bool as_it_is =
        sends && real_[i].is_contiguous() && real_[i].device() == device && !real_[i].is_conj() && !real_[i].is_neg();
    at::Tensor value = as_it_is ? real_[i].detach() : staging.get(like.sizes(), like.scalar_type(), device);
    if (sends && !as_it_is) value.copy_(real_[i]);
    fsdp2::detail::broadcast_from(value, 0, group_, {"a tensor of a state dict"}).wait();
    for (const PutTensor* put : places[like.unsafeGetTensorImpl()]) (*put)(value, /*own=*/false);
  }
}

}  // namespace fsdp2::dcp::detail
