# `cpack` makes a Debian package of what `cmake --install` installs. libtorch is in no Debian package that shoal could depend on:
# the library, the program (CMAKE_INSTALL_RPATH) and find_package(shoal) look for it where it was when shoal was built, and
# find_package(shoal) before that in CMAKE_PREFIX_PATH.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME shoal)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "the shoal maintainers <shoal@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "data-parallel training in C++ on libtorch")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# dpkg-shlibdeps stops at libtorch's libraries, which belong to no package.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6 (>= 2.35), libstdc++6 (>= 12), libssl3, zlib1g")
if(MPI_CXX_FOUND)
  string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", libopenmpi3 | libopenmpi40")
endif()
include(CPack)
