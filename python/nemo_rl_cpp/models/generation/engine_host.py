"""Engines in a worker: several read the weights of one model, and are asked by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.models.generation.interfaces import Responses

if TYPE_CHECKING:
    from nemo_rl_cpp.config.generation import EvalGenerationConfig
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
    from nemo_rl_cpp.models.generation.native import NativeGeneration


class EngineHost:
    """What a worker with engines answers; its class says by `create_generation` how one is made."""

    def __init__(self) -> None:
        self._engines: dict[int, NativeGeneration] = {}

    def create_generation(self, config: EvalGenerationConfig | None = None, **options: object) -> NativeGeneration:
        """An engine on this worker's weights."""
        raise NotImplementedError

    def create_engine(self, config: EvalGenerationConfig | None, options: dict[str, object]) -> int:
        """Makes an engine; its number."""
        number = max(self._engines, default=-1) + 1
        self._engines[number] = self.create_generation(config, **options)
        return number

    def drop_engine(self, number: int) -> None:
        """Gives the engine's memory back."""
        if number in self._engines:
            self._engines.pop(number).shutdown()

    def generate_with(
        self, number: int, prompts: RaggedBatch, greedy: bool, on_finished: Callable[..., None] | None = None
    ) -> Responses:
        """What the engine answers; no prompts, no answers."""
        if prompts.size == 0:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Responses(
                nothing, torch.zeros(1, dtype=torch.int64), torch.zeros(0), torch.zeros(0, dtype=torch.bool)
            )
        return self._engines[number].generate(prompts, greedy=greedy, on_finished=on_finished)

    def ask_engine(self, number: int, method: str, *args: object) -> object:
        """Calls another method of the engine."""
        return getattr(self._engines[number], method)(*args)
