# An overlay port: vcpkg install shoal --overlay-ports=packaging/vcpkg, in a checkout of shoal.
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../..")

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DSHOAL_BUILD_TESTS=OFF -DSHOAL_BUILD_BENCH=OFF
    -DSHOAL_BUILD_PYTHON=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/shoal)
vcpkg_copy_tools(TOOL_NAMES shoal AUTO_CLEAN)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
