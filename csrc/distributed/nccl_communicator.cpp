// NCCL: what travels is bytes, so the arithmetic of sums, and their order, is gradient_sums' alone; NCCL's own
// reductions add in an order of their choice, and serve greetings only. A call returns when this rank's stream has done
// it.
#include "distributed/nccl_communicator.h"

#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "distributed/nccl_connection.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr const char* kMeeting = "meeting the other ranks";
constexpr const char* kKey = "nccl_unique_id";

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const ncclUniqueId& id, const Call& meeting, at::Device device)
      : Communicator(meeting.rank, meeting.size), device_(device), connection_(id, meeting, device) {}

  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    check_all_to_all(*this, out, in, phase);
    check(out, phase), check(in, phase);
    if (in.numel() == 0) return;
    const std::size_t part = in.nbytes() / static_cast<std::size_t>(size());
    run(phase, [&](ncclComm_t communicator, cudaStream_t stream) {
      ncclResult_t result = ncclSuccess;
      for (int r = 0; r < size() && NcclConnection::is_accepted(result); ++r) {
        const std::size_t begin = part * static_cast<std::size_t>(r);
        result = ncclSend(bytes(in) + begin, part, ncclUint8, r, communicator, stream);
        if (NcclConnection::is_accepted(result))
          result = ncclRecv(bytes(out) + begin, part, ncclUint8, r, communicator, stream);
      }
      return result;
    });
  }

  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    check_all_gather(*this, out, in, phase);
    check(out, phase), check(in, phase);
    if (in.numel() == 0) return;
    run(phase, [&](ncclComm_t communicator, cudaStream_t stream) {
      return ncclAllGather(bytes(in), bytes(out), in.nbytes(), ncclUint8, communicator, stream);
    });
  }

  void broadcast(const at::Tensor& tensor, int root, const char* phase) override {
    check(tensor, phase), check_rank(root, phase);
    if (tensor.numel() == 0) return;
    run(phase, [&](ncclComm_t communicator, cudaStream_t stream) {
      return ncclBroadcast(bytes(tensor), bytes(tensor), tensor.nbytes(), ncclUint8, root, communicator, stream);
    });
  }

  void send(const at::Tensor& tensor, int to, const char* phase) override {
    check(tensor, phase), check_other(to, phase);
    if (tensor.numel() == 0) return;
    run(phase, [&](ncclComm_t communicator, cudaStream_t stream) {
      return ncclSend(bytes(tensor), tensor.nbytes(), ncclUint8, to, communicator, stream);
    });
  }

  void receive(const at::Tensor& tensor, int from, const char* phase) override {
    check(tensor, phase), check_other(from, phase);
    if (tensor.numel() == 0) return;
    run(phase, [&](ncclComm_t communicator, cudaStream_t stream) {
      return ncclRecv(bytes(tensor), tensor.nbytes(), ncclUint8, from, communicator, stream);
    });
  }

  /// NCCL has none: every rank waits for a byte of every other.
  void barrier(const char* phase) override {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
    all_gather(at::empty({size(), 1}, options), at::empty({1}, options), phase);
  }

  /// As `NcclGreeting`.
  void greet(const char* phase) {
    const auto number = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device_));
    run(phase, [&](ncclComm_t communicator, cudaStream_t stream) {
      return ncclAllReduce(bytes(number), bytes(number), 1, ncclFloat32, ncclSum, communicator, stream);
    });
  }

 private:
  template <class Enqueue>
  void run(const char* phase, const Enqueue& enqueue) {
    const c10::cuda::CUDAGuard guard(device_);
    connection_.run(phase, enqueue);
  }

  static char* bytes(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

  void check(const at::Tensor& tensor, const char* phase) const {
    NRL_CHECK(tensor.device() == device_ && tensor.is_contiguous(), phase, ": NCCL needs contiguous tensors on ",
              device_.str(), ", got one ", tensor.is_contiguous() ? "" : "with gaps ", "on ", tensor.device().str());
  }
  void check_rank(int other, const char* phase) const {
    NRL_CHECK(other >= 0 && other < size(), phase, ": there is no rank ", other, " among ", size());
  }
  void check_other(int other, const char* phase) const {
    check_rank(other, phase);
    NRL_CHECK(other != rank(), phase, ": rank ", other, " is this rank itself");
  }

  at::Device device_;
  NcclConnection connection_;
};

/// Rank 0 makes the id, and the others find it in the store.
ncclUniqueId agree_on_id(c10d::Store& store, const Call& call) {
  ncclUniqueId id;
  const auto deadline = std::chrono::milliseconds(static_cast<std::int64_t>(call.deadline * 1000) + 1);
  try {
    if (call.rank == 0) {
      NRL_CHECK_ARG(!store.check({kKey}), kMeeting,
                    ": other ranks have met in this store before; give each meeting a prefix of its own");
      const ncclResult_t result = ncclGetUniqueId(&id);
      if (result != ncclSuccess) call.fail(detail::concat("NCCL gives no id: ", ncclGetErrorString(result)));
      store.set(kKey, std::vector<std::uint8_t>(id.internal, id.internal + sizeof(id.internal)));
      return id;
    }
    store.wait({kKey}, deadline);
    const std::vector<std::uint8_t> found = store.get(kKey);
    NRL_CHECK(found.size() == sizeof(id.internal), kMeeting, ": an id of ", found.size(), " bytes");
    std::memcpy(id.internal, found.data(), found.size());
    return id;
  } catch (const CommunicatorError&) {
    throw;
  } catch (const ArgumentError&) {
    throw;
  } catch (const std::exception& error) {
    call.fail_by(error);
  }
}

}  // namespace

std::shared_ptr<Communicator> connect_by_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                              at::Device device, double seconds) {
  NRL_CHECK_ARG(seconds > 0, "the deadline of a communicator is ", seconds, " s: it must be positive");
  NRL_CHECK_ARG(size > 0 && rank >= 0 && rank < size, "rank ", rank, " of ", size, " ranks");
  const Call call{rank, size, kMeeting, seconds};
  const c10::cuda::CUDAGuard guard(device);
  return std::make_shared<NcclCommunicator>(agree_on_id(*store, call), call, device);
}

void greet_by_nccl(Communicator& communicator, const char* phase) {
  auto* const by_nccl = dynamic_cast<NcclCommunicator*>(&communicator);
  NRL_CHECK_ARG(by_nccl != nullptr, phase, ": a communicator that is not NCCL's");
  by_nccl->greet(phase);
}

namespace {
const bool registered = (set_nccl_factory(&connect_by_nccl), set_nccl_greeting(&greet_by_nccl), true);
}

}  // namespace nemo_rl::distributed
