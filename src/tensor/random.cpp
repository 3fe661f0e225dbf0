// Random fills. Note [Random values do not depend on the layout]
// Every rank draws the whole tensor from the same generator state and keeps its part, so a sharded tensor gets the
// values that the unsharded one would have had. Generators cannot be advanced without drawing, bit for bit, so there is
// no cheaper way. That the states are equal is checked, because a difference would give every rank parts of another
// tensor without any sign of it.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/Generator.h>

#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include <fsdp2/error.h>

#include "tensor/operators.h"
#include "tensor/random.h"
#include "tensor/redistribute.h"

namespace fsdp2::detail {
namespace {

/// 64-bit mix over the words of the state; two states that differ give two numbers, but for chance.
int64_t hash_of(const Tensor& state) {
  const Tensor bytes = state.contiguous();
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  const size_t count = bytes.nbytes();
  uint64_t hash = 0x9E3779B97F4A7C15ull ^ count;
  for (size_t offset = 0; offset < count; offset += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + offset, std::min(sizeof(word), count - offset));
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDull;
    hash ^= hash >> 32;
  }
  return static_cast<int64_t>(hash);
}

std::optional<at::Generator> generator_of(const OperatorCall& call) {
  for (size_t index = 0; index < call.info.num_args; ++index) {
    const auto& value = call.arg(index);
    if (value.isGenerator()) return value.toGenerator();
  }
  return std::nullopt;
}

/// Replaces argument 0 by a whole tensor, runs the operator on it and gives this rank's part of its result.
Tensor draw(OperatorCall& call, const DTensorSpec& spec) {
  BelowDTensor below;
  at::NoGradGuard no_grad;
  if (spec.local.is_meta()) {
    call.arg(0) = at::empty(spec.local.sizes(), spec.local.options());
    call.op.callBoxed(call.stack);
    return std::move(call.result(0)).toTensor();
  }
  const auto given = generator_of(call);
  check_generators_agree(given && given->defined() ? *given
                                                   : at::globalContext().defaultGenerator(spec.local.device()),
                         spec.mesh, operator_text(call.op) + " on " + describe(spec));
  call.arg(0) = at::empty(spec.sizes, spec.local.options());
  call.op.callBoxed(call.stack);
  const Tensor full = std::move(call.result(0)).toTensor();
  return cut_for_this_rank(full, *spec.layout);
}

}  // namespace

void check_generators_agree(at::Generator generator, const DeviceMesh& mesh, const std::string& what) {
  Tensor state;
  {
    std::scoped_lock lock(generator.mutex());
    state = generator.get_state();
  }
  const BelowDTensor below;
  const Tensor mine = at::full({1}, hash_of(state), at::kLong).to(control_device(mesh));
  const Tensor hashes = gather_over_axes(mine, mesh, all_axes(mesh), what).view({-1}).cpu();
  const auto* values = hashes.const_data_ptr<int64_t>();
  const Tensor ranks = mesh.ranks().reshape({-1}).contiguous();
  std::string different;
  for (int64_t index = 1; index < hashes.numel(); ++index) {
    if (values[index] == values[0]) continue;
    different += (different.empty() ? "" : ", ") + std::to_string(ranks.const_data_ptr<int64_t>()[index]);
  }
  FSDP2_CHECK(different.empty(), kUsage, "[dtensor] ", what, ": the random generator of rank(s) ", different,
              " is in another state than that of rank ", ranks.const_data_ptr<int64_t>()[0],
              ", so each rank would draw another tensor; call torch::manual_seed with one seed on all ranks and draw "
              "the same numbers on all of them");
}

void run_random(OperatorCall& call) {
  const Tensor self = call.arg(0).toTensor();
  const auto& spec = single_operand(call);
  const Tensor part = draw(call, spec);
  BelowDTensor below;
  at::NoGradGuard no_grad;
  Tensor local = spec.local;
  local.copy_(part);
  call.result(0) = self;
}

void run_random_like(OperatorCall& call) {
  const Tensor self = call.arg(0).toTensor();
  const auto& spec = single_operand(call);
  call.result(0) = make_dtensor_like(spec, draw(call, spec));
}

}  // namespace fsdp2::detail
