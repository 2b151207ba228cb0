"""The answers of the three routes, as OpenAI and vLLM write them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.texts import TextStream
from nemo_rl_cpp.serving.bodies import ChatBody, CompletionBody, GenerateBody, RequestError, TextBody
from nemo_rl_cpp.serving.chat import (
    MARKS,
    AssistantTurn,
    ParsedToolCalls,
    chat_prompt,
    find_calls,
    opens_thinking,
    takes_tools,
    turn_of,
    turns_of,
)
from nemo_rl_cpp.serving.engine import Likeliest, Progress, Sample

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.chat import ParsedToolCalls
    from nemo_rl_cpp.serving.model import ServedModel
    from nemo_rl_cpp.serving.rollouts import Rollout

Json = dict[str, object]
BytesOf = Callable[[int], bytes]


class Spelled(NamedTuple):
    """Tokens of an answer and the text that each adds to it; joined, these are the answer's text."""

    sample: Sample
    texts: list[str]

    @property
    def text(self) -> str:
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
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


_COMPLETION_TOKENS = 16  # OpenAI's, where a completion names no number
_MOST_SAID = 32


def _tells_usage(body: TextBody | GenerateBody) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    return body.stream_options is not None and body.stream_options.include_usage


class TextAnswer:
    """What answers of text have in common.

    Attributes:
        streams: whether each token is sent as it comes.
        prompts: token ids of each prompt.
        samples: answers to each prompt; choice `i` answers prompt `i // samples`.
    """

    kept: tuple[str, ...] = ()
    """special tokens that are part of the text"""

    def __init__(self, model: ServedModel, body: TextBody, rollout: Rollout | None, request_id: str) -> None:
        self.id = request_id
        self.model = model.check_name(body.model)
        self.served, self.body = model, body
        self.streams, self.samples, self.seed = body.stream, body.n or 1, body.seed
        self.prompts = self._prompts(rollout)
        for ids in self.prompts:
            model.check_prompt(ids, "prompt")
        self.sampling = model.sampling(body, self._longest(), max(map(len, self.prompts)), rollout)
        self._speeches: dict[int, Speech] = {}

    def _prompts(self, rollout: Rollout | None) -> list[list[int]]:
        raise NotImplementedError

    def _longest(self) -> int | None:
        return None

    def _text_stream(self, k: int) -> TextStream:
        b = self.body
        return TextStream(
            self.served.tokenizer, self.prompts[k // self.samples], stops=self.sampling.stop_strings, keep_stop=b.include_stop_str_in_output,
            skip_special=b.skip_special_tokens, kept=self.kept,
        )  # fmt: skip

    def _take(self, k: int, part: Sample) -> Spelled:
        """Takes the next tokens of choice `k`; gives those whose texts are certain."""
        if k not in self._speeches:
            self._speeches[k] = Speech(self._text_stream(k))
        return self._speeches[k].take(part)

    def _ids(self, sample: Sample) -> Json:
        return {"token_ids": list(sample.token_ids)} if self.body.return_token_ids else {}

    def _prompt_ids(self) -> Json:
        """Tells the ids of the only prompt where they are asked for."""
        return {"prompt_token_ids": self.prompts[0]} if self.body.return_token_ids and len(self.prompts) == 1 else {}

    def _usage(self, samples: list[Sample]) -> Json:
        return {"usage": usage(sum(map(len, self.prompts)), samples)}

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """What later requests of the rollout go on from."""

    def opening(self, header: Header) -> Iterator[Json]:
        """Chunks before the first token."""
        yield from ()

    def _last_usage(self, header: Header, samples: list[Sample], kind: str) -> Iterator[Json]:
        if _tells_usage(self.body):
            yield header.body(kind, []) | self._usage(samples)


class CompletionAnswer(TextAnswer):
    """An answer of /v1/completions."""

    def __init__(self, model: ServedModel, body: CompletionBody, rollout: Rollout | None, request_id: str) -> None:
        self._asked = body
        if body.best_of not in (None, body.n or 1):
            raise RequestError("best_of is not n: answers are not ranked here", param="best_of")
        super().__init__(model, body, rollout, f"cmpl-{request_id}")
        self._offsets: dict[int, int] = {}  # characters of the tokens that were sent, by choice

    def _prompts(self, rollout: Rollout | None) -> list[list[int]]:
        prompt = self._asked.prompt
        several = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt
        return [prompt_ids(self.served.tokenizer, one) if isinstance(one, str) else list(one) for one in several]

    def _longest(self) -> int | None:
        return _COMPLETION_TOKENS

    def _choice(self, k: int, spelled: Spelled) -> Json:
        begins, at, logprobs = k not in self._offsets, self._offsets.setdefault(k, 0), None
        if self._asked.logprobs is not None:
            logprobs, self._offsets[k] = completion_logprobs(self.served.bytes_of_token, spelled, at)
        reason = spelled.sample.finish_reason
        choice: Json = {"index": k, "text": spelled.text, "logprobs": logprobs, "finish_reason": reason}
        if self.body.return_token_ids and begins:
            choice["prompt_token_ids"] = self.prompts[k // self.samples]
        return choice | self._ids(spelled.sample)

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        """The body of an answer that does not stream."""
        choices = [self._choice(k, self._take(k, sample)) for k, sample in enumerate(samples)]
        return header.body("text_completion", choices) | self._usage(samples) | self._prompt_ids()

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """The chunk of the tokens whose text is certain."""
        part = self._take(progress.sample, progress.part())
        tells_tokens = self._asked.logprobs is not None or self.body.return_token_ids
        if part.text or part.sample.reason or (part.texts and tells_tokens):
            yield header.body("text_completion", [self._choice(progress.sample, part)])

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        """Chunks behind the last token."""
        yield from self._last_usage(header, samples, "text_completion")


class ChatAnswer(TextAnswer):
    """An answer of /v1/chat/completions."""

    def __init__(self, model: ServedModel, body: ChatBody, rollout: Rollout | None, request_id: str) -> None:
        self._asked = body
        self._tools = body.tools if body.tool_choice != "none" else None
        self.kept = MARKS if self._tools else ()
        if self._tools and not takes_tools(model.tokenizer):
            raise RequestError(
                "the model's chat template has no tools (no <tool_call>): leave tools out", param="tools"
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs is given without logprobs: true", param="top_logprobs")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise RequestError(
                f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}, which mean the same: give one of them",
                param="max_completion_tokens",
            )
        super().__init__(model, body, rollout, f"chatcmpl-{request_id}")
        self._whole: dict[int, tuple[Spelled, ParsedToolCalls]] = {}

    def _prompts(self, rollout: Rollout | None) -> list[list[int]]:
        said = [] if rollout is None else list(rollout.said)
        return [chat_prompt(self.served.tokenizer, self._asked.messages, self._tools, said)]

    def _said(self, k: int, sample: Sample) -> tuple[Spelled, ParsedToolCalls]:
        """Spells a whole answer and finds its calls, once."""
        if k not in self._whole:
            spelled = Speech(self._text_stream(k)).take(sample)
            spoken = ParsedToolCalls(spelled.text)
            if self._tools:
                thinks = opens_thinking(self.served.tokenizer, self.prompts[0])
                spoken = find_calls(spelled.text, f"{self.id[-8:]}_{k}", thinks)
            self._whole[k] = spelled, spoken
        return self._whole[k]

    def _finish(self, k: int, sample: Sample) -> str | None:
        calls = sample.finish_reason == "stop" and self._said(k, sample)[1].calls
        return "tool_calls" if calls else sample.finish_reason

    def _logprobs(self, spelled: Spelled) -> Json | None:
        return chat_logprobs(self.served.bytes_of_token, spelled) if self._asked.logprobs else None

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        choices = []
        for k, sample in enumerate(samples):
            spelled, spoken = self._said(k, sample)
            choice: Json = {
                "index": k, "message": chat_message(spoken), "logprobs": self._logprobs(spelled), "finish_reason": self._finish(k, sample)
            }  # fmt: skip
            choices.append(choice | self._ids(sample))
        return header.body("chat.completion", choices) | self._usage(samples) | self._prompt_ids()

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """The conversation with its first answer."""
        _, spoken = self._said(0, samples[0])
        turn = turn_of("assistant", spoken.text, [(call.name, call.arguments) for call in spoken.calls])
        said = AssistantTurn(
            (*turns_of(self._asked.messages), turn), [*self.prompts[0], *samples[0].token_ids], samples[0].reason == 1, self._tools
        )  # fmt: skip
        rollout.said = [*rollout.said[1 - _MOST_SAID :], said]

    def opening(self, header: Header) -> Iterator[Json]:
        """The role, for each answer."""
        for k in range(self.samples):
            yield header.body("chat.completion.chunk", [_delta(k, {"role": "assistant", "content": ""})])

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """The chunk of the tokens whose text is certain. With tools the text comes at the end, when it is known which part of it is a call."""
        if self._tools:
            return
        part = self._take(progress.sample, progress.part())
        if part.text or part.sample.reason or (part.texts and (self._asked.logprobs or self.body.return_token_ids)):
            delta = {"content": part.text} if part.text else {}
            choice = _delta(progress.sample, delta, part.sample.finish_reason, self._logprobs(part))
            yield header.body("chat.completion.chunk", [choice | self._ids(part.sample)])

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        for k, sample in enumerate(samples if self._tools else ()):
            spelled, spoken = self._said(k, sample)
            message = chat_message(spoken)
            calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
            delta: Json = {"content": message["content"]} | ({"tool_calls": calls} if calls else {})
            choice = _delta(k, delta, self._finish(k, sample), self._logprobs(spelled))
            yield header.body("chat.completion.chunk", [choice | self._ids(sample)])
        yield from self._last_usage(header, samples, "chat.completion.chunk")


def _delta(k: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> Json:
    return {"index": k, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class GenerateAnswer:
    """An answer of vLLM's route: token ids, and no text."""

    def __init__(self, model: ServedModel, body: GenerateBody, rollout: Rollout | None, request_id: str) -> None:
        self.id = body.request_id or request_id
        self.model = model.check_name(body.model)
        self.streams, self._body = body.stream, body
        self.samples, self.seed = body.sampling_params.n or 1, body.sampling_params.seed
        self.prompts = [list(body.token_ids)]
        model.check_prompt(self.prompts[0], "token_ids")
        self.sampling = model.sampling(body.sampling_params, None, len(self.prompts[0]), rollout)
        self._told_prompt = not body.return_token_ids

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """Nothing: the client has the ids."""

    def _choice(self, k: int, sample: Sample) -> Json:
        count = self._body.sampling_params.logprobs
        logprobs = None if count is None else generate_logprobs(sample, count)
        return {
            "index": k, "token_ids": list(sample.token_ids), "logprobs": logprobs, "finish_reason": sample.finish_reason
        }  # fmt: skip

    def _prompt_ids(self) -> Json:
        """The prompt's ids where they are asked for, once."""
        told, self._told_prompt = self._told_prompt, True
        return {} if told else {"prompt_token_ids": self.prompts[0]}

    def opening(self, header: Header) -> Iterator[Json]:
        """Nothing goes before the first token."""
        yield from ()

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """The chunk of new tokens."""
        yield self._part(header, [self._choice(progress.sample, progress.part())]) | self._prompt_ids()

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        if _tells_usage(self._body):
            yield self._part(header, []) | {"usage": usage(len(self.prompts[0]), samples)}

    def _part(self, header: Header, choices: list[Json]) -> Json:
        return {
            "request_id": self.id, "output_mode": "tokens", "choices": choices, "weight_version": header.version, "usage": None
        }  # fmt: skip

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        choices = [self._choice(k, sample) for k, sample in enumerate(samples)]
        told = {
            "model": self.model,
            "created": header.created,
            "prompt_logprobs": None,
            "usage": usage(len(self.prompts[0]), samples),
        }
        return self._part(header, choices) | told | self._prompt_ids()
