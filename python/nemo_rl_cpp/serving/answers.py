"""The bodies of answers, as OpenAI and vLLM write them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from nemo_rl_cpp.serving.requests import Sample

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.serving.tool_calls import Spoken

Json = dict[str, object]


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


def spelled(tokenizer: TokenizerType, token_id: int) -> str:
    """A token's own text; special tokens too."""
    return tokenizer.decode([token_id], skip_special_tokens=False)


def completion_logprobs(tokenizer: TokenizerType, sample: Sample, at: int = 0) -> tuple[Json, int]:
    """`logprobs` of /v1/completions for tokens that begin `at` characters behind the answer's first, and where the next begins.

    `top_logprobs` has the sampled token beside the likeliest ones where it is none of them, as OpenAI's. Of tokens that are spelled
    alike (parts of characters) the likeliest is there.
    """
    tokens = [spelled(tokenizer, token) for token in sample.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(at)
        at += len(token)
    above = None
    if any(sample.likeliest):
        above = [
            {spelled(tokenizer, other): its for other, its in reversed(beside)} | {token: logprob}
            for token, logprob, beside in zip(tokens, sample.logprobs, sample.likeliest)
        ]
    body = {"tokens": tokens, "token_logprobs": list(sample.logprobs), "top_logprobs": above, "text_offset": offsets}
    return body, at


def chat_logprobs(tokenizer: TokenizerType, bytes_of: Callable[[int], bytes], sample: Sample) -> Json:
    """`logprobs` of /v1/chat/completions. The text of a part of a character is U+FFFD; `bytes` says which part."""

    def entry(token: int, logprob: float) -> Json:
        return {"token": spelled(tokenizer, token), "logprob": logprob, "bytes": list(bytes_of(token))}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(other, its) for other, its in beside]}
        for token, logprob, beside in zip_longest(sample.token_ids, sample.logprobs, sample.likeliest, fillvalue=())
    ]
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


def chat_message(spoken: Spoken) -> Json:
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
