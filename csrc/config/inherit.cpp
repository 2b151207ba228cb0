#include "config/inherit.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "config/limits.h"
#include "config/scalar.h"
#include "config/yaml_reader.h"

namespace nemo_rl::config {
namespace fs = std::filesystem;
namespace {

/// How a file is named in messages: relative to the working directory when it lies below it.
std::string display_name(const fs::path& path) {
  std::error_code ignored;
  const fs::path full = fs::weakly_canonical(path, ignored);
  const fs::path here = full.lexically_relative(fs::current_path(ignored));
  return here.empty() || *here.begin() == ".." ? full.string() : here.string();
}

std::vector<std::string> parent_names(const Node& defaults) {
  std::vector<std::string> names;
  if (defaults.is_list()) {
    for (const Node& item : defaults.items) {
      if (item.is_mapping() || item.is_list() || item.is_null())
        throw LoadError("root", item.source.text() + ": defaults takes file names, not " + kind_name(item.kind));
      names.push_back(python_text(item));
    }
  } else if (defaults.is_string()) {
    names.push_back(defaults.string);
  } else {
    throw LoadError("root", defaults.source.text() + ": defaults takes a file name or a list of them, not " +
                                kind_name(defaults.kind));
  }
  return names;
}

struct Request {
  fs::path path;
  fs::path base_dir;
  std::string asked_at;  // "child.yaml:1: ", empty for the first file
};

struct Way {
  const std::vector<std::string>& folders;  // where a parent may be that is not beside its child
  std::vector<fs::path> open;               // the files that are being read, each the parent of the one before
  std::size_t files = 0;
};

fs::path parent_path_of(const std::string& parent, const Request& child, const Way& way) {
  if (fs::path(parent).is_absolute()) return parent;
  const fs::path beside = child.base_dir / parent;
  std::error_code error;
  if (fs::exists(beside, error)) return beside;
  for (const std::string& folder : way.folders)
    if (const fs::path shipped = fs::path(folder) / parent; fs::is_regular_file(shipped, error)) return shipped;
  return beside;
}

Node load(const Request& request, const std::vector<Alias>& aliases, std::vector<Problem>& problems, Way& way) {
  std::error_code error;
  if (!fs::is_regular_file(request.path, error)) {
    const bool is_there = fs::exists(request.path, error);
    throw LoadError("missing_file", request.asked_at + "the configuration file " + request.path.string() +
                                        (is_there ? " is no file: name a YAML file" : " does not exist"));
  }
  const fs::path full = fs::canonical(request.path);
  if (std::find(way.open.begin(), way.open.end(), full) != way.open.end())
    throw LoadError("cycle", request.asked_at + "defaults form a circle: " + display_name(full) + " is its own parent");
  if (++way.files > kMostFiles)
    throw LoadError("cycle", request.asked_at + "the configuration takes more than " + std::to_string(kMostFiles) +
                                 " files (a parent counts each time that it is named)");
  way.open.push_back(full);

  std::ifstream file(full, std::ios::binary);
  std::string text(kMostFileBytes + 1, '\0');
  text.resize(static_cast<std::size_t>(file.read(text.data(), static_cast<std::streamsize>(text.size())).gcount()));
  const std::string name = display_name(full);
  Node tree = read_yaml(text, name);
  if (tree.is_null()) tree = Node::make_mapping();
  if (!tree.is_mapping())
    throw LoadError("root", name + ":1: the file must hold a mapping (key: value), not " + kind_name(tree.kind));

  Node merged = Node::make_mapping();
  if (const Node* defaults = tree.find("defaults")) {
    const Source asked = defaults->source;
    const std::vector<std::string> parents = parent_names(*defaults);
    tree.erase("defaults");
    for (const std::string& parent : parents) {
      const fs::path path = parent_path_of(parent, request, way);
      merge_file(merged, load({path, path.parent_path(), asked.text() + ": "}, aliases, problems, way));
    }
  }
  rename_aliases(tree, aliases, problems);
  merge_file(merged, std::move(tree));
  way.open.pop_back();
  return merged;
}

}  // namespace

void merge(Node& base, const Node& child) {
  if (!base.is_mapping() || !child.is_mapping()) {
    base = child;
    return;
  }
  base.source = child.source;
  for (const auto& [key, value] : child.entries) {
    if (Node* old = base.find(key)) merge(*old, value);
    else base.entries.emplace_back(key, value);
  }
}

void merge_file(Node& base, Node child) {
  for (auto& [key, section] : child.entries) {
    const Node* marker = section.is_mapping() ? section.find("_override_") : nullptr;
    const bool replaces = marker != nullptr && (marker->is_number() ? marker->number() != 0
                                                                    : marker->is_string() && !marker->string.empty());
    if (replaces) {
      section.erase("_override_");
      base.erase(key);
    }
  }
  merge(base, child);
}

void rename_aliases(Node& tree, const std::vector<Alias>& aliases, std::vector<Problem>& problems) {
  for (const Alias& alias : aliases) {
    const auto parts = split_key(alias.spelling);
    Node* parent = parts.size() == 1 ? &tree : find_path(tree, join_key(parts, parts.size() - 1));
    Node* given = parent == nullptr || !parent->is_mapping() ? nullptr : parent->find(parts.back());
    if (given == nullptr) continue;
    const Node value = *given;
    parent->erase(parts.back());
    if (const Node* other = find_path(tree, alias.canonical)) {
      if (!other->same_value(value))
        problems.push_back({"alias", alias.spelling, value.source.text(),
                            "is another name of " + alias.canonical + ", which " + other->source.text() +
                                " sets to a different value; keep one of them"});
      continue;
    }
    Node* target = &tree;
    const auto path = split_key(alias.canonical);
    for (std::size_t i = 0; i + 1 < path.size(); ++i) {
      Node* next = target->find(path[i]);
      if (next == nullptr || !next->is_mapping()) {
        Node section = Node::make_mapping();
        section.source = value.source;
        next = &target->set(path[i], std::move(section));
      }
      target = next;
    }
    target->set(path.back(), value);
  }
}

Node load_with_parents(const std::string& path, const std::string& base_dir, const std::vector<std::string>& folders,
                       const std::vector<Alias>& aliases, std::vector<Problem>& problems) {
  Way way{folders, {}, 0};
  const fs::path file(path);
  return load({file, base_dir.empty() ? file.parent_path() : fs::path(base_dir), ""}, aliases, problems, way);
}

}  // namespace nemo_rl::config
