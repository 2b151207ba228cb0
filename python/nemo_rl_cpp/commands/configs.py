"""`nemo-rl-cpp configs`: the shipped configurations, each with what it is."""

import re
from collections.abc import Sequence

from nemo_rl_cpp.command_line import command_parser

_EXAMPLES = """examples:
  nemo-rl-cpp configs
  nemo-rl-cpp configs ppo"""


def main(arguments: Sequence[str]) -> int:
    """Prints a line a configuration."""
    parser = command_parser("configs", "List the shipped configurations.", _EXAMPLES)
    parser.add_argument("word", nargs="?", default="", help="only those with this word in their name or description")
    word = parser.parse_args(arguments).word.lower()
    lines = {name: text for name, text in descriptions().items() if word in f"{name} {text}".lower()}
    if not lines:
        print(f"no shipped configuration has {word!r} in its name or description; nemo-rl-cpp configs lists all")
        return 1
    width = max(map(len, lines)) + 2
    for name, text in lines.items():
        print(f"{name:<{width}}{text}".rstrip())
    return 0


def descriptions() -> dict[str, str]:
    """Name of each shipped configuration -> the first sentence of the comment on its top; "" where there is none."""
    from nemo_rl_cpp.config.locate import find_config, shipped_configs

    return {name: _first_sentence(find_config(name).read_text(encoding="utf-8")) for name in shipped_configs()}


def _first_sentence(text: str) -> str:
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# ").strip())
    whole = " ".join(comment).strip()
    return re.split(r"(?<=[a-z0-9)]\.)\s", whole, maxsplit=1)[0].rstrip(".:")
