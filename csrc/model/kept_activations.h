// Keeps generation's activations for training. While the weights have not changed, the engine's forward pass equals the
// trainer's bit for bit. So the first update after a rollout needs no forward pass, only a backward pass.
//
// A row is identified by its token and all tokens before it. The tokens form a tree whose nodes are the kept rows. A
// row may be missing, because memory was short or because the model never computed the token. Then its micro-batch runs
// a forward pass, whose results are bit-identical.
#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "model/layer_activations.h"

namespace nemo_rl::model {

class KeptActivations {
 public:
  using Node = std::int64_t;
  static constexpr Node kNone = -1;  ///< not kept
  static constexpr Node kRoot = -2;  ///< before a sequence's first token

  /// `bytes`: for one token, the bytes of its LayerActivations in each layer, and of its residual stream after the last
  /// layer.
  explicit KeptActivations(std::span<const std::int64_t> bytes);

  /// From now on keeps at most `bytes` bytes of rows. 0, the initial value, keeps none and frees all memory.
  void set_max_bytes(std::int64_t bytes);
  std::int64_t max_bytes() const { return max_rows_ * row_bytes_; }
  std::int64_t bytes_per_token() const { return row_bytes_; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(slabs_.size()) * kSlabRows * row_bytes_; }
  std::int64_t tokens() const { return static_cast<std::int64_t>(rows_.size() - free_.size()); }
  bool enabled() const { return max_rows_ > 0; }
  bool empty() const { return tokens() == 0; }
  /// Forgets all tokens. Must be called when the weights have changed. The memory is kept for the next tokens.
  void clear();

  /// Returns the node of `token` after `parent`; kNone if there is none, or no parent.
  Node find(Node parent, std::int64_t token) const;
  struct Added {
    Node node = kNone;    ///< kNone: no room, or no parent
    bool is_new = false;  ///< the caller must store its rows
  };
  Added add(Node parent, std::int64_t token);
  bool full() const { return free_.empty() && static_cast<std::int64_t>(rows_.size()) >= max_rows_; }
  /// Forgets `leaf` and the nodes that lead only to it. Returns whether this freed any row.
  bool drop(Node leaf);

  /// Stores row t of a layer's activations for nodes[t], and skips rows of kNone. After the last layer
  /// (`layer` = num_layers) there is only h_in.
  void put(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes);
  /// Reads these rows back into `a`. All nodes must be kept.
  void get(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes) const;
  /// The activations kept for one token: `bytes_per_token()` bytes.
  std::byte* row(Node node) const { return place(node, 0); }

 private:
  static constexpr std::int64_t kSlabRows = 64;
  struct Row {
    Node parent = kNone;
    std::int64_t token = 0;
    std::int64_t children = 0;
    std::uint32_t use = 0;  ///< number of the row's current use; 0: unused. A node contains it, so that nodes of
                            ///< earlier uses are detected
  };
  struct Edge {
    Node parent;
    std::int64_t token;
    bool operator==(const Edge&) const = default;
  };
  struct EdgeHash {
    std::size_t operator()(const Edge& e) const {
      return std::hash<std::uint64_t>()((static_cast<std::uint64_t>(e.parent) * 0x9E3779B97F4A7C15ull) ^
                                        static_cast<std::uint64_t>(e.token));
    }
  };
  static std::size_t row_of(Node node) { return static_cast<std::size_t>(node & 0xffffffff); }
  bool alive(Node node) const {
    return node >= 0 && row_of(node) < rows_.size() && rows_[row_of(node)].use == node >> 32;
  }
  std::byte* place(Node node, std::int64_t layer) const;
  template <class F>
  void for_each_row(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes, const F& f) const;

  std::vector<std::int64_t> begin_;  ///< offset of each layer in a row, and the end of the row
  std::int64_t row_bytes_;
  std::int64_t max_rows_ = 0;
  std::vector<Row> rows_;
  std::vector<std::size_t> free_;  ///< unused rows
  std::uint32_t uses_ = 0;
  std::unordered_map<Edge, Node, EdgeHash> children_;
  std::vector<at::Tensor> slabs_;  ///< [kSlabRows, row_bytes] bytes each
};

}  // namespace nemo_rl::model
