#pragma once

// The operator table of DTensors. Note [Default is deny]
// Every operator that meets a DTensor lands in dtensor_fallback. It runs only what the table lists, by operator AND
// overload (aten::max reduces, aten::max.out is element-wise); anything else throws. There is no branch that computes
// on a shard what it does not know. What optimizers call most often has kernels of its own (direct.cpp), which take the
// place of the fallback, not of the table.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tensor/dtensor_spec.h"

namespace fsdp2::detail {

struct OperatorCall;
using OperatorHandler = void (*)(OperatorCall& call);

/// What an operator may do to terms of a sum.
enum class OnPartial : uint8_t {
  kThrow,
  kIdentity,    // moves or clears values: right for every reduction
  kAdditive,    // linear in all its tensors together: each must be Partial
  kScale,       // linear in its one DTensor, wherever it stands
  kScaleFirst,  // linear in its first argument, which must be the one DTensor
};

/// What the handlers need to know of a schema, read once.
struct OperatorInfo {
  struct Argument {
    uint16_t index;
    bool list;
    bool written;
  };
  static constexpr int16_t kFresh = -1, kNotATensor = -2;

  OperatorHandler handler;
  OnPartial on_partial;
  uint16_t num_args = 0, num_returns = 0;
  bool has_lists = false;
  c10::SmallVector<Argument, 4> tensors;  // Tensor, Tensor?, Tensor[] and Tensor?[] arguments
  c10::SmallVector<int16_t, 2> returns;   // index of the written argument that comes back, or one of the above
};

struct OperatorCall {
  const c10::OperatorHandle& op;
  const OperatorInfo& info;
  torch::jit::Stack& stack;

  c10::IValue& arg(size_t index) const { return stack[stack.size() - info.num_args + index]; }
  c10::IValue& result(size_t index) const { return stack[stack.size() - info.num_returns + index]; }
  /// Drops the arguments; a handler that does not call the operator pushes its results after it.
  void drop_args() const { stack.erase(stack.end() - info.num_args, stack.end()); }
};

/// Null where the table does not list the operator.
const OperatorInfo* find_operator(const c10::OperatorHandle& op);

/// One row of the table.
struct OperatorRow {
  const char* name;  // with namespace
  const char* overload;
  OperatorHandler handler;
  OnPartial on_partial;
};
/// The whole table, expanded, in the order of the source.
const std::vector<OperatorRow>& operator_rows();

// Handlers.
void run_elementwise(OperatorCall& call);  // on the locals; results keep the layout
void run_foreach(OperatorCall& call);      // the same, position by position of lists
void run_alias(OperatorCall& call);
void run_detach(OperatorCall& call);
void run_contiguous(OperatorCall& call);  // the tensor itself
void run_cast(OperatorCall& call);        // dtype or device; differentiable
void run_on_marked(OperatorCall& call);   // reads or changes the TensorImpl, not the values
void run_set_data(OperatorCall& call);
void run_backward_call(OperatorCall& call);
void run_random(OperatorCall& call);  // draws the whole, keeps the part (random.cpp)
void run_random_like(OperatorCall& call);
// Full reductions to one plain value, the same on every rank (reductions.cpp).
void run_sum(OperatorCall& call);
void run_mean(OperatorCall& call);
void run_prod(OperatorCall& call);
void run_max(OperatorCall& call);
void run_min(OperatorCall& call);
void run_any(OperatorCall& call);
void run_all(OperatorCall& call);
void run_count_nonzero(OperatorCall& call);
void run_norm(OperatorCall& call);
void run_foreach_norm(OperatorCall& call);
void run_dot(OperatorCall& call);
void run_equal(OperatorCall& call);
void run_item(OperatorCall& call);

/// Part of the errors that a forbidden forward may end in.
inline constexpr const char* kCallRule =
    "If this came from model->forward(x) or a layer's forward, call model(x), of a type declared with FSDP2_MODULE, or "
    "fsdp2::call(model, x): only these gather the parameters. ";

/// "aten::add.Tensor".
std::string operator_text(const c10::OperatorHandle& op);
/// The error of an operator that is not in the table, or not with these arguments.
[[noreturn]] void throw_not_supported(const c10::OperatorHandle& op, const DTensorSpec& spec, const char* why);
[[noreturn]] void throw_partial(const c10::OperatorHandle& op, const DTensorSpec& spec);
/// The one DTensor of a reduction or fill (argument `index`), checked: marked, no grad recorded, not Partial.
const DTensorSpec& single_operand(const OperatorCall& call, size_t index = 0);
/// The same for a list, every element of which must be a DTensor.
void check_operand_list(const OperatorCall& call, const std::vector<Tensor>& tensors);

}  // namespace fsdp2::detail
