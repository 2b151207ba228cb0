"""PPO: `python -m nemo_rl_cpp.run_ppo --config FILE [--dry-run] [overrides]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.interrupts import program, raise_if_interrupted

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import PPOMasterConfig

DEFAULT_CONFIG = "configs/ppo_math_1B_megatron.yaml"


def _start(config: PPOMasterConfig) -> None:
    from nemo_rl_cpp.algorithms.restarts import train  # torch loads here, after the configuration is known to be right

    raise_if_interrupted()
    train(config)


def main(argv: Sequence[str] | None = None, default_config: str = DEFAULT_CONFIG) -> int:
    """Runs the command line `argv`; returns the exit status, see `config.run.run`."""
    return program(lambda: _main(argv, default_config))


def _main(argv: Sequence[str] | None, default_config: str) -> int:
    from nemo_rl_cpp.config import load_ppo_config  # the schema takes a moment to load, in which Ctrl-C counts
    from nemo_rl_cpp.config.run import run
    from nemo_rl_cpp.distributed.launch import serving

    return run(serving(load_ppo_config), _start, argv, default_config, "Train a language model with PPO.")


if __name__ == "__main__":
    sys.exit(main())
