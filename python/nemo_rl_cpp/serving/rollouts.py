"""Requests and answers of each rollout, by its key: training takes the token ids that were sampled."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from nemo_rl_cpp.serving.bodies import RequestError
from nemo_rl_cpp.serving.engine import LENGTH, STOP_TOKEN, Draw, Sample

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.chat import AssistantTurn

_MOST_UNREGISTERED = 4096
_MOST_ENDED = 1 << 16
HEADER = "x-rollout-key"
"""The header that names a rollout; the field `rollout_key` of a body does the same."""


@dataclass(frozen=True)
class TrainedSampling:
    """The distribution from which samples of a trained rollout must be drawn: training computes their log-probabilities under it."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class Call:
    """One answered request."""

    prompt_ids: list[int]
    sample: Sample
    version: int

    @property
    def truncated(self) -> bool:
        """Whether the answer ran out of room."""
        return self.sample.reason == LENGTH

    @property
    def stopped(self) -> bool:
        """Whether a stop token ended the answer."""
        return self.sample.reason == STOP_TOKEN


@dataclass
class Rollout:
    """The calls of one key.

    Attributes:
        name: part of the key of its draws; None: its key.
        stream: of its random draws (csrc/common/random.h).
        sampling: the distribution of its samples; None: as each request asks.
        turns: conversations by chat, with the token ids of each.
        drawn: the numbers of the answers to each prompt that were given or are under way.
    """

    key: str
    seed: int
    stream: int = 2
    sampling: TrainedSampling | None = None
    calls: list[Call] = field(default_factory=list)
    turns: list[AssistantTurn] = field(default_factory=list)
    name: str | None = None
    drawn: dict[bytes, set[int]] = field(default_factory=dict)


class Rollouts:
    """Rollouts by key. A run registers those that it will train on and takes them when they have ended; of others the latest few
    thousand are kept, for their conversations only.

    Args:
        seed: part of the key of every draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._registered: dict[str, Rollout] = {}
        self._others: OrderedDict[str, Rollout] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def register(self, key: str, stream: int, sampling: TrainedSampling, name: str | None = None) -> str:
        """Add a rollout that will be taken, with the draws of `name`; return its key: `key`, or another if that was used before."""
        with self._lock:
            own, number = key, 1
            while own in self._registered or own in self._ended:
                own, number = f"{number}.{key}", number + 1
            self._registered[own] = Rollout(own, self.seed, stream, sampling, name=name)
            return own

    def take(self, key: str) -> Rollout:
        """Return a rollout that has ended. Requests that name it later are refused."""
        with self._lock:
            rollout = self._registered.pop(key)
            self._ended[key] = None
            while len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
            return replace(rollout, calls=[*rollout.calls])  # later answers are too late

    def find(self, key: str) -> Rollout:
        """Return the rollout of a request. RequestError (410) for one that has been taken."""
        with self._lock:
            if key in self._ended:
                raise RequestError(f"the rollout {key} has ended: its samples are trained already", 410, "rollout_key")
            if key in self._registered:
                return self._registered[key]
            found = self._others.setdefault(key, Rollout(key, self.seed))
            self._others.move_to_end(key)
            while len(self._others) > _MOST_UNREGISTERED:
                self._others.popitem(last=False)
            return found

    def draw(self, rollout: Rollout, prompt_ids: list[int], seed: int | None) -> Draw:
        """Return the key of the draws of the rollout's next answer to this prompt.

        It follows from the seed, the rollout's key, the prompt and the smallest number that no answer to this prompt has; so a
        rollout that is run again gets its samples again, in whatever order requests that are under way together arrive.
        """
        prompt = _digest_of(rollout, prompt_ids)
        with self._lock:
            drawn = rollout.drawn.setdefault(prompt, set())
            number = next(number for number in count() if number not in drawn)
            drawn.add(number)
        draw_id = int.from_bytes(_digest(prompt, number.to_bytes(8, "little")), "little")
        return Draw((rollout.seed if seed is None else seed) & 0xFFFFFFFF, rollout.stream, draw_id, number)

    def gave_up(self, rollout: Rollout, prompt_ids: list[int], draw: Draw) -> None:
        """Free the number of an answer that failed or that its client left: a client that asks again gets it."""
        with self._lock:
            rollout.drawn[_digest_of(rollout, prompt_ids)].discard(draw.number)

    def answered(self, rollout: Rollout, call: Call) -> None:
        """Keep an answer of a trained rollout."""
        if rollout.sampling is not None:
            with self._lock:
                rollout.calls.append(call)


def _digest_of(rollout: Rollout, prompt_ids: list[int]) -> bytes:
    return _digest((rollout.name or rollout.key).encode(), array("q", prompt_ids).tobytes())


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def longest_chain(calls: list[Call]) -> list[Call]:
    """Return the calls of the longest growing conversation: each prompt begins with the prompt and answer of the call before it.

    Retries, sub-agents and a conversation that was cut down are left out. Of several chains, the one with most calls counts,
    then with most tokens; so the order in which calls came in does not matter.
    """
    ordered = sorted(calls, key=lambda call: (len(call.prompt_ids), call.prompt_ids, call.sample.token_ids))
    chains: list[list[Call]] = []
    for call in ordered:
        before = [chain for chain in chains if _extends(call.prompt_ids, chain[-1])]
        chains.append([*max(before, key=_size, default=[]), call])
    return max(chains, key=_size, default=[])


def _size(chain: list[Call]) -> tuple[int, int, list[int]]:
    last = chain[-1]
    return len(chain), len(last.prompt_ids) + len(last.sample.token_ids), [*last.prompt_ids, *last.sample.token_ids]


def _extends(prompt_ids: list[int], call: Call) -> bool:
    before = call.prompt_ids + call.sample.token_ids
    return prompt_ids[: len(before)] == before
