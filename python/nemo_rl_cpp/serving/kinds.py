"""The three kinds of answers: what each takes from its request, and how its parts are written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.serving.answers import (
    Header,
    Json,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    generate_logprobs,
    usage,
)
from nemo_rl_cpp.serving.bodies import ChatBody, CompletionBody, GenerateBody, RequestError, TextBody
from nemo_rl_cpp.serving.chat import Said, chat_prompt, takes_tools, turn_of, turns_of
from nemo_rl_cpp.serving.requests import Progress, Sample
from nemo_rl_cpp.serving.texts import TextStream
from nemo_rl_cpp.serving.tool_calls import Spoken, find_calls

if TYPE_CHECKING:
    from nemo_rl_cpp.serving.model import ServedModel
    from nemo_rl_cpp.serving.rollouts import Rollout

_COMPLETION_TOKENS = 16  # OpenAI's, where a completion names no number
_MOST_SAID = 32


def _tells_usage(body: TextBody | GenerateBody) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    return body.stream_options is not None and body.stream_options.include_usage


class TextAnswer:
    """What answers of text have in common.

    Attributes:
        streams: whether each token is sent as it comes.
        samples: answers to the prompt.
    """

    def __init__(self, model: ServedModel, body: TextBody, rollout: Rollout | None, request_id: str) -> None:
        self.id = request_id
        self.model = model.check_name(body.model)
        self.served, self.body = model, body
        self.streams, self.samples, self.seed = body.stream, body.n or 1, body.seed
        self.prompt_ids = self._prompt(rollout)
        model.check_prompt(self.prompt_ids, "prompt")
        self.sampling = model.sampling(body, self._longest(), len(self.prompt_ids), rollout)
        self.texts = [self._text_stream() for _ in range(self.samples)]

    def _prompt(self, rollout: Rollout | None) -> list[int]:
        raise NotImplementedError

    def _longest(self) -> int | None:
        return None

    def _text_stream(self) -> TextStream:
        b = self.body
        return TextStream(self.served.tokenizer, b.stop_strings, b.include_stop_str_in_output, b.skip_special_tokens)

    def _ids(self, sample: Sample | Progress) -> Json:
        return {"token_ids": list(sample.token_ids)} if self.body.return_token_ids else {}

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """What later requests of the rollout go on from."""

    def opening(self, header: Header) -> Iterator[Json]:
        """Chunks before the first token."""
        yield from ()

    def _last_usage(self, header: Header, samples: list[Sample], kind: str) -> Iterator[Json]:
        if _tells_usage(self.body):
            yield header.body(kind, []) | {"usage": usage(len(self.prompt_ids), samples)}


class CompletionAnswer(TextAnswer):
    """An answer of /v1/completions."""

    def __init__(self, model: ServedModel, body: CompletionBody, rollout: Rollout | None, request_id: str) -> None:
        self._asked = body
        if body.best_of not in (None, body.n or 1):
            raise RequestError("best_of is not n: answers are not ranked here", param="best_of")
        super().__init__(model, body, rollout, f"cmpl-{request_id}")
        self._offsets = [0] * self.samples  # characters of the tokens that were sent

    def _prompt(self, rollout: Rollout | None) -> list[int]:
        prompt = self._asked.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return prompt_ids(self.served.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)

    def _longest(self) -> int | None:
        return _COMPLETION_TOKENS

    def _choice(self, k: int, text: str, sample: Sample) -> Json:
        logprobs = None
        if self._asked.logprobs is not None:
            logprobs, self._offsets[k] = completion_logprobs(self.served.tokenizer, sample, self._offsets[k])
        choice: Json = {"index": k, "text": text, "logprobs": logprobs, "finish_reason": sample.finish_reason}
        return choice | self._ids(sample)

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        """The body of an answer that does not stream."""
        choices = [self._choice(k, self.texts[k].push(s.token_ids, last=True), s) for k, s in enumerate(samples)]
        given = {"prompt_token_ids": self.prompt_ids} if self.body.return_token_ids else {}
        return header.body("text_completion", choices) | {"usage": usage(len(self.prompt_ids), samples)} | given

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """The chunks of new tokens."""
        part = progress.part()
        text = self.texts[progress.sample].push(part.token_ids, last=bool(part.reason))
        if text or part.reason or self._asked.logprobs is not None or self.body.return_token_ids:
            yield header.body("text_completion", [self._choice(progress.sample, text, part)])

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        """Chunks behind the last token."""
        yield from self._last_usage(header, samples, "text_completion")


class ChatAnswer(TextAnswer):
    """An answer of /v1/chat/completions."""

    def __init__(self, model: ServedModel, body: ChatBody, rollout: Rollout | None, request_id: str) -> None:
        self._asked = body
        self._tools = body.tools if body.tool_choice != "none" else None
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
        self._spoken: dict[int, Spoken] = {}

    def _prompt(self, rollout: Rollout | None) -> list[int]:
        said = [] if rollout is None else list(rollout.said)
        return chat_prompt(self.served.tokenizer, self._asked.messages, self._tools, said)

    def _message(self, k: int, sample: Sample) -> Spoken:
        if k not in self._spoken:
            text = self._text_stream().push(sample.token_ids, last=True)
            self._spoken[k] = find_calls(text, f"{self.id[-8:]}_{k}") if self._tools else Spoken(text)
        return self._spoken[k]

    def _finish(self, k: int, sample: Sample) -> str | None:
        calls = sample.finish_reason == "stop" and self._message(k, sample).calls
        return "tool_calls" if calls else sample.finish_reason

    def _logprobs(self, sample: Sample) -> Json | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(self.served.tokenizer, self.served.bytes_of_token, sample)

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        """The body of an answer that does not stream."""
        choices = []
        for k, sample in enumerate(samples):
            message = chat_message(self._message(k, sample))
            choice: Json = {
                "index": k, "message": message, "logprobs": self._logprobs(sample), "finish_reason": self._finish(k, sample)
            }  # fmt: skip
            choices.append(choice | self._ids(sample))
        given = {"prompt_token_ids": self.prompt_ids} if self.body.return_token_ids else {}
        return header.body("chat.completion", choices) | {"usage": usage(len(self.prompt_ids), samples)} | given

    def remember(self, rollout: Rollout, samples: list[Sample]) -> None:
        """The conversation with its first answer."""
        spoken = self._message(0, samples[0])
        turn = turn_of("assistant", spoken.text, [(call.name, call.arguments) for call in spoken.calls])
        said = Said(
            (*turns_of(self._asked.messages), turn), [*self.prompt_ids, *samples[0].token_ids], samples[0].reason == 1, self._tools
        )  # fmt: skip
        rollout.said = [*rollout.said[1 - _MOST_SAID :], said]

    def opening(self, header: Header) -> Iterator[Json]:
        """The role, for each answer."""
        for k in range(self.samples):
            yield header.body("chat.completion.chunk", [_delta(k, {"role": "assistant", "content": ""})])

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """The chunks of new tokens. With tools the text comes at the end, when it is known which part of it is a call."""
        part = progress.part()
        if self._tools:
            return
        text = self.texts[progress.sample].push(part.token_ids, last=bool(part.reason))
        if text or part.reason or self._asked.logprobs or self.body.return_token_ids:
            delta = {"content": text} if text else {}
            yield header.body(
                "chat.completion.chunk",
                [_delta(progress.sample, delta, part.finish_reason, self._logprobs(part)) | self._ids(part)],
            )

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        """Chunks behind the last token."""
        for k, sample in enumerate(samples if self._tools else ()):
            message = chat_message(self._message(k, sample))
            calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())]
            delta: Json = {"content": message["content"]} | ({"tool_calls": calls} if calls else {})
            yield header.body(
                "chat.completion.chunk",
                [_delta(k, delta, self._finish(k, sample), self._logprobs(sample)) | self._ids(sample)],
            )
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
        self.prompt_ids = list(body.token_ids)
        model.check_prompt(self.prompt_ids, "token_ids")
        self.sampling = model.sampling(body.sampling_params, None, len(self.prompt_ids), rollout)
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
        return {} if told else {"prompt_token_ids": self.prompt_ids}

    def opening(self, header: Header) -> Iterator[Json]:
        """Nothing goes before the first token."""
        yield from ()

    def chunk(self, header: Header, progress: Progress) -> Iterator[Json]:
        """The chunk of new tokens."""
        yield self._part(header, [self._choice(progress.sample, progress.part())]) | self._prompt_ids()

    def closing(self, header: Header, samples: list[Sample]) -> Iterator[Json]:
        """Chunks behind the last token."""
        if _tells_usage(self._body):
            yield self._part(header, []) | {"usage": usage(len(self.prompt_ids), samples)}

    def _part(self, header: Header, choices: list[Json]) -> Json:
        return {
            "request_id": self.id, "output_mode": "tokens", "choices": choices, "weight_version": header.version, "usage": None
        }  # fmt: skip

    def whole(self, header: Header, samples: list[Sample]) -> Json:
        """The body of an answer that does not stream."""
        choices = [self._choice(k, sample) for k, sample in enumerate(samples)]
        told = {
            "model": self.model,
            "created": header.created,
            "prompt_logprobs": None,
            "usage": usage(len(self.prompt_ids), samples),
        }
        return self._part(header, choices) | told | self._prompt_ids()
