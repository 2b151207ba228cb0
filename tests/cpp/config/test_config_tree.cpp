#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "config/interpolate.h"
#include "config/limits.h"
#include "config/loader.h"
#include "config/scalar.h"
#include "config/yaml_reader.h"

namespace nemo_rl::config {
namespace {

const Node& at(const Node& root, const std::string& key) {
  const Node* found = find_path(const_cast<Node&>(root), key);
  if (found == nullptr) throw std::runtime_error("no key " + key);
  return *found;
}

/// The message of the error that `action` throws.
template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(YamlTree, EveryValueRecordsItsSourceFileAndLine) {
  const Node tree = read_yaml("a:\n  b: 1\n\n  c: [1,\n    2]\nd: {e: 5}\n", "x.yaml");
  EXPECT_EQ(at(tree, "a").source.text(), "x.yaml:1");
  EXPECT_EQ(at(tree, "a.b").source.text(), "x.yaml:2");
  EXPECT_EQ(at(tree, "a.c").source.text(), "x.yaml:4");
  EXPECT_EQ(at(tree, "a.c.1").source.text(), "x.yaml:5");
  EXPECT_EQ(at(tree, "d.e").source.text(), "x.yaml:6");
}

TEST(YamlTree, QuotedScalarsAreStringsAndUnquotedOnesAreTyped) {
  const Node tree = read_yaml("a: 1\nb: '1'\nc: yes\nd: \"yes\"\ne:\n", "x.yaml");
  EXPECT_EQ(at(tree, "a").kind, Kind::integer);
  EXPECT_EQ(at(tree, "b").kind, Kind::string);
  EXPECT_EQ(at(tree, "c").kind, Kind::boolean);
  EXPECT_EQ(at(tree, "d").kind, Kind::string);
  EXPECT_EQ(at(tree, "e").kind, Kind::null);
}

TEST(YamlTree, DuplicateKeysUnclosedQuotesAndMultipleDocumentsAreErrors) {
  const auto reading = [](const char* text) { return message_of([&] { read_yaml(text, "x.yaml"); }); };
  EXPECT_EQ(reading("a:\n  b: 1\n  b: 2\n"), "x.yaml:3: the key 'b' is given twice (first in line 2)");
  EXPECT_NE(reading("a: 'open\nb: 1\n").find("not closed"), std::string::npos);
  EXPECT_NE(reading("a: 1\n---\nb: 2\n").find("one document"), std::string::npos);
  EXPECT_NE(reading("? [1, 2]\n: 3\n").find("cannot be a key"), std::string::npos);
  EXPECT_NE(reading("a: !!int x\n").find("x.yaml:1"), std::string::npos);
}

TEST(YamlScalar, NumbersAreParsedByTheRulesOfYaml11) {
  EXPECT_EQ(yaml_scalar("010").integer, 8);
  EXPECT_EQ(yaml_scalar("-0x10").integer, -16);
  EXPECT_EQ(yaml_scalar("12:30:45").integer, 45045);
  EXPECT_EQ(yaml_scalar("1e-8").real, 1e-8);
  EXPECT_EQ(yaml_scalar("2024-01-01").kind, Kind::string);
  EXPECT_TRUE(std::isinf(yaml_scalar("-.inf").real));
  EXPECT_EQ(yaml_scalar("inf").kind, Kind::string);
  EXPECT_THROW(yaml_scalar("9223372036854775808"), std::out_of_range);
  EXPECT_EQ(yaml_scalar("9223372036854775807").integer, INT64_MAX);
}

TEST(PythonText, FloatsAreFormattedLikePythonRepr) {
  const std::pair<double, const char*> cases[] = {{1e16, "1e+16"},       {1e15, "1000000000000000.0"},
                                                  {1e-4, "0.0001"},      {1e-5, "1e-05"},
                                                  {0.1, "0.1"},          {123456789.125, "123456789.125"},
                                                  {-2.5e-7, "-2.5e-07"}, {0.0, "0.0"},
                                                  {-0.0, "-0.0"},        {1e22, "1e+22"},
                                                  {5e-324, "5e-324"},    {100.0, "100.0"}};
  for (const auto& [value, text] : cases) EXPECT_EQ(python_text(Node::make_real(value)), text);
}

TEST(ConfigMerge, MappingsAreMergedAndOtherValuesAreReplaced) {
  Node base = read_yaml("a: {x: 1, y: 2}\nl: [1, 2]\nn: {z: 1}\n", "base.yaml");
  merge(base, read_yaml("a: {y: 3}\nl: [9]\nn: null\n", "child.yaml"));
  EXPECT_EQ(at(base, "a.x").source.text(), "base.yaml:1");
  EXPECT_EQ(at(base, "a.y").source.text(), "child.yaml:1");
  EXPECT_EQ(at(base, "a.y").integer, 3);
  EXPECT_EQ(at(base, "l").items.size(), 1u);
  EXPECT_TRUE(at(base, "n").is_null());
}

TEST(KeyAlias, ValueOfAnAliasMovesToTheKeyAndConflictingValuesAreReported) {
  const std::vector<Alias> aliases = {{"s.old", "s.deep.fresh"}};
  std::vector<Problem> problems;
  Node tree = read_yaml("s: {old: 5}\n", "x.yaml");
  rename_aliases(tree, aliases, problems);
  EXPECT_EQ(at(tree, "s.deep.fresh").integer, 5);
  EXPECT_EQ(find_path(tree, "s.old"), nullptr);
  EXPECT_TRUE(problems.empty());

  Node same = read_yaml("s: {old: 5, deep: {fresh: 5}}\n", "x.yaml");
  rename_aliases(same, aliases, problems);
  EXPECT_TRUE(problems.empty());

  Node both = read_yaml("s:\n  old: 5\n  deep: {fresh: 6}\n", "x.yaml");
  rename_aliases(both, aliases, problems);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].where, "x.yaml:2");
  EXPECT_NE(problems[0].message.find("x.yaml:3"), std::string::npos);
}

