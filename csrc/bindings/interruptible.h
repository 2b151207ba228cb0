// Long calls into the engine that Ctrl-C ends.
#pragma once
#include <pybind11/pybind11.h>

#include "generation/engine.h"

namespace nemo_rl::bindings {

/// f(interrupted) without the GIL; interrupted() takes it to let Python see signals. A KeyboardInterrupt reaches the
/// caller.
template <class F>
auto interruptible(const F& f) {
  try {
    pybind11::gil_scoped_release no_gil;
    return f([] {
      pybind11::gil_scoped_acquire gil;
      return PyErr_CheckSignals() != 0;
    });
  } catch (const generation::GenerationInterrupted&) {
    throw pybind11::error_already_set();
  }
}

}  // namespace nemo_rl::bindings
