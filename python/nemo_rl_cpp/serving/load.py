"""A model from a folder, ready to be served."""

import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.checkpoint_template import settle_chat_template
from nemo_rl_cpp.data.token_bytes import token_bytes_table
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.hub.sources import TINY_RANDOM, find_policy_weights, resolve_model
from nemo_rl_cpp.metrics.memory import available_bytes
from nemo_rl_cpp.models.generation.native import native_runner
from nemo_rl_cpp.models.hf_config import max_positions
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.serving.engine_thread import EngineThread, engine_maker, longest_in_cache
from nemo_rl_cpp.serving.model import Limits, ServedModel
from nemo_rl_cpp.serving.rollouts import Rollouts

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
