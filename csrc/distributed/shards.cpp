#include "distributed/shards.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kBucketBytes = std::int64_t{16} << 20;  ///< of one rank: what travels at once
constexpr std::int64_t kStretchBytes = std::int64_t{128}
                                       << 10;  ///< of one rank: what is read and added at once, in cache

/// f(offset, n) once a bucket: of rank r it holds the n elements from shard(r).begin + offset on, or what is left of
/// them.
template <class F>
void for_each_bucket(int size, const at::Tensor& flat, std::int64_t block, const F& f) {
  const std::int64_t longest = shard_of(flat.numel(), 0, size, block).size();
  const std::int64_t bucket = std::min<std::int64_t>(longest, kBucketBytes / flat.element_size());
  for (std::int64_t offset = 0; offset < longest; offset += bucket) f(offset, std::min(bucket, longest - offset));
}

/// The part of rank r's shard in a bucket; it may be empty.
at::Tensor part(int size, const at::Tensor& flat, std::int64_t block, int r, std::int64_t offset, std::int64_t n) {
  const auto shard = shard_of(flat.numel(), r, size, block);
  const std::int64_t begin = std::min(shard.end, shard.begin + offset);
  return flat.narrow(0, begin, std::min(n, shard.end - begin));
}

/// f(begin, n) for short stretches of a shard, by all threads.
template <class F>
void for_each_stretch(const Shard& shard, std::int64_t element_bytes, const F& f) {
  const std::int64_t stretch = kStretchBytes / element_bytes;
  at::parallel_for(0, (shard.size() + stretch - 1) / stretch, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t begin = shard.begin + i * stretch;
      f(begin, std::min(stretch, shard.end - begin));
    }
  });
}

void check_flat(const at::Tensor& flat) {
  NRL_CHECK(flat.dim() == 1 && flat.is_contiguous(), "shards are of a flat buffer, got ", flat.sizes());
}

}  // namespace

const PeerMemory* Shards::memory(const char* phase) {
  if (in_place_ && !asked_) memory_ = PeerMemory::open(*ranks_, phase);
  asked_ = true;
  return memory_.get();
}

// ---------------------------------------------------------------- in place

void Shards::sum_in_place(const PeerMemory& memory, const at::Tensor& flat, std::int64_t block, const char* phase) {
  const auto addresses = memory.addresses(*ranks_, flat, phase);  // so all have come
  AT_DISPATCH_FLOATING_TYPES(flat.scalar_type(), "adding shards", [&] {
    auto* const whole = flat.mutable_data_ptr<scalar_t>();
    for_each_stretch(shard_of(flat.numel(), rank(), size(), block), sizeof(scalar_t), [&](auto begin, auto n) {
      thread_local std::vector<scalar_t> read;
      read.resize(static_cast<std::size_t>(size() * n));
      std::vector<scalar_t*> terms;
      for (int r = 0; r < size(); ++r) {
        terms.push_back(r == rank() ? whole + begin : read.data() + r * n);
        const auto bytes = sizeof(scalar_t) * static_cast<std::size_t>(n);
        const auto address =
            addresses[static_cast<std::size_t>(r)] + sizeof(scalar_t) * static_cast<std::uint64_t>(begin);
        if (r != rank()) memory.read(r, address, terms.back(), bytes, phase);
      }
      along_tree(size(), [&](std::int64_t a, std::int64_t b) {
        auto* __restrict to = terms[static_cast<std::size_t>(a)];
        const auto* __restrict from = terms[static_cast<std::size_t>(b)];
        for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
      });
      if (rank() > 0) std::copy_n(terms[0], n, whole + begin);
    });
  });
  ranks_->barrier(phase);  // nobody writes what another one still reads
}

void Shards::copy_in_place(const PeerMemory& memory, const at::Tensor& flat, std::int64_t block, const char* phase) {
  const auto addresses = memory.addresses(*ranks_, flat, phase);
  const auto bytes = static_cast<std::int64_t>(flat.element_size());
  auto* const whole = static_cast<std::byte*>(flat.mutable_data_ptr());
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    for_each_stretch(shard_of(flat.numel(), r, size(), block), bytes, [&](std::int64_t begin, std::int64_t n) {
      const auto address = addresses[static_cast<std::size_t>(r)] + static_cast<std::uint64_t>(begin * bytes);
      memory.read(r, address, whole + begin * bytes, static_cast<std::size_t>(n * bytes), phase);
    });
  }
  ranks_->barrier(phase);
}

// ---------------------------------------------------------------- by messages

/// [count, n] of memory that is used again.
at::Tensor Shards::rows(at::Tensor& kept, std::int64_t count, std::int64_t n, const at::Tensor& like) const {
  const std::int64_t bytes = count * n * static_cast<std::int64_t>(like.element_size());
  if (!kept.defined() || kept.numel() < bytes || kept.device() != like.device())
    kept = at::empty({bytes}, like.options().dtype(at::kByte));
  return kept.narrow(0, 0, bytes).view(like.scalar_type()).view({count, n});
}

void Shards::reduce_scatter(const at::Tensor& flat, std::int64_t block, const char* phase) {
  if (size() == 1) return;
  check_flat(flat);
  if (const auto* const peers = flat.is_cpu() ? memory(phase) : nullptr)
    return sum_in_place(*peers, flat, block, phase);
  for_each_bucket(size(), flat, block, [&](std::int64_t offset, std::int64_t n) {
    const auto mine = rows(out_, size(), n, flat), theirs = rows(in_, size(), n, flat);
    for (int r = 0; r < size(); ++r) {
      const auto from = part(size(), flat, block, r, offset, n);
      mine[r].narrow(0, 0, from.numel()).copy_(from);
    }
    ranks_->all_to_all(theirs, mine, phase);
    const auto own = part(size(), flat, block, rank(), offset, n);
    if (own.numel() == 0) return;
    add_rows(theirs);
    own.copy_(theirs[0].narrow(0, 0, own.numel()));
  });
}

void Shards::all_gather(const at::Tensor& flat, std::int64_t block, const char* phase) {
  if (size() == 1) return;
  check_flat(flat);
  if (const auto* const peers = flat.is_cpu() ? memory(phase) : nullptr)
    return copy_in_place(*peers, flat, block, phase);
  for_each_bucket(size(), flat, block, [&](std::int64_t offset, std::int64_t n) {
    const auto mine = rows(out_, 1, n, flat), all = rows(in_, size(), n, flat);
    const auto own = part(size(), flat, block, rank(), offset, n);
    mine[0].narrow(0, 0, own.numel()).copy_(own);
    ranks_->all_gather(all, mine[0], phase);
    for (int r = 0; r < size(); ++r) {
      const auto to = part(size(), flat, block, r, offset, n);
      to.copy_(all[r].narrow(0, 0, to.numel()));
    }
  });
}

}  // namespace nemo_rl::distributed
