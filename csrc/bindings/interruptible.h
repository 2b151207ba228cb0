// Long calls into the engine that Ctrl-C ends.
#pragma once
#include <pybind11/eval.h>
#include <pybind11/pybind11.h>

#include "generation/engine.h"

namespace nemo_rl::bindings {

/// Return f(interrupted), called without the GIL; interrupted() takes it to let Python see signals. A KeyboardInterrupt
/// reaches the caller. In the main thread a signal's handler raises it; in another one, where a run works, it is set
/// from outside (`PyThreadState_SetAsyncExc`), and Python raises it when it next executes a function.
template <class F>
auto interruptible(const F& f) {
  try {
    pybind11::gil_scoped_release no_gil;
    return f([] {
      pybind11::gil_scoped_acquire gil;
      static PyObject* const nothing = pybind11::eval("lambda: None").release().ptr();
      PyObject* const none = PyErr_CheckSignals() == 0 ? PyObject_CallNoArgs(nothing) : nullptr;
      Py_XDECREF(none);
      return none == nullptr;
    });
  } catch (const generation::GenerationInterrupted&) {
    throw pybind11::error_already_set();
  }
}

}  // namespace nemo_rl::bindings
