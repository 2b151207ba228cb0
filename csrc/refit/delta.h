// What of some weights has changed: one bit a weight, then the new values of those whose bit is set.
#pragma once
#include <cstdint>

namespace nemo_rl::refit {

/// Writes what is needed to make `now` of `old`, both of `size` bytes, to `out`, which has room for `size` bytes.
/// `width`: bytes of a weight, 2, 4 or 8. Returns how many bytes that is: less than `size`, or `size` where the changes
/// are no shorter and `out` is `now` itself.
std::int64_t encode_changes(const char* old, const char* now, std::int64_t size, std::int64_t width, char* out);

/// Makes of the old weights at `to` the new ones. False, and `to` is of no more use, where the `length` bytes are no
/// changes of `size` bytes of weights.
bool apply_changes(const char* changes, std::int64_t length, std::int64_t size, std::int64_t width, char* to);

}  // namespace nemo_rl::refit
