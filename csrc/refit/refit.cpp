#include "refit/refit.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <unordered_map>

#include "common/check.h"
#include "kernels/weight_digest.h"
#include "runtime/tensor.h"

namespace nemo_rl::refit {
namespace {

using distributed::Communicator;
using Clock = std::chrono::steady_clock;

constexpr int kRoot = 0;
constexpr std::int64_t kMagic = 0x7469'6665'725f'6c72;  // "rl_refit"
constexpr std::int64_t kMostManifestBytes = std::int64_t{1} << 30;
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 20;  ///< of one job when weights are put in place

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::uint64_t digest_of(const at::Tensor& bytes) {
  return kernels::digest_bytes(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel(), nullptr);
}

at::Tensor of_at_least(at::Tensor& buffer, std::int64_t bytes) {
  if (!buffer.defined() || buffer.numel() < bytes) buffer = at::empty({bytes}, at::kByte);
  return buffer.narrow(0, 0, bytes);
}

/// Every rank says whether it refuses. PeerRefused where this one does not and another does.
void agree(Communicator& communicator, bool refuses, const std::string& what) {
  auto own = at::full({1}, refuses ? 1 : 0, at::kLong), all = at::zeros({communicator.size(), 1}, at::kLong);
  communicator.all_gather(all, own, (what + ": whether all ranks take it").c_str());
  for (int rank = 0; rank < communicator.size() && !refuses; ++rank)
    if (all[rank].item<std::int64_t>() != 0)
      throw PeerRefused(detail::concat("rank ", communicator.rank(), " of ", communicator.size(), ": ", what,
                                       " was refused by rank ", rank, ", which says why; no rank has taken it"));
}

std::string what_of(std::uint64_t version) { return detail::concat("refit of version ", version); }

std::string phase_of(const std::string& what, std::size_t bucket, std::size_t count) {
  return detail::concat(what, ": bucket ", bucket + 1, " of ", count);
}

}  // namespace

// ---- the trainer's side

Publisher::Publisher(std::shared_ptr<Communicator> communicator, std::int64_t bucket_bytes)
    : communicator_(std::move(communicator)), bucket_bytes_(bucket_bytes) {
  NRL_CHECK_ARG(bucket_bytes >= 1, "a bucket of a refit has ", bucket_bytes, " bytes: give it room for some weights");
  NRL_CHECK(communicator_->rank() == kRoot, "rank 0 publishes, this is rank ", communicator_->rank());
}

Transfer Publisher::publish(const NamedTensors& weights, std::uint64_t version) {
  const auto began = Clock::now();
  const Manifest manifest{version, bucket_bytes_, specs_of(weights)};
  const auto buckets = buckets_of(manifest);
  const auto what = what_of(version);
  announce(manifest, what);
  agree(*communicator_, false, what);
  Transfer done{0, static_cast<std::int64_t>(buckets.size()), 0};
  std::future<at::Tensor> packing;
  const auto begin_packing = [&](std::size_t i, std::launch how) {
    auto message = of_at_least(buffers_[i % 2], buckets[i].message_bytes());
    packing = std::async(how, [&, i, message] { return pack(weights, buckets[i], message), message; });
  };
  if (!buckets.empty()) begin_packing(0, std::launch::deferred);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const auto message = packing.get();
    if (i + 1 < buckets.size()) begin_packing(i + 1, std::launch::async);
    communicator_->broadcast(message, kRoot, phase_of(what, i, buckets.size()).c_str());
    done.bytes += buckets[i].bytes;
  }
  agree(*communicator_, false, what);
  done.seconds = since(began);
  return done;
}

at::Tensor Publisher::announce(const Manifest& manifest, const std::string& what) {
  const auto bytes = manifest.packed();
  const auto header = at::tensor({kMagic, bytes.numel(), static_cast<std::int64_t>(digest_of(bytes))}, at::kLong);
  communicator_->broadcast(header, kRoot, (what + ": header").c_str());
  communicator_->broadcast(bytes, kRoot, (what + ": manifest").c_str());
  return bytes;
}

