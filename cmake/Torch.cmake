# The libtorch of this build, checked against the versions that were tried.

set(FSDP2_TRIED_TORCH_VERSIONS 2.11 2.13 2.14)

set(TorchWheel_HINTS "${PROJECT_SOURCE_DIR}/.venv")
find_package(TorchWheel REQUIRED)
# Kept, so that a later configure run from another environment does not change libtorch under the objects.
if(NOT TORCH_ROOT)
  set(TORCH_ROOT "${TorchWheel_ROOT}" CACHE PATH "Folder of libtorch, with include/ and lib/" FORCE)
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_minor "${TorchWheel_VERSION}")
if(NOT _torch_minor IN_LIST FSDP2_TRIED_TORCH_VERSIONS)
  list(JOIN FSDP2_TRIED_TORCH_VERSIONS ", " _torch_tried)
  message(WARNING "libtorch ${TorchWheel_VERSION} was never tried with this library (tried: ${_torch_tried}). "
    "It may fail to compile or, worse, behave differently.")
endif()
message(STATUS "libtorch ${TorchWheel_VERSION} at ${TorchWheel_ROOT} (CUDA build: ${TorchWheel_HAS_CUDA})")
