#include <gtest/gtest.h>

#include <stdexcept>

#include "common/random.h"
#include "generation/stop_strings.h"

namespace nemo_rl::generation {

TEST(StopStrings, StopStringInsideOneTokenIsFound) {
  const StopStrings stops({"END"});
  std::string tail;
  EXPECT_FALSE(stops.append(tail, "abc"));
  EXPECT_TRUE(stops.append(tail, "xxENDyy"));
}

TEST(StopStrings, StopStringAcrossSeveralTokensIsFound) {
  const StopStrings stops({"</answer>", "\n\n"});
  std::string tail;
  for (const char* token : {"4", "2", "</", "an", "s", "wer"}) EXPECT_FALSE(stops.append(tail, token)) << token;
  EXPECT_TRUE(stops.append(tail, ">"));
  tail.clear();
  EXPECT_FALSE(stops.append(tail, "x\n"));
  EXPECT_FALSE(stops.append(tail, ""));  // a special token has no bytes and does not come between
  EXPECT_TRUE(stops.append(tail, "\n"));
}

TEST(StopStrings, StopStringIsFoundIfOneOfItsCharactersIsSplitOverTwoTokens) {
  const StopStrings stops({"\xE2\x82\xAC"});  // the euro sign
  std::string tail;
  EXPECT_FALSE(stops.append(tail, "5 \xE2\x82"));
  EXPECT_TRUE(stops.append(tail, "\xAC."));
}

TEST(StopStrings, EmptyStopStringThrows) { EXPECT_THROW(StopStrings({"a", ""}), std::invalid_argument); }

// Random texts over two letters, cut into random tokens: found at the first token after which the whole text holds one.
TEST(StopStrings, IncrementalSearchFindsTheSamePositionsAsASearchOfTheWholeText) {
  std::uint32_t counter = 0;
  const auto random = [&](std::uint32_t n) { return random_bits({1, RandomStream::init, 0, 0, counter++})[0] % n; };
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::string> strings(1 + random(3));
    for (auto& s : strings) {
      for (std::uint32_t i = 0, n = 1 + random(6); i < n; ++i) s += static_cast<char>('a' + random(2));
    }
    const StopStrings stops(strings);
    std::string text, tail;
    for (int token = 0; token < 30; ++token) {
      std::string bytes;
      for (std::uint32_t i = 0, n = random(4); i < n; ++i) bytes += static_cast<char>('a' + random(2));
      text += bytes;
      bool expected = false;
      for (const auto& s : strings) expected |= text.find(s) != std::string::npos;
      ASSERT_EQ(stops.append(tail, bytes), expected) << text;
      if (expected) break;
    }
  }
}

}  // namespace nemo_rl::generation