TEST(Override, TextIsParsedIntoTypeKeyAndValue) {
  const Override parsed = parse_override("++a.b-c.0=[1, 'x', {k: 1e3}]");
  EXPECT_EQ(parsed.type, OverrideType::force_add);
  EXPECT_EQ(parsed.key, "a.b-c.0");
  ASSERT_EQ(parsed.value.items.size(), 3u);
  EXPECT_EQ(parsed.value.items[1].string, "x");
  EXPECT_EQ(at(parsed.value, "2.k").real, 1000.0);
  EXPECT_EQ(parse_override("~a").type, OverrideType::erase);
  EXPECT_FALSE(parse_override("~a").has_value);
}

TEST(Override, MalformedTextThrowsOnlyInvalidArgument) {
  // every prefix of a long override, and every character alone
  const std::string text = R"(+a.b={x: [1, 'y\'z', "q"], int(3.5): ${k.l}, m\,n: str(true)})";
  for (std::size_t n = 0; n <= text.size(); ++n) {
    try {
      parse_override(text.substr(0, n));
    } catch (const std::invalid_argument&) {
    }
  }
  for (int c = 1; c < 256; ++c) {
    try {
      parse_override("a=" + std::string(3, static_cast<char>(c)));
    } catch (const std::invalid_argument&) {
    }
  }
}

TEST(Override, FailedOverrideLeavesTheConfigurationUnchanged) {
  Node tree = read_yaml("a: {b: 1, c: {d: 1}}\n", "x.yaml");
  const Node before = tree;
  std::vector<Problem> problems;
  apply_overrides(tree, {"a={b: 2, nope: 3}", "a.b.x=1", "a.c.d.e.f=2"}, {}, problems);
  EXPECT_EQ(problems.size(), 3u);
  EXPECT_TRUE(tree.same_value(before));
}

TEST(Override, OverrideCreatesKeysOfTheSchemaAndReportsTheFirstUnknownPartOfOtherKeys) {
  Node tree = Node::make_mapping();
  std::vector<Problem> problems;
  const OverrideRules rules{{}, {"s", "s.t", "s.t.u"}};
  apply_overrides(tree, {"s.t.u=1", "s.t.v=1", "s.x.y=1"}, rules, problems);
  EXPECT_EQ(at(tree, "s.t.u").integer, 1);
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_EQ(problems[0].key, "s.t.v");
  EXPECT_EQ(problems[1].key, "s.x");
}

TEST(Interpolation, ResolvedValueKeepsItsSourceLineAndEveryFailureIsReported) {
  Node tree = read_yaml("a: 3\nb: ${a}\nc: ${nope}\nd: ${c}\n", "x.yaml");
  std::vector<Problem> problems;
  resolve_interpolations(tree, {}, problems);
  EXPECT_EQ(at(tree, "b").integer, 3);
  EXPECT_EQ(at(tree, "b").source.text(), "x.yaml:2");
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_EQ(problems[0].key, "c");
  EXPECT_EQ(problems[1].where, "x.yaml:4");
}

TEST(Limits, ShortenedTextDoesNotSplitAMultiByteCharacter) {
  std::string text;  // characters of two bytes from the first on
  for (int i = 0; i < 150; ++i) text += "\xd9\x84";
  EXPECT_EQ(shortened(text), text.substr(0, 200) + "...");
  EXPECT_EQ(shortened("a" + text), "a" + text.substr(0, 198) + "...");
  EXPECT_EQ(shortened("short"), "short");
}

TEST(Interpolation, CyclicReferencesAreReported) {
  for (const char* text :
       {"a: ${a}\n", "a: ${b}\nb: ${c}\nc: ${a}\n", "a: {b: '${c}'}\nc: ${a}\n", "a: x${b}\nb: '${mul:2,${a}}'\n",
        "a: ['${a}']\n", "a: {b: '${a.b}'}\n", "a: ${${a}}\n", "a: ${b.c}\nb: ${a}\n"}) {
    Node tree = read_yaml(text, "x.yaml");
    std::vector<Problem> problems;
    resolve_interpolations(tree, {}, problems);
    EXPECT_FALSE(problems.empty()) << text;
  }
}

TEST(LoadConfig, InterpolationInAParentFileUsesValuesOfTheChildFileAndOverrides) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("nemo_rl_config_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  std::ofstream(folder / "parent.yaml") << "s: {n: 2, m: 0}\nt: ${mul:${s.n}, 3}\n";
  std::ofstream(folder / "child.yaml") << "defaults: parent.yaml\ns: {m: 4}\n";
  const LoadedConfig config = load_config((folder / "child.yaml").string(), {"s.n=5"}, {});
  fs::remove_all(folder);
  EXPECT_TRUE(config.problems.empty());
  EXPECT_EQ(at(config.tree, "t").integer, 15);
  EXPECT_EQ(at(config.tree, "s.m").integer, 4);
  EXPECT_EQ(config.tree.find("defaults"), nullptr);
}

}  // namespace
}  // namespace nemo_rl::config
