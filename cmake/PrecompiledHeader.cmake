# Two precompiled headers: a small one for the library, whose sources avoid torch/torch.h, and all of libtorch for tests
# and programs. One that holds torch/torch.h costs each source 5 s of template instantiation, the small one 3 s.

# fsdp2_add_precompiled_header(<target> <header>...): an object library that only owns the precompiled header.
function(fsdp2_add_precompiled_header target)
  set(empty "${PROJECT_BINARY_DIR}/pch/${target}.cpp")
  file(CONFIGURE OUTPUT "${empty}" CONTENT "" @ONLY)
  add_library(${target} OBJECT "${empty}")
  target_link_libraries(${target} PRIVATE TorchWheel::torch)
  target_precompile_headers(${target} PRIVATE ${ARGN})

  # What ccache hashes in place of the precompiled header: all that its content follows from.
  string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
  string(CONCAT key "${ARGN};${TorchWheel_ROOT};${TorchWheel_VERSION};${CMAKE_CXX_COMPILER};"
    "${CMAKE_CXX_COMPILER_VERSION};${CMAKE_CXX_FLAGS};${CMAKE_CXX_FLAGS_${build_type}};${FSDP2_SANITIZE}")
  string(SHA256 sum "${key}")
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/cmake_pch.hxx.gch.sum"
    CONTENT "${sum}" @ONLY)
endfunction()

function(fsdp2_use_precompiled_header target from)
  if(FSDP2_PRECOMPILED_HEADER)
    target_precompile_headers(${target} REUSE_FROM ${from})
  endif()
endfunction()

if(FSDP2_PRECOMPILED_HEADER)
  fsdp2_add_precompiled_header(fsdp2_core_header
    <ATen/ATen.h> <torch/csrc/autograd/function.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp> <torch/library.h>
    <torch/nn/module.h>)
  fsdp2_add_precompiled_header(fsdp2_torch_header <torch/torch.h>)
endif()
