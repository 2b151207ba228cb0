// One file with its parents (`defaults:`), and how a child is laid over a parent.
#pragma once
#include <string>
#include <vector>

#include "config/node.h"

namespace nemo_rl::config {

/// Two spellings of one key, as full dotted keys; the canonical one is kept.
struct Alias {
  std::string spelling;
  std::string canonical;
};

/// Lays `child` over `base`: mappings merge key by key, everything else (a list, null, a scalar) replaces.
void merge(Node& base, const Node& child);

/// As `merge`, and a top-level section of the child with `_override_: true` replaces the base's whole section
/// (the marker goes away; deeper or false markers stay as data).
void merge_file(Node& base, Node child);

/// Renames alias keys of one file or override. The same key in both spellings with different values is a problem.
void rename_aliases(Node& tree, const std::vector<Alias>& aliases, std::vector<Problem>& problems);

/// Loads `path` and, depth first, the parents that its `defaults` names (a string or a list; relative to the folder of
/// the file that names them, or to `base_dir` for the first file when it is not empty; one that is not there is looked
/// for in `folders`, which hold the shipped files); later parents win over earlier ones and the file over all.
/// `defaults` is removed. Throws LoadError; a missing or cyclic parent names the file and line that asks.
Node load_with_parents(const std::string& path, const std::string& base_dir, const std::vector<std::string>& folders,
                       const std::vector<Alias>& aliases, std::vector<Problem>& problems);

}  // namespace nemo_rl::config
