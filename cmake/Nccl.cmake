# NCCL where libtorch has CUDA and the environment of its wheel carries nccl.h. No CUDA toolkit is needed: the headers
# and libraries are those that pip installed beside torch.

set(FSDP2_HAS_NCCL FALSE)
if(TorchWheel_HAS_CUDA)
  file(GLOB _nvidia_includes "${TorchWheel_SITE_PACKAGES}/nvidia/*/include")
  file(GLOB _nvidia_cudart "${TorchWheel_SITE_PACKAGES}/nvidia/*/lib/libcudart.so.*")
  file(GLOB _nvidia_nccl "${TorchWheel_SITE_PACKAGES}/nvidia/nccl/lib/libnccl.so.*")
  find_path(FSDP2_NCCL_INCLUDE nccl.h HINTS "${TorchWheel_SITE_PACKAGES}/nvidia/nccl/include")
  find_path(FSDP2_CUDART_INCLUDE cuda_runtime.h HINTS ${_nvidia_includes})
  # What these two include; with CUDA 13 they are in packages of their own that torch does not bring.
  find_path(FSDP2_CUDA_CRT_INCLUDE crt/host_config.h HINTS ${_nvidia_includes})
  find_path(FSDP2_CUDA_CCCL_INCLUDE nv/target HINTS ${_nvidia_includes} PATH_SUFFIXES cccl)
  set(FSDP2_HAS_NCCL TRUE)
  foreach(_header NCCL CUDART CUDA_CRT CUDA_CCCL)
    if(NOT FSDP2_${_header}_INCLUDE)
      set(FSDP2_HAS_NCCL FALSE)
      message(STATUS "Built without NCCL: FSDP2_${_header}_INCLUDE is missing; in libtorch's environment, "
        "pip install nvidia-cuda-crt nvidia-cuda-cccl of its CUDA version")
    endif()
  endforeach()
endif()

# fsdp2_select_nccl(<target>): compiles the NCCL backend, or the file that says there is none.
function(fsdp2_select_nccl target)
  set(folder "${PROJECT_SOURCE_DIR}/src/backend")
  if(NOT FSDP2_HAS_NCCL)
    target_sources(${target} PRIVATE "${folder}/no_nccl.cpp")
    return()
  endif()
  target_sources(${target} PRIVATE "${folder}/nccl.cpp")
  set_source_files_properties("${folder}/nccl.cpp" PROPERTIES
    COMPILE_DEFINITIONS USE_C10D_NCCL
    INCLUDE_DIRECTORIES
      "${FSDP2_NCCL_INCLUDE};${FSDP2_CUDART_INCLUDE};${FSDP2_CUDA_CRT_INCLUDE};${FSDP2_CUDA_CCCL_INCLUDE}"
    SKIP_PRECOMPILE_HEADERS ON)
endfunction()
