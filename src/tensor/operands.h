#pragma once

// What may stand together in one call of an operator that runs on locals: the rules of the boxed fallback and of the
// kernels in direct.cpp.

#include <vector>

#include "tensor/operators.h"

namespace fsdp2::detail {

[[noreturn]] void throw_mixed(const c10::OperatorHandle& op, const DTensorSpec& spec, at::IntArrayRef plain);
[[noreturn]] void throw_records_grad(const c10::OperatorHandle& op, const DTensorSpec& spec);
[[noreturn]] void throw_layouts(const c10::OperatorHandle& op, const DTensorSpec& first, const DTensorSpec& second);
/// Throws where grad mode is on and `tensor` requires grad.
void check_grad(const c10::OperatorHandle& op, const Tensor& tensor, const DTensorSpec& spec);
/// The local result as a DTensor of the layout of `like`.
Tensor wrap_result(const c10::OperatorHandle& op, const DTensorSpec& like, Tensor local);

/// The tensors of one call of an element-wise operator: DTensors of one layout, and plain numbers.
class Operands {
 public:
  Operands(const c10::OperatorHandle& op, const OperatorInfo& info) : op_(op), info_(info) {}

  /// The spec of a DTensor, whose local goes into its place; null for what stays. `tensor` must live until finish().
  DTensorSpec* add(const Tensor& tensor, uint16_t index, bool written);
  /// After the last one: throws unless the operator may run on the locals.
  void finish() const;
  Tensor wrap(Tensor local) const { return wrap_result(op_, *layout_, std::move(local)); }

 private:
  bool is_right_on_partial() const;

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  const DTensorSpec* layout_ = nullptr;
  const Tensor* plain_ = nullptr;
  uint16_t first_index_ = 0, num_marked_ = 0, num_plain_ = 0;
};

/// What stands at each position of the lists of a foreach or fused operator: DTensors of one layout, or plain numbers.
class ListOperands {
 public:
  ListOperands(const c10::OperatorHandle& op, const OperatorInfo& info) : op_(op), info_(info) {}

  /// As Operands::add, for an element of a list. The spec must live until the last use of this.
  DTensorSpec* add(const Tensor& tensor, size_t position, bool written);
  /// A tensor outside the lists.
  void add_single(const Tensor& tensor, bool written);
  void finish() const;
  /// A local result of that position as a DTensor; as it is where no DTensor stands there.
  Tensor wrap(size_t position, Tensor local) const;

 private:
  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  std::vector<const DTensorSpec*> specs_;  // by position; null where no DTensor stands
  const DTensorSpec* some_ = nullptr;
  Tensor plain_;
};

}  // namespace fsdp2::detail
