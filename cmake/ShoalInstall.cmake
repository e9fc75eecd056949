# `cmake --install` puts headers, libraries, the program and a package for find_package(shoal) in place.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(SHOAL_LAYERS base layout memory comm module checkpoint optim engine strategy)
add_library(shoal INTERFACE)
target_link_libraries(shoal INTERFACE shoal_strategy shoal_optim shoal_layout)
add_library(shoal::shoal ALIAS shoal)

set(targets shoal shoal_flags)
foreach(layer IN LISTS SHOAL_LAYERS)
  list(APPEND targets shoal_${layer})
endforeach()
install(TARGETS ${targets} EXPORT shoal ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT shoal NAMESPACE shoal:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/shoal FILE shoalTargets.cmake)
install(DIRECTORY include/shoal DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET shoal_cli)
  install(TARGETS shoal_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/shoalConfig.cmake.in ${CMAKE_BINARY_DIR}/shoalConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/shoal)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/shoalConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/shoalConfig.cmake ${CMAKE_BINARY_DIR}/shoalConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/shoal)
