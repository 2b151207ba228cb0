#include "config/yaml_reader.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <unordered_map>

#include "config/limits.h"
#include "config/scalar.h"

namespace nemo_rl::config {
namespace {

constexpr const char* kYamlTag = "tag:yaml.org,2002:";

/// Builds the tree from the parser's events: the tree API of yaml-cpp would lose duplicate keys and quoting.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::string file) : file_(std::move(file)) {}

  Node root;

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    // the parser reports a key without a colon as null at the key's own place
    if (!stack_.empty() && stack_.back().has_key && mark.pos == stack_.back().key_mark.pos)
      fail("syntax", mark, "':' is missing after '" + stack_.back().key + "'");
    place(Node::make_null(), mark, anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) fail("syntax", mark, "an alias inside its own anchor");
    count(found->second, mark, "aliases make more than ");
    place(found->second, mark, 0);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    if (is_key_next()) {
      open_key(value, mark, tag == "?");
      return;
    }
    try {
      place(scalar(tag, value, mark), mark, anchor);
    } catch (const std::out_of_range& error) {
      fail("syntax", mark, error.what());
    }
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    check_collection_tag(tag, "seq", "list", mark);
    open(Node::make_list(), mark, anchor);
  }
  void OnSequenceEnd() override { close(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    check_collection_tag(tag, "map", "mapping", mark);
    open(Node::make_mapping(), mark, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    Node node;
    YAML::Mark mark;
    YAML::anchor_t anchor = 0;
    bool has_key = false;
    bool is_merge = false;  // the pending key is a plain `<<`
    std::string key;
    YAML::Mark key_mark;
    std::vector<Node> merged;
    std::unordered_map<std::string, int> lines;  // of the keys so far
  };

  [[noreturn]] void fail(const std::string& kind, const YAML::Mark& mark, const std::string& message) const {
    throw LoadError(kind, file_ + ":" + std::to_string(mark.line + 1) + ": " + message);
  }

  bool is_key_next() const { return !stack_.empty() && stack_.back().node.is_mapping() && !stack_.back().has_key; }

  /// A tag says what to make of a value: one that is not known would be something else than what was meant.
  void check_collection_tag(const std::string& tag, const char* own, const char* what, const YAML::Mark& mark) const {
    if (tag == "" || tag == "?" || tag == "!" || tag == std::string(kYamlTag) + own) return;
    fail("syntax", mark, "the tag " + tag + " does not fit a " + what + ": remove it (known: !!seq, !!map)");
  }

  Node scalar(const std::string& tag, const std::string& value, const YAML::Mark& mark) const {
    const std::string yaml = kYamlTag;
    if (tag == "?") return yaml_scalar(value);
    if (tag == "!" || tag == yaml + "str") return Node::make_string(value);
    Node node = yaml_scalar(value);
    if (tag == yaml + "float" && node.is_number()) return Node::make_real(node.number());
    if ((tag == yaml + "int" && node.kind == Kind::integer) || (tag == yaml + "bool" && node.kind == Kind::boolean) ||
        (tag == yaml + "null" && node.is_null()))
      return node;
    fail("syntax", mark,
         "the tag " + tag + " does not fit '" + value + "' (known: !!str, !!int, !!float, !!bool, !!null)");
  }

  void open_key(const std::string& key, const YAML::Mark& mark, bool plain) {
    Frame& frame = stack_.back();
    frame.is_merge = plain && key == "<<";
    if (!frame.is_merge)
      if (const auto [first, is_new] = frame.lines.try_emplace(key, mark.line + 1); !is_new)
        fail("duplicate", mark,
             "the key '" + key + "' is given twice (first in line " + std::to_string(first->second) + ")");
    frame.has_key = true;
    frame.key = key;
    frame.key_mark = mark;
  }

  void open(Node node, const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (is_key_next()) fail("syntax", mark, std::string(kind_name(node.kind)) + " cannot be a key");
    if (stack_.size() >= kDeepest)
      fail("syntax", mark, "lists and mappings are nested more than " + std::to_string(kDeepest) + " deep");
    Frame frame;
    frame.node = std::move(node);
    frame.mark = mark;
    frame.anchor = anchor;
    stack_.push_back(std::move(frame));
  }

  void close() {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    for (Node& base : frame.merged)
      for (auto& [key, value] : base.entries)
        if (frame.lines.try_emplace(key, value.source.line).second)
          frame.node.entries.emplace_back(key, std::move(value));
    place(std::move(frame.node), frame.mark, frame.anchor);
  }

  void place(Node node, const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (is_key_next())
      fail("syntax", mark, "a key must be a word or a number, not " + std::string(kind_name(node.kind)));
    const bool keyed = !stack_.empty() && stack_.back().has_key;
    node.source = {file_, (keyed ? stack_.back().key_mark : mark).line + 1};  // a value belongs to the line of its key
    if (++values_ > kMostValues)
      fail("syntax", mark, "the file holds more than " + std::to_string(kMostValues) + " values");
    if (anchor != 0) {
      count(node, mark, "anchors keep more than ");
      anchors_[anchor] = node;
    }
    if (stack_.empty()) {
      root = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.node.is_list()) {
      frame.node.items.push_back(std::move(node));
    } else if (frame.is_merge) {
      add_merge(frame, std::move(node), mark);
      frame.has_key = frame.is_merge = false;
    } else {
      frame.node.entries.emplace_back(frame.key, std::move(node));
      frame.has_key = false;
    }
  }

  /// Of values that are written once and stand in several places.
  void count(const Node& node, const YAML::Mark& mark, const char* what) {
    const Extent extent = extent_of(node);
    copies_ += extent.values;
    copied_bytes_ += extent.bytes;
    if (copies_ > kMostValues) fail("syntax", mark, what + std::to_string(kMostValues) + " values");
    if (copied_bytes_ > kMostCopiedBytes)
      fail("syntax", mark, what + std::to_string(kMostCopiedBytes >> 20) + " MB of text");
  }

  void add_merge(Frame& frame, Node node, const YAML::Mark& mark) const {
    std::vector<Node> bases;
    if (node.is_list()) bases = std::move(node.items);
    else bases.push_back(std::move(node));
    for (Node& base : bases) {
      if (!base.is_mapping()) fail("syntax", mark, "'<<' takes a mapping or a list of mappings");
      frame.merged.push_back(std::move(base));
    }
  }

  std::string file_;
  std::size_t values_ = 0;
  std::size_t copies_ = 0, copied_bytes_ = 0;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, Node> anchors_;
};

/// The parser's terse words, with what usually causes them.
std::string explain(const std::string& message) {
  if (message == "illegal EOF in scalar") return "a quoted text is not closed before the end of the file";
  if (message == "illegal map value")
    return "': ' cannot stand here: the line above has no colon, or a text with ': ' in it needs quotes";
  if (message.rfind("end of map not found", 0) == 0)
    return "this line does not fit the mapping above: check its indentation and its colon";
  return message;
}

void check_encoding(const std::string& text, const std::string& file) {
  const std::size_t bad = std::min(first_not_utf8(text), text.find('\0'));
  if (bad == std::string::npos) return;
  const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(bad), '\n') + 1;
  std::ostringstream message;
  if (text[bad] == '\0') {
    message << file << ":" << line << ": a byte 0 stands in the file, which no text has; save the file as UTF-8 text";
    throw LoadError("syntax", message.str());
  }
  message << file << ":" << line << ": the byte 0x" << std::hex
          << static_cast<int>(static_cast<unsigned char>(text[bad])) << " is not UTF-8; save the file as UTF-8";
  throw LoadError("syntax", message.str());
}

}  // namespace

Node read_yaml(const std::string& text, const std::string& file) {
  if (text.size() > kMostFileBytes)
    throw LoadError("syntax", file + ": a configuration has at most " + std::to_string(kMostFileBytes) +
                                  " bytes, this file has more");
  check_encoding(text, file);
  std::istringstream stream(
      text + (text.ends_with('\n')
                  ? "#"
                  : "\n#"));  // without the '#' the parser lets an unclosed quote run to the end of the file
  TreeBuilder builder(file);
  try {
    YAML::Parser parser(stream);
    if (parser.HandleNextDocument(builder)) {
      TreeBuilder second(file);
      if (parser.HandleNextDocument(second))
        throw LoadError("syntax", file + ": one document is expected, there are more (separated by '---')");
    }
  } catch (const YAML::Exception& error) {
    const std::string where = error.mark.is_null() ? file : file + ":" + std::to_string(error.mark.line + 1);
    throw LoadError("syntax", where + ": " + explain(error.msg));
  }
  return std::move(builder.root);
}

}  // namespace nemo_rl::config
