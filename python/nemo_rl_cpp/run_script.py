"""What the run scripts share: a command line that ends well on Ctrl-C, also while the schema and torch are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.interrupts import program, raise_if_interrupted

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import WholeConfig


class Script(NamedTuple):
    """A run script: the kind of its configurations ("grpo", "ppo" or "eval"), the file that it takes by itself, and what it does."""

    kind: str
    default_config: str
    description: str

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command line `argv`; returns the exit status, see `config.run.run`."""
        return program(partial(self._main, argv))

    def _main(self, argv: Sequence[str] | None) -> int:
        from nemo_rl_cpp.config.loader import LOADERS  # the schema takes a moment to load, in which Ctrl-C counts
        from nemo_rl_cpp.config.run import run
        from nemo_rl_cpp.distributed.launch import serving

        load = LOADERS[self.kind] if self.kind == "eval" else serving(LOADERS[self.kind])
        return run(load, self._start, argv, self.default_config, self.description)

    def _start(self, config: WholeConfig) -> None:
        # torch loads here, after the configuration is known to be right
        if self.kind == "eval":
            from nemo_rl_cpp.evals.eval import main as work
        else:
            from nemo_rl_cpp.algorithms.restarts import train as work
        raise_if_interrupted()
        work(config)
