// What generation computed, kept for training. While the weights have not changed, the engine's forward pass is the
// trainer's bit for bit, so the first update after a rollout finds its forward pass done: only the backward is left.
//
// A token is found by itself and by all tokens before it, whoever computed it: the tokens form a tree whose nodes are
// the kept rows. Rows that are not there (memory was short, a token never went through the model) cost a forward pass
// of their micro-batch and nothing else: the results are the same bits.
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

  /// `layer_bytes`: of one token's LayerActivations; `last_bytes`: of its residual stream after the last layer.
  KeptActivations(std::int64_t num_layers, std::int64_t layer_bytes, std::int64_t last_bytes);

  /// Keeps up to so many bytes of rows from now on; 0 (as at first): none, and all memory is given back.
  void set_max_bytes(std::int64_t bytes);
  std::int64_t max_bytes() const { return max_rows_ * row_bytes_; }
  std::int64_t bytes_per_token() const { return row_bytes_; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(slabs_.size()) * kSlabRows * row_bytes_; }
  std::int64_t tokens() const { return static_cast<std::int64_t>(rows_.size() - free_.size()); }
  bool enabled() const { return max_rows_ > 0; }
  bool empty() const { return tokens() == 0; }
  /// Forgets all tokens, as the weights have changed; memory stays for the next ones.
  void clear();

  /// The node of `token` behind `parent`; kNone if there is none (or no parent).
  Node find(Node parent, std::int64_t token) const;
  struct Added {
    Node node = kNone;    ///< kNone: no room, or no parent
    bool is_new = false;  ///< its rows are to be put
  };
  Added add(Node parent, std::int64_t token);
  bool full() const { return free_.empty() && static_cast<std::int64_t>(rows_.size()) >= max_rows_; }
  /// Forgets `leaf` and what leads to it alone; whether that made room.
  bool drop(Node leaf);

  /// Row t of a layer's activations becomes that of nodes[t]; rows of kNone are passed over. Behind the last layer,
  /// `layer` = num_layers, there is h_in alone.
  void put(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes);
  /// The same back into `a`; every node is a kept one.
  void get(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes) const;

 private:
  static constexpr std::int64_t kSlabRows = 64;
  struct Row {
    Node parent = kNone;
    std::int64_t token = 0;
    std::int64_t children = 0;
    std::uint32_t use =
        0;  ///< number of the row's present use, part of its node; 0: none. So nodes of earlier uses are known as such
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

  std::int64_t num_layers_, layer_bytes_, row_bytes_;
  std::int64_t max_rows_ = 0;
  std::vector<Row> rows_;
  std::vector<std::size_t> free_;  ///< rows out of use
  std::uint32_t uses_ = 0;
  std::unordered_map<Edge, Node, EdgeHash> children_;
  std::vector<at::Tensor> slabs_;  ///< [kSlabRows, row_bytes] bytes each
};

}  // namespace nemo_rl::model
