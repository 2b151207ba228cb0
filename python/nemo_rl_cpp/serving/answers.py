"""The response bodies of the three routes, in the formats of OpenAI and vLLM."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.chat_template import template_variables
from nemo_rl_cpp.data.texts import TextStream
from nemo_rl_cpp.serving import chat
from nemo_rl_cpp.serving.bodies import ChatBody, CompletionBody, GenerateBody, RequestError, TextBody
from nemo_rl_cpp.serving.engine import STOP_TOKEN, Likeliest, Progress, Sample

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.model import ServedModel
    from nemo_rl_cpp.serving.rollouts import Rollout

Json = dict[str, object]
BytesOf = Callable[[int], bytes]
_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_MOST_TURNS = 32  # the number of conversations kept per rollout


@dataclass(frozen=True)
class Header:
    """The fields that every response body, and every chunk of a streamed response, contains."""

    id: str
    model: str
    version: int  # the version of the weights that generate the response
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices,
            "system_fingerprint": f"weights-{self.version}", "weight_version": self.version,
        }  # fmt: skip


def usage(prompts: list[list[int]], samples: list[Sample]) -> Json:
    prompt, completion = sum(map(len, prompts)), sum(len(sample.token_ids) for sample in samples)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_body(message: str, kind: str, param: str | None = None, code: int | str | None = None) -> Json:
    """Return an error's body in OpenAI's format. `kind` is its `type` ("server_error"), `param` the invalid field."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: Json | str) -> bytes:
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


# ---- tokens with their texts and log-probabilities


class Spelled(NamedTuple):
    """Tokens of a response, with the text that each token adds to it."""

    sample: Sample
    texts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Speller:
    """A converter of a stream of tokens to text. It holds back a token as long as later tokens can change its text."""

    _stream: TextStream
    _waiting: Sample = field(default_factory=Sample)

    def take(self, part: Sample) -> Spelled:
        """Add the next tokens of the response. Return the tokens whose texts have become final; at the end of the
        response, these are all that remain."""
        texts = self._stream.push(part.token_ids, last=bool(part.reason))
        w, n = self._waiting, len(texts)
        w.extend(part)
        self._waiting = Sample(w.token_ids[n:], w.logprobs[n:], 0, w.likeliest[n:])
        return Spelled(Sample(w.token_ids[:n], w.logprobs[:n], part.reason, w.likeliest[:n]), texts)


def _spelling(bytes_of: BytesOf, token: int) -> str:
    """Return the text of a single token: the name of a special one, U+FFFD for a partial character."""
    return bytes_of(token).decode(errors="replace")


