# shoal_test(NAME SOURCES file... [LIBRARIES target...] [LABELS label...] [TIMEOUT seconds] [NO_TORCH] [TOGETHER suite...])
#
# A GoogleTest program in one process. Each case becomes a ctest, but where all are fast the program does, and each suite of
# TOGETHER: loading libtorch takes longer than most of their cases.
function(shoal_test name)
  cmake_parse_arguments(ARG "NO_TORCH" "TIMEOUT" "SOURCES;LIBRARIES;LABELS;TOGETHER" ${ARGN})
  shoal_test_defaults()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_LIBRARIES} shoal_test_main shoal_flags shoal_warnings shoal_test_warnings)
  if(NOT ARG_NO_TORCH)
    shoal_uses_torch(${name} shoal_test_pch)
  endif()
  target_compile_options(${name} PRIVATE ${shoal_test_options})
  if(ARG_LABELS STREQUAL "fast" AND NOT ARG_NO_TORCH)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS fast TIMEOUT ${ARG_TIMEOUT})
  else()
    # Most of them start programs or fork: with large pages, the start of libtorch takes a tenth less processor time.
    set(properties LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT GLIBC_TUNABLES=glibc.malloc.hugetlb=1)
    foreach(suite IN LISTS ARG_TOGETHER)
      add_test(NAME ${suite} COMMAND ${name} --gtest_filter=${suite}.*)
      set_tests_properties(${suite} PROPERTIES ${properties} FAIL_REGULAR_EXPRESSION "Running 0 tests"
        SKIP_REGULAR_EXPRESSION "PASSED  . 0 tests[^[]*.  SKIPPED ")
    endforeach()
    list(TRANSFORM ARG_TOGETHER APPEND ".*")
    string(JOIN ":" together ${ARG_TOGETHER})
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST TEST_FILTER "*-${together}" PROPERTIES ${properties})
  endif()
endfunction()

# shoal_world_test(NAME SOURCES file... WORLD 1 2 3 4 [LIBRARIES target...] [LABELS label...] [TIMEOUT seconds] [WAITS])
#
# A GoogleTest program whose cases are run by all ranks together; one ctest per world size. Its files are compiled several at a
# time, for which each has a namespace of its own: shoal::NAME_OF_THE_FILE. Fast tests of other than 2 ranks are labelled
# `thorough` instead: they repeat at another size what 2 ranks show. WAITS: for deadlines, nearly all the time, so that it runs
# beside tests that keep the processors busy.
function(shoal_world_test name)
  cmake_parse_arguments(ARG "WAITS" "TIMEOUT" "SOURCES;LIBRARIES;LABELS;WORLD" ${ARGN})
  shoal_test_defaults()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_LIBRARIES} shoal_test_support shoal_flags shoal_warnings shoal_test_warnings)
  shoal_uses_torch(${name} shoal_test_pch)
  target_compile_options(${name} PRIVATE ${shoal_test_options})
  foreach(ranks IN LISTS ARG_WORLD)
    add_test(NAME ${name}.world${ranks} COMMAND ${name} --ranks ${ranks})
    shoal_world_label(label ${ranks})
    set_tests_properties(${name}.world${ranks} PROPERTIES
      LABELS "${label}" TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${processors} COST 40 FAIL_REGULAR_EXPRESSION "Running 0 tests")
  endforeach()
endfunction()

