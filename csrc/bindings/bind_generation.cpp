#include "bindings/module.h"

namespace nemo_rl::bindings {

void bind_generation(py::module_& m) { (void)m; }

}  // namespace nemo_rl::bindings
