// How the module _cuda, which alone is linked with NCCL, brings its communicator to the core.
#pragma once
#include "distributed/communicator.h"

namespace nemo_rl::distributed {

using NcclFactory = std::shared_ptr<Communicator>(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  at::Device device, double seconds);

/// From now on `nccl_communicator` calls this.
void set_nccl_factory(NcclFactory* factory);

/// `nccl_communicator` without its check of the device. In csrc/distributed/nccl_communicator.cpp.
NcclFactory connect_by_nccl;

}  // namespace nemo_rl::distributed
