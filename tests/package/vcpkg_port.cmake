# Runs the port in packaging/vcpkg without vcpkg: what the port calls is here in short, as vcpkg's documentation describes it.
#
#   SHOAL_TORCH=... cmake -DPORT=packaging/vcpkg/shoal -DWORK=folder [-DBUILT=folder] [-DFEATURES=mpi] -P vcpkg_port.cmake
#
# The package is made in WORK/packages. With BUILT, a build of shoal, the port's configuration is made and what is
# installed comes from BUILT: a build takes as long as that of the library.
cmake_minimum_required(VERSION 3.25)
get_filename_component(PORT "${PORT}" ABSOLUTE)
get_filename_component(CURRENT_PACKAGES_DIR "${WORK}/packages" ABSOLUTE)
get_filename_component(tree "${WORK}/tree" ABSOLUTE)
set(VCPKG_LIBRARY_LINKAGE static)  # as in vcpkg's own triplet for Linux
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}")

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_FILE "${WORK}/log" ERROR_VARIABLE said)
  if(said MATCHES "not used by the project")
    message(FATAL_ERROR "${said}")
  endif()
endfunction()

function(vcpkg_check_linkage which)
  set(VCPKG_LIBRARY_LINKAGE dynamic PARENT_SCOPE)
endfunction()

function(vcpkg_check_features)
  cmake_parse_arguments(ARG "" "OUT_FEATURE_OPTIONS" "FEATURES;INVERTED_FEATURES" ${ARGN})
  set(options)
  foreach(kind FEATURES INVERTED_FEATURES)
    while(ARG_${kind})
      list(POP_FRONT ARG_${kind} feature variable)
      set(value OFF)
      if((feature IN_LIST FEATURES AND kind STREQUAL "FEATURES") OR
          (NOT feature IN_LIST FEATURES AND kind STREQUAL "INVERTED_FEATURES"))
        set(value ON)
      endif()
      list(APPEND options "-D${variable}=${value}")
    endwhile()
  endforeach()
  set(${ARG_OUT_FEATURE_OPTIONS} ${options} PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(ARG "" "SOURCE_PATH" "OPTIONS" ${ARGN})
  set(shared OFF)
  if(VCPKG_LIBRARY_LINKAGE STREQUAL "dynamic")
    set(shared ON)
  endif()
  run(${CMAKE_COMMAND} -G Ninja -S ${ARG_SOURCE_PATH} -B ${tree} --fresh -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=${shared}
    -DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR} -DCMAKE_INSTALL_LIBDIR:STRING=lib -DCMAKE_INSTALL_BINDIR:STRING=bin ${ARG_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
  if(BUILT)
    run(${CMAKE_COMMAND} --install ${BUILT} --prefix ${CURRENT_PACKAGES_DIR})
  else()
    run(${CMAKE_COMMAND} --build ${tree} --target install)
  endif()
endfunction()

# Moves the CMake files to share/PORT, which is one folder nearer to the prefix.
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(ARG "" "CONFIG_PATH" "" ${ARGN})
  set(share ${CURRENT_PACKAGES_DIR}/share/shoal)
  file(MAKE_DIRECTORY ${CURRENT_PACKAGES_DIR}/share)
  file(RENAME ${CURRENT_PACKAGES_DIR}/${ARG_CONFIG_PATH} ${share})
  get_filename_component(parent ${CURRENT_PACKAGES_DIR}/${ARG_CONFIG_PATH} DIRECTORY)
  file(REMOVE_RECURSE ${parent})
  file(GLOB files ${share}/*.cmake)
  foreach(file IN LISTS files)
    file(READ ${file} text)
    set(up "get_filename_component(_IMPORT_PREFIX \"\${_IMPORT_PREFIX}\" PATH)\n")
    string(REPLACE "${up}${up}${up}" "${up}${up}" text "${text}")
    string(REPLACE "\${CMAKE_CURRENT_LIST_DIR}/../../../" "\${CMAKE_CURRENT_LIST_DIR}/../../" text "${text}")
    file(WRITE ${file} "${text}")
  endforeach()
endfunction()

function(vcpkg_copy_tools)
  cmake_parse_arguments(ARG "AUTO_CLEAN" "" "TOOL_NAMES" ${ARGN})
  foreach(tool IN LISTS ARG_TOOL_NAMES)
    file(COPY ${CURRENT_PACKAGES_DIR}/bin/${tool} DESTINATION ${CURRENT_PACKAGES_DIR}/tools/shoal)
  endforeach()
  if(ARG_AUTO_CLEAN)
    file(REMOVE_RECURSE ${CURRENT_PACKAGES_DIR}/bin)
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(ARG "" "" "FILE_LIST" ${ARGN})
  configure_file(${ARG_FILE_LIST} ${CURRENT_PACKAGES_DIR}/share/shoal/copyright COPYONLY)
endfunction()

include(${PORT}/portfile.cmake)

# vcpkg itself then drops folders outside the package from the search paths of libraries and programs, unless told not to.
if(NOT X_VCPKG_RPATH_KEEP_SYSTEM_PATHS)
  file(GLOB_RECURSE files ${CURRENT_PACKAGES_DIR}/tools/* ${CURRENT_PACKAGES_DIR}/lib/*.so*)
  foreach(file IN LISTS files)
    file(RPATH_REMOVE FILE ${file})
  endforeach()
endif()
