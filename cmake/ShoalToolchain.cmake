# Compiler, libtorch, warnings, sanitizers, compiler cache.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# libtorch: SHOAL_TORCH (variable or environment) names a folder with share/cmake/Torch; CMAKE_PREFIX_PATH works as
# usual; Python_EXECUTABLE, given to this project, names a Python whose PyTorch is taken; otherwise the virtual
# environment of scripts/setup. As a part of another project, whose find_package(Python) sets that variable, it does not count.
if(NOT SHOAL_TORCH AND DEFINED ENV{SHOAL_TORCH})
  set(SHOAL_TORCH $ENV{SHOAL_TORCH})
endif()
if(NOT SHOAL_TORCH AND PROJECT_IS_TOP_LEVEL AND SHOAL_BUILD_PYTHON AND Python_EXECUTABLE)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import os, torch; print(os.path.dirname(torch.__file__))"
    OUTPUT_VARIABLE SHOAL_TORCH OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
if(NOT SHOAL_TORCH)
  file(GLOB SHOAL_TORCH ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
endif()
if(SHOAL_TORCH)
  list(PREPEND CMAKE_PREFIX_PATH ${SHOAL_TORCH})
endif()
find_package(Torch REQUIRED)

add_library(shoal_flags INTERFACE)
target_compile_features(shoal_flags INTERFACE cxx_std_20)
target_include_directories(shoal_flags INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
# libtorch's own headers change the layout of at::RecordFunction without NDEBUG; the binary is built with it.
target_compile_definitions(shoal_flags INTERFACE NDEBUG)
# PyTorch's wheels export parts of another version's std::filesystem (PyTorch issue 133437), which crash in programs that
# find them before those of their own libstdc++.
target_link_options(shoal_flags INTERFACE LINKER:--push-state,--no-as-needed,-lstdc++,--pop-state)

add_library(shoal_warnings INTERFACE)
target_compile_options(shoal_warnings INTERFACE -Wall -Wextra -Wno-unused-parameter)
target_include_directories(shoal_warnings INTERFACE ${PROJECT_SOURCE_DIR}/src)
# libtorch's include folder holds another version of fmt than the system's library; used as headers, either one works.
target_compile_definitions(shoal_warnings INTERFACE FMT_HEADER_ONLY)
# Package managers keep headers in folders of their own. Folders that the compiler searches anyway are left out.
target_include_directories(shoal_warnings SYSTEM INTERFACE
  $<TARGET_PROPERTY:fmt::fmt,INTERFACE_INCLUDE_DIRECTORIES>
  $<TARGET_PROPERTY:nlohmann_json::nlohmann_json,INTERFACE_INCLUDE_DIRECTORIES>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of overruns inside its own std::string (GCC bugs 105329, 105651).
  target_compile_options(shoal_warnings INTERFACE -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Its garbage collector starts at 128 MB, which a precompiled header of libtorch has from the start: an eighth of the time.
  target_compile_options(shoal_warnings INTERFACE --param=ggc-min-heapsize=1048576)
endif()
if(SHOAL_SANITIZE)
  # A finding ends the program, so that the test fails. Line tables are what a report needs; more doubles the build.
  target_compile_options(shoal_warnings INTERFACE -fsanitize=${SHOAL_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer -g1)
  target_link_options(shoal_warnings INTERFACE -fsanitize=${SHOAL_SANITIZE})
  target_compile_definitions(shoal_warnings INTERFACE SHOAL_SANITIZED)
endif()
if(SHOAL_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "SHOAL_FUZZ: libFuzzer comes with clang; configure with -DCMAKE_CXX_COMPILER=clang++")
  endif()
  target_compile_options(shoal_warnings INTERFACE -fsanitize=fuzzer-no-link)
endif()

find_program(SHOAL_CCACHE ccache)
if(SHOAL_CCACHE)
  # Precompiled headers are only cached with these checks relaxed.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${SHOAL_CCACHE})
  add_compile_options(
    $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess> "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endif()
