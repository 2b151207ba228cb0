"""The bodies of requests, checked: OpenAI's fields, and those that vLLM adds. A field that would change the answer and is not
known here is refused by name; none is ignored in silence."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

_MOST_SAMPLES = 128
_MOST_STOPS = 16
_MOST_LIKELIEST = 20  # csrc/ops/likeliest.h
Text = Annotated[str, StringConstraints(strict=True)]
Whole = Annotated[int, Field(strict=True)]
TokenIds = list[Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]]
NoPriority = Annotated[int, Field(strict=True, ge=0, le=0)] | None  # requests are answered as they come
StopTexts = Annotated[str, Field(min_length=1, max_length=1024)]


class RequestError(ValueError):
    """A mistake in a request; `status` is HTTP's, `param` the field."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        """Leaves out fields that are null: in OpenAI's protocol null means what an absent field does."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class SamplingFields(_Body):
    """What all three routes take of sampling. None: the server's own value."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=-1)
    n: Whole | None = Field(None, ge=1, le=_MOST_SAMPLES)
    seed: Whole | None = Field(None, ge=0, le=2**63 - 1)
    max_tokens: Whole | None = Field(None, ge=1, le=2**31 - 1)
    stop: StopTexts | Annotated[list[StopTexts], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # at the values that change nothing
    min_p: float | None = Field(None, ge=0, le=0)
    min_tokens: Whole | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    repetition_penalty: float | None = Field(None, ge=1, le=1)
    logit_bias: Annotated[dict, Field(max_length=0)] | None = None
    bad_words: Annotated[list, Field(max_length=0)] | None = None
    spaces_between_special_tokens: Literal[True] = True
    detokenize: Literal[True] = True
    prompt_logprobs: Whole | None = Field(None, ge=0, le=0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.stop] if isinstance(self.stop, str) else self.stop or ()))

    @property
    def num_likeliest(self) -> int:
        """How many alternatives are told beside each token."""
        return 0


class StreamOptions(_Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False  # of OpenAI's servers; changes no text


class TextBody(SamplingFields):
    """What completions and chat have in common."""

    NAME: ClassVar[str] = ""
    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    rollout_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    # kept by nobody here
    user: Text | None = None
    metadata: dict | None = None
    store: bool | None = None
    service_tier: Text | None = None
    priority: NoPriority = None
    cache_salt: Text | None = None
    request_id: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class CompletionBody(TextBody):
    """`POST /v1/completions`."""

    NAME: ClassVar[str] = "completions"
    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(strict=True, ge=0, le=_MOST_LIKELIEST)] | None = None
    echo: Literal[False] = False
    best_of: Whole | None = None
    suffix: Literal[None] = None

    @property
    def num_likeliest(self) -> int:
        return self.logprobs or 0


class ToolCallFunction(_Body):
    """A call in an earlier answer."""

    name: Text
    arguments: Text


class ToolCall(_Body):
    """As OpenAI writes one."""

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
    # what an OpenAI client's own answer holds besides, given back as it came
    refusal: Literal[None] = None
    annotations: Annotated[list, Field(max_length=0)] | None = None
    audio: Literal[None] = None
    function_call: Literal[None] = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class ResponseFormat(_Body):
    """Only free text: nothing constrains the sampling."""

    type: Literal["text"]


class ChatBody(TextBody):
    """`POST /v1/chat/completions`."""

    NAME: ClassVar[str] = "chat"
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Whole | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=_MOST_LIKELIEST)] | None = None
    tools: Annotated[list[dict], Field(max_length=256)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None  # a model that writes several is not held back
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    add_generation_prompt: Literal[True] = True
    reasoning_effort: Literal[None] = None

    @property
    def num_likeliest(self) -> int:
        return self.top_logprobs or 0


class GenerateParams(SamplingFields):
    """`sampling_params` of vLLM's route."""

    logprobs: Annotated[int, Field(strict=True, ge=0, le=_MOST_LIKELIEST)] | None = None
    detokenize: bool = True  # there is no text
    spaces_between_special_tokens: bool = True
    routed_experts_prompt_start: Whole | None = None  # of mixtures of experts whose routers are replayed
    output_kind: Whole | None = None

    @property
    def num_likeliest(self) -> int:
        """How many of the likeliest tokens are looked for beside each sampled one, which is the first that is told."""
        return self.logprobs if self.logprobs and self.logprobs > 1 else 0


class GenerateBody(_Body):
    """`POST /inference/v1/generate`."""

    NAME: ClassVar[str] = "generate"
    model: Text | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool | None = None
    request_id: Text | None = None
    cache_salt: Text | None = None
    priority: NoPriority = None
    rollout_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None


Body = CompletionBody | ChatBody | GenerateBody


def read_body(kind: type[Body], data: object) -> Body:
    """The checked body; RequestError that names the first field which cannot be."""
    if not isinstance(data, dict):
        raise RequestError(f"the body is a JSON {type(data).__name__}: expected an object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"] if not _is_a_kind(part))
        if first["type"] == "extra_forbidden":
            text = f"{path} is not known here: leave it out, or see docs/serving.md for what there is instead"
        else:
            given = repr(first.get("input"))
            text = f"{path or 'the body'}: {first['msg']}" + (
                f", not {given[:80]}" if first["type"] != "missing" else ""
            )
        raise RequestError(text, param=path or None) from None


def _is_a_kind(part: object) -> bool:
    """Whether a part of pydantic's path names one of several types, and no field."""
    return isinstance(part, str) and any(sign in part for sign in "[(") or part in ("str", "constrained-str")
