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
#include "tensor/operators.h"

namespace fsdp2::detail {
namespace {

// ---- Errors

template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

constexpr const char* kCallRule =
    "If this came from model->forward(x) or a layer's forward, call model(x): only that gathers the parameters. ";

[[noreturn]] void throw_mixed(const c10::OperatorHandle& op, const DTensorSpec& spec, at::IntArrayRef plain) {
  const bool whole = plain == c10::IntArrayRef(spec.sizes);
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " mixes ", describe(spec), " with a plain tensor of shape ",
              plain, ". ", kCallRule,
              whole ? "If it came from an optimizer, either the parameter is whole at the moment (a forward or "
                      "unshard() without a backward left it so): call reshard() on its module first; or the "
                      "optimizer's state was made before sharding: make the optimizer after fully_shard. "
                    : "",
              "Else make both DTensors of one layout (distribute_tensor) or both plain (full_tensor, to_local)");
}

[[noreturn]] void throw_records_grad(const c10::OperatorHandle& op, const DTensorSpec& spec) {
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " on ", describe(spec),
              ", which requires grad, with grad mode on: its gradient would be lost. ", kCallRule,
              "Else use to_local(), full_tensor() or redistribute(), which are differentiable, or detach(), or "
              "torch::NoGradGuard");
}

[[noreturn]] void throw_layouts(const c10::OperatorHandle& op, const DTensorSpec& first, const DTensorSpec& second) {
  if (first.has_partial()) throw_partial(op, first);
  if (second.has_partial()) throw_partial(op, second);
  FSDP2_THROW(kUsage, "[dtensor] ", operator_text(op), " on two layouts: ", describe(first), " and ",
              describe(second), "; element-wise operators need one mesh, shape and list of placements: redistribute() "
              "one of them");
}

void check_grad(const OperatorCall& call, const Tensor& tensor, const DTensorSpec& spec) {
  if (records_grad(tensor)) [[unlikely]] throw_records_grad(call.op, spec);
}

// ---- Results

/// The local result as a DTensor of the layout of `like`.
Tensor wrap(const OperatorCall& call, const DTensorSpec& like, Tensor local) {
  FSDP2_CHECK(local.sizes() == like.local.sizes() && local.layout() == at::kStrided, kUnsupported, "[dtensor] ",
              operator_text(call.op), " on ", describe(like), " gave a part of shape ", local.sizes(), ", ",
              local.layout(), " where ", like.local.sizes(), " was due: the result has no such layout");
  return make_dtensor_result(like, std::move(local));
}

// ---- One layout, single tensors

struct Operands {
  explicit Operands(OperatorCall& call) : call_(call) {
    const Tensor* plain = nullptr;
    for (const auto& argument : call.info.tensors) {
      auto& value = call.arg(argument.index);
      if (!value.isTensor()) continue;
      const Tensor& tensor = value.toTensor();
      if (!tensor.defined()) continue;
      if (!is_marked(tensor)) {
        // A 0-dim plain tensor is a number, as long as nothing is written to it and it needs no gradient.
        if (tensor.dim() != 0 || argument.written || records_grad(tensor)) plain = &tensor;
        ++num_plain;
        continue;
      }
      auto* spec = spec_of(tensor);
      if (layout == nullptr) {
        layout = spec;
        first_index = argument.index;
      } else if (spec->layout != layout->layout && !spec->same_layout(*layout)) [[unlikely]] {
        throw_layouts(call.op, *layout, *spec);
      }
      check_grad(call, tensor, *spec);
      marked.emplace_back(argument.index, std::move(value).toTensor());
      value = spec->local;
    }
    FSDP2_CHECK(layout != nullptr, kUsage, "[dtensor] ", operator_text(call.op),
                " reached the DTensor dispatch without a DTensor: the key was included by hand");
    if (plain != nullptr) [[unlikely]] throw_mixed(call.op, *layout, plain->sizes());
    if (layout->has_partial()) [[unlikely]] check_partial();
  }

  /// Runs the operator on the locals and gives the results back as DTensors.
  void run() {
    {
      BelowDTensor below;
      call_.op.callBoxed(call_.stack);
    }
    for (size_t index = 0; index < call_.info.num_returns; ++index) {
      const int16_t source = call_.info.returns[index];
      if (source == OperatorInfo::kNotATensor) continue;
      auto& value = call_.result(index);
      if (source != OperatorInfo::kFresh) {
        for (auto& [position, tensor] : marked) {
          if (position == source) value = tensor;
        }
      } else if (value.isTensor() && value.toTensor().defined()) {
        value = wrap(call_, *layout, std::move(value).toTensor());
      }
    }
  }

