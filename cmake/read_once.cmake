# Two ways to read a header once for many source files. Headers take most of a compilation: torch's and pybind11's 3 to 10 seconds a file, of
# which few lines are our own.
#
# nemo_precompile(target headers...)      precompiled headers. Off with a compiler cache, which would have to be told that a precompiled header
#                                         never changes behind its back.
# nemo_compile_together(target n sources...)   n sources of a folder as one file. For those who change the core every day there is
#                                         -DNEMO_RL_TOGETHER=OFF: then a change compiles one file.
if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
  option(NEMO_RL_PCH "precompiled headers" OFF)
else()
  option(NEMO_RL_PCH "precompiled headers" ON)
endif()
function(nemo_precompile target)
  if(NEMO_RL_PCH)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

option(NEMO_RL_TOGETHER "several sources of a folder are compiled as one" ON)
function(nemo_compile_together target n)
  if(NOT NEMO_RL_TOGETHER)
    return()
  endif()
  foreach(_source IN LISTS ARGN)
    cmake_path(GET _source PARENT_PATH _folder)
    cmake_path(GET _folder FILENAME _folder)
    if(NOT DEFINED _count_${_folder})
      set(_count_${_folder} 0)
    endif()
    math(EXPR _group "${_count_${_folder}} / ${n}")
    math(EXPR _count_${_folder} "${_count_${_folder}} + 1")
    set_source_files_properties("${_source}" PROPERTIES UNITY_GROUP ${_folder}_${_group})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
