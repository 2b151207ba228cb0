// Attention by tiles (kernels/tiles/attention_*) gives the bits of a plain loop over the rules, one row at a time: any
// number of rows, packing, shared prefixes, chunks over the cache, forward and backward. By the tile in software on
// every machine with AVX2, and by AMX's where it can be had.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <vector>

#include "kernels/aligned_room.h"
#include "kernels/attention.h"
#include "kernels/tile_rules.h"

namespace nemo_rl::kernels {
namespace {

constexpr double kLog2E = 1.44269504088896340736;

struct AttentionKernels {
  const char* name;
  AttentionForwardWorkspace* forward_workspace;
  AttentionForward* forward;
  PagedWorkspace* paged_workspace;
  PagedAttention* paged;
  AttentionBackwardWorkspace* backward_workspace;
  AttentionBackward* backward;
  AttentionBackwardReduce* reduce;
};

std::vector<AttentionKernels> kernels_of_this_machine() {
  std::vector<AttentionKernels> all;
#if defined(__x86_64__)
#define NRL_KERNELS(from)                                                                                    \
  {                                                                                                          \
    #from, from::attention_forward_workspace, from::attention_forward_item, from::attention_paged_workspace, \
        from::attention_paged_item, from::attention_backward_workspace, from::attention_backward_job,        \
        from::attention_backward_reduce                                                                      \
  }
  if (has_software_tiles()) all.push_back(NRL_KERNELS(software_tiles));
  if (has_software_tiles_avx512()) all.push_back(NRL_KERNELS(software_tiles_avx512));
  if (has_amx_tiles()) all.push_back(NRL_KERNELS(amx));
#undef NRL_KERNELS
#endif
  return all;
}

/// 2^x as kernels/cpu/vec_register.h has it.
float exp2_by_the_rules(float x) {
  if (x < -126.0f) return 0;
  const float shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);
  float p = 1.53533618e-04f;
  for (const float c : {1.33988744e-03f, 9.61843736e-03f, 5.55033247e-02f, 2.40226479e-01f, 6.93147203e-01f, 1.0f})
    p = std::fma(p, f, c);
  return std::ldexp(p, static_cast<int>(shifted - 12582912.0f));
}

float rounded(float x) { return static_cast<float>(bfloat16(x)); }

/// Packed sequences and what the rules make of them.
struct Batch {
  AttentionShape shape;
  std::vector<AttentionSequence> sequences;
  std::int64_t tokens = 0;
  std::vector<bfloat16> qkv;
  std::vector<bfloat16> sinks;  ///< [N] with odd seeds, else none

  Batch(std::int64_t N, std::int64_t K, std::int64_t H, std::vector<AttentionSequence> all, unsigned seed)
      : shape{N, K, H, 1.0 / std::sqrt(static_cast<double>(H)), ElementType::bfloat16}, sequences(std::move(all)) {
    for (const auto& s : sequences) tokens = std::max(tokens, s.start + s.length);
    qkv = drawn(tokens * shape.row_stride(), Values::normal, seed);
    if (seed % 2 == 1) sinks = drawn(N, Values::normal, seed + 100);
  }
  const void* sinks_or_null() const { return sinks.empty() ? nullptr : sinks.data(); }
  float at(std::int64_t row, std::int64_t head, std::int64_t h) const {
    return static_cast<float>(qkv[static_cast<std::size_t>(row * shape.row_stride() + head * shape.head_dim + h)]);
  }
  static std::int64_t row_of(const AttentionSequence& s, std::int64_t position) {
    return position < s.prefix_length ? s.prefix_start + position : s.start + position - s.prefix_length;
  }
  float key(const AttentionSequence& s, std::int64_t position, std::int64_t kv, std::int64_t h) const {
    return at(row_of(s, position), shape.num_heads + kv, h);
  }
  float value(const AttentionSequence& s, std::int64_t position, std::int64_t kv, std::int64_t h) const {
    return at(row_of(s, position), shape.num_heads + shape.num_kv_heads + kv, h);
  }
  float score(const AttentionSequence& s, std::int64_t position, std::int64_t head, std::int64_t j) const {
    const std::int64_t row = row_of(s, position), kv = head / shape.group();
    const float sum = tile_sum(
        shape.head_dim, [&](std::int64_t h) { return at(row, head, h); },
        [&](std::int64_t h) { return key(s, j, kv, h); });
    return sum * static_cast<float>(shape.scale * kLog2E);
  }