  const DTensorSpec* layout = nullptr;
  uint16_t first_index = 0;
  size_t num_plain = 0;
  c10::SmallVector<std::pair<int16_t, Tensor>, 4> marked;

 private:
  void check_partial() const {
    bool right = false;
    switch (call_.info.on_partial) {
      case OnPartial::kThrow:
        break;
      case OnPartial::kIdentity:
        right = num_plain == 0;
        break;
      case OnPartial::kAdditive:
        right = num_plain == 0 && summed();
        break;
      case OnPartial::kScale:
        right = marked.size() == 1 && summed();
        break;
      case OnPartial::kScaleFirst:
        right = marked.size() == 1 && first_index == 0 && summed();
        break;
    }
    if (!right) throw_partial(call_.op, *layout);
  }
  bool summed() const {
    return at::isFloatingType(layout->local.scalar_type()) &&
           std::all_of(layout->placements.begin(), layout->placements.end(), [](const Placement& placement) {
             const auto* partial = std::get_if<Partial>(&placement);
             return partial == nullptr || partial->op.op_ == ReduceOp::SUM || partial->op.op_ == ReduceOp::AVG;
           });
  }

  OperatorCall& call_;
};

// ---- Lists

/// What stands at one position of the lists of a foreach or fused operator.
struct Positions {
  explicit Positions(OperatorCall& call) : call_(call) {
    for (const auto& argument : call.info.tensors) {
      auto& value = call.arg(argument.index);
      if (!argument.list) {
        if (value.isTensor() && value.toTensor().defined()) single(value.toTensor(), argument.written);
        continue;
      }
      if (!value.isTensorList()) continue;
      auto tensors = value.toTensorVector();
      bool any = false;
      for (size_t position = 0; position < tensors.size(); ++position) {
        any = take(tensors[position], position, argument.written) || any;
      }
      if (any) value = c10::IValue(std::move(tensors));
    }
    const DTensorSpec* some = nullptr;
    for (const auto* spec : specs) some = spec != nullptr ? spec : some;
    FSDP2_CHECK(some != nullptr, kUnsupported, "[dtensor] ", operator_text(call.op),
                " with a DTensor outside its lists");
    if (plain.defined()) throw_mixed(call.op, *some, plain.sizes());
  }

  void run() {
    {
      BelowDTensor below;
      call_.op.callBoxed(call_.stack);
    }
    for (size_t index = 0; index < call_.info.num_returns; ++index) {
      if (call_.info.returns[index] == OperatorInfo::kNotATensor) continue;
      auto& value = call_.result(index);
      auto tensors = value.toTensorVector();
      for (size_t position = 0; position < tensors.size(); ++position) {
        const auto* spec = position < specs.size() ? specs[position] : nullptr;
        if (spec != nullptr) tensors[position] = wrap(call_, *spec, std::move(tensors[position]));
      }
      value = c10::IValue(std::move(tensors));
    }
  }

  std::vector<const DTensorSpec*> specs;  // by position; null where no DTensor stands
  std::vector<Tensor> alive;              // holds the specs
  Tensor plain;

 private:
  void single(const Tensor& tensor, bool written) {
    FSDP2_CHECK(!is_marked(tensor), kUnsupported, "[dtensor] ", operator_text(call_.op),
                " with a DTensor outside its lists: pass a number or a plain 0-dim tensor");
    if (tensor.dim() != 0 || written || records_grad(tensor)) plain = tensor;
  }

  bool take(Tensor& tensor, size_t position, bool written) {
    if (!tensor.defined()) return false;
    if (!is_marked(tensor)) {
      if (tensor.dim() != 0 || (written && records_grad(tensor))) plain = tensor;
      return false;
    }
    auto* spec = spec_of(tensor);
    if (specs.size() <= position) specs.resize(position + 1, nullptr);
    if (specs[position] == nullptr) {
      specs[position] = spec;
    } else if (!spec->same_layout(*specs[position])) {
      throw_layouts(call_.op, *specs[position], *spec);
    }
    check_grad(call_, tensor, *spec);
    if (spec->has_partial() && call_.info.on_partial != OnPartial::kIdentity) throw_partial(call_.op, *spec);
    alive.push_back(std::exchange(tensor, spec->local));
    return true;
  }

  OperatorCall& call_;
};

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
  if (info == nullptr) [[unlikely]] deny(op, *stack);
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
      check_grad(call, tensor, *other);
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
    check_grad(call, tensor, *spec);
    if (spec->has_partial()) throw_partial(call.op, *spec);
  }
}

void run_elementwise(OperatorCall& call) { Operands(call).run(); }

void run_foreach(OperatorCall& call) { Positions(call).run(); }

void run_alias(OperatorCall& call) {
  const auto& self = call.arg(0).toTensor();
  check_grad(call, self, *spec_of(self));
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
