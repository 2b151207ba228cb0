// Gloo, by a process group of torch.distributed.
#include <chrono>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "common/check.h"
#include "distributed/call.h"
#include "distributed/communicator.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {

namespace {

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, double seconds)
      : Communicator(group->getRank(), group->getSize()),
        group_(std::move(group)),
        deadline_(static_cast<std::int64_t>(seconds * 1000)) {}

  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    check_all_to_all(*this, out, in, phase);
    check(out, phase), check(in, phase);
    if (in.numel() == 0) return;
    run(phase, [&] {
      std::vector<std::int64_t> splits;  // none: equal parts
      c10d::AllToAllOptions options;
      options.timeout = deadline_;
      auto to = out.view({out.size(0), -1}), from = in.view({in.size(0), -1});
      return group_->alltoall_base(to, from, splits, splits, options);
    });
  }

  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    check_all_gather(*this, out, in, phase);
    check(out, phase), check(in, phase);
    if (in.numel() == 0) return;
    run(phase, [&] {
      c10d::AllgatherOptions options;
      options.timeout = deadline_;
      std::vector<at::Tensor> inputs{in.view(-1)};
      std::vector<std::vector<at::Tensor>> outputs{{}};
      for (std::int64_t r = 0; r < size(); ++r) outputs[0].push_back(out[r].view(-1));
      return group_->allgather(outputs, inputs, options);
    });
  }

  void broadcast(const at::Tensor& tensor, int root, const char* phase) override {
    check(tensor, phase);
    run(phase, [&] {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      options.timeout = deadline_;
      std::vector<at::Tensor> tensors{tensor};
      return group_->broadcast(tensors, options);
    });
  }

  void send(const at::Tensor& tensor, int to, const char* phase) override {
    check(tensor, phase);
    std::vector<at::Tensor> tensors{tensor};
    run(phase, [&] { return group_->send(tensors, to, /*tag=*/0); });
  }

  void receive(const at::Tensor& tensor, int from, const char* phase) override {
    check(tensor, phase);
    std::vector<at::Tensor> tensors{tensor};
    run(phase, [&] { return group_->recv(tensors, from, /*tag=*/0); });
  }

  void barrier(const char* phase) override {
    run(phase, [&] {
      c10d::BarrierOptions options;
      options.timeout = deadline_;
      return group_->barrier(options);
    });
  }

 private:
  void check(const at::Tensor& tensor, const char* phase) const {
    NRL_CHECK(tensor.is_cpu() && tensor.is_contiguous(), phase,
              ": Gloo needs contiguous tensors on the CPU, got one on ", tensor.device().str());
  }

  template <class F>
  void run(const char* phase, const F& start) {
    const Call call{rank(), size(), phase, std::chrono::duration<double>(deadline_).count()};
    try {
      start()->wait(deadline_);
    } catch (const std::exception& error) {
      call.fail_by(error);
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::chrono::milliseconds deadline_;
};

}  // namespace

std::shared_ptr<Communicator> gloo_communicator(const std::string& group_name, double seconds) {
  NRL_CHECK_ARG(seconds > 0, "the deadline of a communicator is ", seconds, " s: it must be positive");
  return std::make_shared<GlooCommunicator>(c10d::resolve_process_group(group_name), seconds);
}

}  // namespace nemo_rl::distributed
