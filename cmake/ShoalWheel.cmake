# The Python package as a wheel, from the objects of this build: the target `wheel` puts it into dist/ of the build folder. What
# is in it needs no libraries but libtorch's and the C and C++ ones: the others are linked statically and kept to itself, and
# the transport mpi lies in a library of its own, which is loaded where a program asks for it. shoal/lib, shoal/bin and
# shoal/include lie in the package's folder, with libtorch beside it in torch/lib.
find_library(SHOAL_STATIC_CRYPTO libcrypto.a)
find_library(SHOAL_STATIC_ZLIB libz.a)
if(NOT SHOAL_STATIC_CRYPTO OR NOT SHOAL_STATIC_ZLIB)
  if(SKBUILD)
    message(FATAL_ERROR "the wheel needs libcrypto.a and libz.a (Debian: libssl-dev zlib1g-dev)")
  endif()
  message(STATUS "Python: no target `wheel`; it needs libcrypto.a and libz.a (Debian: libssl-dev zlib1g-dev)")
  return()
endif()

set(mpi shoal_no_mpi)
if(TARGET shoal_mpi)
  set(mpi shoal_loaded_mpi)
endif()
add_library(shoal_wheel_library SHARED EXCLUDE_FROM_ALL ${library_objects} $<TARGET_OBJECTS:${mpi}>)
target_link_libraries(shoal_wheel_library PUBLIC shoal_flags ${torch_in_build}
  PRIVATE ${SHOAL_STATIC_ZLIB} ${SHOAL_STATIC_CRYPTO} Threads::Threads ${CMAKE_DL_LIBS})
target_link_options(shoal_wheel_library PRIVATE LINKER:--exclude-libs,ALL)
# One file with the name that the extension asks for: a wheel has no links.
set_target_properties(shoal_wheel_library PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME shoal EXPORT_NAME shoal
  SUFFIX .so.${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/wheel INSTALL_RPATH "$ORIGIN/../../torch/lib")

set(mpi_module)
if(TARGET shoal_mpi)
  set(mpi_module shoal_wheel_mpi)
  add_library(shoal_wheel_mpi MODULE EXCLUDE_FROM_ALL $<TARGET_OBJECTS:shoal_mpi>
    ${PROJECT_SOURCE_DIR}/src/comm/mpi/mpi_module.cpp)
  target_link_options(shoal_wheel_mpi PRIVATE LINKER:--as-needed)
  target_link_libraries(shoal_wheel_mpi PRIVATE shoal_wheel_library shoal_warnings MPI::MPI_CXX)
  target_include_directories(shoal_wheel_mpi PRIVATE ${PROJECT_SOURCE_DIR}/src)
  set_target_properties(shoal_wheel_mpi PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME shoal_mpi
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/wheel INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
  install(TARGETS shoal_wheel_mpi LIBRARY DESTINATION lib COMPONENT wheel EXCLUDE_FROM_ALL)
endif()

shoal_objects(program_objects cli launch models data)
add_executable(shoal_wheel_program EXCLUDE_FROM_ALL ${program_objects})
target_link_libraries(shoal_wheel_program PRIVATE shoal_wheel_library ${SHOAL_STATIC_ZLIB})
target_link_options(shoal_wheel_program PRIVATE LINKER:--exclude-libs,ALL)
set_target_properties(shoal_wheel_program PROPERTIES LINKER_LANGUAGE CXX OUTPUT_NAME shoal
  RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/wheel INSTALL_RPATH "$ORIGIN/../lib;$ORIGIN/../../torch/lib")

set(SHOAL_INSTALLED_TORCH "\${CMAKE_CURRENT_LIST_DIR}/../../../../torch")
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/shoalConfig.cmake.in ${PROJECT_BINARY_DIR}/wheel/shoalConfig.cmake
  INSTALL_DESTINATION lib/cmake/shoal)

# The component `wheel`: no part of what `cmake --install` installs otherwise.
set(part COMPONENT wheel EXCLUDE_FROM_ALL)
install(TARGETS shoal_wheel_library shoal_flags EXPORT shoal_wheel LIBRARY DESTINATION lib ${part})
install(TARGETS shoal_wheel_program RUNTIME DESTINATION bin ${part})
install(TARGETS shoal_python LIBRARY DESTINATION . ${part})
install(EXPORT shoal_wheel NAMESPACE shoal:: DESTINATION lib/cmake/shoal FILE shoalTargets.cmake ${part})
install(FILES ${PROJECT_BINARY_DIR}/wheel/shoalConfig.cmake ${PROJECT_BINARY_DIR}/shoalConfigVersion.cmake
  DESTINATION lib/cmake/shoal ${part})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/shoal DESTINATION include ${part})
install(FILES ${package}/_version.py DESTINATION . ${part})
install(DIRECTORY shoal/ DESTINATION . ${part} FILES_MATCHING PATTERN *.py PATTERN *.pyi PATTERN py.typed
  PATTERN __pycache__ EXCLUDE)

add_custom_target(wheel_files DEPENDS shoal_wheel_library ${mpi_module} shoal_wheel_program shoal_python)
# scikit-build-core writes the wheel's metadata and names the torch and the Python that it is for, as for a wheel that it
# builds itself from the sources (`pip wheel .`, which makes the target above and installs the component).
set(staged ${PROJECT_BINARY_DIR}/wheel/staged)
add_custom_target(wheel
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${staged} ${PROJECT_BINARY_DIR}/dist
  COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --component wheel --strip --prefix ${staged}/shoal
    > ${PROJECT_BINARY_DIR}/wheel/install.log
  COMMAND ${Python_EXECUTABLE} -m pip wheel --quiet --no-index --disable-pip-version-check --no-build-isolation --no-deps -w ${PROJECT_BINARY_DIR}/dist
    -C wheel.cmake=false -C wheel.platlib=true -C sdist.inclusion-mode=manual -C wheel.packages=${staged}/shoal ${PROJECT_SOURCE_DIR}
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/repair_wheel.py ${PROJECT_BINARY_DIR}/dist
  DEPENDS wheel_files VERBATIM)
