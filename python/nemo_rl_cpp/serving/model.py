"""A model that the HTTP server serves, with its engine, its tokenizer and the server's limits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.checkpoint_template import settle_chat_template
from nemo_rl_cpp.data.texts import bytes_of_token, token_bytes_table
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.cluster import check_device
from nemo_rl_cpp.hub.sources import find_policy_weights, resolve_model
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.generation.native import native_runner
from nemo_rl_cpp.models.hf_config import max_positions
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.serving.bodies import GenerateBody, RequestError, SamplingFields, TextBody
from nemo_rl_cpp.serving.engine import EngineThread, Likeliest, Sampling, likeliest_of_sequence, score_sequence
from nemo_rl_cpp.serving.rollouts import Rollout, Rollouts

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType

PromptScorer = Callable[[list[int], int], tuple[list[float], list[Likeliest]]]
"""A function from the token ids of a prompt and a number k to (log-probability of each token given those before it, at
temperature 1, and 0 for the first token; the k most likely tokens at each position, none at the first)."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server: the number and size of requests, and timeouts."""

    max_queue: int = 1024  # responses running or waiting, over all clients; further requests get status 503
    max_body_bytes: int = 8 << 20  # the largest request body
    request_timeout_s: float = 600.0  # the time from the last byte of a request to the last byte of its response
    body_timeout_s: float = 30.0  # the time for a request's body to arrive


@dataclass
class ServedModel:
    """A model that a server serves, with its engine, its tokenizer and its limits."""

    names: tuple[str, ...]  # the model names that requests may use; the server lists the first
    tokenizer: TokenizerType
    engine: EngineThread
    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    rollouts: Rollouts
    default: Sampling = field(default_factory=Sampling)  # sampling parameters for requests without any
    limits: Limits = field(default_factory=Limits)
    digest: str = ""  # the digest of the weights; "" if unknown
    score_prompt: PromptScorer | None = None  # None if the server does not score prompts

    @cached_property
    def bytes_of_token(self) -> Callable[[int], bytes]:
        """Return a function from a token id to the token's bytes, which may be a partial character."""
        return bytes_of_token(self.tokenizer)

    def check_name(self, name: str | None) -> str:
        """Return the requested model name (None: the server's first). Raise RequestError if it is unknown."""
        if name is not None and name not in self.names:
            raise RequestError(f"the model `{name}` does not exist: this server has `{self.names[0]}`", 404, "model")
        return name or self.names[0]

    def check_prompt(self, prompt_ids: list[int], param: str) -> None:
        """Raise RequestError, naming the field `param`, if a prompt is empty, too long, or has an unknown token."""
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
        """Return the sampling parameters of a request whose prompt has `prompt` tokens. If the request sets no limit, a
        response has at most `longest` tokens, or as many as fit; in a training rollout, the run's max_new_tokens. Raise
        RequestError if such a rollout's request differs from the run's parameters or asks for several responses."""
        trained = None if rollout is None else rollout.sampling
        limit = body.max_tokens or getattr(body, "max_completion_tokens", None)
        if trained is None:
            limit = limit or longest or self.max_model_len - prompt
        else:
            limit = min(limit or self.default.max_new_tokens, self.default.max_new_tokens)
            if (body.n or 1) != 1:
                raise RequestError("n is not 1, but a call of a rollout that is trained has one answer", param="n")
        rule: dict[str, float] = {}
        for name in ("temperature", "top_p", "top_k"):
            base = getattr(trained or self.default, name)
            rule[name] = base if getattr(body, name) is None else getattr(body, name)
            rule[name] = max(rule[name], 0)  # top_k -1: no limit
            if trained is not None and rule[name] != base:
                raise RequestError(
                    f"{name} is {rule[name]:g}, but this rollout is trained, and its samples are drawn with {name} {base:g} "
                    f"(policy.generation.{name}): leave {name} out",
                    param=name,
                )
        if rule["temperature"] == 0:
            rule |= {"top_p": 1.0, "top_k": 0}
        return Sampling(
            **rule,
            max_new_tokens=min(limit, self.max_model_len),
            stop_token_ids=(*(() if body.ignore_eos else self.end_token_ids), *(body.stop_token_ids or ())),
            stop_strings=tuple(dict.fromkeys((*self.default.stop_strings, *(body.stop or ())))),
            num_likeliest=body.num_likeliest,
        )

    def rollout_of(self, body: TextBody | GenerateBody, header: str | None) -> Rollout | None:
        """Return the rollout whose key is in a request's header or body, or None if the request has no key."""
        if header is not None and body.rollout_key is not None and header != body.rollout_key:
            raise RequestError("the header X-Rollout-Key and rollout_key name two rollouts", param="rollout_key")
        key = header or body.rollout_key
        if key is not None and len(key) > 256:
            raise RequestError("the key of a rollout has more than 256 characters", param="rollout_key")
        return None if key is None else self.rollouts.find(key)


