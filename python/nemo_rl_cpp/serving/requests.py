"""What a request asks of the engine, and what it is given: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

STOP_TOKEN, STOP_STRING, LENGTH = 1, 2, 3
"""Why a sequence ended, as csrc/generation/sequence.h numbers it; 0: it goes on."""
FINISH_REASONS = {STOP_TOKEN: "stop", STOP_STRING: "stop", LENGTH: "length"}
"""The same in OpenAI's words."""


class ServingError(RuntimeError):
    """A request that gets no answer: the server's state is the reason, not the request."""


Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place, with their log-probabilities, likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """How a request is sampled and where it stops. Greedy: the likeliest token each time.

    `num_likeliest`: tokens that are told beside each sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_likeliest: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0


@dataclass(frozen=True)
class Draw:
    """The key of a request's random draws: what it samples follows from this, its prompt and its sampling alone.

    `number`: of the rollout's requests with this prompt, from which `draw_id` was made.
    """

    seed: int
    stream: int = 2  # "eval", csrc/common/random.h
    draw_id: int = 0
    first_sample: int = 0
    number: int = 0


@dataclass
class Sample:
    """The tokens that one answer to a request has so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: int = 0
    likeliest: list[Likeliest] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word; None while it goes on."""
        return FINISH_REASONS.get(self.reason)


@dataclass(frozen=True)
class Progress:
    """What a request's owner is told: the new tokens of one of its answers, or that all of them have failed.

    Attributes:
        sample: which of the answers.
        reason: 0 while it goes on.
        error: why there is no answer; the other fields then say nothing.
    """

    sample: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: int = 0
    error: Exception | None = None
    likeliest: tuple[Likeliest, ...] = ()

    def part(self) -> Sample:
        """The new tokens alone."""
        return Sample(list(self.token_ids), list(self.logprobs), self.reason, list(self.likeliest))


@dataclass(eq=False)
class PendingRequest:
    """A request on its way through the engine.

    Attributes:
        samples: answers to the one prompt, whose computation they share.
        tell: is called from the engine's thread, after each step with `every_token`, else once an answer is complete.
        version: of the weights that answer; None before it has begun.
    """

    prompt_ids: list[int]
    sampling: Sampling
    draw: Draw
    tell: Callable[[Progress], None]
    samples: int = 1
    every_token: bool = False
    version: int | None = None
    answers: list[Sample] = field(default_factory=list)
    first: int = -1  # the engine's number of the first sample
    left: int = 0  # samples that go on
