# Finds the libtorch of a Python wheel (or of an unpacked libtorch archive) without find_package(Torch), which
# insists on a CUDA toolkit as soon as the libtorch is a CUDA build. Only include folders and libraries are needed.
#
# Looked for, in this order:
#   1. TORCH_ROOT (variable or environment), the folder that holds include/ and lib/;
#   2. each entry of CMAKE_PREFIX_PATH: that folder, a Python prefix, or torch's own share/cmake;
#   3. torch of the active Python environment;
#   4. TorchWheel_HINTS, folders like TORCH_ROOT or Python prefixes.
#
# Gives the target TorchWheel::torch and TorchWheel_{ROOT,VERSION,HAS_CUDA,PYTHON,SITE_PACKAGES}.
# TorchWheel_PYTHON is the interpreter that owns the wheel, empty for an archive.

set(_torch_marker include/ATen/core/Tensor.h)

# The torch folders that `entry` may stand for.
function(_torch_candidates entry result)
  file(GLOB in_prefix "${entry}/lib/python3*/site-packages/torch" "${entry}/lib/python3*/dist-packages/torch")
  set(${result} "${entry}" "${entry}/torch" "${entry}/../.." ${in_prefix} PARENT_SCOPE)
endfunction()

function(_torch_pick result)
  set(${result} "" PARENT_SCOPE)
  foreach(entry IN LISTS ARGN)
    _torch_candidates("${entry}" candidates)
    foreach(candidate IN LISTS candidates)
      if(EXISTS "${candidate}/${_torch_marker}" AND EXISTS "${candidate}/lib/libtorch_cpu.so")
        get_filename_component(absolute "${candidate}" ABSOLUTE)
        set(${result} "${absolute}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
endfunction()

function(_torch_of_python result)
  set(${result} "" PARENT_SCOPE)
  find_program(_torch_python NAMES python3 python NO_CACHE NO_CMAKE_PATH NO_CMAKE_SYSTEM_PATH)
  if(NOT _torch_python)
    return()
  endif()
  execute_process(
    COMMAND "${_torch_python}" -c
      "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

set(TorchWheel_ROOT "")
set(_torch_wanted "${TORCH_ROOT}")
if(NOT _torch_wanted)
  set(_torch_wanted "$ENV{TORCH_ROOT}")
endif()
if(_torch_wanted)
  _torch_pick(TorchWheel_ROOT "${_torch_wanted}")
  if(NOT TorchWheel_ROOT)
    message(FATAL_ERROR "TORCH_ROOT is ${_torch_wanted}, which holds no libtorch: expected ${_torch_marker} and "
      "lib/libtorch_cpu.so in it. Give the torch folder inside site-packages, or an unpacked libtorch.")
  endif()
endif()
if(NOT TorchWheel_ROOT)
  _torch_pick(TorchWheel_ROOT ${CMAKE_PREFIX_PATH})
endif()
if(NOT TorchWheel_ROOT)
  _torch_of_python(_torch_folder)
  if(_torch_folder)
    _torch_pick(TorchWheel_ROOT "${_torch_folder}")
  endif()
endif()
if(NOT TorchWheel_ROOT)
  _torch_pick(TorchWheel_ROOT ${TorchWheel_HINTS})
endif()

set(TorchWheel_VERSION "")
if(TorchWheel_ROOT)
  foreach(_torch_header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT TorchWheel_VERSION AND EXISTS "${TorchWheel_ROOT}/include/${_torch_header}")
      file(STRINGS "${TorchWheel_ROOT}/include/${_torch_header}" _torch_lines
        REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      string(REGEX MATCHALL "[0-9]+" _torch_numbers "${_torch_lines}")
      list(JOIN _torch_numbers "." TorchWheel_VERSION)
    endif()
  endforeach()

  set(TorchWheel_HAS_CUDA FALSE)
  if(EXISTS "${TorchWheel_ROOT}/lib/libtorch_cuda.so")
    set(TorchWheel_HAS_CUDA TRUE)
  endif()

  # <prefix>/lib/python3.x/site-packages/torch belongs to <prefix>/bin/python.
  set(TorchWheel_PYTHON "")
  get_filename_component(TorchWheel_SITE_PACKAGES "${TorchWheel_ROOT}" DIRECTORY)
  get_filename_component(_torch_prefix "${TorchWheel_SITE_PACKAGES}/../../.." ABSOLUTE)
  foreach(_torch_name python3 python)
    if(NOT TorchWheel_PYTHON AND TorchWheel_SITE_PACKAGES MATCHES "(site|dist)-packages$"
        AND EXISTS "${_torch_prefix}/bin/${_torch_name}")
      set(TorchWheel_PYTHON "${_torch_prefix}/bin/${_torch_name}")
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel
  REQUIRED_VARS TorchWheel_ROOT TorchWheel_VERSION
  VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE
    "No libtorch was found. Activate a Python environment that has torch or pass -DTORCH_ROOT=<torch folder>.")

if(TorchWheel_FOUND AND NOT TARGET TorchWheel::torch AND NOT CMAKE_SCRIPT_MODE_FILE)
  add_library(TorchWheel::torch INTERFACE IMPORTED)
  # A CUDA libtorch registers its kernels when it is loaded, so it must stay linked though nothing refers to it.
  set(_torch_libraries torch torch_cpu c10)
  if(TorchWheel_HAS_CUDA)
    list(APPEND _torch_libraries torch_cuda c10_cuda)
  endif()
  foreach(_torch_name IN LISTS _torch_libraries)
    add_library(TorchWheel::${_torch_name}_library SHARED IMPORTED)
    set_target_properties(TorchWheel::${_torch_name}_library PROPERTIES
      IMPORTED_LOCATION "${TorchWheel_ROOT}/lib/lib${_torch_name}.so")
    target_link_libraries(TorchWheel::torch INTERFACE TorchWheel::${_torch_name}_library)
  endforeach()
  target_include_directories(TorchWheel::torch INTERFACE
    "${TorchWheel_ROOT}/include" "${TorchWheel_ROOT}/include/torch/csrc/api/include")
  target_link_options(TorchWheel::torch INTERFACE "LINKER:--no-as-needed")
  find_package(Threads REQUIRED)
  target_link_libraries(TorchWheel::torch INTERFACE Threads::Threads)
endif()
