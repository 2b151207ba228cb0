// What a configuration may expand to, and what a text must be. Far above what any run needs: files that exceed these
// are mistakes or attacks, and each is a sentence instead of a machine without memory.
#pragma once
#include <cstddef>
#include <string>

#include "common/check.h"
#include "config/node.h"

namespace nemo_rl::config {

inline constexpr std::size_t kMostFileBytes = 4 << 20;
inline constexpr std::size_t kMostFiles = 100;            // with all parents
inline constexpr std::size_t kMostValues = 20000;         // of a file, or copied by aliases and interpolations
inline constexpr std::size_t kMostTextBytes = 4 << 20;    // made by interpolations
inline constexpr std::size_t kMostCopiedBytes = 4 << 20;  // of texts that aliases copy
inline constexpr int kDeepest = 100;                      // lists and mappings, interpolations, parts of a key

/// Counts how deep a recursion is; ArgumentError `what` "more than 100 deep" below that.
class Depth {
 public:
  Depth(int& depth, const char* what) : depth_(depth) {
    NRL_CHECK_ARG(depth < kDeepest, what, " more than ", kDeepest, " deep");
    ++depth_;
  }
  ~Depth() { --depth_; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;
};

/// What a tree holds, itself included: values, and bytes of keys and texts.
struct Extent {
  std::size_t values = 0, bytes = 0;
};
Extent extent_of(const Node& node);

/// The number of values of a tree, itself included.
std::size_t count_values(const Node& node);

/// Index of the first byte that is no UTF-8; npos if there is none.
std::size_t first_not_utf8(const std::string& text);

/// A long text's beginning, for messages; characters stay whole.
std::string shortened(const std::string& text, std::size_t bytes = 200);

}  // namespace nemo_rl::config
