#include "ops/recorded_work.h"

namespace nemo_rl::ops {

decltype(recorded_work_cuda) recorded_work_cuda("recorded_work");

}  // namespace nemo_rl::ops
