# `cmake --install` puts headers, one shared library, the program and a package for find_package(shoal) in place. What
# the library is built with besides libtorch (MPI, zlib, OpenSSL) is its own affair: users need none of it to build.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# shoal_objects(RESULT part...): the objects of those layers that are there.
function(shoal_objects result)
  set(objects)
  foreach(part IN LISTS ARGN)
    if(TARGET shoal_${part})
      list(APPEND objects $<TARGET_OBJECTS:shoal_${part}>)
    endif()
  endforeach()
  set(${result} ${objects} PARENT_SCOPE)
endfunction()
shoal_objects(library_objects base layout memory comm kernels_baseline kernels_avx2 module checkpoint optim engine strategy
  training planning loop elastic)
set(mpi no_mpi)
if(TARGET shoal_mpi)
  set(mpi mpi)
endif()
# The program is the file `shoal`, so the library's target is not.
add_library(libshoal SHARED ${library_objects} $<TARGET_OBJECTS:shoal_${mpi}>)
# libtorch's libraries have paths of this machine, so shoalConfig.cmake takes them from the libtorch that it finds.
list(TRANSFORM TORCH_LIBRARIES REPLACE "(.+)" "$<BUILD_INTERFACE:\\1>" OUTPUT_VARIABLE torch_in_build)
target_link_libraries(libshoal PUBLIC shoal_flags ${torch_in_build}
  PRIVATE ZLIB::ZLIB OpenSSL::Crypto Threads::Threads $<TARGET_NAME_IF_EXISTS:MPI::MPI_CXX>)
set_target_properties(libshoal PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME shoal EXPORT_NAME shoal
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
add_library(shoal::shoal ALIAS libshoal)

install(TARGETS libshoal shoal_flags EXPORT shoal
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT shoal NAMESPACE shoal:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/shoal FILE shoalTargets.cmake)
install(DIRECTORY include/shoal DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET shoal_cli)
  install(TARGETS shoal_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(SHOAL_INSTALLED_TORCH ${TORCH_INSTALL_PREFIX})
configure_package_config_file(cmake/shoalConfig.cmake.in ${PROJECT_BINARY_DIR}/shoalConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/shoal)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/shoalConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/shoalConfig.cmake ${PROJECT_BINARY_DIR}/shoalConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/shoal)
