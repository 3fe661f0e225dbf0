// The boxed fallback on the DTensor key and the handlers that run on locals.

#include <ATen/Functions.h>
#include <ATen/core/op_registration/op_registration.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <fsdp2/error.h>

#include "tensor/autograd.h"
#include "tensor/operands.h"

namespace fsdp2::detail {
namespace {

template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

const DTensorSpec* first_spec(const c10::IValue& value) {
  const DTensorSpec* found = nullptr;
  for_each_tensor(value, [&](const Tensor& tensor) {
    if (found == nullptr) found = spec_of(tensor);
  });
  return found;
}

/// Not in the table: says what was probably meant.
[[noreturn]] void deny(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t num_args = op.schema().arguments().size();
  const DTensorSpec* spec = nullptr;
  Tensor plain, requires_grad;
  for (size_t index = stack.size() - num_args; index < stack.size(); ++index) {
    for_each_tensor(stack[index], [&](const Tensor& tensor) {
      if (is_marked(tensor)) {
        if (spec == nullptr) spec = spec_of(tensor);
        if (records_grad(tensor)) requires_grad = tensor;
      } else if (tensor.dim() > 0) {
        plain = tensor;
      }
    });
  }
  FSDP2_CHECK(spec != nullptr, kUsage, "[dtensor] ", operator_text(op),
              " reached the DTensor dispatch without a DTensor: the key was included by hand");
  if (plain.defined()) throw_mixed(op, *spec, plain.sizes());
  if (requires_grad.defined()) throw_records_grad(op, *spec_of(requires_grad));
  throw_not_supported(op, *spec, "it is not one of the operators that are defined on parts");
}

void dtensor_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto* info = find_operator(op);
  if (info == nullptr) [[unlikely]]
    deny(op, *stack);
  OperatorCall call{op, *info, *stack};
  info->handler(call);
}

}  // namespace

std::string operator_text(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void throw_not_supported(const c10::OperatorHandle& op, const DTensorSpec& spec, const char* why) {
  FSDP2_THROW(kUnsupported, "[dtensor] ", operator_text(op), " on ", describe(spec), ": ", why, ". ", kCallRule,
              "Else work on full_tensor() or to_local(), and come back with distribute_tensor or from_local");
}

void throw_partial(const c10::OperatorHandle& op, const DTensorSpec& spec) {
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " on ", describe(spec),
              ": its terms are not summed over the ranks yet. If it is a gradient that was accumulated without "
              "synchronisation, call synchronize_gradients() first; else redistribute() it");
}

const DTensorSpec& single_operand(const OperatorCall& call, size_t index) {
  const DTensorSpec* spec = first_spec(call.arg(index));
  if (spec == nullptr) {
    // The DTensor is another argument, for example the `out` of a plain input.
    deny(call.op, call.stack);
  }
  for (const auto& argument : call.info.tensors) {
    const auto& value = call.arg(argument.index);
    for_each_tensor(value, [&](const Tensor& tensor) {
      const auto* other = spec_of(tensor);
      if (other == nullptr) throw_mixed(call.op, *spec, tensor.sizes());
      if (!other->same_layout(*spec)) throw_layouts(call.op, *spec, *other);
      check_grad(call.op, tensor, *other);
    });
  }
  if (spec->has_partial()) throw_partial(call.op, *spec);
  return *spec;
}

void check_operand_list(const OperatorCall& call, const std::vector<Tensor>& tensors) {
  const auto* first = first_spec(c10::IValue(tensors));
  if (first == nullptr) deny(call.op, call.stack);
  for (const auto& tensor : tensors) {
    const auto* spec = spec_of(tensor);
    if (spec == nullptr) throw_mixed(call.op, *first, tensor.sizes());
    check_grad(call.op, tensor, *spec);
    if (spec->has_partial()) throw_partial(call.op, *spec);
  }
}

void run_elementwise(OperatorCall& call) {
  Operands operands(call.op, call.info);
  c10::SmallVector<std::pair<int16_t, Tensor>, 4> marked;
  for (const auto& argument : call.info.tensors) {
    auto& value = call.arg(argument.index);
    if (!value.isTensor()) continue;
    const DTensorSpec* spec = operands.add(value.toTensor(), argument.index, argument.written);
    if (spec == nullptr) continue;
    marked.emplace_back(argument.index, std::move(value).toTensor());
    value = spec->local;
  }
  operands.finish();
  {
    BelowDTensor below;
    call.op.callBoxed(call.stack);
  }
  for (size_t index = 0; index < call.info.num_returns; ++index) {
    const int16_t source = call.info.returns[index];
    if (source == OperatorInfo::kNotATensor) continue;
    auto& value = call.result(index);
    if (source != OperatorInfo::kFresh) {
      for (auto& [position, tensor] : marked) {
        if (position == source) value = tensor;
      }
    } else if (value.isTensor() && value.toTensor().defined()) {
      value = operands.wrap(std::move(value).toTensor());
    }
  }
}