  struct Row {
    std::vector<bfloat16> out;
    float lse;
  };
  /// The query of a head at an own position of a sequence.
  Row forward(const AttentionSequence& s, std::int64_t position, std::int64_t head) const {
    const std::int64_t H = shape.head_dim, kv = head / shape.group();
    float max = -INFINITY;
    std::array<float, 16> sum{};
    std::vector<float> acc(static_cast<std::size_t>(H), 0.0f);
    if (!sinks.empty()) {
      max = static_cast<float>(sinks[static_cast<std::size_t>(head)]) * static_cast<float>(kLog2E);
      sum[0] = 1;
    }
    for (std::int64_t t = 0; t * 32 <= position; ++t) {
      float w[32], new_max = max;
      const auto seen = [&](int j) { return t * 32 + j <= position; };
      for (int j = 0; j < 32; ++j) {
        w[j] = seen(j) ? score(s, position, head, t * 32 + j) : -INFINITY;
        new_max = std::max(new_max, w[j]);
      }
      for (float& x : w) x = exp2_by_the_rules(x - new_max);
      if (new_max != max) {
        const float factor = exp2_by_the_rules(max - new_max);
        for (float& x : sum) x *= factor;
        for (float& x : acc) x = std::abs(x * factor) < FLT_MIN ? 0.0f : x * factor;
        max = new_max;
      }
      for (std::size_t i = 0; i < 16; ++i) sum[i] += w[i] + w[i + 16];
      for (std::int64_t h = 0; h < H; ++h)
        acc[static_cast<std::size_t>(h)] = tile_step(
            acc[static_cast<std::size_t>(h)], [&](int j) { return rounded(w[j]); },
            [&](int j) { return seen(j) ? value(s, t * 32 + j, kv, h) : 0.0f; });
    }
    double total = 0;
    for (const float x : sum) total += static_cast<double>(x);
    Row row;
    for (const float x : acc) row.out.push_back(bfloat16(x * (1.0f / static_cast<float>(total)) + 0.0f));
    row.lse = 0.69314718055994530942f * (max + std::log2(static_cast<float>(total)));
    return row;
  }
};

struct Outputs {
  std::vector<bfloat16> out;
  std::vector<float> lse;
};

/// Items of so many own tokens each; sequences that follow one another with one prefix go together where `together`.
Outputs forward(const AttentionKernels& with, const Batch& b, std::int64_t step, bool together = false) {
  Outputs o{std::vector<bfloat16>(static_cast<std::size_t>(b.tokens * b.shape.num_heads * b.shape.head_dim)),
            std::vector<float>(static_cast<std::size_t>(b.tokens * b.shape.num_heads))};
  const AttentionForwardArgs args{b.shape,           b.qkv.data(), b.sequences.data(),
                                  b.sinks_or_null(), o.out.data(), o.lse.data()};
  std::int64_t longest = 0;
  for (const auto& s : b.sequences) longest = std::max(longest, s.prefix_length + s.length);
  Room room(static_cast<std::int64_t>(with.forward_workspace(b.shape, longest)));
  const auto count = static_cast<std::int32_t>(b.sequences.size());
  for (std::int32_t kv = 0; kv < b.shape.num_kv_heads; ++kv)
    for (std::int32_t i = 0; i < count;) {
      std::int32_t end = i + 1;
      const auto& s = b.sequences[static_cast<std::size_t>(i)];
      while (together && end < count && s.prefix_length > 0 &&
             b.sequences[static_cast<std::size_t>(end)].prefix_length == s.prefix_length)
        ++end;
      const std::int64_t tokens = end > i + 1 ? 1 << 20 : step;
      for (std::int64_t token = 0; token < s.length; token += tokens)
        with.forward(args, {i, end, kv, token, token + tokens}, static_cast<std::byte*>(room.get()));
      i = end;
    }
  return o;
}

void expect_rules(const AttentionKernels& with, const Batch& b, const Outputs& got) {
  for (const auto& s : b.sequences)
    for (std::int64_t i = 0; i < s.length; ++i)
      for (std::int64_t head = 0; head < b.shape.num_heads; ++head) {
        const auto want = b.forward(s, s.prefix_length + i, head);
        const std::int64_t row = (s.start + i) * b.shape.num_heads + head;
        expect_bits(got.lse[static_cast<std::size_t>(row)], want.lse, with.name, row);
        for (std::int64_t h = 0; h < b.shape.head_dim; ++h)
          ASSERT_EQ(got.out[static_cast<std::size_t>(row * b.shape.head_dim + h)].bits,
                    want.out[static_cast<std::size_t>(h)].bits)
              << with.name << " row " << s.start + i << " head " << head << " column " << h;
      }
}

bool same_bits(const std::vector<bfloat16>& a, const std::vector<bfloat16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

/// All own tokens of the sequences (which have no prefix) through a cache of blocks in descending order, whose
/// positions hold NaN until they are written: chunks of `step` tokens each, one slice a sequence at a time.
std::vector<bfloat16> through_the_cache(const AttentionKernels& with, const Batch& b, std::int64_t step) {
  const auto& shape = b.shape;
  std::int64_t blocks = 0, longest = 0;
  std::vector<std::vector<std::int32_t>> tables;
  for (const auto& s : b.sequences) {
    tables.emplace_back();
    for (std::int64_t t = 0; t * kKeyTile < s.length; ++t) tables.back().push_back(static_cast<std::int32_t>(blocks++));
    longest = std::max(longest, s.length);
  }
  for (auto& table : tables)
    for (auto& block : table) block = static_cast<std::int32_t>(blocks) - 1 - block;
  std::vector<bfloat16> cache(static_cast<std::size_t>(blocks * shape.num_kv_heads * 2 * shape.head_dim * kKeyTile),
                              bfloat16(NAN)),
      out(static_cast<std::size_t>(b.tokens * shape.num_heads * shape.head_dim));
  Room room(static_cast<std::int64_t>(with.paged_workspace(shape)));
  for (std::int64_t from = 0; from < longest; from += step) {
    std::vector<PagedSlice> slices;
    for (std::size_t i = 0; i < tables.size(); ++i) {
      const auto& s = b.sequences[i];
      if (from < s.length)
        slices.push_back({s.start + from, std::min(step, s.length - from), from, tables[i].data(),
                          static_cast<std::int64_t>(tables[i].size())});
    }
    const PagedAttentionArgs args{shape,        b.qkv.data(), slices.data(), b.sinks_or_null(),
                                  cache.data(), out.data(),   nullptr};
    with.paged(args, {0, static_cast<std::int64_t>(slices.size()) * shape.num_kv_heads, 0, 1 << 20, true},
               static_cast<std::byte*>(room.get()));
  }
  return out;
}

struct HeadShape {
  std::int64_t N, K, H;
};
const HeadShape kShapes[] = {{3, 1, 64}, {6, 3, 32},  {8, 2, 96}, {4, 2, 24},
                             {2, 2, 8},  {20, 1, 16}, {5, 1, 80}, {1, 1, 256}};

}  // namespace

TEST(TileAttention, ForwardIsBitIdenticalToAScalarReference) {
  for (const auto& with : kernels_of_this_machine())
    for (const auto& [N, K, H] : kShapes) {
      // the last two share the first 37 rows of the one before them
      const Batch b(N, K, H, {{0, 1}, {1, 31}, {32, 33}, {65, 70}, {135, 9, 65, 37}, {144, 30, 65, 37}}, 11);
      const Outputs got = forward(with, b, 1 << 20);
      expect_rules(with, b, got);
      const Outputs together = forward(with, b, 1 << 20, true);
      EXPECT_TRUE(same_bits(together.out, got.out) && together.lse == got.lse) << with.name;
      for (const std::int64_t step : {1, 7, 32})
        EXPECT_TRUE(same_bits(forward(with, b, step).out, got.out)) << with.name << " in parts of " << step;
    }
}

TEST(TileAttention, ForwardIsBitIdenticalForAnySequenceLengthAndPrefillChunk) {
  for (const auto& with : kernels_of_this_machine()) {
    const Batch whole(3, 1, 16, {{0, 300}}, 12);
    const Outputs all = forward(with, whole, 1 << 20);
    expect_rules(with, whole, all);
    for (std::int64_t rows = 1; rows < 300; ++rows) {
      Batch some = whole;
      some.sequences[0].length = rows;
      const Outputs got = forward(with, some, 1 << 20);
      ASSERT_EQ(std::memcmp(got.out.data(), all.out.data(), static_cast<std::size_t>(rows * 3 * 16 * 2)), 0)
          << with.name << " " << rows;
    }
    for (const std::int64_t step : {1, 5, 32, 33, 300})
      EXPECT_TRUE(same_bits(through_the_cache(with, whole, step), all.out)) << with.name << " chunks of " << step;
  }
}

TEST(TileAttention, PagedAttentionIsBitIdenticalToPackedAttention) {
  for (const auto& with : kernels_of_this_machine())
    for (const auto& [N, K, H] : kShapes) {
      const Batch b(N, K, H, {{0, 45}, {45, 1}, {46, 64}, {110, 34}}, 13);
      const Outputs got = forward(with, b, 1 << 20);
      for (const std::int64_t step : {1, 20})
        EXPECT_TRUE(same_bits(through_the_cache(with, b, step), got.out)) << with.name << " " << H << " " << step;
    }
}

TEST(TileAttention, NanAndInfinityInLaterTokensDoNotChangeEarlierRows) {
  for (const auto& with : kernels_of_this_machine())
    for (const float poison : {NAN, INFINITY})
      for (const std::int64_t cut : {1, 13, 32, 40}) {
        const Batch clean(20, 1, 24, {{0, 70}}, 14);
        const Outputs want = forward(with, clean, 1 << 20);
        Batch poisoned = clean;
        for (auto i = static_cast<std::size_t>(cut * clean.shape.row_stride()); i < poisoned.qkv.size(); ++i)
          poisoned.qkv[i] = bfloat16(poison);
        const auto bytes = static_cast<std::size_t>(cut * 20 * 24 * 2);
        EXPECT_EQ(std::memcmp(forward(with, poisoned, 1 << 20).out.data(), want.out.data(), bytes), 0);
        EXPECT_EQ(std::memcmp(through_the_cache(with, poisoned, 70).data(), want.out.data(), bytes), 0);
      }
}

// ---------------------------------------------------------------- backward

namespace {

/// Sums [position][H] of the gradients of a run of keys and of their values.
struct KeySums {
  std::vector<float> keys, values;
  KeySums(std::int64_t count, std::int64_t H) : keys(static_cast<std::size_t>(count * H)), values(keys.size()) {}
};

struct Backward {
  const Batch& b;
  const Outputs& o;
  const std::vector<float>& d_out;  ///< [T, N*H]
  std::vector<float> d_qkv;

