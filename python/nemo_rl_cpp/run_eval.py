"""Evaluation: `python -m nemo_rl_cpp.run_eval --config FILE [--dry-run] [overrides]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.interrupts import program, raise_if_interrupted

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import EvalMasterConfig

DEFAULT_CONFIG = "configs/evals/eval.yaml"


def _start(config: EvalMasterConfig) -> None:
    from nemo_rl_cpp.evals.eval import (
        main as evaluate,  # torch loads here, after the configuration is known to be right
    )

    raise_if_interrupted()
    evaluate(config)


def main(argv: Sequence[str] | None = None, default_config: str = DEFAULT_CONFIG) -> int:
    """Runs the command line `argv`; returns the exit status, see `config.run.run`."""
    return program(lambda: _main(argv, default_config))


def _main(argv: Sequence[str] | None, default_config: str) -> int:
    from nemo_rl_cpp.config import load_eval_config  # the schema takes a moment to load, in which Ctrl-C counts
    from nemo_rl_cpp.config.run import run

    return run(load_eval_config, _start, argv, default_config, "Evaluate a language model: pass@k or cons@k.")


if __name__ == "__main__":
    sys.exit(main())
