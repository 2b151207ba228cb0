"""Report exceptions in one sentence, and write their tracebacks to a file.

A command line prints the sentence and the name of the file with the traceback; `--debug` also prints the traceback. In
Python, exceptions are raised as usual. An exception in user code keeps its type, and its message says in which
function, file and line it was raised."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

PACKAGE = Path(__file__).resolve().parent
ERROR_FILE = "error.txt"
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib", "purelib", "platlib")})
# if this package raises an exception of these types, its message says what to do
_SENTENCES = (ValueError, RuntimeError, ImportError, AssertionError, OSError)
_INNER = re.compile(r"\.<locals>\.<(listcomp|genexpr|dictcomp|setcomp)>")  # redundant with the line number
_LONGEST = 600  # maximum length of a message that this package did not write
_INSTALLED_AS = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "reasoning_gym": "reasoning-gym", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml", "ray": "'nemo_rl_cpp[ray]'", "verifiers": "'nemo_rl_cpp[agents]'",
}  # fmt: skip

_folder: Path | None = None  # the run's log folder, once it exists
_secrets: dict[str, str] = {}  # secret -> its replacement in files


class UserCodeError(Exception):
    """Raised if user code failed. The message is one sentence with the function, file and line. `__cause__` is the
    original exception, and the error is also an instance of its type (see `in_user_code`)."""

    def __init__(self, sentence: str) -> None:
        Exception.__init__(self, sentence)

    def __str__(self) -> str:
        return str(self.args[0])


class Finding(NamedTuple):
    """A problem that a check found. With `level` "error" the run ends before it starts; a "warning" is only printed.
    `key` is the dotted key to change, or "". `message` is one sentence on what is wrong and what to do."""

    level: Literal["error", "warning"]
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key} {self.message}" if self.key else self.message


_SAID: set[str] = set()  # remarks that the user has seen, without their memory forecast


def note_as_said(remark: str) -> str:
    """Record that the user has seen the message `remark`, so that `say_once` does not print it; return it."""
    _SAID.add(remark.partition("; memory forecast")[0])
    return remark


def say_once(kind: str, remark: str) -> None:
    """Print the message `remark` to stderr, unless this process has already shown it. `kind`, "warning" or "note", is
    put before it."""
    if remark.partition("; memory forecast")[0] not in _SAID:
        print(f"{kind}: {note_as_said(remark)}", file=sys.stderr, flush=True)


class Place(NamedTuple):
    """A line of source code, with its file and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{short_path(self.file)}:{self.line}"
        return where if self.function == "<module>" else f"{self.function} ({where})"


