#include "distributed/self_test.h"

#include <cmath>
#include <cstdint>
#include <functional>

#include "common/check.h"
#include "distributed/call.h"
#include "distributed/shards.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kFew = 257;  ///< a message that NCCL sends by another protocol than long ones

/// float32 [n] of a rank, between 2^-10 and 2^10 in size, so that the order of a sum shows in its bits.
at::Tensor numbers(int rank, std::int64_t n) {
  auto out = at::empty({n}, at::kFloat);
  auto* const to = out.mutable_data_ptr<float>();
  auto state = static_cast<std::uint64_t>(rank) + 1;
  for (std::int64_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
    const auto size = static_cast<int>(state >> 59) % 21 - 10;
    const auto fraction = static_cast<float>(state >> 35 & 0xffffff) / 16777216.0f;
    to[i] = std::ldexp((state >> 34 & 1) != 0 ? 1 + fraction : -1 - fraction, size);
  }
  return out;
}

class SelfTest {
 public:
  /// `fail` becomes a function that throws the first difference.
  SelfTest(const std::shared_ptr<Communicator>& ranks, at::Device device, std::int64_t n, std::function<void()>& fail)
      : ranks_(ranks), device_(device), n_(n), own_(numbers(ranks->rank(), n).to(device)), fail_(fail) {}

  void sums() {
    constexpr auto kPhase = "self-test: sums over all ranks";
    const Call call = begin(kPhase);
    const int size = ranks_->size();
    const std::int64_t block = (n_ + 2 * size - 1) / (2 * size);
    const auto flat = own_.clone();
    Shards shards(ranks_);
    shards.reduce_scatter(flat, block, kPhase);
    shards.all_gather(flat, block, kPhase);
    auto rows = at::empty({size, n_}, at::kFloat);
    for (int r = 0; r < size; ++r) rows[r].copy_(numbers(r, n_));
    add_rows(rows);
    compare(call, flat, rows[0], "the sum");
  }

  void broadcasts() {
    for (int root = 0; root < ranks_->size(); ++root) {
      constexpr auto kPhase = "self-test: broadcasts";
      const Call call = begin(kPhase);
      const auto tensor = own_.clone();
      ranks_->broadcast(tensor, root, kPhase);
      compare(call, tensor, numbers(root, n_), detail::concat("the broadcast of rank ", root));
    }
  }

  void pairs() {
    constexpr auto kPhase = "self-test: messages between two ranks";
    const int me = ranks_->rank();
    for (int from = 0; from < ranks_->size(); ++from)
      for (int to = 0; to < ranks_->size(); ++to) {
        if (from == to || (me != from && me != to)) continue;
        const Call call = begin(kPhase);
        if (me == from) {
          ranks_->send(own_, to, kPhase);
          continue;
        }
        const auto tensor = at::zeros_like(own_);
        ranks_->receive(tensor, from, kPhase);
        compare(call, tensor, numbers(from, n_), detail::concat("the message of rank ", from));
      }
  }

 private:
  Call begin(const char* phase) const { return {ranks_->rank(), ranks_->size(), phase, /*deadline=*/0}; }

  /// A difference is kept until the end, because the other ranks wait for this one's messages.
  void compare(const Call& call, const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
    const auto differ = got.cpu().view(at::kInt).ne(wanted.view(at::kInt)).sum().item<std::int64_t>();
    if (differ == 0 || fail_) return;
    fail_ = [call, text = detail::concat(what, " differs in ", differ, " of ", n_, " numbers on ", device_.str(),
                                         ": this connection changes data; with several GPUs, try NCCL_P2P_DISABLE=1")] {
      call.fail(text);
    };
  }

  std::shared_ptr<Communicator> ranks_;
  at::Device device_;
  std::int64_t n_;
  at::Tensor own_;
  std::function<void()>& fail_;
};

}  // namespace

void self_test(const std::shared_ptr<Communicator>& ranks, at::Device device, std::int64_t elements) {
  std::function<void()> fail;
  for (const auto n : {kFew, elements}) {
    SelfTest test(ranks, device, n, fail);
    test.sums();
    test.broadcasts();
    test.pairs();
  }
  if (fail) fail();
}

}  // namespace nemo_rl::distributed
