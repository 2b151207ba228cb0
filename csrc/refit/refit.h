// New weights from a trainer to engines in other processes. Rank 0 of the communicator publishes, all others receive:
//
//   header, manifest | all agree | bucket 0, bucket 1, ... | all agree | put in place
//
// A receiver looks at everything before it touches the weights in use, and all receivers take a version or none does.
// While one bucket travels, the publisher packs the next one and receivers verify the last one, on a second thread.
#pragma once
#include <memory>

#include "distributed/communicator.h"
#include "refit/manifest.h"

namespace nemo_rl::refit {

/// What one refit came to.
struct Transfer {
  std::int64_t bytes = 0;  ///< of weights
  std::int64_t buckets = 0;
  double seconds = 0;  ///< until all ranks had agreed; for a receiver, until its weights were in place
};

/// The trainer's side. It holds two buckets of memory.
class Publisher {
 public:
  /// `bucket_bytes`: weights of one message.
  Publisher(std::shared_ptr<distributed::Communicator> communicator, std::int64_t bucket_bytes);

  /// Sends these weights, contiguous on the CPU, as `version`. PeerRefused where a receiver does not take them;
  /// PeerLost and TimedOut as every message.
  Transfer publish(const NamedTensors& weights, std::uint64_t version);

 private:
  at::Tensor announce(const Manifest& manifest, const std::string& what);
  void pack(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const;

  std::shared_ptr<distributed::Communicator> communicator_;
  std::int64_t bucket_bytes_;
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
  void put_in_place(const Manifest& manifest, const std::vector<Bucket>& buckets);

  std::shared_ptr<distributed::Communicator> communicator_;
  NamedTensors weights_;
  std::vector<TensorSpec> specs_;
  at::Tensor staged_;  ///< the messages one behind the other, uint8
};

}  // namespace nemo_rl::refit
