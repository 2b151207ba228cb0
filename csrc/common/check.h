// Checks that carry what was given and where. User mistakes (NRL_CHECK_ARG) become Python's ValueError, broken
// invariants and failures of the machine (NRL_CHECK) become RuntimeError.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace nemo_rl {

/// A mistake in what the caller gave: pybind11 turns std::invalid_argument into ValueError.
using ArgumentError = std::invalid_argument;

namespace detail {

template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream os;
  (os << ... << args);
  return os.str();
}

/// A string literal as the condition would always be true: reject it at compile time.
template <class T>
constexpr bool is_string_literal = std::is_array_v<std::remove_reference_t<T>>;

}  // namespace detail
}  // namespace nemo_rl

#define NRL_CHECK_IMPL(Error, where, cond, ...)                                                          \
  do {                                                                                                   \
    static_assert(!::nemo_rl::detail::is_string_literal<decltype((cond))>, "the condition is a string"); \
    if (!(cond)) [[unlikely]]                                                                            \
      throw Error(::nemo_rl::detail::concat(__VA_ARGS__) + (where));                                     \
  } while (0)

#define NRL_STRINGIFY_IMPL(x) #x
#define NRL_STRINGIFY(x) NRL_STRINGIFY_IMPL(x)

/// The message of a user error stands alone: it says what was given, what was expected and which key to change.
#define NRL_CHECK_ARG(cond, ...) NRL_CHECK_IMPL(::nemo_rl::ArgumentError, "", cond, __VA_ARGS__)
#define NRL_CHECK(cond, ...)                                                                                    \
  NRL_CHECK_IMPL(std::runtime_error, " [" #cond " is false at " __FILE__ ":" NRL_STRINGIFY(__LINE__) "]", cond, \
                 __VA_ARGS__)
