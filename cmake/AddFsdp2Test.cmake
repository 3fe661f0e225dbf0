# fsdp2_add_test(<file>): one executable and one ctest entry for a GoogleTest file below tests/.
#
# Comments at the start of a line steer it, the first of each kind counts:
#   // labels: ranks, slow      ctest labels; default: fast
#   // timeout: 600             seconds for the whole executable; default: 300
#   // libraries: fsdp2_llama   more targets to link, e.g. of the examples
#   // processors: 4            what ctest -j counts it as; default: 2 for `ranks` and `peer`, else 1
#   // backends: gloo, shm      what ranks that the harness starts talk over, one ctest entry each; default: gloo
# A test that includes a private header ("process/collectives.h") is linked with the objects of the library, whose
# internal symbols libfsdp2.so does not export; all others with libfsdp2.so.

function(_fsdp2_test_setting file name default result)
  file(STRINGS "${file}" lines LIMIT_COUNT 1 REGEX "^// ${name}: ")
  string(REGEX REPLACE "^// ${name}: *" "" value "${lines}")
  if(NOT value)
    set(value "${default}")
  endif()
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

function(fsdp2_add_test file)
  file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}/tests" "${file}")
  string(REGEX REPLACE "\\.cpp$" "" name "${name}")
  string(MAKE_C_IDENTIFIER "${name}" target)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")

  set(library fsdp2::fsdp2)
  file(STRINGS "${file}" includes REGEX "^#include \"")
  foreach(include IN LISTS includes)
    string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" header "${include}")
    if(EXISTS "${PROJECT_SOURCE_DIR}/src/${header}")
      set(library fsdp2_objects)
    endif()
  endforeach()

  _fsdp2_test_setting("${file}" libraries "" more_libraries)
  string(REGEX REPLACE " *, *" ";" more_libraries "${more_libraries}")
  foreach(more IN LISTS more_libraries)
    if(NOT TARGET ${more})
      message(STATUS "No test ${name}: it needs ${more}, which is not built here")
      return()
    endif()
  endforeach()

  add_executable(${target} "${file}")
  target_link_libraries(${target} PRIVATE ${library} ${more_libraries} fsdp2_test_support GTest::gtest_main)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests" "${PROJECT_SOURCE_DIR}/src")
  fsdp2_use_precompiled_header(${target} fsdp2_torch_header)
  set_target_properties(${target} PROPERTIES
    LINK_DEPENDS_NO_SHARED ON
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")

  _fsdp2_test_setting("${file}" labels fast labels)
  string(REGEX REPLACE " *, *" ";" labels "${labels}")
  _fsdp2_test_setting("${file}" timeout 300 timeout)
  set(processors 1)
  if("ranks" IN_LIST labels OR "peer" IN_LIST labels)
    set(processors 2)
  endif()
  _fsdp2_test_setting("${file}" processors ${processors} processors)

  _fsdp2_test_setting("${file}" backends gloo backends)
  string(REGEX REPLACE " *, *" ";" backends "${backends}")
  list(GET backends 0 first_backend)
  foreach(backend IN LISTS backends)
    set(entry ${name})
    set(results ${target})
    if(NOT backend STREQUAL first_backend)
      set(entry "${name}@${backend}")
      set(results "${target}_${backend}")
    endif()
    add_test(NAME ${entry} COMMAND ${target})
    set_tests_properties(${entry} PROPERTIES
      LABELS "${labels}"
      TIMEOUT ${timeout}
      PROCESSORS ${processors}
      ENVIRONMENT "OMP_NUM_THREADS=1;FSDP2_TEST_BACKEND=${backend};\
GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/test-results/${results}.xml")
  endforeach()
endfunction()
