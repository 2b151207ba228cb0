"""The bodies of answers, as OpenAI and vLLM write them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.data.texts import TextStream
from nemo_rl_cpp.serving.requests import Likeliest, Sample

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.tool_calls import ParsedToolCalls

Json = dict[str, object]
BytesOf = Callable[[int], bytes]


class Spelled(NamedTuple):
    """Tokens of an answer and the text that each adds to it; joined, these are the answer's text."""

    sample: Sample
    texts: list[str]

    @property
    def text(self) -> str:
        """The tokens' text."""
        return "".join(self.texts)


class Speech:
    """Turns the tokens of an answer, as they come, into tokens with their texts: a token waits until its text is certain."""

    def __init__(self, stream: TextStream) -> None:
        self._stream, self._waiting = stream, Sample()

    def take(self, part: Sample) -> Spelled:
        """Takes the next tokens; gives those whose texts are certain, all of them where `part` ends the answer."""
        texts = self._stream.push(part.token_ids, last=bool(part.reason))
        w, n = self._waiting, len(texts)
        ids, logprobs, likeliest = (
            w.token_ids + part.token_ids, w.logprobs + part.logprobs, w.likeliest + part.likeliest
        )  # fmt: skip
        self._waiting = Sample(ids[n:], logprobs[n:], 0, likeliest[n:])
        return Spelled(Sample(ids[:n], logprobs[:n], part.reason, likeliest[:n]), texts)


@dataclass(frozen=True)
class Header:
    """What every part of an answer repeats.

    Attributes:
        id: of the request.
        model: as it was asked for.
        version: of the weights that answer.
    """

    id: str
    model: str
    version: int
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: list[Json]) -> Json:
        """The frame of an answer."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices,
            "system_fingerprint": f"weights-{self.version}", "weight_version": self.version,
        }  # fmt: skip


def usage(prompt_tokens: int, samples: list[Sample]) -> Json:
    """Tokens of prompt and answers."""
    completion = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion, "total_tokens": prompt_tokens + completion
    }  # fmt: skip


def _spelling(bytes_of: BytesOf, token: int) -> str:
    """A token by itself, special ones by their names; a part of a character is U+FFFD."""
    return bytes_of(token).decode(errors="replace")


def completion_logprobs(bytes_of: BytesOf, spelled: Spelled, at: int = 0) -> tuple[Json, int]:
    """Makes `logprobs` of /v1/completions for tokens whose text begins at character `at` of the answer, and where the next begins.

    `tokens` joined are the text: a token that adds none to it (a special one, the first parts of a character) is "".
    `top_logprobs` holds the sampled token by its text in `tokens`, also where it is none of the likeliest, as OpenAI's. Another token of
    the same text is told by its number, as vLLM writes it: `token_id:5`.
    """
    sample, texts = spelled
    offsets = []
    for text in texts:
        offsets.append(at)
        at += len(text)
    above = None
    if any(sample.likeliest):
        above = [
            _by_text(bytes_of, *of_token)
            for of_token in zip(sample.token_ids, texts, sample.logprobs, sample.likeliest, strict=True)
        ]
    body = {"tokens": texts, "token_logprobs": list(sample.logprobs), "top_logprobs": above, "text_offset": offsets}
    return body, at


def _by_text(bytes_of: BytesOf, token: int, text: str, logprob: float, likeliest: Likeliest) -> dict[str, float]:
    found: dict[str, float] = {}
    for other, its in likeliest:
        name = text if other == token else _spelling(bytes_of, other)
        taken = other != token and (name == text or name in found)
        found[f"token_id:{other}" if taken else name] = its
    return found | {text: logprob}


def chat_logprobs(bytes_of: BytesOf, spelled: Spelled) -> Json:
    """Makes `logprobs` of /v1/chat/completions. `token` and `bytes`, joined, are the answer's text; `bytes` of a part of a character are
    that part. `top_logprobs` has tokens by themselves, special ones by their names."""

    def other(token: int, logprob: float) -> Json:
        return {"token": _spelling(bytes_of, token), "logprob": logprob, "bytes": list(bytes_of(token))}

    content = []
    for token, text, logprob, likeliest in zip_longest(
        spelled.sample.token_ids, spelled.texts, spelled.sample.logprobs, spelled.sample.likeliest, fillvalue=()
    ):
        is_part = "\ufffd" in _spelling(bytes_of, token)
        own = {"token": text, "logprob": logprob, "bytes": list(bytes_of(token) if is_part else text.encode())}
        content.append(own | {"top_logprobs": [other(*pair) for pair in likeliest]})
    return {"content": content, "refusal": None}


def generate_logprobs(sample: Sample, count: int) -> Json:
    """`logprobs` of vLLM's route, whose tokens are numbers: of each sampled token, with the first `count` (at least one) of it and the
    likeliest beside it. `rank` is 1 for the likeliest, null for one that is not among those, or where one alone is told. Older clients read
    the number in `token`."""

    def entry(token: int, logprob: float, rank: int | None) -> Json:
        return {"token_id": token, "logprob": logprob, "rank": rank, "token": f"token_id:{token}", "bytes": None}

    content = []
    for token, logprob, beside in zip_longest(sample.token_ids, sample.logprobs, sample.likeliest, fillvalue=()):
        rank = next((i for i, (other, _) in enumerate(beside, 1) if other == token), None)
        others = [entry(other, its, i) for i, (other, its) in enumerate(beside, 1) if other != token]
        sampled = entry(token, logprob, rank)
        content.append(sampled | {"top_logprobs": [sampled, *others][: max(count, 1)]})
    return {"content": content}


def chat_message(spoken: ParsedToolCalls) -> Json:
    """The assistant's message."""
    message: Json = {"role": "assistant", "content": spoken.text or None if spoken.calls else spoken.text}
    if spoken.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in spoken.calls
        ]
    return message


def error_body(message: str, kind: str, param: str | None = None, code: int | str | None = None) -> Json:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: Json | str) -> bytes:
    """A server-sent event."""
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()
