#pragma once

// Users' hooks on the final gradient. libtorch's own slot fires when autograd has accumulated, and of a sharded
// parameter that is the whole, unreduced gradient; so the library owns the slot and runs the hooks after the reduction.

#include <ATen/core/Tensor.h>

namespace fsdp2::detail {

/// Hooks on `param` run when run_post_accumulate_hooks() says so, no longer when autograd accumulates.
void defer_post_accumulate_hooks(const at::Tensor& param);
bool has_post_accumulate_hooks(const at::Tensor& param);
void run_post_accumulate_hooks(at::Tensor& param);

}  // namespace fsdp2::detail
