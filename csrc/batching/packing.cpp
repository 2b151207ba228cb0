#include "batching/packing.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "common/check.h"

namespace nemo_rl::batching {
namespace {

void check_lengths(std::span<const std::int64_t> lengths, std::int64_t capacity) {
  NRL_CHECK_ARG(capacity > 0, "bin capacity is ", capacity, "; it must be positive (max_tokens_per_microbatch)");
  for (std::size_t i = 0; i < lengths.size(); ++i)
    NRL_CHECK_ARG(lengths[i] <= capacity, "sequence ", i, " has length ", lengths[i],
                  ", which exceeds the bin capacity ", capacity,
                  ": raise the token budget (train_mb_tokens / logprob_mb_tokens) or shorten the sequence");
}

/// Room left in every bin, as a tree of maxima: the first bin with enough room is found in O(log n). Bins that are
/// not open yet stand at the end with all their room, so a place is always found.
class FirstFitTree {
 public:
  FirstFitTree(std::size_t bins, std::int64_t capacity) : leaves_(1) {
    while (leaves_ < bins) leaves_ *= 2;
    room_.assign(2 * leaves_, capacity);
  }

  std::size_t place(std::int64_t length) {
    std::size_t node = 1;
    while (node < leaves_) node = room_[2 * node] >= length ? 2 * node : 2 * node + 1;
    const std::size_t bin = node - leaves_;
    room_[node] -= length;
    while (node /= 2) room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
    return bin;
  }

 private:
  std::size_t leaves_;
  std::vector<std::int64_t> room_;
};

struct Item {
  std::int64_t index;
  std::int64_t size;
};

/// Items that are taken one by one from a sorted list; the nearest one left on either side of a position is found in
/// nearly constant time (path compression).
class SortedItems {
 public:
  explicit SortedItems(std::vector<Item> items)
      : items_(std::move(items)), next_(items_.size() + 2), prev_(next_.size()) {
    std::iota(next_.begin(), next_.end(), 0);
    std::iota(prev_.begin(), prev_.end(), 0);
    left_ = items_.size();
  }

  std::size_t end() const { return items_.size(); }
  std::size_t left() const { return left_; }
  const Item& operator[](std::size_t i) const { return items_[i]; }

  /// First position >= i still there, or end().
  std::size_t at_or_after(std::size_t i) { return find(next_, i + 1) - 1; }
  /// Last position < i still there, or end() when none is.
  std::size_t before(std::size_t i) {
    const std::size_t found = find(prev_, i);
    return found == 0 ? end() : found - 1;
  }

  Item take(std::size_t i) {
    next_[i + 1] = i + 2;  // slots are shifted by one: slot 0 is "before the first", slot size + 1 is the end
    prev_[i + 1] = i;
    --left_;
    return items_[i];
  }

 private:
  static std::size_t find(std::vector<std::size_t>& link, std::size_t i) {
    std::size_t root = i;
    while (link[root] != root) root = link[root];
    while (link[i] != root) i = std::exchange(link[i], root);
    return root;
  }

  std::vector<Item> items_;
  std::vector<std::size_t> next_, prev_;
  std::size_t left_ = 0;
};

std::vector<Item> sorted(std::vector<Item> items, bool descending) {
  std::stable_sort(items.begin(), items.end(), [descending](const Item& a, const Item& b) {
    return descending ? a.size > b.size : a.size < b.size;
  });
  return items;
}

/// First position in a descending list whose size is at most `room`.
std::size_t first_fitting(const SortedItems& descending, std::int64_t room) {
  std::size_t low = 0, high = descending.end();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (descending[middle].size > room) low = middle + 1;
    else high = middle;
  }
  return low;
}

/// Number of items in an ascending list whose size is at most `room`.
std::size_t count_fitting(const SortedItems& ascending, std::int64_t room) {
  std::size_t low = 0, high = ascending.end();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (ascending[middle].size <= room) low = middle + 1;
    else high = middle;
  }
  return low;
}

struct OpenBin {
  std::vector<std::int64_t> members;
  std::int64_t room = 0;
  bool has_medium = false;

  void add(const Item& item) {
    members.push_back(item.index);
    room -= item.size;
  }
};

void add_mediums(std::vector<OpenBin>& bins, SortedItems& medium) {
  for (OpenBin& bin : bins) {
    const std::size_t i = medium.at_or_after(first_fitting(medium, bin.room));
    if (i == medium.end()) continue;
    bin.add(medium.take(i));
    bin.has_medium = true;
  }
}

void add_pairs_of_smalls(std::vector<OpenBin>& bins, SortedItems& small) {
  for (auto bin = bins.rbegin(); bin != bins.rend() && small.left() >= 2; ++bin) {
    if (bin->has_medium) continue;
    const std::size_t first = small.at_or_after(0);
    const std::size_t second = small.at_or_after(first + 1);
    if (small[first].size + small[second].size > bin->room) continue;
    bin->add(small.take(first));
    bin->add(small.take(small.before(count_fitting(small, bin->room))));
  }
}

