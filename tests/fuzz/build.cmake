# Every tests/fuzz/NAME_fuzz.cpp is a libFuzzer program; its corpus is tests/fuzz/corpus/NAME.
file(GLOB fuzzers CONFIGURE_DEPENDS tests/fuzz/*_fuzz.cpp)
foreach(source IN LISTS fuzzers)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE weir_engine weir_convert_lib)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endforeach()
# The libraries too report what they cover: without it the fuzzer searches blindly.
foreach(library IN ITEMS weir_kernels weir_engine weir_convert_lib)
  target_compile_options(${library} PRIVATE -fsanitize=fuzzer-no-link)
endforeach()
