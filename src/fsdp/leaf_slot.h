#pragma once

// Note [What hangs on a parameter]
// libtorch gives every leaf one slot whose function it calls when autograd has accumulated. Of a sharded parameter that
// is the whole, unreduced gradient, so the library owns the slot and runs users' hooks after the reduction. The slot
// lives exactly as long as the parameter object, so it also says which group has the parameter, and holds what must
// go with it.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

namespace fsdp2::detail {

class ParamGroup;

/// Where a parameter's hooks find it: it may move to another group (a tied parameter).
struct LeafTarget {
  std::weak_ptr<ParamGroup> group;
  size_t index = 0;
};

/// Null before a group took the parameter. The group may be gone since, or hold another parameter there.
std::shared_ptr<LeafTarget> leaf_target_of(const at::Tensor& param);
/// From now on users' hooks on `param` run when run_post_accumulate_hooks() says so, no longer when autograd
/// accumulates. `token` is held until the parameter is gone, or this is called again.
void set_leaf_target(const at::Tensor& param, std::shared_ptr<LeafTarget> target, std::shared_ptr<void> token);

bool has_post_accumulate_hooks(const at::Tensor& param);
void run_post_accumulate_hooks(at::Tensor& param);

}  // namespace fsdp2::detail
