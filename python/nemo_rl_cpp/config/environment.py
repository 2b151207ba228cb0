"""Which values of a configuration come from environment variables: they may be secrets and are never written down."""

import os
import re
from collections.abc import Iterator, Sequence

from nemo_rl_cpp import _config
from nemo_rl_cpp.errors import keep_out_of_files

from .aliases import ALIASES
from .locate import parent_folders

_VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*([A-Za-z_]\w*)")
_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")


def environment_values(file: str | os.PathLike[str], overrides: Sequence[str]) -> dict[str, str]:
    """Dotted key -> the text that stands there, for every value that is made with `${oc.env:...}`, directly or by a
    reference to such a value. The file is read again, with its interpolations as text."""
    try:
        # the schema's keys need no '+' on the command line, but here only those of the file are known
        forced = [text if text.startswith("~") else "++" + text.lstrip("+") for text in overrides]
        tree, _ = _config.apply_overrides(_config.load_file(os.fspath(file), folders=parent_folders()), forced)
    except _config.LoadError:
        return {}
    texts = {_canonical(key): text for key, text in _texts(tree, "")}
    found = {key: text for key, text in texts.items() if "${oc.env:" in text.replace(" ", "")}
    while more := {key: text for key, text in _referring(texts, found) if key not in found}:
        found |= more
    names = {name for text in found.values() for name in _VARIABLE.findall(text)}
    keep_out_of_files({os.environ[name]: f"${{oc.env:{name}}}" for name in names if name in os.environ})
    return found


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        if "${" in node:
            yield key, node
        return
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, item in items:
        yield from _texts(item, f"{key}.{name}" if key else str(name))


def _referring(texts: dict[str, str], found: dict[str, str]) -> Iterator[tuple[str, str]]:
    for key, text in texts.items():
        for reference in _REFERENCE.findall(text):
            target = _canonical(_absolute(reference.strip(), key))
            if target in found:
                yield key, text
            for other in [name for name in found if name.startswith(f"{target}.")]:  # a whole section is taken over
                yield key + other[len(target) :], found[other]


def _absolute(reference: str, key: str) -> str:
    """`.a` is a sibling of the key, `..a` one of its section's."""
    path = re.sub(r"\[(\w+)\]", r".\1", reference)
    rest = path.lstrip(".")
    dots = len(path) - len(rest)
    above = key.split(".")[:-dots] if dots else []
    return ".".join([*above, rest])


def _canonical(key: str) -> str:
    return dict(ALIASES).get(key, key)
