#include "refit/delta.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace nemo_rl::refit {
namespace {

constexpr std::int64_t kBits = 64;  ///< weights of one word of bits

std::int64_t words_of(std::int64_t count) { return (count + kBits - 1) / kBits; }

/// Bit i: whether weight i differs; n <= 64.
template <class T>
std::uint64_t differing(const char* old, const char* now, std::int64_t n) {
  if (std::memcmp(old, now, static_cast<std::size_t>(n) * sizeof(T)) == 0) return 0;
  std::uint64_t bits = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    T a, b;
    std::memcpy(&a, old + i * static_cast<std::int64_t>(sizeof a), sizeof a);
    std::memcpy(&b, now + i * static_cast<std::int64_t>(sizeof b), sizeof b);
    bits |= static_cast<std::uint64_t>(a != b) << i;
  }
  return bits;
}

/// -1 where it would not be shorter.
template <class T>
std::int64_t encode(const char* old, const char* now, std::int64_t size, char* out) {
  constexpr auto width = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t count = size / width;
  std::int64_t end = words_of(count) * 8;
  for (std::int64_t i = 0, word = 0; i < count; i += kBits, ++word) {
    const auto n = std::min(kBits, count - i);
    auto bits = differing<T>(old + i * width, now + i * width, n);
    if (end + std::popcount(bits) * width >= size) return -1;
    std::memcpy(out + word * 8, &bits, sizeof bits);
    for (; bits != 0; bits &= bits - 1, end += width)
      std::memcpy(out + end, now + (i + std::countr_zero(bits)) * width, width);
  }
  return end < size ? end : -1;
}

template <class T>
bool apply(const char* changes, std::int64_t length, std::int64_t size, char* to) {
  constexpr auto width = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t count = size / width;
  std::int64_t at = words_of(count) * 8;
  if (at > length) return false;
  for (std::int64_t i = 0, word = 0; i < count; i += kBits, ++word) {
    std::uint64_t bits;
    std::memcpy(&bits, changes + word * 8, sizeof bits);
    if (at + std::popcount(bits) * width > length) return false;
    for (; bits != 0; bits &= bits - 1, at += width) {
      const std::int64_t place = i + std::countr_zero(bits);
      if (place >= count) return false;
      std::memcpy(to + place * width, changes + at, width);
    }
  }
  return at == length;
}

/// f of a number as wide as a weight; `otherwise` where weights are cut.
template <class Result, class F>
Result by_width(std::int64_t size, std::int64_t width, Result otherwise, const F& f) {
  if (size % width != 0) return otherwise;
  if (width == 2) return f(std::uint16_t{});
  if (width == 4) return f(std::uint32_t{});
  return width == 8 ? f(std::uint64_t{}) : otherwise;
}

}  // namespace

std::int64_t encode_changes(const char* old, const char* now, std::int64_t size, std::int64_t width, char* out) {
  const auto length = by_width(size, width, std::int64_t{-1},
                               [&](auto number) { return encode<decltype(number)>(old, now, size, out); });
  if (length >= 0) return length;
  std::memcpy(out, now, static_cast<std::size_t>(size));
  return size;
}

bool apply_changes(const char* changes, std::int64_t length, std::int64_t size, std::int64_t width, char* to) {
  if (length == size) {
    std::memcpy(to, changes, static_cast<std::size_t>(size));
    return true;
  }
  return length < size &&
         by_width(size, width, false, [&](auto number) { return apply<decltype(number)>(changes, length, size, to); });
}

}  // namespace nemo_rl::refit