def completion_logprobs(bytes_of: BytesOf, spelled: Spelled, at: int = 0) -> tuple[Json, int]:
    """Return (`logprobs` of /v1/completions, end) for the tokens `spelled`, whose text is from character `at` to `end`.

    The entries of `tokens`, joined, are the response's text, so a token that adds no text (a special token, a part of a
    character) has "". As in OpenAI's API, `top_logprobs` always includes the sampled token; its key is its entry in
    `tokens`. If another token has the same text, its key is its id, as in vLLM: `token_id:5`. The first token of an
    echoed prompt, which nothing predicts, has None instead of a log-probability."""
    sample, texts = spelled
    offsets = []
    for text in texts:
        offsets.append(at)
        at += len(text)
    above = None
    if any(sample.likeliest):
        rows = zip(sample.token_ids, texts, sample.logprobs, sample.likeliest, strict=True)
        above = [None if row[2] is None else _by_text(bytes_of, *row) for row in rows]
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
    """Return `logprobs` of /v1/chat/completions for the tokens `spelled`. The `token` entries, joined, give the text,
    as do the `bytes` entries, which also hold partial characters. In `top_logprobs` special tokens have a text, too."""
    content = []
    for token, text, logprob, likeliest in zip_longest(
        spelled.sample.token_ids, spelled.texts, spelled.sample.logprobs, spelled.sample.likeliest, fillvalue=()
    ):
        is_part = "\ufffd" in _spelling(bytes_of, token)
        entry = {"token": text, "logprob": logprob, "bytes": list(bytes_of(token) if is_part else text.encode())}
        others = [{"token": _spelling(bytes_of, i), "logprob": p, "bytes": list(bytes_of(i))} for i, p in likeliest]
        content.append(entry | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def generate_logprobs(sample: Sample, count: int) -> Json:
    """Return `logprobs` of vLLM's route /inference/v1/generate. `top_logprobs` of a sampled token lists that token,
    then the most likely ones: `count` entries in total, at least one.

    `rank` is 1 for the most likely token, and null for a sampled token that is not among the most likely ones. Older
    clients read the token id from `token`."""

    def entry(token: int, logprob: float, rank: int | None) -> Json:
        return {"token_id": token, "logprob": logprob, "rank": rank, "token": f"token_id:{token}", "bytes": None}

    content = []
    for token, logprob, likeliest in zip_longest(sample.token_ids, sample.logprobs, sample.likeliest, fillvalue=()):
        ranked = {other: (its, rank) for rank, (other, its) in enumerate(likeliest, 1)}
        sampled = entry(token, logprob, ranked.pop(token, (0.0, None))[1])
        others = [entry(other, *its) for other, its in ranked.items()]
        content.append(sampled | {"top_logprobs": [sampled, *others][: max(count, 1)]})
    return {"content": content}


# ---- the routes


class Answer:
    """The base class of responses. A subclass defines `whole`, the body of a response that is not streamed, and for
    streams `chunk`, the bodies for new tokens, and `closing`, those after the last token.

    Attributes:
        streams: whether each token is sent immediately.
        prompts: the token ids of each prompt.
        samples: responses per prompt; choice `i` belongs to prompt `i // samples`.
        seed: the seed of the request."""

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """Store the conversation for later requests of the same rollout. Only chat responses do this."""

    def opening(self, header: Header) -> Iterator[Json]:
        """Yield the chunks that come before the first token of a streamed response."""
        yield from ()


class TextAnswer(Answer):
    """The base class of responses as text. A subclass defines the methods that make an entry of `choices`: `_part` for
    a streamed chunk, `_complete` for a whole response."""

    kind: str  # the object name of a whole response
    chunk_kind: str  # the object name of a stream's chunks
    kept: tuple[str, ...] = ()  # special tokens that are part of the text

    def __init__(
        self, model: ServedModel, body: TextBody, prompts: list[list[int]], rollout: Rollout | None, request_id: str
    ) -> None:
        self.id, self.model = request_id, model.check_name(body.model)
        self.served, self.body, self.prompts = model, body, prompts
        self.streams, self.samples, self.seed = body.stream, body.n or 1, body.seed
        for ids in prompts:
            model.check_prompt(ids, "prompt")
        longest = _COMPLETION_TOKENS if isinstance(body, CompletionBody) else None
        self.sampling = model.sampling(body, longest, max(map(len, prompts)), rollout)
        self._spellers: dict[int, Speller] = {}

    def _take(self, k: int, part: Sample) -> Spelled:
        """Add the next tokens of choice `k`, and return those whose text later ones cannot change."""
        if k not in self._spellers:
            b = self.body
            stream = TextStream(
                self.served.tokenizer, self.prompts[k // self.samples], stops=self.sampling.stop_strings,
                keep_stop=b.include_stop_str_in_output, skip_special=b.skip_special_tokens, kept=self.kept,
            )  # fmt: skip
            self._spellers[k] = Speller(stream)
        return self._spellers[k].take(part)

    def _ids(self, sample: Sample) -> Json:
        return {"token_ids": list(sample.token_ids)} if self.body.return_token_ids else {}

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        """Return the body of the complete response."""
        choices = [self._complete(k, sample) for k, sample in enumerate(samples)]
        tells_prompt = self.body.return_token_ids and len(self.prompts) == 1
        told = {"prompt_token_ids": self.prompts[0]} if tells_prompt else {}
        return header.body(self.kind, choices) | {"usage": usage(self.prompts, samples)} | told

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """Yield the next chunk of a stream: the tokens whose text has become final, if there are any, or the end."""
        part = self._take(progress.sample, progress.part)
        if part.text or part.sample.reason or (part.texts and (self._logprobs or self.body.return_token_ids)):
            yield header.body(self.chunk_kind, [self._part(progress.sample, part)])

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        if self.body.stream_options.include_usage:
            yield header.body(self.chunk_kind, []) | {"usage": usage(self.prompts, samples)}


class CompletionAnswer(TextAnswer):
    """A response of /v1/completions."""

    kind = chunk_kind = "text_completion"
    _scored: Sequence[tuple[list[float], list[Likeliest]]] = ()  # of each prompt, see `PromptScorer`

    def __init__(self, model: ServedModel, body: CompletionBody, rollout: Rollout | None, request_id: str) -> None:
        if body.best_of not in (None, body.n or 1):
            raise RequestError("best_of is not n: answers are not ranked here", param="best_of")
        prompt = body.prompt
        self._given = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt
        prompts = [prompt_ids(model.tokenizer, one) if isinstance(one, str) else list(one) for one in self._given]
        super().__init__(model, body, prompts, rollout, f"cmpl-{request_id}")
        self._logprobs = body.logprobs is not None
        if body.prompt_logprobs is not None and body.stream:
            raise RequestError("prompt_logprobs is not given with stream", param="prompt_logprobs")
        asks = "prompt_logprobs" if body.prompt_logprobs is not None else "echo with logprobs"
        if body.prompt_logprobs is not None or (body.echo and self._logprobs):
            if model.score_prompt is None:
                raise RequestError(f"{asks} is not given by a policy in training", param=asks.split()[0])
            count = min(body.num_likeliest, model.vocab_size) if body.echo else 0
            self._scored = [model.score_prompt(ids, count) for ids in prompts]
        self._offsets: dict[int, int] = {}  # the number of characters sent so far, by choice

    def _of_prompt(self, number: int) -> list[Json | None]:
        """Return vLLM's `prompt_logprobs` of a prompt at temperature 1: an entry for each token, None for the first."""
        ids, scored = self.prompts[number], self._scored[number][0]
        spelled = [_spelling(self.served.bytes_of_token, token) for token in ids]
        entries = zip(ids[1:], scored[1:], spelled[1:], strict=True)
        return [None, *({str(token): {"logprob": p, "decoded_token": text}} for token, p, text in entries)]

    def _echoed(self, number: int) -> Spelled:
        """Return the tokens of a prompt with their texts, and if they are asked for with their log-probabilities. A BOS
        token that is not in the text of the request has no text. Without log-probabilities the first token has the text
        of the request, which its tokens do not spell if the tokenizer normalises texts."""
        ids, given, tokenizer = self.prompts[number], self._given[number], self.served.tokenizer
        bos = getattr(tokenizer, "bos_token", None)
        added = isinstance(given, str) and ids[0] == tokenizer.bos_token_id and not given.startswith(bos) if bos else 0
        texts = [""] * added + TextStream(tokenizer, skip_special=False).push(ids[added:], last=True)
        if isinstance(given, str) and not self._logprobs:
            texts = [given, *[""] * (len(ids) - 1)]
        scored, likeliest = self._scored[number] if self._scored else ([], [])
        return Spelled(Sample([*ids], [None, *scored[1:]], 0, [*likeliest]), texts)

    def _part(self, k: int, spelled: Spelled) -> Json:
        number, begins, at, logprobs = k // self.samples, k not in self._offsets, self._offsets.setdefault(k, 0), None
        shown = spelled
        if self.body.echo and begins:
            shown = self._echoed(number)
            shown.sample.extend(spelled.sample)
            shown.texts.extend(spelled.texts)
        if self._logprobs:
            logprobs, self._offsets[k] = completion_logprobs(self.served.bytes_of_token, shown, at)
        reason = spelled.sample.finish_reason
        choice: Json = {"index": k, "text": shown.text, "logprobs": logprobs, "finish_reason": reason}
        if self.body.return_token_ids and begins:
            choice["prompt_token_ids"] = self.prompts[number]
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._of_prompt(number)
        return choice | self._ids(spelled.sample)

    def _complete(self, k: int, sample: Sample) -> Json:
        return self._part(k, self._take(k, sample))


class ChatAnswer(TextAnswer):
    """A response of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: ServedModel, body: ChatBody, rollout: Rollout | None, request_id: str) -> None:
        self._messages, self._tools = body.messages, body.tools if body.tool_choice != "none" else None
        self._options = body.chat_template_kwargs | ({"tools": self._tools} if self._tools else {})
        self._logprobs, self._call_id = body.logprobs, uuid.uuid4().hex[:8]
        self.kept = chat.MARKS if self._tools else ()
        if self._tools and chat.MARK not in str(getattr(model.tokenizer, "chat_template", None)):
            raise RequestError("the model's chat template has no <tool_call>: leave tools out", param="tools")
        variables = body.chat_template_kwargs
        if variables and (unread := sorted(variables.keys() - (reads := template_variables(model.tokenizer)))):
            text = f"the model's chat template does not read {', '.join(unread)}; it reads {', '.join(sorted(reads)) or 'none'}"
            raise RequestError(f"chat_template_kwargs: {text}", param="chat_template_kwargs")
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs is given without logprobs: true", param="top_logprobs")
        longest, same = body.max_tokens, body.max_completion_tokens
        if longest is not None and same not in (None, longest):
            text = f"max_tokens is {longest} and max_completion_tokens {same}, which mean the same: give one of them"
            raise RequestError(text, param="max_completion_tokens")
        earlier = [] if rollout is None else list(rollout.turns)
        prompts = [chat.chat_prompt(model.tokenizer, body.messages, self._options, earlier)]
        super().__init__(model, body, prompts, rollout, f"chatcmpl-{request_id}")

    def _parse(self, k: int, sample: Sample) -> tuple[Spelled, chat.ParsedToolCalls]:
        """Return the texts of all tokens of choice `k`, which end with `sample`, and its tool calls."""
        self._spellers.pop(k, None)
        spelled = self._take(k, sample)
        if not self._tools:
            return spelled, chat.ParsedToolCalls(spelled.text)
        end = self.served.tokenizer.decode(self.prompts[0][-chat.ENOUGH_IDS :], skip_special_tokens=False)
        opens_thinking = end.rstrip().endswith(chat.THINK)  # as the templates of some reasoning models do
        return spelled, chat.find_calls(spelled.text, f"{self._call_id}_{k}", opens_thinking, self._tools)

    def _complete(self, k: int, sample: Sample, name: str = "message") -> Json:
        """Return the `choices` entry of the complete response `k`, whose message has the key `name`."""
        spelled, parsed = self._parse(k, sample)
        message: Json = {"role": "assistant", "content": parsed.text or (None if parsed.calls else "")}
        reason = sample.finish_reason
        if parsed.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.calls
            ]
            reason = "tool_calls" if reason == "stop" else reason
        choice = {"index": k, name: message, "logprobs": self._logprobs_of(spelled), "finish_reason": reason}
        return choice | self._ids(sample)

    def _logprobs_of(self, spelled: Spelled) -> Json | None:
        return chat_logprobs(self.served.bytes_of_token, spelled) if self._logprobs else None

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """Store the conversation with the first response, for later requests of the rollout."""
        _, parsed = self._parse(0, samples[0])
        turn = chat.turn_of("assistant", parsed.text, [(call.name, call.arguments) for call in parsed.calls])
        ids, stopped = [*self.prompts[0], *samples[0].token_ids], samples[0].reason == STOP_TOKEN
        conversation = chat.AssistantTurn((*chat.turns_of(self._messages), turn), ids, stopped, self._options)
        rollout.turns = [*rollout.turns[1 - _MOST_TURNS :], conversation]

    def opening(self, header: Header) -> Iterator[Json]:
        """Yield for each response the chunk that begins its stream: the role "assistant" without text."""
        for k in range(self.samples):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": k, "delta": delta, "logprobs": None, "finish_reason": None}
            yield header.body(self.chunk_kind, [choice])

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """Yield the next chunk. If the request has tools, yield nothing: all text is sent at the end."""
        if not self._tools:
            yield from super().chunk(header, progress)

    def _part(self, k: int, spelled: Spelled) -> Json:
        delta, reason = {"content": spelled.text} if spelled.text else {}, spelled.sample.finish_reason
        choice = {"index": k, "delta": delta, "logprobs": self._logprobs_of(spelled), "finish_reason": reason}
        return choice | self._ids(spelled.sample)

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        for k, sample in enumerate(samples if self._tools else ()):
            choice = self._complete(k, sample, "delta")
            delta = choice["delta"]
            del delta["role"]
            for i, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = i
            yield header.body(self.chunk_kind, [choice])
        yield from super().closing(header, samples)


class GenerateAnswer(Answer):
    """A response of vLLM's route /inference/v1/generate: token ids, no text."""

    def __init__(self, model: ServedModel, body: GenerateBody, rollout: Rollout | None, request_id: str) -> None:
        params = body.sampling_params
        self.id, self.model = request_id, model.check_name(body.model)
        self.streams, self._body, self._count = body.stream, body, params.logprobs
        self.samples, self.seed = params.n or 1, params.seed
        self.prompts = [list(body.token_ids)]
        model.check_prompt(self.prompts[0], "token_ids")
        self.sampling = model.sampling(params, None, len(self.prompts[0]), rollout)
        self._tells_prompt = body.return_token_ids

    def _part(self, header: Header, samples: dict[int, Sample]) -> Json:
        choices = []
        for k, sample in samples.items():
            logprobs = None if self._count is None else generate_logprobs(sample, self._count)
            choice = {"index": k, "token_ids": list(sample.token_ids), "logprobs": logprobs}
            choices.append(choice | {"finish_reason": sample.finish_reason})
        body = {"request_id": self.id, "output_mode": "tokens", "choices": choices, "weight_version": header.version}
        if self._tells_prompt:  # once, in the first part of a stream
            self._tells_prompt = False
            body["prompt_token_ids"] = self.prompts[0]
        return body | {"usage": None}

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        yield self._part(header, {progress.sample: progress.part})

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        if self._body.stream_options.include_usage:
            yield self._part(header, {}) | {"usage": usage(self.prompts, samples)}

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        more = {"model": self.model, "created": header.created, "prompt_logprobs": None}
        return self._part(header, dict(enumerate(samples))) | more | {"usage": usage(self.prompts, samples)}
