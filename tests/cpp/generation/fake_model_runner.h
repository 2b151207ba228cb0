// A model whose logits are a hash of all tokens up to a row, or with a window of the last ones, read back from the
// cache through the block tables: a wrong block, a missed copy, a token written to the wrong place or a block that was
// released too early changes what is generated.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "generation/model_runner.h"
#include "runtime/tensor.h"

namespace nemo_rl::generation {

class FakeModelRunner : public ModelRunner {
 public:
  /// `windows`: those of the layers, one for each pool; 0: all tokens.
  FakeModelRunner(std::int64_t vocab, std::int64_t block, std::vector<std::int64_t> windows = {0})
      : vocab_(vocab), block_(block), windows_(std::move(windows)) {}

  std::int64_t vocab_size() const override { return vocab_; }
  std::int64_t block_size() const override { return block_; }
  std::int64_t draft_rows() const override { return drafts; }
  std::vector<CachePool> cache_pools() const override {
    std::vector<CachePool> pools;
    for (const std::int64_t window : windows_) pools.push_back({window, 1024});
    return pools;
  }
  void allocate_cache(const std::vector<std::int64_t>& num_blocks) override {
    caches_.clear();
    for (const std::int64_t count : num_blocks) caches_.emplace_back(count * block_, kEmpty);
    ++allocations;
  }
  void release_cache() override { caches_.clear(); }

  at::Tensor forward(const ForwardBatch& batch) override {
    ++steps;
    largest_step = std::max<std::int64_t>(largest_step, static_cast<std::int64_t>(batch.token_ids.size()));
    widest_step = std::max<std::int64_t>(widest_step, static_cast<std::int64_t>(batch.slices.size()));
    if (fail_at_step == steps) throw std::runtime_error("the device is gone");
    for (const BlockCopy& copy : batch.copies) {
      const auto p = static_cast<std::size_t>(copy.pool);
      for (int i = 0; i < block_; ++i) cell(p, copy.to, i) = i < copy.length ? cell(p, copy.from, i) : kEmpty;
    }
    write(batch);
    const at::Tensor logits = at::empty({static_cast<std::int64_t>(batch.logits_rows.size()), vocab_}, at::kFloat);
    for (std::size_t r = 0; r < batch.logits_rows.size(); ++r) {
      std::vector<std::vector<std::int64_t>> seen;
      for (std::size_t p = 0; p < windows_.size(); ++p) seen.push_back(history(batch, batch.logits_rows[r], p));
      hash_logits(seen, logits.data_ptr<float>() + static_cast<std::int64_t>(r) * vocab_);
    }
    return logits;
  }

  /// What the model says after `tokens`: about normal, scale 2.
  void fill_logits(const std::vector<std::int64_t>& tokens, float* row) const {
    std::vector<std::vector<std::int64_t>> seen;
    for (const std::int64_t window : windows_) {
      const auto count = static_cast<std::int64_t>(tokens.size());
      seen.emplace_back(window == 0 || count <= window ? tokens.begin() : tokens.end() - window, tokens.end());
    }
    hash_logits(seen, row);
  }

  std::int64_t drafts = 0;   ///< see ModelRunner::draft_rows
  std::int64_t weights = 0;  ///< a cell holds which weights computed it: token + 1000 * weights
  std::int64_t steps = 0, allocations = 0, largest_step = 0, widest_step = 0;
  std::int64_t fail_at_step = -1;
  std::int64_t nan_after = -1;  ///< tokens after which the logits hold a NaN

 private:
  static constexpr std::int64_t kEmpty = -1;

  void hash_logits(const std::vector<std::vector<std::int64_t>>& seen, float* row) const {
    std::uint64_t h = 0x9E3779B97F4A7C15ull;
    for (const auto& tokens : seen)
      for (const std::int64_t t : tokens) h = mix(h ^ static_cast<std::uint64_t>(t + 1));
    for (std::int64_t v = 0; v < vocab_; ++v) {
      const std::uint64_t bits = mix(h + static_cast<std::uint64_t>(v) * 0xD1B54A32D192ED03ull);
      double sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<double>((bits >> (16 * i)) & 0xFFFF) / 65536 - 0.5;
      row[v] = static_cast<float>(sum * 3.5);
    }
    if (nan_after == static_cast<std::int64_t>(seen.front().size())) row[0] = std::numeric_limits<float>::quiet_NaN();
  }

  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  std::int64_t& cell(std::size_t pool, std::int32_t block, std::int64_t i) {
    EXPECT_GE(block, 0) << "no block";
    return caches_.at(pool).at(static_cast<std::size_t>(block * block_ + i));
  }

  void write(const ForwardBatch& batch) {
    std::set<std::tuple<std::size_t, std::int32_t, std::int64_t>> written;
    std::int64_t expected_start = 0;
    for (const SequenceSlice& s : batch.slices) {
      EXPECT_EQ(s.query_start, expected_start);
      EXPECT_GT(s.query_length, 0);
      expected_start += s.query_length;
      for (std::int64_t i = 0; i < s.query_length; ++i) {
        const std::int64_t position = s.context_length + i;
        const std::int64_t token = batch.token_ids[static_cast<std::size_t>(s.query_start + i)] + 1000 * weights;
        for (std::size_t p = 0; p < windows_.size(); ++p) {
          const std::int32_t block = s.block_tables.at(p).at(static_cast<std::size_t>(position / block_));
          EXPECT_TRUE(written.emplace(p, block, position % block_).second) << "two sequences write one cell";
          cell(p, block, position % block_) = token;
        }
      }
    }
    EXPECT_EQ(expected_start, static_cast<std::int64_t>(batch.token_ids.size()));
  }

  std::vector<std::int64_t> history(const ForwardBatch& batch, std::int64_t row, std::size_t pool) {
    for (const SequenceSlice& s : batch.slices) {
      if (row < s.query_start || row >= s.query_start + s.query_length) continue;
      std::vector<std::int64_t> tokens;
      const std::int64_t last = s.context_length + row - s.query_start, window = windows_[pool];
      for (std::int64_t p = window == 0 ? 0 : std::max<std::int64_t>(0, last - window + 1); p <= last; ++p) {
        tokens.push_back(cell(pool, s.block_tables.at(pool).at(static_cast<std::size_t>(p / block_)), p % block_));
        EXPECT_NE(tokens.back(), kEmpty) << "position " << p << " was never written";
      }
      return tokens;
    }
    ADD_FAILURE() << "row " << row << " belongs to no slice";
    return {};
  }

  std::int64_t vocab_, block_;
  std::vector<std::int64_t> windows_;
  std::vector<std::vector<std::int64_t>> caches_;  // of each pool
};

}  // namespace nemo_rl::generation
