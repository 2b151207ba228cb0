"""The requests and responses of each rollout, by the rollout's key. Training uses the token ids that were sampled."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from nemo_rl_cpp.serving.bodies import RequestError
from nemo_rl_cpp.serving.engine import Draw, Sample, Sampling

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.chat import AssistantTurn

_MOST_UNREGISTERED = 4096
_MOST_ENDED = 1 << 16
HEADER = "x-rollout-key"  # the header that names a rollout, equivalent to the body's field `rollout_key`


@dataclass(frozen=True)
class Call:
    """One request of a rollout to the policy, with its response."""

    prompt_ids: list[int]
    sample: Sample
    version: int

    @property
    def ids(self) -> list[int]:
        """The tokens of prompt and response."""
        return self.prompt_ids + self.sample.token_ids


@dataclass
class Rollout:
    """The requests of one rollout of an agent, which all send the same rollout key."""

    key: str
    seed: int
    stream: int = 2  # the random stream (csrc/common/random.h)
    # the temperature, top_p and top_k that all requests of a training rollout must have, because training computes log-
    # probabilities under them; None: each request sets them
    sampling: Sampling | None = None
    calls: list[Call] = field(default_factory=list)
    turns: list[AssistantTurn] = field(default_factory=list)  # its chat conversations, each with its token ids
    name: str | None = None  # seeds the sampling; if None, the rollout's key seeds it
    drawn: dict[bytes, set[int]] = field(default_factory=dict)  # prompt -> indices of its responses


class Rollouts:
    """All rollouts by their keys. A training run registers each rollout on which it will train, and removes the rollout
    when it ends (`take`). The latest few thousand unregistered rollouts are kept, too, only so that their conversations
    can be continued. `seed` seeds all sampling."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._registered: dict[str, Rollout] = {}
        self._others: OrderedDict[str, Rollout] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def register(self, key: str, stream: int, sampling: Sampling, name: str | None = None) -> str:
        """Add a rollout that a run will train on. Return its key: `key`, or a new one if it was already used. `stream`
        ("train" or "val" as a number), `name` (None: the key) and `sampling` determine its samples."""
        with self._lock:
            own, number = key, 1
            while own in self._registered or own in self._ended:
                own, number = f"{number}.{key}", number + 1
            self._registered[own] = Rollout(own, self.seed, stream, sampling, name=name)
            return own

    def take(self, key: str) -> Rollout:
        """Remove and return a rollout that has ended. Later requests with its key are rejected."""
        with self._lock:
            rollout = self._registered.pop(key)
            self._ended[key] = None
            while len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
            return replace(rollout, calls=[*rollout.calls])  # a copy: later responses are ignored

    def find(self, key: str) -> Rollout:
        """Return the rollout with this key. Raise RequestError (410) if `take` has already returned it."""
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
        """Return the sampling seed for the rollout's next response to this prompt. The seed depends on the run's seed,
        the rollout, the prompt, and the smallest response index not yet used for the prompt. So a repeated rollout gets
        the same samples, in whatever order concurrent requests arrive."""
        prompt = _digest_of(rollout, prompt_ids)
        with self._lock:
            drawn = rollout.drawn.setdefault(prompt, set())
            number = next(number for number in count() if number not in drawn)
            drawn.add(number)
        draw_id = int.from_bytes(_digest(prompt, number.to_bytes(8, "little")), "little")
        return Draw((rollout.seed if seed is None else seed) & 0xFFFFFFFF, rollout.stream, draw_id, number)

    def gave_up(self, rollout: Rollout, prompt_ids: list[int], draw: Draw) -> None:
        """Release the response index in `draw`, since the response failed, so that a retry gets the same samples."""
        with self._lock:
            rollout.drawn[_digest_of(rollout, prompt_ids)].discard(draw.number)

    def answered(self, rollout: Rollout, call: Call) -> None:
        """Record a request and its response, if the rollout is trained on."""
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
    """Return the calls of the longest conversation (most calls, then most tokens): each prompt starts with the previous
    call's prompt and response. Retries, sub-agents and shortened conversations are dropped."""
    ordered = sorted(calls, key=lambda call: (len(call.prompt_ids), call.prompt_ids, call.sample.token_ids))
    size = lambda chain: (len(chain), len(chain[-1].ids), chain[-1].ids)  # noqa: E731
    chains: list[list[Call]] = []
    for call in ordered:
        before = [chain for chain in chains if call.prompt_ids[: len(chain[-1].ids)] == chain[-1].ids]
        chains.append([*max(before, key=size, default=[]), call])
    return max(chains, key=size, default=[])
