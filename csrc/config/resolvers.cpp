#include "config/resolvers.h"

#include <algorithm>
#include <cstdlib>

#include "common/check.h"
#include "config/limits.h"
#include "config/scalar.h"

namespace nemo_rl::config {
namespace {

Node environment(const std::vector<Node>& arguments) {
  NRL_CHECK_ARG(arguments.size() == 1 || arguments.size() == 2, "oc.env takes a name and possibly a default");
  const std::string name = python_text(arguments[0]);
  if (const char* value = std::getenv(name.c_str())) {
    NRL_CHECK_ARG(first_not_utf8(value) == std::string::npos, "the environment variable ", name, " is not UTF-8");
    return Node::make_string(value);
  }
  NRL_CHECK_ARG(arguments.size() == 2, "the environment variable ", name,
                " is not set; set it, or give a default: ${oc.env:", name, ",default}");
  return arguments[1].is_null() ? Node::make_null() : Node::make_string(python_text(arguments[1]));
}

std::int64_t as_int(const Node& node) { return node.kind == Kind::boolean ? node.boolean : node.integer; }

Node integer_result(const std::string& name, std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  const bool overflow = name == "mul"   ? __builtin_mul_overflow(a, b, &out)
                        : name == "add" ? __builtin_add_overflow(a, b, &out)
                                        : __builtin_sub_overflow(a, b, &out);
  NRL_CHECK_ARG(!overflow, name, " of ", a, " and ", b, " does not fit 64 bits");
  return Node::make_int(out);
}

Node on_numbers(const std::string& name, const Node& a, const Node& b) {
  const double x = a.number(), y = b.number();
  if (name == "max") return y > x ? b : a;
  if (name == "div") {
    NRL_CHECK_ARG(y != 0, "division by zero");
    return Node::make_real(x / y);
  }
  if (a.kind != Kind::real && b.kind != Kind::real) return integer_result(name, as_int(a), as_int(b));
  return Node::make_real(name == "mul" ? x * y : name == "add" ? x + y : x - y);
}

Node repeat(const Node& text, const Node& times) {
  if (text.string.empty() || as_int(times) <= 0) return Node::make_string("");
  const auto n = static_cast<std::uint64_t>(as_int(times));
  NRL_CHECK_ARG(n <= (1 << 20) / text.string.size(), "the repeated text is too long");
  std::string out;
  for (std::uint64_t i = 0; i < n; ++i) out += text.string;
  return Node::make_string(out);
}

}  // namespace

Node call_resolver(const std::string& name, const std::vector<Node>& arguments) {
  if (name == "oc.env") return environment(arguments);
  NRL_CHECK_ARG(name == "mul" || name == "add" || name == "sub" || name == "div" || name == "max", "unknown resolver '",
                name, "' (known: mul, add, sub, div, max, oc.env)");
  NRL_CHECK_ARG(arguments.size() == 2, name, " takes two values, not ", arguments.size());
  const Node &a = arguments[0], &b = arguments[1];
  if (a.is_number() && b.is_number()) return on_numbers(name, a, b);
  if (name == "mul" && a.is_string() && b.kind == Kind::integer) return repeat(a, b);
  if (name == "mul" && b.is_string() && a.kind == Kind::integer) return repeat(b, a);
  if (name == "add" && a.is_string() && b.is_string()) return Node::make_string(a.string + b.string);
  if (name == "max" && a.is_string() && b.is_string()) return b.string > a.string ? b : a;
  NRL_CHECK_ARG(false, name, " of ", kind_name(a.kind), " and ", kind_name(b.kind), " is not possible");
  return {};
}

}  // namespace nemo_rl::config
