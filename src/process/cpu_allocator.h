#pragma once

namespace fsdp2::detail {

/// Makes libtorch take the memory of large CPU tensors from here. Note [Memory of large tensors] in the .cpp. Does
/// nothing the second time, where a user set an allocator, or with FSDP2_CPU_ALLOCATOR=0.
void install_cpu_allocator();

}  // namespace fsdp2::detail
