#pragma once

// Arguments for any operator, made from its schema: plain ones, and the same with every tensor distributed.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include <fsdp2/tensor/dtensor.h>

#include "tensor/dtensor_spec.h"
#include "tensor/operators.h"
#include "tensor/redistribute.h"

namespace fsdp2::testing {

using detail::operator_text;

/// What the tensors of a case look like.
struct CaseLayout {
  std::vector<int64_t> sizes;
  Placement placement;
};

/// One way of filling a schema.
struct CaseOptions {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype = at::kFloat;
  c10::ScalarType out_dtype = at::kFloat;
  c10::Scalar scalar = 0.5;
};

/// Values on both sides of 0 and 1, different per argument, the same on every rank.
inline Tensor sample(const CaseOptions& options, c10::ScalarType dtype, size_t seed) {
  const int64_t count = c10::multiply_integers(options.sizes);
  const Tensor steps = at::arange(count, at::kLong).mul(5 + 2 * static_cast<int64_t>(seed)).add(3).remainder(11);
  Tensor values = steps.to(at::kDouble).sub(3.25).div(2.5);
  if (at::isIntegralType(dtype, false)) values = steps.sub(4).to(at::kDouble);
  if (dtype == at::kBool) return steps.remainder(2).to(at::kBool).view(options.sizes).clone();
  if (at::isComplexType(dtype)) return at::complex(values, values.flip({0})).to(dtype).view(options.sizes).clone();
  return values.to(dtype).view(options.sizes).clone();
}

inline bool is_tensor_type(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && is_tensor_type(optional->getElementType());
}

inline bool is_tensor_list_type(const c10::TypePtr& type) {
  const auto list = type->cast<c10::ListType>();
  return list && is_tensor_type(list->getElementType());
}

inline bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (is_tensor_type(argument.type()) || is_tensor_list_type(argument.type())) return true;
  }
  return false;
}

constexpr size_t kListLength = 3;

/// A value for an argument that holds no tensor.
inline c10::IValue other_value(const c10::Argument& argument, const CaseOptions& options) {
  const auto& name = argument.name();
  const auto type = argument.type();
  if (name == "rounding_mode") return "floor";
  if (name == "dtype" && type->kind() != c10::TypeKind::OptionalType) return static_cast<int64_t>(at::kDouble);
  if (name == "amsgrad") return true;
  if (name == "min") return options.scalar;
  if (name == "max") return 1.25;
  if (argument.default_value().has_value()) return *argument.default_value();
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      return c10::IValue();
    case c10::TypeKind::NumberType:
      return options.scalar;
    case c10::TypeKind::BoolType:
      return false;
    case c10::TypeKind::FloatType:
      return 0.25;
    case c10::TypeKind::IntType:
      if (name == "to" || name == "high") return 9;
      return 1;
    case c10::TypeKind::DeviceObjType:
      return c10::Device(at::kCPU);
    case c10::TypeKind::ListType: {
      const auto element = type->cast<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::NumberType) {
        c10::List<c10::Scalar> scalars;
        for (size_t index = 0; index < kListLength; ++index) scalars.push_back(options.scalar);
        return scalars;
      }
      return c10::List<int64_t>();
    }
    default:
      return c10::IValue();
  }
}

/// Plain arguments.
inline torch::jit::Stack plain_arguments(const c10::FunctionSchema& schema, const CaseOptions& options) {
  torch::jit::Stack stack;
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const auto& argument = schema.arguments()[index];
    const bool written_only = argument.is_out();
    const auto dtype = written_only ? options.out_dtype : options.dtype;
    if (is_tensor_list_type(argument.type())) {
      std::vector<Tensor> tensors;
      for (size_t position = 0; position < kListLength; ++position) {
        Tensor tensor = sample(options, dtype, index * 3 + position);
        // Second moments are not negative, and counts of steps are single numbers.
        const auto& name = argument.name();
        if (name == "exp_avg_sqs" || name == "max_exp_avg_sqs" || name == "state_sums") tensor = tensor.abs();
        if (name == "state_steps") tensor = at::full({}, 3.0);
        tensors.push_back(tensor);
      }
      stack.emplace_back(tensors);
    } else if (argument.type()->kind() == c10::TypeKind::OptionalType && is_tensor_type(argument.type())) {
      const bool scaling = argument.name() == "grad_scale" || argument.name() == "found_inf";
      stack.push_back(scaling ? c10::IValue() : c10::IValue(sample(options, dtype, index)));
    } else if (is_tensor_type(argument.type())) {
      const bool number = argument.name() == "lr" || (argument.name() == "value" && index > 0) ||
                          (schema.name().starts_with("aten::_foreach") && !written_only);
      const bool mask = argument.name() == "mask" || (argument.name() == "condition");
      stack.emplace_back(number ? at::full({}, options.scalar, dtype)
                                : sample(options, mask ? at::kBool : dtype, index));
    } else {
      stack.push_back(other_value(argument, options));
    }
  }
  return stack;
}

