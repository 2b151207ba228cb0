"""Validated request bodies: OpenAI's fields, and the fields that vLLM adds.

A field that would change the response but is not supported is rejected by name. No field is silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from nemo_rl_cpp.argument_checks import did_you_mean

Text = Annotated[str, StringConstraints(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Likeliest = Annotated[int, Field(strict=True, ge=0, le=20)]  # the limit of csrc/ops/likeliest.h
TokenIds = list[Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]]
NewTokens = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
StopTexts = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=1024)]],
    Field(max_length=16),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Key = Annotated[str, Field(min_length=1, max_length=256)]
RequestId = Annotated[str, Field(pattern="^[!-~]+$", max_length=256)]  # is sent back in a header

_NEUTRAL: dict[str, object] = {
    "min_p": 0, "min_tokens": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {},
    "bad_words": [], "spaces_between_special_tokens": True, "detokenize": True, "echo": False,
    "priority": 0, "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"],
    "verbosity": "medium", "add_generation_prompt": True,
}  # fmt: skip
"""Fields that are accepted only with a value that changes nothing."""
_IGNORED = {
    "user", "metadata", "store", "service_tier", "cache_salt", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
"""Fields that do not affect the response."""
_IGNORED_PARAMS = {"detokenize", "spaces_between_special_tokens", "routed_experts_prompt_start", "output_kind"}
"""Fields of vLLM's `sampling_params` that do not affect token ids."""


class RequestError(ValueError):
    """Raised for an invalid request. `status` is the HTTP status, and `param` names the invalid field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        """Drop fields that are null, because in OpenAI's protocol null means that the field is not set."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class SamplingFields(_Body):
    """The sampling fields of all three routes. None means the server's default."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=-1)
    n: Whole | None = Field(None, ge=1, le=128)
    seed: Whole | None = Field(None, ge=0, le=2**63 - 1)
    max_tokens: NewTokens | None = None
    stop: StopTexts | None = None  # one text or several
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class StreamOptions(_Body):
    """The field `stream_options` of OpenAI."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False  # options of OpenAI's servers that have no effect on the text


class TextBody(SamplingFields):
    """The fields shared by completions and chat."""

    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    rollout_key: Key | None = None
    request_id: RequestId | None = None


class CompletionBody(TextBody):
    """The body of `POST /v1/completions`."""

    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Likeliest | None = None
    prompt_logprobs: Literal[0] | None = None  # 0: log-probabilities of the prompt's own tokens only
    echo: bool = False  # the text and its log-probabilities begin with the prompt's
    best_of: Whole | None = None

    @property
    def num_likeliest(self) -> int:
        """The number of most likely tokens to return for the position of each sampled token."""
        return self.logprobs or 0


class ToolCallFunction(_Body):
    name: Text
    arguments: Text


class ToolCall(_Body):
    """A tool call of an earlier response, in OpenAI's format."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction
    index: Whole | None = None


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    annotations: Annotated[list, Field(max_length=0)] | None = None  # an OpenAI client sends it back with a response

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class ChatBody(TextBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: NewTokens | None = None
    logprobs: bool = False
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[dict], Field(max_length=256)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, object] = {}

    @property
    def num_likeliest(self) -> int:
        return self.top_logprobs or 0


class GenerateParams(SamplingFields):
    """The field `sampling_params` in the body of vLLM's route /inference/v1/generate."""

    logprobs: Likeliest | None = None

    @property
    def num_likeliest(self) -> int:
        """The number of most likely tokens to return at each position. `logprobs: 1` asks for the sampled token alone."""
        return self.logprobs if self.logprobs and self.logprobs > 1 else 0


class GenerateBody(_Body):
    """The body of `POST /inference/v1/generate`."""

    model: Text | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool = False
    request_id: RequestId | None = None
    rollout_key: Key | None = None


Body = CompletionBody | ChatBody | GenerateBody


def read_body(kind: type[Body], data: object) -> Body:
    """Return `data` as a validated body of the class `kind`. Raise RequestError for the first invalid field."""
    if not isinstance(data, dict):
        raise RequestError(f"the body is a JSON {type(data).__name__}: expected an object")
    data = _without_neutral(data, _IGNORED, kept={"echo"} if kind is CompletionBody else set())
    if kind is GenerateBody and isinstance(data.get("sampling_params"), dict):
        data["sampling_params"] = _without_neutral(data["sampling_params"], _IGNORED_PARAMS)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        paths = [[part for part in each["loc"] if not _is_a_kind(part)] for each in errors]
        # a field that accepts several types has an error for each: the deepest is of the type that was meant
        of_field = [i for i, path in enumerate(paths) if path[: len(paths[0])] == paths[0]]
        deepest = max(of_field, key=lambda i: len(paths[i]))
        first, path = errors[deepest], ".".join(map(str, paths[deepest]))
        if first["type"] == "extra_forbidden":
            otherwise = "leave it out, or see docs/serving.md for what there is instead"
            text = f"{path} is not known here: {did_you_mean(path, kind.model_fields, otherwise, 0.75)}"
        else:
            text = f"{path or 'the body'}: {first['msg']}"
            text += f", not {first.get('input')!r:.80}" if first["type"] not in ("missing", "too_short") else ""
        raise RequestError(text, param=path or None) from None


def _without_neutral(data: dict[str, Any], ignored: set[str], kept: set[str] = frozenset()) -> dict[str, Any]:
    """Return the fields of a body, except those that are null or in `ignored`, and those in `_NEUTRAL` that are not in
    `kept`. A field in `_NEUTRAL` may only have the value given there, which has no effect; raise RequestError if such a
    field has another value."""
    changing = {name: value for name, value in data.items() if value is not None and name not in ignored}
    for name in changing.keys() & _NEUTRAL.keys() - kept:
        value = changing.pop(name)
        neutral = _NEUTRAL[name]
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise RequestError(f"{name} is {value!r:.80}: expected {neutral!r}, or leave it out", param=name)
    return changing


def _is_a_kind(part: object) -> bool:
    """Return whether an element of pydantic's error path is the type of a union's member, not the name of a field."""
    return isinstance(part, str) and any(sign in part for sign in "[(") or part in ("str", "constrained-str")
