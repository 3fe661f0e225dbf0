#pragma once

// Sums over ranks, in the order of the ranks.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace fsdp2::detail::shm {

/// out[i] = (in[0][i] + in[1][i] + ... in this order) / divisor. Adds up in fp32 for fp32, bf16 and fp16, in fp64 for
/// fp64, and rounds once, to `out_dtype`. `out` may be one of the inputs where the dtypes agree. kUnsupported for other
/// dtypes. Same bits for the same inputs, whatever the processor.
void sum_in_order(void* out, at::ScalarType out_dtype, c10::ArrayRef<const void*> in, at::ScalarType in_dtype,
                  int64_t numel, double divisor);

/// The same, where `past_cache` writing to memory without first reading it into the cache: for large outputs.
void sum_in_order(void* out, at::ScalarType out_dtype, c10::ArrayRef<const void*> in, at::ScalarType in_dtype,
                  int64_t numel, double divisor, bool past_cache);

}  // namespace fsdp2::detail::shm