def short_path(path: str | os.PathLike[str]) -> str:
    """Return the path as shown in messages: relative if it is inside the working directory."""
    full = Path(path)
    try:
        return str(full.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def tracebacks_go_to(folder: str | os.PathLike[str] | None) -> None:
    """Set the folder to which `save_traceback` writes: the log folder of a run, or None without one."""
    global _folder
    _folder = None if folder is None else Path(folder)


def keep_out_of_files(texts: Mapping[str, str]) -> None:
    """Make `save_traceback` write, in place of each secret (a key of `texts` with at least 6 characters), the value of
    this key in `texts`."""
    _secrets.update({secret: shown for secret, shown in texts.items() if len(secret) >= 6})


# ---- whose code raised an exception


def _is_ours(file: str) -> bool:
    return _real(file).startswith(str(PACKAGE) + os.sep)


def _real(file: str) -> str:
    """Return a source file's real path, even without a working directory, and a name like `<string>` unchanged."""
    return os.path.realpath(file) if os.path.isabs(file) else file


def _is_library(file: str) -> bool:
    if file.startswith("<frozen") or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return True
    return _real(file).startswith(tuple(f"{path}{os.sep}" for path in _LIBRARIES))


def _places(error: BaseException) -> list[Place]:
    """Return the lines of code (file, line number, function) in the exception's traceback, outermost first."""
    frames: Iterable[tuple[FrameType, int]] = traceback.walk_tb(error.__traceback__)
    return [Place(frame.f_code.co_filename, line, _INNER.sub("", frame.f_code.co_qualname)) for frame, line in frames]


def user_place(error: BaseException) -> Place | None:
    """Return the line of user code (file, line number, function) that raised an exception inside a call of this
    package; None if this package raised it. Libraries, and code that called this package, are skipped."""
    places = _places(error)
    first = next((i for i, place in enumerate(places) if _is_ours(place.file)), len(places))
    for place in reversed(places[first:]):
        if _is_ours(place.file):
            return None
        if not _is_library(place.file):
            return place
    return None


def _called_place(error: BaseException) -> Place | None:
    """Return the line that the function called by this package's innermost frame was executing when `error` was raised;
    None if that frame called no function. The line counts as user code even if it is in a library."""
    places = _places(error)
    last = max((i for i, place in enumerate(places) if _is_ours(place.file)), default=len(places))
    return places[last + 1] if last + 1 < len(places) else None


def _as_type_of(error: BaseException) -> type[UserCodeError]:
    """Return a class that inherits from UserCodeError and from the exception's type, or UserCodeError if that is impossible."""
    kind = type(error) if isinstance(error, Exception) else RuntimeError  # SystemExit must not end the process
    if issubclass(kind, (StopIteration, StopAsyncIteration)):
        return UserCodeError  # StopIteration would end a loop; contextlib mishandles a RuntimeError raised from one
    try:
        return type(kind.__name__, (UserCodeError, kind), {"__module__": kind.__module__})
    except TypeError:
        return UserCodeError


def as_user_error(error: BaseException, text: str) -> UserCodeError:
    """Return an exception that marks `error` as raised by user code. Its message is `text`, and its cause `error`."""
    made = _as_type_of(error)(text)
    made.__cause__ = error
    return made


def in_user_code(
    error: BaseException, what: str = "your code", hint: str = "", called: bool = False
) -> UserCodeError | None:
    """Return the exception to raise in place of `error` if user code raised it. It has the type of `error`, and its
    message is one sentence that begins with `what`, a name for the code, and ends with `hint`. Return None if `error`
    is not from user code, is KeyboardInterrupt, or already has such a message. With `called`, this package was calling
    user code, so the exception counts as raised by user code even if a library raised it."""
    if isinstance(error, (UserCodeError, KeyboardInterrupt)) or (isinstance(error, GeneratorExit) and not called):
        return None
    place = user_place(error) or (_called_place(error) if called else None)
    if place is None:
        return None
    ended = isinstance(error, SystemExit)
    said = "called sys.exit, which does not end a run" if ended else f"failed with {_type_and_text(error)}"
    return _as_type_of(error)(f"{what} {said}, in {place}" + (f"; {hint}" if hint else ""))


RAISED_ON = "raised on"
"""Prefix of the note on an exception that a worker raised (`distributed/worker_calls.py`)."""


class user_code(AbstractContextManager):  # noqa: N801  (reads as a function; one made from a generator could not handle StopIteration)
    """A context manager for a call of user code, which turns an exception into one sentence (`in_user_code`)."""

    def __init__(self, what: str = "your code", hint: Callable[[BaseException], str] | None = None) -> None:
        """Store `what`, a name for the user's code, and `hint`, a function from the exception to a text for the end of
        the message."""
        self._what, self._hint = what, hint

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        told = in_user_code(error, self._what, self._hint(error) if self._hint is not None else "", called=True)
        if told is not None:
            raise told from error


# ---- the sentence


def last_lines(log: Path) -> list[str]:
    """Return the last twelve lines of `log`, the output of a child process, for an error message; [] if none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 4000, 0))
            return file.read().decode(errors="replace").strip().splitlines()[-12:]
    except OSError:
        return []


def _flat(text: str) -> str:
    """Return a message in one line, without the C++ stack trace and references to it."""
    text = re.split(r"\nException raised from |\nC\+\+ CapturedTraceback", text)[0]
    line = "; ".join(re.sub(r"\s+", " ", line).strip(" ;") for line in text.strip().splitlines() if line.strip())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def _type_and_text(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1:
        return f"KeyError {error.args[0]!r}"
    text = _flat(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _says_it_all(error: BaseException) -> bool:
    """Return whether this package wrote the exception's message. Such a message is clear without the name of the
    exception's type."""
    if isinstance(error, UserCodeError) or type(error).__module__.partition(".")[0] == "nemo_rl_cpp":
        return True
    if not isinstance(error, _SENTENCES) or isinstance(error, UnicodeError):
        return False
    places = _places(error)
    return not places or _is_ours(places[-1].file)


def one_sentence(error: BaseException) -> str:
    """Return an exception's message for users, in one line, with the rank of a worker that raised it."""
    note = next((note for note in getattr(error, "__notes__", ()) if note.startswith(RAISED_ON)), None)
    return _sentence(error) + (f" ({note.splitlines()[0].removeprefix('raised on ').rstrip(':')})" if note else "")


def _sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "out of memory; `--dry-run` shows what each phase needs: lower policy.train_micro_batch_size, "
            f"policy.generation.max_batch_size or policy.max_total_sequence_length ({_type_and_text(error)})"
        )
    if isinstance(error, OSError) and error.strerror:
        return _os_sentence(error)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "nemo_rl_cpp":
        return _package_sentence(error.name, user_place(error))
    if _says_it_all(error) and str(error):
        return _flat(str(error))
    told = in_user_code(error)
    if told is not None:
        return str(told)
    ours = next((place for place in reversed(_places(error)) if _is_ours(place.file)), None)
    where = f", in {ours.function} ({Path(ours.file).relative_to(PACKAGE.parent)}:{ours.line})" if ours else ""
    return f"unexpected {_type_and_text(error)}{where}"


def _package_sentence(name: str, place: Place | None) -> str:
    wanted = f", which {place} imports" if place else ""
    package = name.partition(".")[0]
    if package != name and package in sys.modules:
        return f"there is no module {name}{wanted}"
    install = f"pip install {_INSTALLED_AS.get(package, package)}"
    return f"the package {package}{wanted}{',' if wanted else ''} is not installed: run `{install}`"


def _os_sentence(error: OSError) -> str:
    names = " -> ".join(repr(str(name)) for name in (error.filename, error.filename2) if name is not None)
    text = f"{names}: {error.strerror}" if names else error.strerror
    place = user_place(error)
    return f"{text}, in {place}" if place else text


# ---- the command line


def save_traceback(error: BaseException) -> Path | None:
    """Write the traceback to the log folder, or else to the temporary folder. Return the file, or None if both fail."""
    text = "".join(traceback.format_exception(error))
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, _secrets[secret])
    stamp = f"nemo_rl_cpp_error_{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}.txt"
    for path in ([_folder / ERROR_FILE] if _folder is not None else []) + [Path(tempfile.gettempdir()) / stamp]:
        try:
            path.write_text(text, encoding="utf-8")
            return path
        except OSError:
            continue
    return None


def report(error: BaseException, debug: bool = False, saves: bool = True) -> None:
    """Print an error to stderr: with `debug` the traceback, then one sentence and, if `saves`, the path of a file to
    which the traceback is saved."""
    if debug:
        traceback.print_exception(error)
    sentence, path = one_sentence(error), save_traceback(error) if saves else None
    details = f" (details: {short_path(path)})" if path is not None else ""
    print(f"error: {sentence}{details}", file=sys.stderr, flush=True)
