"""Code shared by the package's command lines. It loads neither torch nor the configuration's schema."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import NoReturn

from nemo_rl_cpp import __version__
from nemo_rl_cpp.argument_checks import did_you_mean
from nemo_rl_cpp.errors import report
from nemo_rl_cpp.interrupts import Ended, nobody_reads, say, startup

_OPTION = re.compile("--?[a-z][a-z-]*(=|$)")


class Exit(SystemExit):
    """Raised when a command line exits on purpose (--help, an invalid option). Any other SystemExit is an error."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    options = property(attrgetter("_option_string_actions"))

    def parse_args(self, words: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        known, rest = self.parse_known_args(words)
        if option := next((word.partition("=")[0] for word in rest if word.startswith("-")), None):
            otherwise = "--help lists the options, and a text that begins with a dash comes after --"
            self.error(f"unknown option {option}; {did_you_mean(option, self.options, otherwise)}")
        if rest:
            self.error(f"unknown arguments: {' '.join(rest)} (a text of several words goes into quotes)")
        return known

    def parse_known_args(self, words: Sequence[str], namespace: None = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        self._words = words
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:  # a misspelt option is the first thing to mend
            options = (word.partition("=")[0] for word in self._words if _OPTION.match(word))
            unknown = next((option for option in options if option not in self.options), None)
            if unknown is not None:
                message = f"unknown option {unknown}; {did_you_mean(unknown, self.options, message)}"
        print(f"error: {message}", file=sys.stderr)
        raise Exit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise Exit(status)


class Outcome:
    """A holder of a command's exit status, which the context manager `program` sets."""

    status = 0
    mistakes: tuple[type[Exception], ...] = ()
    """The exceptions that mean a mistake in the command line. Their traceback is not saved."""


@contextmanager
def program(debug: bool = False) -> Iterator[Outcome]:
    """Run the body of a command line. Turn an exception or a signal into an exit `status` and one sentence on stderr.

    The context manager yields an `Outcome`. Its status becomes 2 for an exception of a class in its `mistakes`, and 1
    for any other, unless its class has an attribute `exit_status`. `debug` also prints the traceback. The status is 130
    for Ctrl-C, 128 + the signal's number for another signal, and 141 (SIGPIPE) if the reader of the output has closed
    the pipe."""
    outcome = Outcome()
    with startup(), _plain_warnings():
        try:
            try:
                yield outcome
            finally:
                if sys.stdout is not None and not sys.stdout.closed:
                    sys.stdout.flush()
        except KeyboardInterrupt:
            say("interrupted: stopped at once")
            outcome.status = 130
        except Ended as ended:
            say(f"ended by {ended.signal_name}: stopped at once")
            outcome.status = ended.code
        except Exit:
            raise
        except BaseException as error:
            if isinstance(error, BrokenPipeError) and nobody_reads():
                with open(os.devnull, "wb") as nowhere:  # discards the buffer and whatever is printed at exit
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())
                outcome.status = 128 + signal.SIGPIPE
                return
            outcome.status = getattr(error, "exit_status", 2 if isinstance(error, outcome.mistakes) else 1)
            report(error, debug, saves=outcome.status == 1)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    names = "Hugging Face folder, model name, or checkpoint of a run (step_N, or their folder)"
    parser.add_argument("--model", required=True, help=names)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--quantization",
        choices=("q8_0", "q4_0", "nf4"),
        help="hold the matrices in 8 or 4 bits (default: as --precision)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU (default: cpu)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: all cores)")


def at_least(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """Return an argparse type for integers from `low` to `high`."""

    def number(text: str) -> int:
        found = int(text)
        if not low <= found <= high:
            bounds = f"at least {low}" if found < low else f"at most {high}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: expected {bounds}")
        return found

    return number


def positive(text: str) -> float:
    """Parse an option as a number above 0 and below 1e9."""
    found = float(text)
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is out of range: expected a number above 0")
    return found


def command_parser(name: str | None, description: str, examples: str) -> OneLineParser:
    """Return the parser of `nemo-rl-cpp NAME`, or of the running program if `name` is None. It has the options --debug
    and --version, and its help shows `examples` below the options."""
    parser = OneLineParser(
        prog=name and f"nemo-rl-cpp {name}", description=description, epilog=examples, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error, too")
    parser.add_argument("--version", action="version", version=f"nemo_rl_cpp {__version__}")
    return parser


def unknown_option(words: Sequence[str], options: Iterable[str]) -> str | None:
    """Return an error message for the first of the arguments `words` that is no override `key=value` but an unknown
    option or the name of a file; None if all are overrides. The message suggests one of the command's `options`."""
    for i, word in enumerate(words):
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            return f"{word} is not an override: a file is given by --config {word}"
        if not word.startswith("-") or word == "-":
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if "." not in name:
            otherwise = "--help lists the options; a key of the configuration is set by section.key=value"
            return f"unknown option {word}; {did_you_mean(word.partition('=')[0], options, otherwise, 0.75)}"
        following = words[i + 1] if i + 1 < len(words) else "--"
        given = value if equals else "VALUE" if "=" in following or following.startswith("--") else following
        return f"unknown option {word}: a key of the configuration is set without dashes, write {name}={given}"
    return None


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print each warning issued in the `with` block in one line on stderr, without the line of source code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **line: f"warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before
