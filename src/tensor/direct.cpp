// Kernels without boxing for the operators of libtorch's optimizers, which meet every parameter several times a step.
// They do what run_elementwise and run_foreach do, by the same rules and the same row of the table.

#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/zero_ops.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensor/operands.h"

namespace fsdp2::detail {
namespace {

template <class Op>
const c10::OperatorHandle& handle_of() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  return op;
}

template <class Op>
const OperatorInfo& info_of() {
  static const OperatorInfo* info = find_operator(handle_of<Op>());
  return *info;
}

template <class Op, class Schema = typename Op::schema>
struct Elementwise;

template <class Op, class Result, class... Args>
struct Elementwise<Op, Result(Args...)> {
  static Result run(Args... args) { return run_numbered(std::index_sequence_for<Args...>(), args...); }

 private:
  template <size_t... Index>
  static Result run_numbered(std::index_sequence<Index...>, Args... args) {
    Operands operands(handle_of<Op>(), info_of<Op>());
    const std::tuple<Args...> locals{part<Args>(operands, args, Index)...};
    operands.finish();
    if constexpr (std::is_same_v<Result, Tensor&>) {
      std::apply(Op::call, locals);
      return std::get<0>(std::tuple<Args...>(args...));
    } else {
      return operands.wrap(std::apply(Op::call, locals));
    }
  }

  template <class Arg>
  static Arg part(Operands& operands, Arg arg, uint16_t index) {
    constexpr bool written = std::is_same_v<Arg, Tensor&>;
    if constexpr (written || std::is_same_v<Arg, const Tensor&>) {
      DTensorSpec* spec = operands.add(arg, index, written);
      return spec != nullptr ? spec->local : arg;
    } else {
      return arg;
    }
  }
};

/// zero_grad() calls it for every gradient. As run_on_marked.
Tensor& detach_marked_(Tensor& self) {
  const BelowDTensor below;
  return at::_ops::detach_::call(self);
}

template <class Op, class Schema = typename Op::schema>
struct Lists;

template <class Op, class... Args>
struct Lists<Op, void(Args...)> {
  static void run(Args... args) { run_numbered(std::index_sequence_for<Args...>(), args...); }

 private:
  template <size_t... Index>
  static void run_numbered(std::index_sequence<Index...>, Args... args) {
    ListOperands operands(handle_of<Op>(), info_of<Op>());
    const auto* argument = info_of<Op>().tensors.begin();  // the tensors and lists among `args`, in their order
    std::array<std::vector<Tensor>, sizeof...(Args)> lists;
    const std::tuple<Args...> locals{part<Args>(operands, args, argument, lists[Index])...};
    operands.finish();
    std::apply(Op::call, locals);
  }

  template <class Arg>
  static Arg part(ListOperands& operands, Arg arg, const OperatorInfo::Argument*& argument,
                  std::vector<Tensor>& locals) {
    if constexpr (std::is_same_v<Arg, at::TensorList>) {
      const bool written = argument++->written;
      for (size_t position = 0; position < arg.size(); ++position) {
        const DTensorSpec* spec = operands.add(arg[position], position, written);
        if (spec != nullptr && locals.empty()) {
          locals.reserve(arg.size());
          locals.assign(arg.begin(), arg.begin() + position);
        }
        if (spec != nullptr || !locals.empty()) locals.push_back(spec != nullptr ? spec->local : arg[position]);
      }
      return locals.empty() ? arg : at::TensorList(locals);
    } else if constexpr (std::is_same_v<Arg, const std::optional<Tensor>&>) {
      const bool written = argument++->written;
      if (arg.has_value() && arg->defined()) operands.add_single(*arg, written);
      return arg;
    } else {
      static_assert(!std::is_same_v<std::decay_t<Arg>, Tensor>, "tensors outside the lists are not handled");
      return arg;
    }
  }
};

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  library.impl("add.Tensor", TORCH_FN(Elementwise<at::_ops::add_Tensor>::run));
  library.impl("add_.Tensor", TORCH_FN(Elementwise<at::_ops::add__Tensor>::run));
  library.impl("add_.Scalar", TORCH_FN(Elementwise<at::_ops::add__Scalar>::run));
  library.impl("mul.Tensor", TORCH_FN(Elementwise<at::_ops::mul_Tensor>::run));
  library.impl("mul.Scalar", TORCH_FN(Elementwise<at::_ops::mul_Scalar>::run));
  library.impl("mul_.Tensor", TORCH_FN(Elementwise<at::_ops::mul__Tensor>::run));
  library.impl("mul_.Scalar", TORCH_FN(Elementwise<at::_ops::mul__Scalar>::run));
  library.impl("detach_", TORCH_FN(detach_marked_));
  library.impl("div.Tensor", TORCH_FN(Elementwise<at::_ops::div_Tensor>::run));
  library.impl("div.Scalar", TORCH_FN(Elementwise<at::_ops::div_Scalar>::run));
  library.impl("addcmul_", TORCH_FN(Elementwise<at::_ops::addcmul_>::run));
  library.impl("addcdiv_", TORCH_FN(Elementwise<at::_ops::addcdiv_>::run));
  library.impl("sqrt", TORCH_FN(Elementwise<at::_ops::sqrt>::run));
  library.impl("zero_", TORCH_FN(Elementwise<at::_ops::zero_>::run));
  library.impl("_fused_adam_", TORCH_FN(Lists<at::_ops::_fused_adam_>::run));
  library.impl("_fused_adamw_", TORCH_FN(Lists<at::_ops::_fused_adamw_>::run));
  library.impl("_fused_sgd_", TORCH_FN(Lists<at::_ops::_fused_sgd_>::run));
}

}  // namespace
}  // namespace fsdp2::detail
