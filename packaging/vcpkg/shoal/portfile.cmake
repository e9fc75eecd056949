# An overlay port, in a checkout of shoal:
#   SHOAL_TORCH=/path/to/libtorch vcpkg install shoal --overlay-ports=packaging/vcpkg
# vcpkg's own libtorch is older than shoal needs, and built without c10d.
if(NOT EXISTS "$ENV{SHOAL_TORCH}/share/cmake/Torch/TorchConfig.cmake")
  message(FATAL_ERROR "set the environment variable SHOAL_TORCH to libtorch's folder, which holds share/cmake/Torch; "
    "it is '$ENV{SHOAL_TORCH}'")
endif()
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../..")

vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)
set(VCPKG_BUILD_TYPE release)  # there is one libtorch for both, and it decides about NDEBUG
set(X_VCPKG_RPATH_KEEP_SYSTEM_PATHS ON)  # libtorch's folder among them
vcpkg_check_features(OUT_FEATURE_OPTIONS features INVERTED_FEATURES mpi CMAKE_DISABLE_FIND_PACKAGE_MPI)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS ${features} "-DSHOAL_TORCH=$ENV{SHOAL_TORCH}"
  -DSHOAL_BUILD_TESTS=OFF -DSHOAL_BUILD_BENCH=OFF -DSHOAL_BUILD_PYTHON=OFF -DCMAKE_UNITY_BUILD=ON)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/shoal)
vcpkg_copy_tools(TOOL_NAMES shoal AUTO_CLEAN)
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
