#pragma once

// The reductions of c10d over the ranks' values, in the order of the ranks.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp2::detail::shm {

struct Reduction {
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  at::ScalarType dtype = at::kFloat;   // a complex one adds up like its real and imaginary parts
  c10::ArrayRef<double> factors = {};  // of the ranks' values before a PREMUL_SUM
  bool past_cache = false;             // as for sum_in_order
};

/// kUnsupported where there is no such reduction.
void check_can_reduce(c10d::ReduceOp::RedOpType op, at::ScalarType dtype);
const char* name_of(c10d::ReduceOp::RedOpType op);

/// `bytes` of values, rank by rank, into `out`, which may be one of the inputs. bf16 and fp16 are computed in fp32 and
/// rounded once. Same bits wherever it is computed.
void reduce_in_order(const Reduction& reduction, void* out, c10::ArrayRef<const void*> in, size_t bytes);

}  // namespace fsdp2::detail::shm
