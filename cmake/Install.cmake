# The installed package: headers, libfsdp2.so, the program, and what find_package(fsdp2) reads.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/fsdp2")

# Relative to themselves for what is installed together, absolute for libtorch (and NCCL), which stays where it is.
# (INSTALL_RPATH_USE_LINK_PATH would leave out a .venv inside this tree.)
set(_libtorch_folders "${TorchWheel_ROOT}/lib")
if(FSDP2_HAS_NCCL)
  foreach(_library IN LISTS _nvidia_cudart _nvidia_nccl)
    get_filename_component(_folder "${_library}" DIRECTORY)
    list(APPEND _libtorch_folders "${_folder}")
  endforeach()
endif()
set_target_properties(fsdp2 PROPERTIES INSTALL_RPATH "$ORIGIN;${_libtorch_folders}")
install(TARGETS fsdp2 EXPORT fsdp2Targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET fsdp2_program)
  file(RELATIVE_PATH _from_bin "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(fsdp2_program PROPERTIES INSTALL_RPATH "$ORIGIN/${_from_bin};${_libtorch_folders}")
  install(TARGETS fsdp2_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/fsdp2" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
# Side by side as in this tree, so that the links from one to the other hold.
install(DIRECTORY "${PROJECT_SOURCE_DIR}/skills" "${PROJECT_SOURCE_DIR}/docs" "${PROJECT_SOURCE_DIR}/examples"
  DESTINATION "${CMAKE_INSTALL_DATADIR}/fsdp2")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/benchmarks" DESTINATION "${CMAKE_INSTALL_DATADIR}/fsdp2"
  FILES_MATCHING PATTERN "report.md" PATTERN "*.svg")

install(EXPORT fsdp2Targets NAMESPACE fsdp2:: DESTINATION "${_package_folder}")
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/fsdp2Config.cmake.in" "${PROJECT_BINARY_DIR}/fsdp2Config.cmake"
  INSTALL_DESTINATION "${_package_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/fsdp2ConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(
  FILES
    "${PROJECT_BINARY_DIR}/fsdp2Config.cmake"
    "${PROJECT_BINARY_DIR}/fsdp2ConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/FindTorchWheel.cmake"
  DESTINATION "${_package_folder}")
