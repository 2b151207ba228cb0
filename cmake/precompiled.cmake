# Precompiled headers: torch's and pybind11's headers take 5 to 10 seconds in each source file, of which few lines are our own.
# Off with a compiler cache, which would have to be told that a precompiled header never changes behind its back.
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
