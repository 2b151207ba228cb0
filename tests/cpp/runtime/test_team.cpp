// Team: work reaches all who help and is done once, with errors, nesting and helpers that come late; the threads here
// are the test's own, as this file is compiled without OpenMP.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/parallel_items.h"
#include "runtime/team.h"

namespace nemo_rl::runtime {
namespace {

void with_team(int threads, const std::function<void()>& f) {
  Team team(threads);
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back([&team, t] { team.help(t); });
  try {
    team.lead_here(f);
  } catch (...) {
    for (auto& h : helpers) h.join();
    throw;
  }
  for (auto& h : helpers) h.join();
}

TEST(ThreadTeam, EveryItemOfManySmallTasksIsProcessedOnce) {
  std::int64_t wrong = 0;
  with_team(3, [&] {
    for (std::int64_t n = 0; n < 5000; ++n) {
      std::vector<std::atomic<int>> done(static_cast<std::size_t>(n % 17));
      const auto count = static_cast<std::int64_t>(done.size());
      if (n % 2 == 0) {
        parallel_items(count, true, [&](std::int64_t i) { done[static_cast<std::size_t>(i)]++; });
      } else {
        parallel_tiles(count, 1 + n % 3, [&](std::int64_t begin, std::int64_t end, bool) {
          for (std::int64_t i = begin; i < end; ++i) done[static_cast<std::size_t>(i)]++;
        });
      }
      for (const auto& d : done) wrong += d != 1;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadTeam, AllThreadsWorkConcurrently) {
  std::set<std::int64_t> threads;
  std::mutex mutex;
  with_team(3, [&] {
    Team::current()->share([&](std::int64_t thread) {
      {
        const std::lock_guard lock(mutex);
        threads.insert(thread);
      }
      for (;;) {  // until the others are here as well
        const std::lock_guard lock(mutex);
        if (threads.size() == 3) return;
      }
    });
  });
  EXPECT_EQ(threads, (std::set<std::int64_t>{0, 1, 2}));
}

TEST(ThreadTeam, LeaderThreadDoesAllWorkIfNoHelperThreadJoins) {
  Team team(2);  // whose second thread never does
  int done = 0;
  team.lead_here([&] { parallel_items(5, true, [&](std::int64_t) { ++done; }); });
  EXPECT_EQ(done, 5);
}

TEST(ThreadTeam, NestedParallelLoopRunsOnTheThreadThatStartedIt) {
  std::atomic<int> done{0};
  with_team(2, [&] {
    parallel_items(4, true, [&](std::int64_t) {
      EXPECT_EQ(Team::current(), nullptr);
      const auto here = std::this_thread::get_id();
      parallel_items(3, true, [&](std::int64_t) {
        EXPECT_EQ(std::this_thread::get_id(), here);
        ++done;
      });
    });
    EXPECT_NE(Team::current(), nullptr);
  });
  EXPECT_EQ(done, 12);
  EXPECT_EQ(Team::current(), nullptr);
}

TEST(ThreadTeam, ExceptionInAnyThreadIsRethrownInTheLeaderAndTheTeamStaysUsable) {
  std::atomic<int> done{0};
  with_team(2, [&] {
    for (int bad = 0; bad < 2; ++bad) {  // by whom it is thrown
      std::atomic<int> here{0};
      EXPECT_THROW(Team::current()->share([&](std::int64_t thread) {
        ++here;
        while (here < 2) std::this_thread::yield();
        if (thread == bad) throw std::runtime_error("a bad tile");
      }),
                   std::runtime_error);
    }
    parallel_items(7, true, [&](std::int64_t) { ++done; });
  });
  EXPECT_EQ(done, 7);
  EXPECT_THROW(with_team(2, [] { throw std::runtime_error("between works"); }), std::runtime_error);
  EXPECT_EQ(Team::current(), nullptr);
}

TEST(ThreadTeam, PrefetchRequestsOfAnySizeAreAccepted) {
  const std::vector<char> w(1000);
  std::atomic<int> done{0};
  with_team(2, [&] {
    for (const std::int64_t bytes : {0, 1, 63, 1000}) {
      Team::current()->ask_ahead({{{w.data(), bytes / 2}, {w.data() + bytes / 2, bytes / 2}}});
      parallel_items(2, true, [&](std::int64_t) { ++done; });
      Team::current()->ask_ahead({{{w.data(), bytes}, {}}});
      parallel_items(2, true, [&](std::int64_t) { ++done; });
    }
  });
  EXPECT_EQ(done, 16);
}

}  // namespace
}  // namespace nemo_rl::runtime
