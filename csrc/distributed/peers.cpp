#include "distributed/peers.h"

#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kManyElements = 1 << 16;  // from here on each of more than two ranks adds a part

void add_in_order(const at::Tensor& to, const at::Tensor& parts) {
  at::add_out(const_cast<at::Tensor&>(to), parts[0], parts[1]);
  for (std::int64_t r = 2; r < parts.size(0); ++r) const_cast<at::Tensor&>(to).add_(parts[r]);
}

}  // namespace

/// [rows, like.numel() / ...] of memory that is used again.
at::Tensor Peers::scratch(std::int64_t elements, const at::Tensor& like) {
  const std::int64_t bytes = elements * static_cast<std::int64_t>(like.element_size());
  if (!bytes_.defined() || bytes_.numel() < bytes) bytes_ = at::empty({bytes + bytes / 8}, at::kByte);
  return bytes_.narrow(0, 0, bytes).view(like.scalar_type());
}

at::Tensor Peers::gather(const at::Tensor& x, const char* phase) {
  auto shape = x.sizes().vec();
  shape.insert(shape.begin(), size());
  const auto all = scratch(size() * x.numel(), x).view(shape);
  ranks_->all_gather(all, x.contiguous(), phase);
  return all;
}

void Peers::sum(const at::Tensor& x, const char* phase) {
  const std::int64_t n = x.numel(), N = size();
  if (n == 0) return;
  const auto flat = x.view(-1);
  if (N == 2 || n < kManyElements || n % N > 0) return add_in_order(flat, gather(flat, phase));
  const auto parts = scratch(n, x).view({N, n / N});
  ranks_->all_to_all(parts, flat.view({N, n / N}), phase);
  const auto own = at::empty({n / N}, x.options());
  add_in_order(own, parts);
  ranks_->all_gather(flat.view({N, n / N}), own, phase);
}

}  // namespace nemo_rl::distributed
