"""Checks of arguments. A check returns the value in its proper form, or raises ValueError with one sentence."""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_WORDS = re.compile(r"[^\W_]+")
_SAME = {
    "beta": "kl weight", "coef": "weight", "coeff": "weight", "coefficient": "weight", "penalty": "weight", "dtype": "precision",
    "epsilon": "ratio clip", "eval": "val", "freq": "period", "high": "max", "interval": "period", "len": "length", "low": "min",
    "rank": "dim", "seq": "sequence", "temp": "temperature",
}  # fmt: skip
"""A word in names of keys -> the words that mean the same."""


def in_a_line(value: object, longest: int = 60) -> str:
    """Return the repr of a value in one line of at most `longest` characters, for messages."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - the repr of a caller's object may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return "did you mean NAME?" for the known names that have all words of `name`, or else for the one spelt most
    similarly (see `nearest`), or `otherwise` if there is none."""
    near = having_words(name, known := list(known))
    if not near and (similar := nearest(name, known, cutoff)):
        near = [similar]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def having_words(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that have all words of `name` or their synonyms, fewest other words first."""

    def words_of(text: str) -> set[str]:
        return {part for word in _WORDS.findall(text) for part in _SAME.get(word, word).split()}

    wanted, words = words_of(name), {other: words_of(other) for other in known if other != name}
    found = [other for other in words if wanted and wanted <= words[other]]
    return sorted(found, key=lambda other: (len(words[other]), len(other), other))[:3]


def nearest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """Return the known name most similar to `name`, or None if all have a difflib ratio below `cutoff`.

    For names that share whole words, such as `use_`, the other words must be similar, too: `use_triton` does not
    suggest `use_rslora`."""
    for near in difflib.get_close_matches(name, list(known), 3, cutoff):
        words, others = _WORDS.findall(name), _WORDS.findall(near)
        own, its = ("".join(w for w in some if w not in rest) for some, rest in ((words, others), (others, words)))
        if not own or not its or difflib.SequenceMatcher(None, own, its).ratio() >= cutoff:
            return near
    return None


SMALLEST, LARGEST = 1e-38, 1e38
"""Bounds of a temperature above 0: the engine stores it and its reciprocal as float32."""


def _scalar(value: object) -> object:
    """Return a numpy or torch scalar as a Python number, and any other value unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def whole_number(name: str, value: object, low: int, high: int = 2**63 - 1) -> int:
    """Return `value` as an int from `low` to `high`. Accept numpy integers and 3.0, but not True."""
    found = _scalar(value)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
        bounds = f"of at least {low}" if high == 2**63 - 1 else f"from {low} to {high}"
        raise ValueError(f"{name} = {in_a_line(value)}: expected a whole number {bounds}")
    return found


def number(name: str, value: object, low: float, high: float, zero_is: str = "") -> float:
    """Return `value` as a float from `low` to `high`. If `zero_is` is not empty, 0 is valid, too, and the error message
    describes the meaning of 0 with this text. Reject True and strings."""
    found = _scalar(value)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not (low <= found <= high or zero_is and found == 0):
        zero = f", or 0 {zero_is}" if zero_is else ""
        raise ValueError(f"{name} = {in_a_line(value)}: expected a number from {low:g} to {high:g}{zero}")
    return float(found)


def token_ids(name: str, value: object) -> list[int]:
    """Return token ids (a sequence, array or tensor of whole numbers) as a list of ints. Error messages call them
    `name`."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise ValueError(f"{name} is {in_a_line(value)}: expected a list of token ids, as tokenizer(text)['input_ids']")
    if all(type(token) is int for token in ids):
        return list(ids)
    return [whole_number(f"token {i} of {name}", token, 0) for i, token in enumerate(ids)]


def stop_texts(value: object) -> list[str]:
    """Return stop strings as a list: [value] for a single string, [] for None."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop_strings = {in_a_line(value)}: expected a text or a list of texts")
    fault = stop_text_fault(texts)
    if fault:
        raise ValueError(f"stop_strings {fault}")
    return [str(text) for text in texts]


def stop_text_fault(texts: Iterable[str]) -> str:
    """Return an error message about the first invalid stop string, or "" if all are valid."""
    for text in texts:
        if not text:
            return "holds an empty string, at which every response would end"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"holds {in_a_line(text)}, which has half a character (a lone surrogate)"
    return ""


def model_name(model: object) -> str:
    """Return the name or folder of a model as a string. Raise ValueError if `model` is neither."""
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if not isinstance(model, str) or not model or "\0" in model:
        shown = repr(model) if isinstance(model, (str, int, float, type(None))) else f"a {type(model).__name__}"
        raise ValueError(f"model is {shown}; it must be a folder, a packaged model, or a name on the hub")
    return model


def folder_path(value: object, name: str) -> Path:
    """Return `value` as a Path, which need not exist. Raise ValueError, which names the argument `name`, if invalid."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and path and "\0" not in path:
        return Path(os.path.expanduser(path))
    raise ValueError(f"{name} is {in_a_line(value)}; it must be the path of a folder")


def is_iterable(value: object) -> bool:
    """Return whether `value` can be iterated, unlike zero-dimensional arrays, whose class is iterable."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def names_of(keys: Iterable[object]) -> list[str]:
    """Return the first 20 of the sorted keys as texts, for error messages."""
    return sorted(
        key if isinstance(key, str) and key.isprintable() and len(key) <= 60 else in_a_line(key) for key in keys
    )[:20]


def described(value: object) -> str:
    """Return a value as text for error messages: a number or string itself, otherwise its type ("a function")."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return in_a_line(value)
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
