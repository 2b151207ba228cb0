// The memory of other ranks that are processes of this machine: read in place, so that a message is one copy.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/communicator.h"

namespace nemo_rl::distributed {

/// Linux's process_vm_readv. What a rank reads must not be written meanwhile: callers meet before and after.
class PeerMemory {
 public:
  /// All ranks call it. nullptr on all of them where one may not read the memory of another: ranks of several machines,
  /// a system that forbids it, or does not have it. Ranks with one parent process allow its descendants to read them.
  static std::unique_ptr<PeerMemory> open(Communicator& ranks, const char* phase);

  /// Where each rank has its `tensor`. All ranks call it, so it also waits until all are here.
  std::vector<std::uint64_t> addresses(Communicator& ranks, const at::Tensor& tensor, const char* phase) const;
  /// `bytes` from `address` on of another rank. Throws PeerLost where that process is gone. Any thread may call it.
  void read(int from, std::uint64_t address, void* to, std::size_t bytes, const char* phase) const;

 private:
  PeerMemory(int rank, std::vector<std::int64_t> processes) : rank_(rank), processes_(std::move(processes)) {}
  int rank_;
  std::vector<std::int64_t> processes_;
};

}  // namespace nemo_rl::distributed
