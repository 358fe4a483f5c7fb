# Every tests/FOLDER/NAME_test.cpp is a program of its own; what it links follows from its folder.
find_package(GTest CONFIG REQUIRED)
include(GoogleTest)

function(weir_test folder library)
  file(GLOB sources CONFIGURE_DEPENDS tests/${folder}/*_test.cpp)
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE ${library} nlohmann_json::nlohmann_json GTest::gtest GTest::gtest_main)
    target_compile_definitions(${name} PRIVATE WEIR_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
                               WEIR_BINARY_DIR="${CMAKE_BINARY_DIR}")
    add_test(NAME ${folder}/${name} COMMAND ${name})
    set_tests_properties(${folder}/${name} PROPERTIES LABELS ${folder} TIMEOUT 600)
  endforeach()
endfunction()

weir_test(ops weir_kernels)
weir_test(unit "weir_engine;weir_convert_lib")
weir_test(sim weir_engine)
if(WEIR_SERVER)
  weir_test(serve "weir_server_lib;weir_client_lib")
endif()

# The scheduler's simulation is itself tested: each of a list of bugs, put into a copy of the
# scheduler, must make it fail.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  add_test(NAME sim/scheduler_bugs
           COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_SOURCE_DIR}/tests/sim/scheduler_bugs/self_test.py
                   ${CMAKE_CXX_COMPILER} ${CMAKE_BINARY_DIR}/scheduler_bugs)
  set_tests_properties(sim/scheduler_bugs PROPERTIES LABELS selftest TIMEOUT 600)
else()
  message(STATUS "No Python 3: sim/scheduler_bugs, the simulation's self-test, is left out")
endif()

# Benchmarks print tables; nothing is asserted about time.
if(NOT WEIR_SANITIZE)
  file(GLOB benches CONFIGURE_DEPENDS tests/bench/*_bench.cpp)
  foreach(source IN LISTS benches)
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE weir_engine nlohmann_json::nlohmann_json)
  endforeach()
endif()
