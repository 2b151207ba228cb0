"""What a server serves, from a folder or a run, and the limits within which it does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.checkpoint_template import settle_chat_template
from nemo_rl_cpp.data.texts import bytes_of_token, token_bytes_table
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.hub.sources import TINY_RANDOM, find_policy_weights, resolve_model
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.generation.native import native_runner
from nemo_rl_cpp.models.hf_config import max_positions
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.serving.bodies import GenerateBody, RequestError, SamplingFields, TextBody
from nemo_rl_cpp.serving.engine import EngineThread, Sampling, engine_maker, longest_in_cache
from nemo_rl_cpp.serving.rollouts import Rollout, Rollouts

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.serving.engine import EngineThread


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


PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DEFAULT_SLOTS = 64
DEFAULT_CHUNK = 512
_LONGEST_CACHE = 4 << 30


@dataclass(frozen=True)
class EngineSizes:
    """How much a served engine holds at once. None: what fits.

    Attributes:
        max_model_len: longest sequence, prompt and answer; None: as many tokens as the model has positions for and the cache holds.
        kv_cache_gb: memory of keys and values; None: half of the free memory, 4 GiB at most.
        max_batch_size: answers that are generated at the same time.
        prefill_chunk_tokens: tokens of prompts that a step computes, so that a long prompt does not hold up the others.
    """

    max_model_len: int | None = None
    kv_cache_gb: float | None = None
    max_batch_size: int = DEFAULT_SLOTS
    prefill_chunk_tokens: int = DEFAULT_CHUNK

    def cache_bytes(self) -> int:
        """Of keys and values, at most."""
        if self.kv_cache_gb is not None:
            return int(self.kv_cache_gb * 1e9)
        return max(min(available_bytes() // 2, _LONGEST_CACHE), 1)


def load_model(
    name: str, *, served_name: str | None = None, precision: str = "bfloat16", sizes: EngineSizes | None = None, limits: Limits | None = None,
    seed: int = 42,
) -> ServedModel:  # fmt: skip
    """The model of a folder, a model name, a checkpoint (`step_N`) or the folder of a run's checkpoints, with its engine.

    Args:
        served_name: by which clients call it, beside `name`.
        seed: part of the draws of requests that name a rollout and no seed of their own.

    Raises ValueError where the model cannot be had or does not fit.
    """
    if name == TINY_RANDOM:
        raise ValueError(
            f"'{TINY_RANDOM}' has random weights: give the checkpoints of a run that has trained it, or a model"
        )
    sizes = sizes or EngineSizes()
    folder = resolve_model(find_policy_weights(name), key="--model")
    opened = open_model_folder(str(folder), max_length=sizes.max_model_len, length_key="--max-model-len", key="--model")
    longest = min(sizes.max_model_len or 1 << 60, max_positions(opened.config))
    opened = replace(opened, max_length=longest)
    opened.check_weights()
    tokenizer = Tokenizer.from_pretrained(folder, section="")
    try:
        for remark in settle_chat_template(tokenizer, folder):
            warnings.warn(remark, stacklevel=2)
    except ValueError:
        pass  # without a template there are completions, and chat says what is missing
    model = C.DecoderModel(opened.native(), PRECISIONS[precision], False)
    opened.fill(model)
    runner, cache_bytes = native_runner(model, {}), sizes.cache_bytes()
    longest = length_that_fits(runner, cache_bytes, longest, is_given=sizes.max_model_len is not None)
    vocab_size = int(opened.config["vocab_size"])
    make = engine_maker(
        runner, max_batch_size=sizes.max_batch_size, prefill_chunk_tokens=sizes.prefill_chunk_tokens, max_model_len=longest,
        cache_bytes=cache_bytes, token_bytes=lambda: token_bytes_table(tokenizer, vocab_size),
    )  # fmt: skip
    engine = EngineThread(make, version_of(folder))
    names = tuple(dict.fromkeys(n for n in (served_name, name) if n))
    return ServedModel(
        names, tokenizer, engine, vocab_size, longest, tuple(end_token_ids(folder, opened.config, tokenizer)),
        Rollouts(seed), limits=limits or Limits(), digest=f"{model.digest():016x}",
    )  # fmt: skip


def length_that_fits(runner: C.ModelRunner, cache_bytes: int, longest: int, is_given: bool) -> int:
    """The length of sequences that the cache holds, at most `longest`; a warning where it is less.

    Raises ValueError where less was not asked for (`is_given`), or nothing fits.
    """
    fits = longest_in_cache(runner, cache_bytes)
    if longest <= fits:
        return longest
    cache = f"{cache_bytes / 1e9:.3g} GB of keys and values"
    if fits < 2:
        raise ValueError(f"--kv-cache-gb: {cache} hold no sequence of this model: raise it")
    if is_given:
        raise ValueError(
            f"--max-model-len is {longest}, but {cache} hold a sequence of {fits} tokens: raise --kv-cache-gb, or lower --max-model-len"
        )
    warnings.warn(
        f"sequences have at most {fits} tokens here, though the model has {longest} positions: {cache} hold no longer one; "
        "raise --kv-cache-gb for longer ones",
        stacklevel=3,
    )
    return fits


def version_of(folder: Path) -> int:
    """The step of a checkpoint step_N/policy/weights; 0 for a model that is none."""
    found = re.fullmatch(r"step_(\d+)", folder.parent.parent.name)
    return int(found[1]) if found else 0