void run_foreach(OperatorCall& call) {
  ListOperands operands(call.op, call.info);
  std::vector<Tensor> alive;  // holds the specs
  for (const auto& argument : call.info.tensors) {
    auto& value = call.arg(argument.index);
    if (!argument.list) {
      if (value.isTensor() && value.toTensor().defined()) operands.add_single(value.toTensor(), argument.written);
      continue;
    }
    if (!value.isTensorList()) continue;
    auto tensors = value.toTensorVector();
    bool any = false;
    for (size_t position = 0; position < tensors.size(); ++position) {
      const DTensorSpec* spec = operands.add(tensors[position], position, argument.written);
      if (spec == nullptr) continue;
      alive.push_back(std::exchange(tensors[position], spec->local));
      any = true;
    }
    if (any) value = c10::IValue(std::move(tensors));
  }
  operands.finish();
  {
    BelowDTensor below;
    call.op.callBoxed(call.stack);
  }
  for (size_t index = 0; index < call.info.num_returns; ++index) {
    if (call.info.returns[index] == OperatorInfo::kNotATensor) continue;
    auto& value = call.result(index);
    auto tensors = value.toTensorVector();
    for (size_t position = 0; position < tensors.size(); ++position) {
      tensors[position] = operands.wrap(position, std::move(tensors[position]));
    }
    value = c10::IValue(std::move(tensors));
  }
}

void run_alias(OperatorCall& call) {
  const auto& self = call.arg(0).toTensor();
  check_grad(call.op, self, *spec_of(self));
  run_detach(call);
}

void run_detach(OperatorCall& call) {
  Tensor result = make_dtensor_alias(call.arg(0).toTensor());
  call.drop_args();
  call.stack.emplace_back(std::move(result));
}

void run_contiguous(OperatorCall& call) {
  // The marked tensor is contiguous already; how the local lies is nobody's business but the operators'.
  const auto format = call.arg(1).toMemoryFormat();
  const auto& spec = *spec_of(call.arg(0).toTensor());
  if (format != at::MemoryFormat::Contiguous && format != at::MemoryFormat::Preserve) {
    throw_not_supported(call.op, spec, "only the contiguous memory format has a meaning for it");
  }
  Tensor self = call.arg(0).toTensor();
  call.drop_args();
  call.stack.emplace_back(std::move(self));
}

void run_cast(OperatorCall& call) {
  const Tensor self = call.arg(0).toTensor();
  if (!is_marked(self)) {
    // to.other: only the dtype and device of the DTensor are read.
    call.arg(1) = local_of(call.arg(1).toTensor());
    BelowDTensor below;
    call.op.callBoxed(call.stack);
    return;
  }
  const auto& spec = *spec_of(self);
  for (const auto& argument : call.info.tensors) {
    auto& value = call.arg(argument.index);
    if (value.isTensor() && is_marked(value.toTensor())) value = local_of(value.toTensor());
  }
  {
    BelowDTensor below;
    at::NoGradGuard no_grad;
    call.op.callBoxed(call.stack);
  }
  Tensor local = std::move(call.result(0)).toTensor();
  if (local.is_same(spec.local)) {
    call.result(0) = self;
    return;
  }
  if (spec.has_partial() && !at::isFloatingType(local.scalar_type())) throw_partial(call.op, spec);
  FSDP2_CHECK(local.layout() == at::kStrided, kUnsupported, "[dtensor] ", operator_text(call.op), " of ",
              describe(spec), " to layout ", local.layout(), ": DTensors are strided");
  Tensor result = make_dtensor_over(spec.layout, std::move(local), spec.fqn);
  if (records_grad(self) && torch::autograd::isDifferentiableType(result.scalar_type())) attach_cast(result, self);
  call.result(0) = std::move(result);
}

void run_on_marked(OperatorCall& call) {
  BelowDTensor below;
  call.op.callBoxed(call.stack);
}

void run_set_data(OperatorCall& call) {
  const Tensor& self = call.arg(0).toTensor();
  const Tensor& data = call.arg(1).toTensor();
  const auto* spec = is_marked(self) ? spec_of(self) : spec_of(data);
  if (!is_marked(self)) throw_mixed(call.op, *spec, self.sizes());
  if (!is_marked(data)) throw_mixed(call.op, *spec, data.sizes());
  run_on_marked(call);
}

void run_backward_call(OperatorCall& call) {
  // Called here instead of below the key: the engine would carry the exclusion into everything that runs in it.
  const Tensor self = call.arg(0).toTensor();
  const auto inputs = call.arg(1).toTensorVector();
  const Tensor gradient = call.arg(2).isTensor() ? call.arg(2).toTensor() : Tensor();
  const auto retain_graph = call.arg(3).toOptional<bool>();
  const bool create_graph = call.arg(4).toBool();
  call.drop_args();
  torch::autograd::backward({self}, {gradient}, retain_graph, create_graph, inputs);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&dtensor_fallback>());
}

}  // namespace fsdp2::detail
