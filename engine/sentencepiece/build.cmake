# sentencepiece tokenizes, out of a shared library of its own that programs load at run time:
# bin/PROGRAM, lib/libweir-sentencepiece.so and lib/weir-private/libsentencepiece.so.0 move together.
find_path(SENTENCEPIECE_INCLUDE sentencepiece_processor.h REQUIRED)
find_library(SENTENCEPIECE_LIBRARY sentencepiece REQUIRED)
file(REAL_PATH ${SENTENCEPIECE_LIBRARY} SENTENCEPIECE_FILE)

add_executable(make_private engine/sentencepiece/make_private.cpp)
set(PRIVATE_SENTENCEPIECE ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/weir-private/libsentencepiece.so.0)
add_custom_command(
  OUTPUT ${PRIVATE_SENTENCEPIECE}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/weir-private
  COMMAND make_private ${SENTENCEPIECE_FILE} ${PRIVATE_SENTENCEPIECE}
  DEPENDS make_private ${SENTENCEPIECE_FILE})
add_custom_target(private_sentencepiece DEPENDS ${PRIVATE_SENTENCEPIECE})

add_library(weir-sentencepiece MODULE engine/sentencepiece/plugin.cpp
            engine/sentencepiece/model_check.cpp)
target_include_directories(weir-sentencepiece PRIVATE ${CMAKE_SOURCE_DIR})
target_include_directories(weir-sentencepiece SYSTEM PRIVATE ${SENTENCEPIECE_INCLUDE})
target_link_libraries(weir-sentencepiece PRIVATE ${PRIVATE_SENTENCEPIECE})
# RPATH and not RUNPATH: it stands before LD_LIBRARY_PATH, so no other copy can take its place.
target_link_options(weir-sentencepiece PRIVATE -Wl,--disable-new-dtags -Wl,-Bsymbolic -Wl,-z,now)
set_target_properties(weir-sentencepiece PROPERTIES
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/weir-private"
  LINK_DEPENDS ${PRIVATE_SENTENCEPIECE})
add_dependencies(weir-sentencepiece private_sentencepiece)
add_dependencies(weir_engine weir-sentencepiece)
