# The Python package holds what is installed: shoal/lib, shoal/bin, shoal/include, with libtorch beside it in torch/lib. It
# needs no libraries but libtorch's and the C library's: no MPI, and the others are linked statically and kept to itself.
set(CMAKE_INSTALL_RPATH "$ORIGIN/../../torch/lib;$ORIGIN/../lib")
set(CMAKE_INSTALL_LIBDIR lib)
set(SHOAL_INSTALLED_TORCH "\${CMAKE_CURRENT_LIST_DIR}/../../../../torch")
set(OPENSSL_USE_STATIC_LIBS TRUE)
set(ZLIB_USE_STATIC_LIBS ON)
add_link_options(LINKER:--exclude-libs,ALL)
