#include "model/kept_activations.h"

#include <cstring>

#include "common/check.h"
#include "runtime/large_tensor.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
KeptActivations::KeptActivations(std::span<const std::int64_t> bytes) : begin_{0} {
  for (const auto n : bytes) begin_.push_back(begin_.back() + n);
  row_bytes_ = begin_.back();
}

void KeptActivations::set_max_bytes(std::int64_t bytes) {
  NRL_CHECK_ARG(bytes >= 0, "kept activations: ", bytes, " bytes; expected 0 or more");
  const std::int64_t rows = bytes / row_bytes_;
  if (rows < max_rows_) {
    children_.clear();
    rows_.clear();
    free_.clear();
    slabs_.clear();
  }
  max_rows_ = rows;
}

void KeptActivations::clear() {
  children_.clear();
  free_.clear();
  for (std::size_t row = rows_.size(); row-- > 0;) {
    rows_[row] = {};
    free_.push_back(row);
  }
}

KeptActivations::Node KeptActivations::find(Node parent, std::int64_t token) const {
  const auto found = children_.find({parent, token});
  return found == children_.end() ? kNone : found->second;
}

KeptActivations::Added KeptActivations::add(Node parent, std::int64_t token) {
  if (parent != kRoot && !alive(parent)) return {};
  if (const Node node = find(parent, token); node != kNone) return {node, false};
  if (full()) return {};
  std::size_t row = rows_.size();
  if (free_.empty()) {
    if (row % kSlabRows == 0)
      slabs_.push_back(runtime::empty_large({kSlabRows, row_bytes_}, at::TensorOptions().dtype(at::kByte)));
    rows_.emplace_back();
  } else {
    row = free_.back();
    free_.pop_back();
  }
  uses_ = uses_ % 0x7fffffff + 1;
  rows_[row] = {parent, token, 0, uses_};
  if (parent != kRoot) ++rows_[row_of(parent)].children;
  const Node node = static_cast<Node>(uses_) << 32 | static_cast<Node>(row);
  children_.emplace(Edge{parent, token}, node);
  return {node, true};
}

bool KeptActivations::drop(Node leaf) {
  bool dropped = false;
  while (alive(leaf) && rows_[row_of(leaf)].children == 0) {
    const Row row = rows_[row_of(leaf)];
    children_.erase({row.parent, row.token});
    if (row.parent != kRoot) --rows_[row_of(row.parent)].children;
    rows_[row_of(leaf)] = {};
    free_.push_back(row_of(leaf));
    leaf = row.parent;
    dropped = true;
  }
  return dropped;
}

std::byte* KeptActivations::place(Node node, std::int64_t layer) const {
  NRL_CHECK(alive(node), "kept activations: this token's row is in use for another one");
  const auto row = static_cast<std::int64_t>(row_of(node));
  auto* slab = static_cast<std::byte*>(slabs_[static_cast<std::size_t>(row / kSlabRows)].data_ptr());
  return slab + row % kSlabRows * row_bytes_ + begin_[static_cast<std::size_t>(layer)];
}

/// f(node, offset in the layer's part of a kept row, bytes, how many) for every token of every activation.
template <class F>
void KeptActivations::for_each_row(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes,
                                   const F& f) const {
  struct Field {
    std::byte* data;
    std::int64_t bytes;
  };
  const auto T = static_cast<std::int64_t>(nodes.size());
  std::vector<Field> fields;
  std::int64_t sum = 0;
  for (const auto& t : a.all()) {
    if (!t.defined() || T == 0) continue;
    NRL_CHECK(t.is_cpu() && t.is_contiguous() && t.size(0) == T, "kept activations: ", T, " tokens for a tensor of ",
              t.sizes());
    fields.push_back({static_cast<std::byte*>(t.data_ptr()), static_cast<std::int64_t>(t.nbytes()) / T});
    sum += fields.back().bytes;
  }
  const auto l = static_cast<std::size_t>(layer);
  NRL_CHECK(T == 0 || sum == begin_[l + 1] - begin_[l], "kept activations: ", sum, " bytes of a token in layer ",
            layer);
  runtime::parallel_rows(T, /*grain=*/8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      std::int64_t offset = 0;
      for (const auto& field : fields) {
        f(nodes[static_cast<std::size_t>(t)], offset, field.data + t * field.bytes,
          static_cast<std::size_t>(field.bytes));
        offset += field.bytes;
      }
    }
  });
}

void KeptActivations::put(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes) {
  for_each_row(layer, a, nodes, [&](Node node, std::int64_t offset, const std::byte* from, std::size_t bytes) {
    if (node != kNone) std::memcpy(place(node, layer) + offset, from, bytes);
  });
}

void KeptActivations::get(std::int64_t layer, const LayerActivations& a, std::span<const Node> nodes) const {
  for_each_row(layer, a, nodes, [&](Node node, std::int64_t offset, std::byte* to, std::size_t bytes) {
    std::memcpy(to, place(node, layer) + offset, bytes);
  });
}

}  // namespace nemo_rl::model
