// Full reductions. Note [One gather per reduction]
// Every rank reduces its part, the parts' values are gathered, and every rank combines them in the same order. So the
// result is the same on every rank to the last bit, NaN and infinities come through (a backend's MAX drops NaN), an
// empty part takes no part, and no dtype depends on what a backend can add. It costs one small collective.

#include <ATen/Functions.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <fsdp2/error.h>

#include "tensor/operators.h"
#include "tensor/redistribute.h"

namespace fsdp2::detail {
namespace {

/// Values of the parts that are not empty, stacked: `mine` has the same shape and dtype on every rank.
Tensor values_of_parts(const DTensorSpec& spec, const Tensor& mine) {
  const auto axes = spec.layout->sharded_axes();
  const bool one_rank =
      std::all_of(axes.begin(), axes.end(), [&](int64_t axis) { return spec.mesh.size(axis) == 1; });
  if (one_rank || mine.is_meta()) return mine.unsqueeze(0);
  std::vector<int64_t> shape{-1};
  shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
  const Tensor all = gather_over_axes(mine, spec.mesh, axes, spec.fqn).view(shape);
  const auto coordinates = coordinates_over_axes(spec.mesh, axes);
  std::vector<int64_t> filled;
  for (size_t index = 0; index < coordinates.size(); ++index) {
    if (c10::multiply_integers(spec.layout->local_shape(coordinates[index])) > 0) {
      filled.push_back(static_cast<int64_t>(index));
    }
  }
  if (filled.size() == coordinates.size()) return all;
  return all.index_select(0, at::tensor(filled, at::kLong).to(all.device()));
}

/// Sums run in float where the dtype is shorter, and over the parts in double.
c10::ScalarType compute_dtype(c10::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

c10::ScalarType wide_dtype(c10::ScalarType dtype) {
  if (at::isComplexType(dtype)) return at::kComplexDouble;
  return at::isFloatingType(dtype) ? at::kDouble : dtype;
}

/// The part, or where it is empty one element that values_of_parts drops: so every rank runs the same operator and
/// meets the same error, and none waits for another in a collective.
Tensor part_or_stand_in(const DTensorSpec& spec) {
  return spec.local.numel() > 0 ? spec.local : at::zeros({1}, spec.local.options());
}

void finish(OperatorCall& call, c10::IValue result) {
  call.drop_args();
  call.stack.push_back(std::move(result));
}

/// Refuses `dim` arguments that leave a dimension; an empty list means all here.
void check_full(const OperatorCall& call, const DTensorSpec& spec, size_t dim_index, size_t keepdim_index) {
  const auto& dim = call.arg(dim_index);
  if (keepdim_index < call.info.num_args && call.arg(keepdim_index).toBool()) {
    throw_not_supported(call.op, spec, "keepdim=true is not offered");
  }
  if (dim.isNone()) return;
  const auto dims = dim.isInt() ? std::vector<int64_t>{dim.toInt()} : dim.toIntVector();
  std::vector<bool> named(spec.sizes.size(), false);
  const auto count = static_cast<int64_t>(spec.sizes.size());
  for (const int64_t index : dims) {
    if (index >= -count && index < count) named[index < 0 ? index + count : index] = true;
  }
  if (dims.empty() || std::find(named.begin(), named.end(), false) == named.end()) return;
  throw_not_supported(call.op, spec, "only the reduction over all dimensions is offered");
}

std::optional<c10::ScalarType> dtype_argument(const OperatorCall& call, const char* name = "dtype") {
  for (size_t index = 0; index < call.info.num_args; ++index) {
    if (call.op.schema().arguments()[index].name() == name) return call.arg(index).toOptional<c10::ScalarType>();
  }
  return std::nullopt;
}

/// Runs `body(spec)` below the DTensor key and pushes its result.
template <class Body>
void reduce(OperatorCall& call, Body&& body) {
  const Tensor self = call.arg(0).toTensor();
  const auto& spec = single_operand(call);
  at::NoGradGuard no_grad;
  BelowDTensor below;
  finish(call, body(spec));
}

c10::ScalarType sum_dtype(const OperatorCall& call, const DTensorSpec& spec) {
  const auto asked = dtype_argument(call);
  if (asked.has_value()) return *asked;
  const auto dtype = spec.local.scalar_type();
  return at::isIntegralType(dtype, /*includeBool=*/true) ? at::kLong : dtype;
}

Tensor global_sum(const DTensorSpec& spec, c10::ScalarType dtype) {
  const Tensor mine = at::sum(spec.local, compute_dtype(dtype));
  return at::sum(values_of_parts(spec, mine), wide_dtype(dtype));
}

template <class Reduce>
void reduce_extremum(OperatorCall& call, Reduce&& extremum) {
  const auto& spec = single_operand(call);
  if (call.info.num_args > 1) check_full(call, spec, 1, 2);
  reduce(call, [&](const DTensorSpec&) -> Tensor {
    if (c10::multiply_integers(spec.sizes) == 0) return extremum(spec.local);  // libtorch's error, on every rank
    return extremum(values_of_parts(spec, extremum(part_or_stand_in(spec))));
  });
}

/// The norms of whole tensors from the norms of their parts; one row per part that is not empty.
Tensor combine_norms(const Tensor& parts, const at::Scalar& ord, c10::ScalarType dtype) {
  const Tensor wide = parts.to(at::kDouble);
  // The 0-norm counts, so it adds up.
  const Tensor total = ord.toDouble() == 0.0 ? at::sum(wide, at::IntArrayRef{0})
                                             : at::linalg_vector_norm(wide, ord, at::IntArrayRef{0});
  return total.to(dtype);
}

c10::ScalarType norm_dtype(const DTensorSpec& spec, std::optional<c10::ScalarType> asked) {
  return c10::toRealValueType(asked.value_or(spec.local.scalar_type()));
}

Tensor local_norm(const DTensorSpec& spec, const at::Scalar& ord, std::optional<c10::ScalarType> asked) {
  const auto dtype = asked.value_or(spec.local.scalar_type());
  FSDP2_CHECK(at::isFloatingType(dtype) || at::isComplexType(dtype), kInvalidArgument, "[dtensor] the norm of ",
              describe(spec), " of ", c10::toString(dtype), ": only floating-point and complex values have one");
  return at::linalg_vector_norm(part_or_stand_in(spec), ord, std::nullopt, false, compute_dtype(dtype));
}

}  // namespace

void run_sum(OperatorCall& call) {
  const auto& spec = single_operand(call);
  if (call.info.num_args == 4) check_full(call, spec, 1, 2);
  const auto dtype = sum_dtype(call, spec);
  reduce(call, [&](const DTensorSpec&) { return global_sum(spec, dtype).to(dtype); });
}

void run_mean(OperatorCall& call) {
  const auto& spec = single_operand(call);
  if (call.info.num_args == 4) check_full(call, spec, 1, 2);
  const auto dtype = dtype_argument(call).value_or(spec.local.scalar_type());
  FSDP2_CHECK(at::isFloatingType(dtype) || at::isComplexType(dtype), kInvalidArgument, "[dtensor] ",
              operator_text(call.op), " of ", describe(spec), " in ", c10::toString(dtype),
              ": only floating-point and complex values have a mean; pass such a dtype");
  reduce(call, [&](const DTensorSpec&) {
    return global_sum(spec, dtype).div_(static_cast<double>(c10::multiply_integers(spec.sizes))).to(dtype);
  });
}

void run_prod(OperatorCall& call) {
  const auto& spec = single_operand(call);
  const auto dtype = sum_dtype(call, spec);
  reduce(call, [&](const DTensorSpec&) {
    const Tensor mine = at::prod(spec.local, compute_dtype(dtype));
    return at::prod(values_of_parts(spec, mine), wide_dtype(dtype)).to(dtype);
  });
}

void run_max(OperatorCall& call) {
  reduce_extremum(call, [](const Tensor& values) { return at::max(values); });
}

void run_min(OperatorCall& call) {
  reduce_extremum(call, [](const Tensor& values) { return at::min(values); });
}

void run_any(OperatorCall& call) {
  reduce(call, [](const DTensorSpec& spec) { return at::any(values_of_parts(spec, at::any(spec.local))); });
}

void run_all(OperatorCall& call) {
  reduce(call, [](const DTensorSpec& spec) { return at::all(values_of_parts(spec, at::all(spec.local))); });
}

void run_count_nonzero(OperatorCall& call) {
  const auto& spec = single_operand(call);
  check_full(call, spec, 1, call.info.num_args);
  reduce(call, [&](const DTensorSpec&) {
    const Tensor mine = at::count_nonzero(spec.local, std::optional<int64_t>());
    return at::sum(values_of_parts(spec, mine), at::kLong);
  });
}

void run_norm(OperatorCall& call) {
  const auto& spec = single_operand(call);
  // (self, p), (self, p, *, dtype), (self, p, dim, keepdim), (self, p, dim, keepdim, *, dtype)
  if (call.info.num_args >= 4) check_full(call, spec, 2, 3);
  const at::Scalar ord = call.arg(1).isNone() ? at::Scalar(2.0) : call.arg(1).toScalar();
  const auto asked = dtype_argument(call);
  reduce(call, [&](const DTensorSpec&) {
    return combine_norms(values_of_parts(spec, local_norm(spec, ord, asked)), ord, norm_dtype(spec, asked));
  });
}

void run_foreach_norm(OperatorCall& call) {
  const auto tensors = call.arg(0).toTensorVector();
  check_operand_list(call, tensors);
  const at::Scalar ord = call.arg(1).toScalar();
  const auto asked = call.arg(2).toOptional<c10::ScalarType>();
  at::NoGradGuard no_grad;
  BelowDTensor below;
  std::vector<Tensor> results(tensors.size());
  // One gather for all tensors that lie on the same axes of the same mesh.
  std::vector<bool> done(tensors.size(), false);
  for (size_t first = 0; first < tensors.size(); ++first) {
    if (done[first]) continue;
    const auto& lead = *spec_of(tensors[first]);
    const auto axes = lead.layout->sharded_axes();
    std::vector<size_t> members;
    std::vector<Tensor> norms;
    for (size_t index = first; index < tensors.size(); ++index) {
      const auto& spec = *spec_of(tensors[index]);
      if (done[index] || !(spec.mesh == lead.mesh) || spec.layout->sharded_axes() != axes) continue;
      done[index] = true;
      members.push_back(index);
      norms.push_back(local_norm(spec, ord, asked).to(at::kDouble));
    }
    const Tensor all =
        gather_over_axes(at::stack(norms), lead.mesh, axes, lead.fqn).view({-1, static_cast<int64_t>(norms.size())});
    const auto coordinates = coordinates_over_axes(lead.mesh, axes);
    for (size_t member = 0; member < members.size(); ++member) {
      const auto& spec = *spec_of(tensors[members[member]]);
      std::vector<Tensor> parts;
      for (size_t row = 0; row < coordinates.size(); ++row) {
        if (c10::multiply_integers(spec.layout->local_shape(coordinates[row])) == 0) continue;
        parts.push_back(all[static_cast<int64_t>(row)][static_cast<int64_t>(member)]);
      }
      const Tensor stacked = parts.empty() ? at::zeros({0}, all.options()) : at::stack(parts);
      results[members[member]] = combine_norms(stacked, ord, norm_dtype(spec, asked));
    }
  }
  finish(call, c10::IValue(std::move(results)));
}

void run_dot(OperatorCall& call) {
  const Tensor other = call.arg(1).toTensor();
  const bool conjugate = call.op.schema().name() == "aten::vdot";
  reduce(call, [&](const DTensorSpec& spec) {
    const auto dtype = spec.local.scalar_type();
    const Tensor a = spec.local.to(compute_dtype(dtype));
    const Tensor b = local_of(other).to(compute_dtype(dtype));
    const Tensor mine = conjugate ? at::vdot(a, b) : at::dot(a, b);
    return at::sum(values_of_parts(spec, mine), wide_dtype(dtype)).to(dtype);
  });
}

void run_equal(OperatorCall& call) {
  const Tensor other = call.arg(1).toTensor();
  reduce(call, [&](const DTensorSpec& spec) {
    const bool mine = at::equal(spec.local, local_of(other));
    const Tensor flag = at::full({}, mine, at::TensorOptions().dtype(at::kBool).device(control_device(spec.mesh)));
    return at::all(values_of_parts(spec, flag)).item<bool>();
  });
}

void run_item(OperatorCall& call) {
  const bool as_bool = call.op.schema().name() == "aten::is_nonzero";
  reduce(call, [&](const DTensorSpec& spec) -> c10::IValue {
    FSDP2_CHECK(c10::multiply_integers(spec.sizes) == 1, kInvalidArgument, "[dtensor] ", operator_text(call.op), " of ",
                describe(spec), ": only a tensor of one element has a single value");
    const Tensor mine = spec.local.numel() == 1 ? spec.local.reshape({}) : at::zeros({}, spec.local.options());
    const Tensor value = values_of_parts(spec, mine)[0];
    if (as_bool) return value.is_nonzero();
    return value.item();
  });
}

}  // namespace fsdp2::detail
