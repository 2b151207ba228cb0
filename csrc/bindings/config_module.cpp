// The _config module: YAML only, no torch, so that a mistake in a configuration is reported within a second.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "config/interpolate.h"
#include "config/limits.h"
#include "config/loader.h"

namespace py = pybind11;
using namespace nemo_rl::config;

namespace {

py::object to_python(const Node& node) {
  switch (node.kind) {
    case Kind::null:
      return py::none();
    case Kind::boolean:
      return py::bool_(node.boolean);
    case Kind::integer:
      return py::int_(node.integer);
    case Kind::real:
      return py::float_(node.real);
    case Kind::string:
      return py::str(node.string);
    case Kind::list: {
      py::list list;
      for (const Node& item : node.items) list.append(to_python(item));
      return list;
    }
    case Kind::mapping:
      break;
  }
  py::dict dict;
  for (const auto& [key, value] : node.entries) dict[py::str(key)] = to_python(value);
  return dict;
}

/// Python's text as UTF-8. Lone surrogates, which stand for bytes that were no UTF-8, become what is none either.
std::string utf8(const py::handle& value) { return py::bytes(py::str(value).attr("encode")("utf-8", "surrogatepass")); }

/// For messages, which may quote what is no UTF-8.
py::object readable(const std::string& text) { return py::bytes(text).attr("decode")("utf-8", "replace"); }

std::vector<std::string> text_list(const py::sequence& values) {
  std::vector<std::string> texts;
  for (const auto& value : values) texts.push_back(utf8(value));
  return texts;
}

std::int64_t integer_from_python(const py::handle& value) {
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  NRL_CHECK_ARG(overflow == 0, "the integer ", shortened(utf8(value), 40), " does not fit 64 bits");
  return number;
}

Node from_python(const py::handle& value, int& depth) {
  const Depth guard(depth, "lists and dictionaries are nested");
  if (value.is_none()) return Node::make_null();
  if (py::isinstance<py::bool_>(value)) return Node::make_bool(value.cast<bool>());
  if (py::isinstance<py::int_>(value)) return Node::make_int(integer_from_python(value));
  if (py::isinstance<py::float_>(value)) return Node::make_real(value.cast<double>());
  if (py::isinstance<py::dict>(value)) {
    Node node = Node::make_mapping();
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value))
      node.set(utf8(key), from_python(item, depth));
    return node;
  }
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    Node node = Node::make_list();
    for (const auto& item : value) node.items.push_back(from_python(item, depth));
    return node;
  }
  const std::string text = utf8(value);  // text, and what has one (a path)
  NRL_CHECK_ARG(first_not_utf8(text) == std::string::npos,
                "a text is not UTF-8: ", py::repr(value).cast<std::string>());
  return Node::make_string(text);
}

Node from_python(const py::handle& value) {
  int depth = 0;
  return from_python(value, depth);
}

void add_positions(const Node& node, const std::string& key, py::dict& positions) {
  if (!key.empty() && !node.source.file.empty()) positions[py::str(key)] = node.source.text();
  const std::string prefix = key.empty() ? "" : key + ".";
  for (std::size_t i = 0; i < node.items.size(); ++i)
    add_positions(node.items[i], prefix + std::to_string(i), positions);
  for (const auto& [name, value] : node.entries) add_positions(value, prefix + name, positions);
}

py::list problem_list(const std::vector<Problem>& problems) {
  py::list list;
  for (const Problem& p : problems)
    list.append(py::make_tuple(p.kind, readable(p.key), readable(p.where), readable(p.message)));
  return list;
}

std::vector<Alias> alias_list(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::vector<Alias> aliases;
  for (const auto& [spelling, canonical] : pairs) aliases.push_back({spelling, canonical});
  return aliases;
}

void register_load_error(py::module_& m) {
  static py::exception<LoadError> load_error(m, "LoadError", PyExc_ValueError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const LoadError& error) {
      py::object made = py::reinterpret_borrow<py::object>(load_error)(error.what());
      made.attr("kind") = error.kind();
      PyErr_SetObject(load_error.ptr(), made.ptr());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_config, m) {
  m.doc() = "Configuration loader of nemo_rl_cpp (yaml-cpp)";
  register_load_error(m);

  m.def(
      "load",
      [](const std::string& path, const py::sequence& overrides,
         const std::vector<std::pair<std::string, std::string>>& aliases,
         const std::unordered_set<std::string>& known_keys, const std::vector<std::string>& folders) {
        const LoadedConfig config = load_config(path, text_list(overrides), {alias_list(aliases), known_keys}, folders);
        py::dict positions;
        add_positions(config.tree, "", positions);
        return py::make_tuple(to_python(config.tree), positions, problem_list(config.problems));
      },
      py::arg("path"), py::arg("overrides"), py::arg("aliases"), py::arg("known_keys"),
      py::arg("folders") = std::vector<std::string>{},
      "File with parents (looked for in `folders` too), overrides and interpolation -> (data, {dotted key: "
      "'file.yaml:line'}, [(kind, key, where, "
      "message)])");

  m.def(
      "load_file",
      [](const std::string& path, const std::string& base_dir, const std::vector<std::string>& folders) {
        std::vector<Problem> problems;
        return to_python(load_with_parents(path, base_dir, folders, {}, problems));
      },
      py::arg("path"), py::arg("base_dir") = "", py::arg("folders") = std::vector<std::string>{},
      "A file with its parents (looked for in `folders` too); interpolations stay as text");

  m.def(
      "apply_overrides",
      [](const py::dict& config, const py::sequence& overrides) {
        Node tree = from_python(config);
        std::vector<Problem> problems;
        apply_overrides(tree, text_list(overrides), {}, problems);
        return py::make_tuple(to_python(tree), problem_list(problems));
      },
      py::arg("config"), py::arg("overrides"), "Hydra overrides on a plain dict -> (dict, problems)");
}