void fill_greedily(std::vector<OpenBin>& bins, SortedItems& descending) {
  for (OpenBin& bin : bins) {
    while (descending.left() > 0 && descending[descending.before(descending.end())].size <= bin.room)
      bin.add(descending.take(descending.at_or_after(first_fitting(descending, bin.room))));
  }
}

/// Bins of what no bin with a large sequence could take, by ascending load.
Bins pack_leftovers(SortedItems& descending, std::int64_t capacity) {
  using Entry = std::tuple<std::int64_t, std::int64_t, std::size_t>;  // load, when it was put here, bin
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> by_load;
  Bins bins;
  std::int64_t clock = 0;
  for (std::size_t i = descending.at_or_after(0); i != descending.end(); i = descending.at_or_after(i + 1)) {
    const Item& item = descending[i];
    std::int64_t load = item.size;
    std::size_t bin = bins.size();
    if (!by_load.empty() && std::get<0>(by_load.top()) + item.size <= capacity) {
      load += std::get<0>(by_load.top());
      bin = std::get<2>(by_load.top());
      by_load.pop();
    } else {
      bins.emplace_back();
    }
    bins[bin].push_back(item.index);
    by_load.emplace(load, clock++, bin);
  }
  Bins ordered;
  for (; !by_load.empty(); by_load.pop()) ordered.push_back(std::move(bins[std::get<2>(by_load.top())]));
  return ordered;
}

}  // namespace

Bins pack_concatenative(std::span<const std::int64_t> lengths, std::int64_t capacity,
                        std::int64_t max_sequences_per_bin) {
  check_lengths(lengths, capacity);
  Bins bins;
  std::int64_t load = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const bool full = max_sequences_per_bin >= 0 && !bins.empty() &&
                      static_cast<std::int64_t>(bins.back().size()) >= max_sequences_per_bin;
    if (bins.empty() || full || load + lengths[i] > capacity) {
      bins.emplace_back();
      load = 0;
    }
    bins.back().push_back(static_cast<std::int64_t>(i));
    load += lengths[i];
  }
  return bins;
}

Bins pack_first_fit(std::span<const std::int64_t> lengths, std::span<const std::int64_t> order, std::int64_t capacity) {
  check_lengths(lengths, capacity);
  FirstFitTree tree(order.size(), capacity);
  Bins bins;
  for (const std::int64_t i : order) {
    NRL_CHECK_ARG(i >= 0 && i < static_cast<std::int64_t>(lengths.size()), "order holds ", i, ", but there are ",
                  lengths.size(), " sequences");
    const std::size_t bin = tree.place(lengths[static_cast<std::size_t>(i)]);
    if (bin >= bins.size()) bins.resize(bin + 1);
    bins[bin].push_back(i);
  }
  return bins;
}

Bins pack_first_fit_decreasing(std::span<const std::int64_t> lengths, std::int64_t capacity) {
  std::vector<std::pair<std::int64_t, std::int64_t>> keyed(lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i) keyed[i] = {lengths[i], static_cast<std::int64_t>(i)};
  std::sort(keyed.begin(), keyed.end(), std::greater<>());
  std::vector<std::int64_t> order(lengths.size());
  std::transform(keyed.begin(), keyed.end(), order.begin(), [](const auto& pair) { return pair.second; });
  return pack_first_fit(lengths, order, capacity);
}

Bins pack_modified_first_fit_decreasing(std::span<const std::int64_t> lengths, std::int64_t capacity) {
  check_lengths(lengths, capacity);
  std::vector<Item> large, medium_items, small_items, rest;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const Item item{static_cast<std::int64_t>(i), lengths[i]};
    NRL_CHECK_ARG(item.size > 0, "sequence ", i, " has length ", item.size,
                  "; modified_first_fit_decreasing needs positive lengths");
    if (item.size > capacity / 2) large.push_back(item);
    else if (item.size > capacity / 3) medium_items.push_back(item);
    else if (item.size > capacity / 6) small_items.push_back(item);
    else rest.push_back(item);
  }
  std::vector<OpenBin> open;
  for (const Item& item : sorted(std::move(large), true)) {
    open.push_back({{}, capacity, false});
    open.back().add(item);
  }
  SortedItems medium(sorted(std::move(medium_items), true));
  SortedItems small(sorted(std::move(small_items), false));
  add_mediums(open, medium);
  add_pairs_of_smalls(open, small);
  for (auto* items : {&medium, &small})
    for (std::size_t i = items->at_or_after(0); i != items->end(); i = items->at_or_after(i + 1))
      rest.push_back((*items)[i]);
  SortedItems remaining(sorted(std::move(rest), true));
  fill_greedily(open, remaining);

  Bins bins;
  for (OpenBin& bin : open) bins.push_back(std::move(bin.members));
  for (auto& bin : pack_leftovers(remaining, capacity)) bins.push_back(std::move(bin));
  return bins;
}

}  // namespace nemo_rl::batching
