// Messages between the processes ("ranks") of one run. Every call is made by all ranks in the same order, with the name
// of its phase; it ends within the communicator's deadline or fails with a typed error, never by hanging.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace c10d {
class Store;
}

namespace nemo_rl::distributed {

/// A call that did not come to its end: who noticed it, in which phase, after how long.
struct CommunicatorError : std::runtime_error {
  CommunicatorError(int rank, std::string phase, double seconds, const std::string& what);
  int rank;
  std::string phase;
  double seconds;
};
/// Another rank is gone, or its connection is.
struct PeerLost : CommunicatorError {
  using CommunicatorError::CommunicatorError;
};
/// Another rank did not come within the deadline.
struct TimedOut : CommunicatorError {
  using CommunicatorError::CommunicatorError;
};

/// Tensors are contiguous, of equal shape and dtype on all ranks, and lie on the device of the back end (Gloo: the CPU,
/// NCCL: one GPU). N is the number of ranks.
class Communicator {
 public:
  virtual ~Communicator() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// out[r] of this rank becomes in[this rank] of rank r. Both [N, ...].
  virtual void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) = 0;
  /// out[r] becomes `in` of rank r. out [N, ...], in [...].
  virtual void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) = 0;
  virtual void broadcast(const at::Tensor& tensor, int root, const char* phase) = 0;
  virtual void send(const at::Tensor& tensor, int to, const char* phase) = 0;
  virtual void receive(const at::Tensor& tensor, int from, const char* phase) = 0;
  virtual void barrier(const char* phase) = 0;

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_, size_;
};

/// Gloo, by the process group that torch.distributed has registered under this name. `seconds`: the deadline of a call.
std::shared_ptr<Communicator> gloo_communicator(const std::string& group_name, double seconds);

/// NCCL, for tensors on `device`, a GPU of this process that no other rank has. The ranks meet over `store`, in which
/// no others have met before. `seconds`: the deadline of a call, the meeting too. A communicator whose call has failed
/// is of no more use.
/// Throws ArgumentError for another device, and where this package was built without NCCL.
std::shared_ptr<Communicator> nccl_communicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device, double seconds);

/// Tensors on a GPU go over `on_cpu`, copied to the CPU's memory and back: for ranks that share a GPU, which NCCL does
/// not connect.
std::shared_ptr<Communicator> communicator_through_cpu(std::shared_ptr<Communicator> on_cpu);

/// Tensors on the CPU go over the first, those on another device over the second; the first serves barriers. Both are
/// of the same ranks.
std::shared_ptr<Communicator> communicator_by_device(std::shared_ptr<Communicator> on_cpu,
                                                     std::shared_ptr<Communicator> on_device);

}  // namespace nemo_rl::distributed