  Backward(const Batch& batch, const Outputs& outputs, const std::vector<float>& grad)
      : b(batch), o(outputs), d_out(grad), d_qkv(b.qkv.size()) {}

  float grad(std::int64_t row, std::int64_t head, std::int64_t h) const {
    return rounded(d_out[static_cast<std::size_t>((row * b.shape.num_heads + head) * b.shape.head_dim + h)]);
  }
  float dot(std::int64_t row, std::int64_t head) const {
    float lanes[16] = {};
    for (std::int64_t h = 0; h < b.shape.head_dim; ++h) {
      const auto out = o.out[static_cast<std::size_t>((row * b.shape.num_heads + head) * b.shape.head_dim + h)];
      lanes[h % 16] = std::fma(grad(row, head, h), static_cast<float>(out), lanes[h % 16]);
    }
    double total = 0;
    for (const float x : lanes) total += static_cast<double>(x);
    return static_cast<float>(total);
  }

  /// Own tokens [begin, end) of a sequence with one kv head. sums(position, &sums, &index) says where those of a key
  /// are.
  template <class SumsOf>
  void queries(const AttentionSequence& s, std::int64_t kv, std::int64_t begin, std::int64_t end,
               const SumsOf& sums_of) {
    const auto& shape = b.shape;
    const std::int64_t G = shape.group(), H = shape.head_dim, most = attention_query_tokens(G);
    for (std::int64_t token = begin; token < end;) {
      const std::int64_t first = s.prefix_length + token,
                         next = std::min(end, (first / most + 1) * most - s.prefix_length), rows = (next - token) * G;
      for (std::int64_t t = 0; t * 32 < s.prefix_length + next; ++t) {
        std::vector<float> p(static_cast<std::size_t>(rows * 32)), ds(p.size());
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t position = first + r / G, row = b.row_of(s, position), head = kv * G + r % G;
          const float log_sum =
              o.lse[static_cast<std::size_t>(row * shape.num_heads + head)] * static_cast<float>(kLog2E);
          const float out = dot(row, head);
          for (std::int64_t j = 0; j < 32 && t * 32 + j <= position; ++j) {
            const float x = exp2_by_the_rules(b.score(s, position, head, t * 32 + j) - log_sum);
            const float dp = tile_sum(
                H, [&](std::int64_t h) { return grad(row, head, h); },
                [&](std::int64_t h) { return b.value(s, t * 32 + j, kv, h); });
            p[static_cast<std::size_t>(r * 32 + j)] = rounded(x);
            ds[static_cast<std::size_t>(r * 32 + j)] = rounded(x * (dp - out));
          }
          for (std::int64_t h = 0; h < H; ++h) {
            float& to = d_qkv[static_cast<std::size_t>(row * shape.row_stride() + head * H + h)];
            to = tile_step(
                to, [&](int j) { return ds[static_cast<std::size_t>(r * 32 + j)]; },
                [&](int j) { return t * 32 + j < s.prefix_length + next ? b.key(s, t * 32 + j, kv, h) : 0.0f; });
          }
        }
        for (std::int64_t j = 0; j < 32 && t * 32 + j < s.prefix_length + next; ++j)
          for (std::int64_t h = 0; h < H; ++h) {
            const auto [sums, index] = sums_of(t * 32 + j);
            const auto add = [&](float& to, const std::vector<float>& w, const auto& x) {
              for (std::int64_t r0 = 0; r0 < rows; r0 += 32)
                to = tile_step(
                    to, [&](int r) { return r0 + r < rows ? w[static_cast<std::size_t>((r0 + r) * 32 + j)] : 0.0f; },
                    [&](int r) { return r0 + r < rows ? x(r0 + r) : 0.0f; });
            };
            const auto row = [&](std::int64_t r) { return b.row_of(s, first + r / G); };
            add(sums->values[static_cast<std::size_t>(index * H + h)], p,
                [&](std::int64_t r) { return grad(row(r), kv * G + r % G, h); });
            add(sums->keys[static_cast<std::size_t>(index * H + h)], ds,
                [&](std::int64_t r) { return b.at(row(r), kv * G + r % G, h); });
          }
      }
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t h = 0; h < H; ++h)
          d_qkv[static_cast<std::size_t>(b.row_of(s, first + r / G) * shape.row_stride() + (kv * G + r % G) * H + h)] *=
              static_cast<float>(shape.scale);
      token = next;
    }
  }

