// New weights from a trainer to engines in other processes. Rank 0 of the communicator publishes, all others receive:
//
//   header, manifest | all agree | bucket 0, bucket 1, ... | all agree | put in place
//
// Buckets hold all weights, or what has changed since the last version (refit/delta.h), whose length goes before each.
// To processes of the same machine goes where each weight lies and its digest: they read it there
// (distributed/peer_memory.h). A receiver looks at everything before it touches the weights in use, and all receivers
// take a version or none does. While one bucket travels, the publisher packs the next one and receivers verify the last
// one, on a second thread.
#pragma once
#include <memory>
#include <optional>
#include <unordered_map>

#include "distributed/communicator.h"
#include "distributed/peer_memory.h"
#include "refit/manifest.h"

namespace nemo_rl::refit {

/// How all weights come. `kAsk`: the ranks find out whether receivers may read them in place, and do so if they may.
enum Way : std::int64_t { kBuckets = 0, kInPlace = 1, kAsk = 2 };

/// What one refit came to.
struct Transfer {
  std::int64_t bytes = 0;  ///< of weights
  std::int64_t sent = 0;   ///< of the buckets' messages; weights that are read in place count
  std::int64_t buckets = 0;
  double seconds = 0;  ///< until all ranks had agreed; for a receiver, until its weights were in place
};

/// The trainer's side. It holds two buckets of memory.
class Publisher {
 public:
  /// `bucket_bytes`: weights of one message; of those that are read in place, which a message names, from the second
  /// refit on at least 64 MB. `delta`: sends what has changed since the last version that all receivers
  /// have taken from it; it holds the weights of that version too. `in_place`: receivers on this machine read all
  /// weights where they lie, if they may.
  Publisher(std::shared_ptr<distributed::Communicator> communicator, std::int64_t bucket_bytes, bool delta = false,
            bool in_place = true);

  /// Sends these weights, contiguous on the CPU, as `version`. PeerRefused where a receiver does not take them;
  /// PeerLost and TimedOut as every message.
  Transfer publish(const NamedTensors& weights, std::uint64_t version);

 private:
  Transfer send(const NamedTensors& weights, const Manifest& manifest);
  at::Tensor announce(const Manifest& manifest, const std::string& what);
  at::Tensor pack(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const;
  at::Tensor pack_changes(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const;
  at::Tensor pack_places(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const;

  /// The weights that the receivers have: of each tensor in the order of the manifest the bytes.
  struct Base {
    std::uint64_t version = 0;
    std::vector<TensorSpec> tensors;
    std::vector<at::Tensor> bytes;
  };
  Base make_base(const Manifest& manifest) const;

  std::shared_ptr<distributed::Communicator> communicator_;
  std::int64_t bucket_bytes_;
  bool delta_;
  Way way_;
  std::optional<Base> base_;  ///< none: all weights are sent
  at::Tensor buffers_[2];
};

/// An engine's side. Beside the weights in use it holds the ones that come: once their size.
class Receiver {
 public:
  /// `weights`: those in use, contiguous on the CPU; they are written by `receive` alone.
  Receiver(std::shared_ptr<distributed::Communicator> communicator, NamedTensors weights);

  /// Waits for `version` and puts it in place. RefitRefused, and the old weights stay, where a tensor is unknown,
  /// missing, of another shape or type, or damaged on the way, and where it is another version; PeerRefused where
  /// another receiver has refused it.
  Transfer receive(std::uint64_t version);

 private:
  Manifest await_manifest(const std::string& what, std::string& problem);
  std::vector<std::string> await_buckets(const Manifest& manifest, const std::vector<Bucket>& buckets,
                                         const std::string& what);
  std::string verify(const Manifest& manifest, const Bucket& bucket, const char* message) const;
  std::string take_changes(const Manifest& manifest, const Bucket& bucket, const at::Tensor& message, char* to) const;
  at::Tensor await_message(const Manifest& manifest, const Bucket& bucket, const at::Tensor& place,
                           const std::string& phase);
  bool read_in_place(const Bucket& bucket, const at::Tensor& place, const std::string& phase);
  void put_in_place(const Manifest& manifest, const std::vector<Bucket>& buckets);

  std::shared_ptr<distributed::Communicator> communicator_;
  NamedTensors weights_;
  std::unordered_map<std::string, char*> places_;  ///< of the weights in use
  std::vector<TensorSpec> specs_;
  std::optional<std::uint64_t> version_;  ///< of the weights in use
  std::unique_ptr<distributed::PeerMemory> memory_;
  std::int64_t way_ = kBuckets;  ///< of this refit, as the publisher's header says
  at::Tensor staged_;            ///< the messages one behind the other, uint8; of changes the weights that they make
  at::Tensor changes_[2];        ///< messages that hold changes
  std::int64_t sent_ = 0;        ///< bytes of the messages of this refit
};

}  // namespace nemo_rl::refit
