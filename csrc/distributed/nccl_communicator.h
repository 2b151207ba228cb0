// How the module _cuda, which alone is linked with NCCL, brings its communicator to the core.
#pragma once
#include "distributed/communicator.h"

namespace nemo_rl::distributed {

using NcclFactory = std::shared_ptr<Communicator>(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  at::Device device, double seconds);

/// From now on `nccl_communicator` calls this.
void set_nccl_factory(NcclFactory* factory);

/// One number that NCCL itself sums over all ranks. Communicators of other programs (vLLM's) begin with it, so that a
/// rank which meets them must do it too, before anything else. Throws ArgumentError for a communicator that is not
/// NCCL's.
using NcclGreeting = void(Communicator& communicator, const char* phase);

/// From now on `nccl_greeting` calls this.
void set_nccl_greeting(NcclGreeting* greeting);
NcclGreeting nccl_greeting;

/// What the module _cuda brings for it. In csrc/distributed/nccl_communicator.cpp.
NcclGreeting greet_by_nccl;

/// `nccl_communicator` without its check of the device. In csrc/distributed/nccl_communicator.cpp.
NcclFactory connect_by_nccl;

}  // namespace nemo_rl::distributed