inline Tensor distribute(const Tensor& full, const DeviceMesh& mesh, const Placement& placement) {
  if (!full.defined() || full.dim() == 0) return full;
  detail::BelowDTensor below;
  const auto layout = std::make_shared<const detail::DTensorLayout>(mesh, std::vector<Placement>{placement},
                                                                    full.sizes().vec());
  return detail::make_dtensor_over(layout, detail::cut_for_this_rank(full, *layout), "w");
}

/// The same values with every tensor of at least one dimension distributed.
inline torch::jit::Stack distributed_arguments(const torch::jit::Stack& plain, const DeviceMesh& mesh,
                                               const Placement& placement) {
  torch::jit::Stack stack;
  for (const auto& value : plain) {
    if (value.isTensor()) {
      stack.emplace_back(distribute(value.toTensor(), mesh, placement));
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(distribute(tensor, mesh, placement));
      stack.emplace_back(tensors);
    } else {
      stack.push_back(value);
    }
  }
  return stack;
}

inline torch::jit::Stack copy_of(const torch::jit::Stack& stack) {
  torch::jit::Stack copy;
  for (const auto& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) {
      copy.emplace_back(value.toTensor().clone());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor.clone());
      copy.emplace_back(tensors);
    } else {
      copy.push_back(value);
    }
  }
  return copy;
}

/// Options with which the operator runs on plain tensors; none where no combination works.
inline std::optional<CaseOptions> find_options(const c10::OperatorHandle& op, const std::vector<int64_t>& sizes) {
  const auto& schema = op.schema();
  const bool has_out = std::any_of(schema.arguments().begin(), schema.arguments().end(),
                                   [](const c10::Argument& argument) { return argument.is_out(); });
  for (const auto dtype : {at::kFloat, at::kLong, at::kBool, at::kComplexFloat, at::kDouble}) {
    for (const auto out_dtype : {at::kFloat, at::kBool, at::kLong, at::kDouble, at::kComplexFloat,
                                 at::kComplexDouble}) {
      if (!has_out && out_dtype != at::kFloat) continue;
      CaseOptions options{sizes, dtype, out_dtype, dtype == at::kFloat ? c10::Scalar(0.5) : c10::Scalar(2)};
      auto stack = plain_arguments(schema, options);
      try {
        op.callBoxed(stack);
        return options;
      } catch (const std::exception&) {
        continue;
      }
    }
  }
  return std::nullopt;
}

/// Empty where `actual` is what `expected` should look like on this rank, else what differs.
inline std::string difference(const c10::IValue& actual, const c10::IValue& expected) {
  if (expected.isTensorList()) {
    const auto actual_list = actual.toTensorVector();
    const auto expected_list = expected.toTensorVector();
    if (actual_list.size() != expected_list.size()) return "lists of other lengths";
    for (size_t index = 0; index < actual_list.size(); ++index) {
      const auto text = difference(actual_list[index], expected_list[index]);
      if (!text.empty()) return c10::str("[", index, "] ", text);
    }
    return "";
  }
  if (!expected.isTensor()) {
    std::ostringstream got, want;
    got << actual;
    want << expected;
    return got.str() == want.str() ? "" : got.str() + " instead of " + want.str();
  }
  const Tensor& full = expected.toTensor();
  const Tensor& tensor = actual.toTensor();
  if (!full.defined()) return tensor.defined() ? "defined" : "";
  if (tensor.sizes() != full.sizes()) return c10::str("sizes ", tensor.sizes(), " instead of ", full.sizes());
  if (tensor.scalar_type() != full.scalar_type()) {
    return c10::str("dtype ", tensor.scalar_type(), " instead of ", full.scalar_type());
  }
  Tensor part = tensor, wanted = full;
  if (is_dtensor(tensor)) {
    const auto& spec = *detail::spec_of(tensor);
    part = spec.local;
    wanted = detail::cut_for_this_rank(full, *spec.layout);
  } else if (full.dim() > 0) {
    return "a plain tensor";
  }
  if (part.sizes() != wanted.sizes()) return c10::str("local sizes ", part.sizes(), " instead of ", wanted.sizes());
  if (at::isComplexType(part.scalar_type())) {
    part = at::view_as_real(part.resolve_conj());
    wanted = at::view_as_real(wanted.resolve_conj());
  }
  if (at::allclose(part.to(at::kDouble), wanted.to(at::kDouble), 1e-5, 1e-6, /*equal_nan=*/true)) return "";
  return c10::str("values\n", part, "\ninstead of\n", wanted);
}

}  // namespace fsdp2::testing
