// Errors of calls, and communicators that are made of others.
#include "distributed/communicator.h"

#include "common/check.h"
#include "distributed/call.h"
#include "distributed/nccl_communicator.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {

CommunicatorError::CommunicatorError(int rank, std::string phase, double seconds, const std::string& what)
    : std::runtime_error(what), rank(rank), phase(std::move(phase)), seconds(seconds) {}

// ---------------------------------------------------------------- Call

std::string Call::text(const std::string& what, const std::string& why) const {
  return detail::concat("rank ", rank, " of ", size, ": ", phase, " failed after ", seconds(), " s: ", what, " (", why,
                        ")");
}

void Call::time_out(const std::string& why) const {
  throw TimedOut(rank, phase, seconds(), text("another rank did not come", why));
}

void Call::lose_peer(const std::string& why) const {
  throw PeerLost(rank, phase, seconds(), text("another rank is gone", why));
}

void Call::fail(const std::string& why) const {
  throw CommunicatorError(rank, phase, seconds(), text("this rank cannot go on", why));
}

void Call::fail_by(const std::exception& error) const {
  const std::string all = error.what(), first_line = all.substr(0, all.find('\n'));
  const bool late = first_line.find("imed out") != std::string::npos || first_line.find("imeout") != std::string::npos;
  late ? time_out(first_line) : lose_peer(first_line);
}

void check_all_to_all(const Communicator& ranks, const at::Tensor& out, const at::Tensor& in, const char* phase) {
  NRL_CHECK(in.dim() > 0 && in.size(0) == ranks.size() && out.sizes() == in.sizes(), "all_to_all in ", phase, ": ",
            in.sizes(), " to ", out.sizes(), " of ", ranks.size(), " ranks");
}

void check_all_gather(const Communicator& ranks, const at::Tensor& out, const at::Tensor& in, const char* phase) {
  NRL_CHECK(out.dim() > 0 && out.size(0) == ranks.size() && out.numel() == ranks.size() * in.numel(), "all_gather in ",
            phase, ": ", in.sizes(), " to ", out.sizes(), " of ", ranks.size(), " ranks");
}

// ---------------------------------------------------------------- NCCL, where the module _cuda has brought it

namespace {
NcclFactory* nccl_factory = nullptr;
NcclGreeting* greeting_of_nccl = nullptr;
}  // namespace

void set_nccl_factory(NcclFactory* factory) { nccl_factory = factory; }
void set_nccl_greeting(NcclGreeting* greeting) { greeting_of_nccl = greeting; }

void nccl_greeting(Communicator& communicator, const char* phase) {
  NRL_CHECK_ARG(greeting_of_nccl != nullptr, phase,
                ": this nemo_rl_cpp was built without NCCL: build it with NEMO_RL_CUDA=on");
  greeting_of_nccl(communicator, phase);
}

std::shared_ptr<Communicator> nccl_communicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device, double seconds) {
  NRL_CHECK_ARG(device.is_cuda() && device.has_index(), "NCCL connects GPUs, each by its number (cuda:0, ...), not ",
                device.str(), "; on the CPU take Gloo");
  NRL_CHECK_ARG(nccl_factory != nullptr, "NCCL for ", device.str(),
                " was asked for, but this nemo_rl_cpp was built without it: build it with NEMO_RL_CUDA=on");
  return nccl_factory(store, rank, size, device, seconds);
}

// ---------------------------------------------------------------- through the CPU's memory

namespace {

class CommunicatorThroughCpu final : public Communicator {
 public:
  explicit CommunicatorThroughCpu(std::shared_ptr<Communicator> on_cpu)
      : Communicator(on_cpu->rank(), on_cpu->size()), on_cpu_(std::move(on_cpu)) {}

  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    const auto received = like(out);
    on_cpu_->all_to_all(received, in.cpu(), phase);
    out.copy_(received);
  }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    const auto received = like(out);
    on_cpu_->all_gather(received, in.cpu(), phase);
    out.copy_(received);
  }
  void broadcast(const at::Tensor& tensor, int root, const char* phase) override {
    const auto copy = tensor.cpu();
    on_cpu_->broadcast(copy, root, phase);
    if (root != rank()) tensor.copy_(copy);
  }
  void send(const at::Tensor& tensor, int to, const char* phase) override { on_cpu_->send(tensor.cpu(), to, phase); }
  void receive(const at::Tensor& tensor, int from, const char* phase) override {
    const auto received = like(tensor);
    on_cpu_->receive(received, from, phase);
    tensor.copy_(received);
  }
  void barrier(const char* phase) override { on_cpu_->barrier(phase); }

 private:
  static at::Tensor like(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  }

  std::shared_ptr<Communicator> on_cpu_;
};

}  // namespace

std::shared_ptr<Communicator> communicator_through_cpu(std::shared_ptr<Communicator> on_cpu) {
  return std::make_shared<CommunicatorThroughCpu>(std::move(on_cpu));
}

// ---------------------------------------------------------------- by device

namespace {

class CommunicatorByDevice final : public Communicator {
 public:
  CommunicatorByDevice(std::shared_ptr<Communicator> on_cpu, std::shared_ptr<Communicator> on_device)
      : Communicator(on_cpu->rank(), on_cpu->size()), on_cpu_(std::move(on_cpu)), on_device_(std::move(on_device)) {}

  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    of(out).all_to_all(out, in, phase);
  }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    of(out).all_gather(out, in, phase);
  }
  void broadcast(const at::Tensor& tensor, int root, const char* phase) override {
    of(tensor).broadcast(tensor, root, phase);
  }
  void send(const at::Tensor& tensor, int to, const char* phase) override { of(tensor).send(tensor, to, phase); }
  void receive(const at::Tensor& tensor, int from, const char* phase) override {
    of(tensor).receive(tensor, from, phase);
  }
  void barrier(const char* phase) override { on_cpu_->barrier(phase); }

 private:
  Communicator& of(const at::Tensor& tensor) const { return tensor.is_cpu() ? *on_cpu_ : *on_device_; }

  std::shared_ptr<Communicator> on_cpu_, on_device_;
};

}  // namespace

std::shared_ptr<Communicator> communicator_by_device(std::shared_ptr<Communicator> on_cpu,
                                                     std::shared_ptr<Communicator> on_device) {
  NRL_CHECK(on_cpu->rank() == on_device->rank() && on_cpu->size() == on_device->size(), "rank ", on_cpu->rank(), " of ",
            on_cpu->size(), " on the CPU, rank ", on_device->rank(), " of ", on_device->size(), " on the device");
  return std::make_shared<CommunicatorByDevice>(std::move(on_cpu), std::move(on_device));
}

}  // namespace nemo_rl::distributed