void Publisher::pack(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const {
  auto* to = static_cast<char*>(message.data_ptr());
  char* digests = to + bucket.bytes;
  for (const auto& piece : bucket.pieces) {
    const auto* from = static_cast<const char*>(weights[piece.tensor].second.const_data_ptr()) + piece.begin;
    const auto digest = kernels::digest_bytes(from, piece.size, to + piece.place);
    std::memcpy(digests, &digest, sizeof digest);
    digests += sizeof digest;
  }
}

// ---- an engine's side

Receiver::Receiver(std::shared_ptr<Communicator> communicator, NamedTensors weights)
    : communicator_(std::move(communicator)), weights_(std::move(weights)), specs_(specs_of(weights_)) {
  NRL_CHECK(communicator_->rank() != kRoot, "rank 0 publishes, it does not receive");
}

Transfer Receiver::receive(std::uint64_t version) {
  const auto began = Clock::now();
  const auto what = what_of(version);
  const auto refuse = [&](const std::string& problem) {
    throw RefitRefused(detail::concat("rank ", communicator_->rank(), " of ", communicator_->size(), ": ", what,
                                      " is refused, the old weights stay: ", problem));
  };
  std::string problem;
  const auto manifest = await_manifest(what, problem);
  if (problem.empty()) problem = difference(manifest, specs_, version);
  agree(*communicator_, !problem.empty(), what);
  if (!problem.empty()) refuse(problem);
  const auto buckets = buckets_of(manifest);
  for (const auto& damage : await_buckets(manifest, buckets, what)) problem += (problem.empty() ? "" : "; ") + damage;
  agree(*communicator_, !problem.empty(), what);
  if (!problem.empty()) refuse(problem);
  put_in_place(manifest, buckets);
  Transfer done{0, static_cast<std::int64_t>(buckets.size()), since(began)};
  for (const auto& bucket : buckets) done.bytes += bucket.bytes;
  return done;
}

Manifest Receiver::await_manifest(const std::string& what, std::string& problem) {
  auto header = at::zeros({3}, at::kLong);
  communicator_->broadcast(header, kRoot, (what + ": header").c_str());
  const auto* values = header.const_data_ptr<std::int64_t>();
  if (values[0] != kMagic || values[1] < 0 || values[1] > kMostManifestBytes)  // what follows cannot be found
    throw RefitRefused(detail::concat(what, " is refused, the old weights stay: its header is damaged"));
  auto bytes = at::empty({values[1]}, at::kByte);
  communicator_->broadcast(bytes, kRoot, (what + ": manifest").c_str());
  if (digest_of(bytes) != static_cast<std::uint64_t>(values[2])) {
    problem = "the manifest was damaged on the way";
    return {};
  }
  try {
    return Manifest::unpacked(bytes);
  } catch (const RefitRefused& error) {
    problem = error.what();
    return {};
  }
}

std::vector<std::string> Receiver::await_buckets(const Manifest& manifest, const std::vector<Bucket>& buckets,
                                                 const std::string& what) {
  std::int64_t total = 0;
  for (const auto& bucket : buckets) total += bucket.message_bytes();
  auto all = of_at_least(staged_, total);
  std::vector<std::string> problems;
  std::future<std::string> verifying;
  const auto finish = [&] {
    if (!verifying.valid()) return;
    if (auto problem = verifying.get(); !problem.empty()) problems.push_back(std::move(problem));
  };
  std::int64_t place = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {  // also behind damage, so that all ranks stay in step
    const auto message = all.narrow(0, place, buckets[i].message_bytes());
    const auto phase = phase_of(what, i, buckets.size());
    communicator_->broadcast(message, kRoot, phase.c_str());
    finish();
    const bool last = i + 1 == buckets.size();
    verifying = std::async(last ? std::launch::deferred : std::launch::async, [&, i, message] {
      auto names = verify(manifest, buckets[i], static_cast<const char*>(message.const_data_ptr()));
      return names.empty() ? names : detail::concat("bucket ", i + 1, " of ", buckets.size(), ": ", names);
    });
    place += message.numel();
  }
  finish();
  return problems;
}

std::string Receiver::verify(const Manifest& manifest, const Bucket& bucket, const char* message) const {
  std::string damaged;
  const char* digests = message + bucket.bytes;
  for (const auto& piece : bucket.pieces) {
    std::uint64_t wanted;
    std::memcpy(&wanted, digests, sizeof wanted);
    digests += sizeof wanted;
    const auto found = kernels::digest_bytes(message + piece.place, piece.size, nullptr);
    if (found != wanted)
      damaged += detail::concat(damaged.empty() ? "" : ", ", manifest.tensors[piece.tensor].name, " has digest ",
                                std::hex, found, " against ", wanted, std::dec, " of the sender");
  }
  return damaged;
}

void Receiver::put_in_place(const Manifest& manifest, const std::vector<Bucket>& buckets) {
  struct Job {
    char* to;
    const char* from;
    std::int64_t size;
  };
  std::unordered_map<std::string, char*> targets;
  for (const auto& [name, tensor] : weights_) targets.emplace(name, static_cast<char*>(tensor.data_ptr()));
  std::vector<Job> jobs;
  const auto* message = static_cast<const char*>(staged_.const_data_ptr());
  for (const auto& bucket : buckets) {
    for (const auto& piece : bucket.pieces) {
      char* to = targets.at(manifest.tensors[piece.tensor].name) + piece.begin;
      for (std::int64_t done = 0; done < piece.size; done += kCopyBytes)
        jobs.push_back({to + done, message + piece.place + done, std::min(kCopyBytes, piece.size - done)});
    }
    message += bucket.message_bytes();
  }
  at::parallel_for(0, static_cast<std::int64_t>(jobs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
      std::memcpy(jobs[i].to, jobs[i].from, static_cast<std::size_t>(jobs[i].size));
  });
}

}  // namespace nemo_rl::refit
