"""What a server serves, and the limits within which it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.token_bytes import bytes_of_token
from nemo_rl_cpp.serving.bodies import GenerateBody, RequestError, SamplingFields, TextBody
from nemo_rl_cpp.serving.requests import Sampling
from nemo_rl_cpp.serving.rollouts import Rollout, Rollouts

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.serving.engine_thread import EngineThread


@dataclass(frozen=True)
class Limits:
    """What a server takes before it refuses.

    Attributes:
        max_queue: answers that are under way or wait, over all clients; more are refused with status 503.
        max_body_bytes: of a request.
        request_timeout_s: from the last byte of a request to the last byte of its answer.
        body_timeout_s: for a request's body to arrive.
        header_timeout_s: for the head of a request to arrive.
        max_connections: open connections; more are refused with status 503.
    """

    max_queue: int = 1024
    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    max_connections: int = 2048


@dataclass
class ServedModel:
    """A model behind a server.

    Attributes:
        names: by which requests may call it; the first is shown.
        end_token_ids: where answers end.
        default: sampling where a request says nothing.
        digest: of the weights; "" where it is not known.
    """

    names: tuple[str, ...]
    tokenizer: TokenizerType
    engine: EngineThread
    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    rollouts: Rollouts
    default: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    digest: str = ""

    @cached_property
    def bytes_of_token(self) -> Callable[[int], bytes]:
        """The bytes of a token, which may be a part of a character only."""
        return bytes_of_token(self.tokenizer)

    def check_name(self, name: str | None) -> str:
        """The name by which the model was called; RequestError for another's."""
        if name is not None and name not in self.names:
            raise RequestError(
                f"the model `{name}` does not exist here: this server has `{self.names[0]}`", 404, "model"
            )
        return name or self.names[0]

    def check_prompt(self, prompt_ids: list[int], param: str) -> None:
        """RequestError for a prompt that cannot be answered."""
        if not prompt_ids:
            raise RequestError("the prompt has no token: give at least one character", param=param)
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer: this model's maximum context length is "
                f"{self.max_model_len} tokens",
                param=param,
            )
        if max(prompt_ids) >= self.vocab_size:
            raise RequestError(
                f"the prompt holds token {max(prompt_ids)}, but the vocabulary has {self.vocab_size} tokens",
                param=param,
            )

    def sampling(self, body: SamplingFields, longest: int | None, prompt: int, rollout: Rollout | None) -> Sampling:
        """How a request is sampled. `longest`: answer where the body names none; None: as long as there is room behind the prompt.

        An answer of a rollout that is trained has at most `default.max_new_tokens` tokens, the run's longest response.

        RequestError where a rollout that is trained asks for another distribution than training's.
        """
        asked_tokens = body.max_tokens or getattr(body, "max_completion_tokens", None)
        ends = () if body.ignore_eos else self.end_token_ids
        of_rollout = None if rollout is None else rollout.sampling
        base = of_rollout or self.default
        if of_rollout is None:
            limit = asked_tokens or longest or self.max_model_len - prompt
        else:
            limit = min(asked_tokens or self.default.max_new_tokens, self.default.max_new_tokens)
        asked = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        if asked["top_k"] is not None:
            asked["top_k"] = max(asked["top_k"], 0)
        given = {name: getattr(base, name) if value is None else value for name, value in asked.items()}
        if of_rollout is not None:
            for name, value in given.items():
                if value != getattr(of_rollout, name):
                    raise RequestError(
                        f"{name} is {value:g}, but this rollout is trained, and its samples are drawn with {name} {getattr(of_rollout, name):g} "
                        f"(policy.generation.{name}): leave {name} out",
                        param=name,
                    )
            if (body.n or 1) != 1:
                raise RequestError("n is not 1, but a call of a rollout that is trained has one answer", param="n")
        if given["temperature"] == 0:
            given |= {"top_p": 1.0, "top_k": 0}
        return Sampling(
            temperature=float(given["temperature"]), top_p=float(given["top_p"]), top_k=int(given["top_k"]),
            max_new_tokens=min(limit, self.max_model_len), stop_token_ids=(*ends, *(body.stop_token_ids or ())),
            stop_strings=tuple(dict.fromkeys((*self.default.stop_strings, *body.stop_strings))),
            num_likeliest=body.num_likeliest,
        )  # fmt: skip

    def rollout_of(self, body: TextBody | GenerateBody, header: str | None) -> Rollout | None:
        """The rollout that a request belongs to, by its header or its body."""
        if header is not None and body.rollout_key is not None and header != body.rollout_key:
            raise RequestError("the header X-Rollout-Key and rollout_key name two rollouts", param="rollout_key")
        key = header or body.rollout_key
        if key is not None and len(key) > 256:
            raise RequestError("the key of a rollout has more than 256 characters", param="rollout_key")
        return None if key is None else self.rollouts.find(key)
