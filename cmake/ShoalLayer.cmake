# shoal_layer(NAME SOURCES file... DEPENDS layer... [LIBRARIES target...] [NO_TORCH])
#
# One static library per layer, shoal_NAME. DEPENDS names lower layers only; tests/architecture checks the includes.
function(shoal_layer name)
  cmake_parse_arguments(ARG "NO_TORCH" "" "SOURCES;DEPENDS;LIBRARIES" ${ARGN})
  add_library(shoal_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(shoal_${name} PUBLIC shoal_flags ${ARG_LIBRARIES})
  target_link_libraries(shoal_${name} PRIVATE $<BUILD_INTERFACE:shoal_warnings>)
  foreach(layer IN LISTS ARG_DEPENDS)
    target_link_libraries(shoal_${name} PUBLIC shoal_${layer})
  endforeach()
  if(NOT ARG_NO_TORCH)
    shoal_uses_torch(shoal_${name})
  endif()
endfunction()

# shoal_light(TARGET...)
#
# Code whose time is that of libtorch and of other layers: optimised less, it compiles in three quarters of the time.
function(shoal_light)
  foreach(target IN LISTS ARGN)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endforeach()
endfunction()

# shoal_uses_torch(TARGET [PCH])
#
# Links libtorch and shares one precompiled header among all targets that use it: shoal_pch, or the one given.
function(shoal_uses_torch target)
  set(pch shoal_pch)
  if(ARGC GREATER 1)
    set(pch ${ARGV1})
  endif()
  target_link_libraries(${target} PUBLIC ${TORCH_LIBRARIES})
  target_precompile_headers(${target} REUSE_FROM ${pch})
  # Programs are compiled like the libraries, since a precompiled header fits one setting only.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
endfunction()