  void write(std::int64_t row, std::int64_t kv, const KeySums& sums, std::int64_t index) {
    const std::int64_t H = b.shape.head_dim;
    for (std::int64_t h = 0; h < H; ++h) {
      const auto at = static_cast<std::size_t>(row * b.shape.row_stride() + (b.shape.num_heads + kv) * H + h);
      d_qkv[at] = sums.keys[static_cast<std::size_t>(index * H + h)] * static_cast<float>(b.shape.scale);
      d_qkv[at + static_cast<std::size_t>(b.shape.num_kv_heads * H)] =
          sums.values[static_cast<std::size_t>(index * H + h)];
    }
  }

  /// A sequence without prefix and those that share its beginning. Several jobs' sums are added up from zero.
  void group(const std::vector<AttentionBackwardJob>& jobs, const std::vector<std::int32_t>& sharers, std::int64_t kv) {
    const auto& owner = b.sequences[static_cast<std::size_t>(jobs[0].owner)];
    const std::int64_t H = b.shape.head_dim;
    KeySums total(owner.length, H);
    for (const auto& job : jobs) {
      KeySums sums(owner.length, H);
      queries(owner, kv, job.token_begin, job.token_end,
              [&](std::int64_t position) { return std::pair(&sums, position); });
      for (auto i = job.sharer_begin; i < job.sharer_end; ++i) {
        const auto& s = b.sequences[static_cast<std::size_t>(sharers[static_cast<std::size_t>(i)])];
        const std::int64_t whole = s.prefix_length / 32 * 32;
        KeySums own(s.prefix_length + s.length - whole, H);
        queries(s, kv, 0, s.length, [&](std::int64_t position) {
          return position < whole ? std::pair(&sums, position) : std::pair(&own, position - whole);
        });
        for (std::int64_t k = 0; k < (s.prefix_length - whole) * H; ++k) {
          sums.keys[static_cast<std::size_t>(whole * H + k)] += own.keys[static_cast<std::size_t>(k)];
          sums.values[static_cast<std::size_t>(whole * H + k)] += own.values[static_cast<std::size_t>(k)];
        }
        for (std::int64_t k = 0; k < s.length; ++k) write(s.start + k, kv, own, s.prefix_length - whole + k);
      }
      if (jobs.size() == 1) total = sums;
      else
        for (std::int64_t k = 0; k < job.key_end * H; ++k) {
          total.keys[static_cast<std::size_t>(k)] += sums.keys[static_cast<std::size_t>(k)];
          total.values[static_cast<std::size_t>(k)] += sums.values[static_cast<std::size_t>(k)];
        }
    }
    for (std::int64_t k = 0; k < owner.length; ++k) write(owner.start + k, kv, total, k);
  }
};

}  // namespace