# shoal_world_variant(NAME VARIANT WORLD 1 2 ... ARGS argument... [SUITES suite...] [DIVIDED] [WAITS] [LABELS label...] [TIMEOUT seconds])
#
# The same program once more with other arguments, as ctests NAME.VARIANT.worldN, `thorough` unless labelled otherwise; with
# SUITES, these suites of it. --transport and --check-agreement are the world's options (see tests/support/world_main.cpp).
# DIVIDED: the cases are divided among the world sizes, so that each runs once; without the variant each runs at all sizes.
# Every exchange over sockets takes several times as long. To run all: NAME --ranks N argument...
function(shoal_world_variant name variant)
  cmake_parse_arguments(ARG "DIVIDED;WAITS" "TIMEOUT" "LABELS;WORLD;ARGS;SUITES" ${ARGN})
  if(ARG_SUITES)
    list(TRANSFORM ARG_SUITES REPLACE "(.+)" "\\1.*:*/\\1.*" OUTPUT_VARIABLE patterns)
    string(JOIN ":" patterns ${patterns})
    list(APPEND ARG_ARGS "--gtest_filter=${patterns}")
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS thorough)
  endif()
  shoal_test_defaults()
  list(LENGTH ARG_WORLD parts)
  set(part 0)
  foreach(ranks IN LISTS ARG_WORLD)
    add_test(NAME ${name}.${variant}.world${ranks} COMMAND ${name} --ranks ${ranks} ${ARG_ARGS})
    shoal_world_label(label ${ranks})
    set_tests_properties(${name}.${variant}.world${ranks} PROPERTIES
      LABELS "${label}" TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${processors} COST 40 FAIL_REGULAR_EXPRESSION "Running 0 tests")
    if(ARG_DIVIDED)
      set_tests_properties(${name}.${variant}.world${ranks} PROPERTIES
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=${part}")
    endif()
    math(EXPR part "${part} + 1")
  endforeach()
endfunction()

# shoal_runs_with_mpi(NAME WORLD 2 3 [ARGS argument...] [LABELS label...] [TIMEOUT seconds])
#
# The world test NAME once more, started by mpirun and over MPI; `thorough` unless labelled otherwise.
function(shoal_runs_with_mpi name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "LABELS;WORLD;ARGS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS thorough)
  endif()
  shoal_test_defaults()
  foreach(ranks IN LISTS ARG_WORLD)
    add_test(NAME ${name}.mpi${ranks}
      COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${name}> --transport mpi ${ARG_ARGS})
    shoal_world_label(label ${ranks})
    set_tests_properties(${name}.mpi${ranks} PROPERTIES
      LABELS "${label}" TIMEOUT ${ARG_TIMEOUT} PROCESSORS ${processors} COST 40 FAIL_REGULAR_EXPRESSION "Running 0 tests"
      ENVIRONMENT "${SHOAL_MPIRUN_ENVIRONMENT}")
  endforeach()
endfunction()

# shoal_fuzz(NAME SOURCES file... LIBRARIES target... CORPUS folder...)
#
# A libFuzzer target, with SHOAL_FUZZ. What it finds stays found: with any compiler, ctest NAME_replay runs it over the
# corpus, and over its files cut short.
function(shoal_fuzz name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBRARIES;CORPUS" ${ARGN})
  set(targets ${name}_replay)
  add_executable(${name}_replay ${ARG_SOURCES} ${PROJECT_SOURCE_DIR}/tests/support/fuzz_replay.cpp)
  if(SHOAL_FUZZ)
    list(APPEND targets ${name})
    add_executable(${name} ${ARG_SOURCES})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  endif()
  foreach(target IN LISTS targets)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target} PUBLIC ${ARG_LIBRARIES} shoal_flags shoal_warnings shoal_test_warnings)
    shoal_uses_torch(${target} shoal_test_pch)
    target_compile_options(${target} PRIVATE ${shoal_test_options})
  endforeach()
  list(TRANSFORM ARG_CORPUS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  add_test(NAME ${name}_replay COMMAND ${name}_replay ${ARG_CORPUS})
  set_tests_properties(${name}_replay PROPERTIES LABELS thorough)
endfunction()

# Open MPI: more ranks than cores, as root, not bound to cores that another test's ranks are bound to as well, and waits that
# give way to other tests.
set(SHOAL_MPIRUN_ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1)

# Busy tests begin first (COST), so that those which wait run beside them.
macro(shoal_world_label result ranks)
  set(${result} "${ARG_LABELS}")
  set(processors 3)
  if(${ranks} EQUAL 1 OR ARG_WAITS)
    set(processors 1)
  endif()
  if(NOT ${ranks} EQUAL 2 AND ARG_LABELS STREQUAL "fast")
    set(${result} thorough)
  endif()
endmacro()

macro(shoal_test_defaults)
  if(NOT ARG_LABELS)
    set(ARG_LABELS fast)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)  # a machine may be three times as slow as those that the tests were written on
  endif()
  if(SHOAL_SANITIZE)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")
  endif()
endmacro()
