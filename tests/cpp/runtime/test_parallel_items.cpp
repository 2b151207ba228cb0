// parallel_tiles, parallel_rows: every tile once, whatever the least number at a time; a range that owner and thieves
// empty at once. (This file is compiled without OpenMP: one thread does all stretches in turn.
// tests/unit/ops/test_linear_swiglu.py has two.)
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "runtime/parallel_items.h"

namespace nemo_rl::runtime {
namespace {

std::vector<int> times_done(std::int64_t count, std::int64_t at_least) {
  std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
  parallel_tiles(count, at_least, [&](std::int64_t begin, std::int64_t end, bool) {
    for (std::int64_t t = begin; t < end; ++t) done[static_cast<std::size_t>(t)]++;
  });
  return {done.begin(), done.end()};
}

TEST(ParallelTiles, EveryTileIsProcessedOnce) {
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (const std::int64_t count : {0, 1, 2, 7, 18, 1000})
      for (const std::int64_t at_least : {1, 4, 10})
        EXPECT_EQ(times_done(count, at_least), std::vector<int>(static_cast<std::size_t>(count), 1));
  }
}

TEST(ParallelRows, EveryRowIsProcessedOnceByOneThreadAndByATeam) {
  for (const bool team : {false, true})
    for (const std::int64_t count : {0, 1, 5, 64, 1000})
      for (const std::int64_t grain : {1, 8, 100}) {
        std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
        const auto work = [&] {
          parallel_rows(count, grain, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t t = begin; t < end; ++t) done[static_cast<std::size_t>(t)]++;
          });
        };
        Team leads(team ? 3 : 1);  // helpers that never come: whoever leads does all
        team ? leads.lead_here(work) : work();
        for (const auto& n : done) EXPECT_EQ(n, 1) << count << " rows, grain " << grain << ", team " << team;
      }
}

TEST(TileRange, OwnerTakesTilesFromTheFrontAndOtherThreadsFromTheBack) {
  TileRange range;
  range.set(10, 15);
  const auto front = range.take(2, true), back = range.take(2, false), last = range.take(2, true),
             none = range.take(1, false);
  EXPECT_EQ(front.begin, 10);
  EXPECT_EQ(front.end, 12);
  EXPECT_EQ(front.left, 3);
  EXPECT_EQ(back.begin, 13);
  EXPECT_EQ(back.end, 15);
  EXPECT_EQ(last.begin, 12);
  EXPECT_EQ(last.end, 13);
  EXPECT_EQ(last.left, 0);
  EXPECT_EQ(none.begin, none.end);
}

TEST(TileRange, WorkStealingProcessesEveryTileExactlyOnce) {
  constexpr std::int64_t kTiles = 100'000;
  TileRange range;
  range.set(0, kTiles);
  std::vector<std::atomic<int>> done(kTiles);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      for (auto t = range.take(1 + i, i == 0); t.begin < t.end; t = range.take(1 + i, i == 0))
        for (std::int64_t k = t.begin; k < t.end; ++k) done[static_cast<std::size_t>(k)]++;
    });
  for (auto& t : threads) t.join();
  for (const auto& n : done) ASSERT_EQ(n, 1);
}

}  // namespace
}  // namespace nemo_rl::runtime