TEST(TileAttention, GradientsAreBitIdenticalToAScalarReference) {
  for (const auto& with : kernels_of_this_machine())
    for (const auto& [N, K, H] : {HeadShape{3, 1, 64}, {4, 2, 24}, {20, 1, 16}, {1, 1, 8}})
      for (const bool split : {false, true}) {
        const Batch b(N, K, H, {{0, 75}, {75, 9, 0, 37}, {84, 40, 0, 64}}, 15);
        const Outputs o = forward(with, b, 1 << 20);
        const auto halves = drawn(b.tokens * N * H, Values::normal, 16);
        std::vector<float> d_out;
        for (const bfloat16 x : halves) d_out.push_back(static_cast<float>(x) * 1.0009765625f);  // is rounded again
        const std::vector<std::int32_t> sharers{1, 2};
        std::vector<AttentionBackwardJob> jobs{{0, 0, 75, 0, 2, 75, -1}};
        const std::int64_t one = 2 * H * K;
        if (split) jobs = {{0, 0, 64, 0, 0, 64, 0}, {0, 64, 75, 0, 1, 75, 64 * one}, {0, 75, 75, 1, 2, 64, 139 * one}};
        std::vector<float> d_qkv(b.qkv.size(), NAN), partials(static_cast<std::size_t>(203 * one));
        const AttentionBackwardArgs args{b.shape,      ElementType::float32, b.qkv.data(),       o.out.data(),
                                         d_out.data(), o.lse.data(),         b.sequences.data(), sharers.data(),
                                         d_qkv.data(), partials.data()};
        Room room(static_cast<std::int64_t>(with.backward_workspace(b.shape, 75, 46)));
        Backward want(b, o, d_out);
        for (std::int64_t kv = 0; kv < K; ++kv) {
          for (const auto& job : jobs) with.backward(args, job, kv, static_cast<std::byte*>(room.get()));
          if (split) with.reduce(args, jobs.data(), 3, kv, 0, 75);
          want.group(jobs, sharers, kv);
        }
        for (std::size_t i = 0; i < d_qkv.size(); ++i)
          expect_bits(d_qkv[i], want.d_qkv[i], with.name, static_cast<std::int64_t>(i));
      }
}

}  // namespace nemo_rl::kernels
