"""What keys of other trainers are called here, and which keys of NeMo RL's recipes nothing reads: the tables of foreign_names.toml."""

import tomllib
from pathlib import Path

TABLES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FOREIGN = TABLES["keys"]
"""Last part of a key of another trainer -> the key of this package."""


def dead_key(dotted: str) -> str | None:
    """What to say about a key that nothing reads; None for any other."""
    right = TABLES["dead"].get(dotted.rpartition(".")[2])
    return right and f"is read by nothing, in NeMo RL neither; the key that works is {right}; remove it"


def own_name(name: str, known: frozenset[str]) -> str | None:
    """The key of this package for another trainer's name, of those that a kind of configuration knows (a PPO run's section is
    `ppo`), and what it needs besides; None for a name of nobody."""
    key = FOREIGN.get(name, "")
    of_kind = (
        key,
        key.replace("grpo.", "ppo.", 1),
        key.removeprefix("policy."),
        key.replace("data.train.", "data.", 1),
    )
    own = next((each for each in of_kind if each in known or each.startswith("env.reward_functions")), None)
    if own is None or name not in TABLES["besides"]:
        return own
    section = own.rpartition(".")[0]
    return f"{own} (with {section}.{TABLES['besides'][name].format(section=section)})"