_LONGEST_CACHE = 4 << 30


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of a server's engine: sequence length, KV cache and batch."""

    max_model_len: int | None = None  # tokens of the longest sequence; None: what the model and the cache allow
    kv_cache_gb: float | None = None  # size of the KV cache; None: half of the free memory, on a CPU at most 4 GiB
    max_batch_size: int = 64  # the number of responses generated concurrently
    prefill_chunk_tokens: int = 512  # prompt tokens prefilled per step, so that a long prompt delays no others

    def cache_bytes(self, device: str = "cpu") -> int:
        if self.kv_cache_gb is not None:
            return int(self.kv_cache_gb * 1e9)
        if device == "cuda":
            return torch.cuda.mem_get_info()[0] // 2
        return max(min(available_bytes() // 2, _LONGEST_CACHE), 1)

    def engine(self, runner: C.ModelRunner, cache_bytes: int, token_bytes: list[bytes]) -> C.ResidentEngine:
        """Return an engine of these sizes that runs the model of `runner`, with a KV cache of at most `cache_bytes`."""
        return C.ResidentEngine(
            runner, max_batch_size=self.max_batch_size, prefill_chunk_tokens=self.prefill_chunk_tokens,
            max_model_len=self.max_model_len, max_cache_bytes=cache_bytes, token_bytes=token_bytes,
        )  # fmt: skip


def engine_thread(
    runner: C.ModelRunner, tokenizer: TokenizerType, sizes: EngineSizes, cache_bytes: int, version: int,
    is_open: bool = True,
) -> EngineThread:  # fmt: skip
    """Return a thread that makes and runs an engine. Responses report `version` as the version of the weights until a
    call of `EngineThread.open` sets another."""
    return EngineThread(
        lambda: sizes.engine(runner, cache_bytes, token_bytes_table(tokenizer, runner.vocab_size())), version, is_open
    )


def load_model(
    name: str,
    *,
    served_name: str | None,
    precision: str,
    sizes: EngineSizes,
    limits: Limits,
    quantization: str | None = None,
    device: str = "cpu",
    seed: int = 42,
) -> ServedModel:
    """Load a model for a server. `name` is a model folder, a model name, a checkpoint (`step_N`), or a run's folder,
    for its newest checkpoint; clients may also use `served_name`. `device` is "cpu" or "cuda". `seed` seeds requests
    that name a rollout but no seed. Raise ValueError if the model cannot be found or does not fit."""
    check_device(device, "--device")
    folder = resolve_model(find_policy_weights(name), key="--model")
    opened = open_model_folder(str(folder), max_length=sizes.max_model_len, length_key="--max-model-len", key="--model")
    opened = replace(opened, max_length=min(sizes.max_model_len or 1 << 60, max_positions(opened.config)))
    opened.check_device(device)
    opened = opened.quantised(quantization, "--quantization")
    opened.check_weights()
    tokenizer = Tokenizer.from_pretrained(folder, section="")
    try:
        for remark in settle_chat_template(tokenizer, folder):
            warnings.warn(remark, stacklevel=2)
    except ValueError:
        pass  # without a template, completions work and chat reports that it is missing
    model = C.DecoderModel(opened.native(), getattr(torch, precision), False, device)
    opened.fill(model)
    runner, cache_bytes = native_runner(model, {}), sizes.cache_bytes(device)
    fits = runner.longest_sequence(sizes.prefill_chunk_tokens, cache_bytes)
    longest = length_that_fits(fits, cache_bytes, opened.max_length, is_given=sizes.max_model_len is not None)
    version = re.fullmatch(r"step_(\d+)", folder.parent.parent.name)  # in a checkpoint: step_N/policy/weights
    sizes, number = replace(sizes, max_model_len=longest), int(version[1]) if version else 0
    engine = engine_thread(runner, tokenizer, sizes, cache_bytes, number)
    names, ends = dict.fromkeys(n for n in (served_name, name) if n), end_token_ids(folder, opened.config, tokenizer)
    return ServedModel(
        tuple(names), tokenizer, engine, int(opened.config["vocab_size"]), longest, tuple(ends), Rollouts(seed), limits=limits,
        digest=f"{model.digest():016x}", score_prompt=prompt_scorer(model, engine),
    )  # fmt: skip


def prompt_scorer(model: C.DecoderModel, engine: EngineThread) -> PromptScorer:
    """Return a scorer of prompts. It runs the training forward pass of `model` while `engine` pauses between two
    steps."""
    trainer = cache(lambda: C.Trainer(model))

    def score(ids: list[int], count: int) -> tuple[list[float], list[Likeliest]]:
        with engine.model_lock:
            scored = score_sequence(trainer(), ids, torch.zeros(len(ids), dtype=trainer().out_dtype)).tolist()
            return scored, likeliest_of_sequence(trainer(), ids, count)

    return score


def length_that_fits(fits: int, cache_bytes: int, longest: int, is_given: bool) -> int:
    """Return the maximum length of sequences: `longest` if the KV cache can hold it, otherwise, with a warning, `fits`,
    the longest that it can hold. Raise ValueError if the user has set `longest` (`is_given`) and it does not fit, or if
    no sequence fits."""
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
