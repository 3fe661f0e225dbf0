#pragma once

// Models that are larger than one process's memory: built without memory, sharded, then materialised.
// Python twin: `with torch.device("meta")`, Module.to_empty, Module.reset_parameters.

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <fsdp2/export.h>
#include <fsdp2/module_ref.h>

namespace fsdp2 {

/// While it lives, tensors that this thread makes without naming a device are on meta: shape and dtype, no memory.
class FSDP2_API MetaDeviceGuard {
 public:
  MetaDeviceGuard();
  MetaDeviceGuard(const MetaDeviceGuard&) = delete;
  MetaDeviceGuard& operator=(const MetaDeviceGuard&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

/// Gives every parameter and buffer uninitialised memory on `device`; a sharded parameter gets its shard's only.
/// A tensor that is then never written is named at the module's first use instead of being computed with.
FSDP2_API void to_empty(ModuleRef module, c10::Device device);

/// Writes parameters and buffers anew, children first, each module once: stock torch::nn modules, types declared with
/// FSDP2_MODULE that have reset_parameters(), and modules deriving from ResetParameters. Each method runs on
/// full-size tensors, one module at a time, and this rank keeps its shard: the values are those of the unsharded
/// model with the same generator state. All ranks call it, with equal generator states (else kUsage).
/// Throws kUsage naming what it could not reset, after the rest.
FSDP2_API void reset_parameters(ModuleRef module);

/// Says that values written through raw pointers are there.
FSDP2_API void mark_initialized(ModuleRef module);

}  // namespace fsdp2
