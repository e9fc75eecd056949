function(must)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nexit code ${code}\n${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/build)
must(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
# As on a machine where none of what the library is built with can be found.
must(${CMAKE_COMMAND} -G Ninja -S ${CONSUMER} -B ${WORK}/build -DCMAKE_PREFIX_PATH=${WORK}/prefix -DTorch_DIR=${TORCH}/share/cmake/Torch
  -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON -DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON)
must(${CMAKE_COMMAND} --build ${WORK}/build)
must(${WORK}/prefix/bin/shoal launch -n 2 -- ${WORK}/build/example)
message(STATUS "${out}")
if(NOT out MATCHES "\\[0\\] loss [0-9.]+ on 2 ranks")
  message(FATAL_ERROR "the example printed: ${out}")
endif()

# The README shows this very program.
file(READ ${CONSUMER}/example.cpp program)
file(READ ${CONSUMER}/../../../README.md readme)
string(FIND "${readme}" "${program}" place)
if(place EQUAL -1)
  message(FATAL_ERROR "README.md does not show tests/package/consumer/example.cpp as it is")
endif()
