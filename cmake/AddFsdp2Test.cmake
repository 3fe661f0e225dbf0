# fsdp2_add_tests(<file>...): a program and ctest entries for each GoogleTest file below tests/. With FSDP2_UNITY_BUILD
# several files are compiled as one (scripts/join_tests.py), and the program of each is a link to theirs.
#
# Comments at the start of a line steer it, the first of each kind counts:
#   // labels: ranks, slow      ctest labels; default: fast
#   // timeout: 600             seconds for the whole executable; default: 300
#   // libraries: fsdp2_llama   more targets to link, e.g. of the examples
#   // needs: programs          targets that it starts, built with it
#   // alone: why              compiled by itself in any case, e.g. as it declares something at global scope
#   // processors: 4            what ctest -j counts it as; default: 2 for `ranks` and `peer`, else 1
#   // backends: gloo, shm      what ranks that the harness starts talk over, one ctest entry each; default: gloo
# A test that includes a private header ("process/collectives.h") is linked with the objects of the library, whose
# internal symbols libfsdp2.so does not export; all others with libfsdp2.so.

set(_fsdp2_tests_in_one 8)

function(_fsdp2_test_setting file name default result)
  file(STRINGS "${file}" lines LIMIT_COUNT 1 REGEX "^// ${name}: ")
  string(REGEX REPLACE "^// ${name}: *" "" value "${lines}")
  if(NOT value)
    set(value "${default}")
  endif()
  string(REGEX REPLACE " *, *" ";" value "${value}")
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

# fsdp/unshard_test of tests/fsdp/unshard_test.cpp, and the program fsdp_unshard_test.
function(_fsdp2_test_name file name program)
  file(RELATIVE_PATH path "${PROJECT_SOURCE_DIR}/tests" "${file}")
  string(REGEX REPLACE "\\.cpp$" "" path "${path}")
  string(MAKE_C_IDENTIFIER "${path}" identifier)
  set(${name} "${path}" PARENT_SCOPE)
  set(${program} ${identifier} PARENT_SCOPE)
endfunction()

function(_fsdp2_test_library file result)
  set(library fsdp2::fsdp2)
  file(STRINGS "${file}" includes REGEX "^#include \"")
  foreach(include IN LISTS includes)
    string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" header "${include}")
    if(EXISTS "${PROJECT_SOURCE_DIR}/src/${header}")
      set(library fsdp2_objects)
    endif()
  endforeach()
  set(${result} ${library} PARENT_SCOPE)
endfunction()

function(_fsdp2_test_program target source library)
  add_executable(${target} "${source}")
  target_link_libraries(${target} PRIVATE ${library} ${ARGN} fsdp2_test_support)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests" "${PROJECT_SOURCE_DIR}/src")
  # What is timed is not here. At -O1 GCC takes fields of libtorch's variants for uninitialised.
  target_compile_options(${target} PRIVATE "$<$<CONFIG:Release>:-O1;-Wno-maybe-uninitialized>")
  fsdp2_use_precompiled_header(${target} fsdp2_torch_header)
  set_target_properties(${target} PROPERTIES
    LINK_DEPENDS_NO_SHARED ON
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  # It may have been a link to a program of several files before, through which the linker would write.
  add_custom_command(TARGET ${target} PRE_LINK
    COMMAND "${CMAKE_COMMAND}" -E rm -f "${PROJECT_BINARY_DIR}/tests/${target}" VERBATIM)
endfunction()

# One program of several files, and a name for each of them.
function(_fsdp2_joined_program target library)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/${target}.cpp")
  add_custom_command(OUTPUT "${source}"
    COMMAND python3 "${PROJECT_SOURCE_DIR}/scripts/join_tests.py" "${source}" ${ARGN}
    DEPENDS ${ARGN} "${PROJECT_SOURCE_DIR}/scripts/join_tests.py"
    COMMENT "Joining the files of ${target}" VERBATIM)
  _fsdp2_test_program(${target} "${source}" ${library})
  foreach(file IN LISTS ARGN)
    _fsdp2_test_name("${file}" name program)
    add_custom_command(TARGET ${target} POST_BUILD
      COMMAND "${CMAKE_COMMAND}" -E create_symlink ${target} "${PROJECT_BINARY_DIR}/tests/${program}" VERBATIM)
    add_custom_target(${program} DEPENDS ${target})
  endforeach()
endfunction()

function(_fsdp2_test_entries file)
  _fsdp2_test_name("${file}" name program)
  _fsdp2_test_setting("${file}" labels fast labels)
  _fsdp2_test_setting("${file}" timeout 300 timeout)
  set(processors 1)
  if("ranks" IN_LIST labels OR "peer" IN_LIST labels)
    set(processors 2)
  endif()
  _fsdp2_test_setting("${file}" processors ${processors} processors)

  _fsdp2_test_setting("${file}" backends gloo backends)
  list(GET backends 0 first_backend)
  foreach(backend IN LISTS backends)
    set(entry ${name})
    set(results ${program})
    if(NOT backend STREQUAL first_backend)
      set(entry "${name}@${backend}")
      set(results "${program}_${backend}")
    endif()
    add_test(NAME ${entry} COMMAND "${PROJECT_BINARY_DIR}/tests/${program}")
    set_tests_properties(${entry} PROPERTIES
      LABELS "${labels}"
      TIMEOUT ${timeout}
      PROCESSORS ${processors}
      ENVIRONMENT "OMP_NUM_THREADS=1;FSDP2_TEST_BACKEND=${backend};\
GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/test-results/${results}.xml")
  endforeach()
endfunction()

function(fsdp2_add_tests)
  foreach(file IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
    _fsdp2_test_name("${file}" name program)
    _fsdp2_test_library("${file}" library)
    _fsdp2_test_setting("${file}" libraries "" more_libraries)
    _fsdp2_test_setting("${file}" needs "" needs)
    _fsdp2_test_setting("${file}" alone "" alone)
    set(missing "")
    foreach(more IN LISTS more_libraries needs)
      if(NOT TARGET ${more})
        set(missing ${more})
      endif()
    endforeach()
    if(missing)
      message(STATUS "No test ${name}: it needs ${missing}, which is not built here")
      continue()
    endif()
    _fsdp2_test_entries("${file}")
    if(FSDP2_UNITY_BUILD AND NOT more_libraries AND NOT alone)
      string(MAKE_C_IDENTIFIER "${library}" kind)
      if(needs)
        string(APPEND kind _and_programs)
        list(APPEND needs_${kind} ${needs})
      endif()
      list(APPEND files_${kind} "${file}")
      set(library_${kind} ${library})
      list(APPEND kinds ${kind})
    else()
      _fsdp2_test_program(${program} "${file}" ${library} ${more_libraries})
      if(needs)
        add_dependencies(${program} ${needs})
      endif()
    endif()
  endforeach()

  list(REMOVE_DUPLICATES kinds)
  set(number 0)
  foreach(kind IN LISTS kinds)
    while(files_${kind})
      list(SUBLIST files_${kind} 0 ${_fsdp2_tests_in_one} files)
      list(REMOVE_ITEM files_${kind} ${files})
      math(EXPR number "${number} + 1")
      _fsdp2_joined_program(tests_${number} ${library_${kind}} ${files})
      if(needs_${kind})
        add_dependencies(tests_${number} ${needs_${kind}})
      endif()
    endwhile()
  endforeach()
endfunction()
