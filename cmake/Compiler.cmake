# Settings that every target of this build shares.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
# Programs too, and with -fPIC instead of -fPIE, so that all of them can share one precompiled header.
add_compile_options(-fPIC)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo" FORCE)
endif()

if(FSDP2_SANITIZE)
  add_compile_options(-fsanitize=${FSDP2_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FSDP2_SANITIZE})
endif()

add_compile_options(-Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 reports these about std::string + "text", wrongly.
  add_compile_options(-Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread)
endif()
if(FSDP2_WERROR)
  add_compile_options(-Werror)
endif()

find_program(FSDP2_MOLD mold)
if(FSDP2_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
  add_link_options(-fuse-ld=mold)
endif()

find_program(FSDP2_CCACHE ccache)
if(FSDP2_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # base_dir makes checkouts in different folders share objects; the precompiled header is represented by the .sum
  # file written beside it (see PrecompiledHeader.cmake), since its bytes differ from build to build.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_PCH_EXTSUM=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${FSDP2_CCACHE})
endif()
