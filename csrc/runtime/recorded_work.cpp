#include "runtime/recorded_work.h"

namespace nemo_rl::runtime {

decltype(recorded_work_cuda) recorded_work_cuda("recorded_work");

}  // namespace nemo_rl::runtime
