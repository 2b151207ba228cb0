"""What every engine reads of `policy.generation`, and of the rows that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.config.sections import check_keys
from nemo_rl_cpp.data.boundaries import end_token_ids_of_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.telemetry.memory import available_bytes

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType

DEFAULT_CHUNK = 2048
"""Tokens of prompts that are computed at once without `prefill_chunk_tokens`."""
STREAMS = {"train": 0, "val": 1, "eval": 2}
"""Streams of random draws, by their number in csrc/common/random.h."""


class Sampling(NamedTuple):
    """How tokens are drawn; top_k 0: no limit."""

    temperature: float
    top_p: float
    top_k: int
    greedy: bool


class EngineSettings:
    """The settings of an engine.

    Args:
        config: section `policy.generation`, a mapping or a typed model.
        tokenizer: gives the pad token and the bytes on which stop strings are matched.
        end_token_ids: where responses end without `stop_token_ids` (`data.boundaries`); None: at the tokenizer's end tokens.
        max_model_len: longest sequence, prompt and response together; None: `vllm_cfg.max_model_len`, or no limit.
        seed: part of the key of every random draw.

    Raises ValueError for unknown keys.
    """

    def __init__(
        self, config: EvalGenerationConfig | Mapping[str, object], tokenizer: TokenizerType, *,
        end_token_ids: Sequence[int] | None, max_model_len: int | None, seed: int,
    ) -> None:  # fmt: skip
        check_keys(config, "policy.generation", EvalGenerationConfig)
        self.config = config
        self.tokenizer = tokenizer
        self.seed = int(seed) & 0xFFFFFFFF
        self.max_model_len = int(max_model_len or get_setting(get_setting(config, "vllm_cfg"), "max_model_len") or 0)
        self._stop_token_ids = _stop_token_ids(config, tokenizer, end_token_ids)
        self._next_draw_id = 0

    def sampling(self, greedy: bool, stream: str) -> Sampling:
        """How tokens of this stream are drawn. Greedy decoding reports log-probabilities at temperature 1 without a filter."""

        def setting(name: str, default: float) -> float:
            validation = get_setting(self.config, f"val_{name}") if stream == "val" else None
            value = get_setting(self.config, name) if validation is None else validation
            return default if value is None else value

        temperature = setting("temperature", 1.0)
        greedy = greedy or temperature == 0
        return Sampling(
            temperature=1.0 if greedy else temperature,
            top_p=setting("top_p", 1.0),
            top_k=max(int(setting("top_k", 0)), 0),
            greedy=greedy,
        )

    def sampling_rule(self, greedy: bool, stream: str) -> C.SamplingRule:
        """`sampling` for the native sampler."""
        return C.SamplingRule(**self.sampling(greedy, stream)._asdict())

    def max_new_tokens(self, lengths: Tensor) -> Tensor:
        """int64 [B]: the longest response to prompts of these lengths [B]."""
        limit = get_setting(self.config, "max_new_tokens")
        if limit is None and not self.max_model_len:
            raise ValueError(
                "policy.generation.max_new_tokens is null and no longest sequence is known: set one of them"
            )
        if limit is None:
            return (self.max_model_len - lengths).clamp(min=1)
        return torch.full_like(lengths, int(limit))

    def draw_ids(self, draw_ids: Tensor | Sequence[int] | None, rows: int) -> Tensor:
        """int64 [B]: those of the caller, or the next numbers."""
        if draw_ids is not None:
            return row_integers("draw_ids", draw_ids, rows)
        first = self._next_draw_id
        self._next_draw_id += rows
        return torch.arange(first, first + rows)

    def stop_texts(self, per_row: Sequence[str | Sequence[str] | None] | None, rows: int) -> list[tuple[str, ...]]:
        """[B]: the different stop strings of each row, those of the configuration first. ValueError for another number of rows."""
        per_row = [None] * rows if per_row is None else list(per_row)
        if len(per_row) != rows:
            raise ValueError(f"stop_strings: {len(per_row)} entries for {rows} rows")
        common = _strings_of(get_setting(self.config, "stop_strings"))
        return [tuple(dict.fromkeys(common + _strings_of(row))) for row in per_row]

    def cache_bytes(self, device: torch.device, memory_share: float) -> int:
        """What keys and values may take: kv_cache_gb, or half of the share of the memory that is free where they lie."""
        gigabytes = get_setting(self.config, "kv_cache_gb")
        return int(gigabytes * 1e9) if gigabytes else max(int(_free_bytes(device) * memory_share) // 2, 1)


def _free_bytes(device: torch.device) -> int:
    """Memory that can still be taken: the GPU's, or this machine's."""
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def get_setting(config: object, key: str) -> object:
    """config[key] or config.key; None where it is absent."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _strings_of(value: str | Sequence[str] | None) -> list[str]:
    """One string, several, or none, as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _stop_token_ids(
    config: EvalGenerationConfig | Mapping[str, object], tokenizer: TokenizerType, end_token_ids: Sequence[int] | None
) -> list[int]:
    given = get_setting(config, "stop_token_ids")
    if given is None:
        given = end_token_ids_of_tokenizer(tokenizer) if end_token_ids is None else end_token_ids
    return [int(i) for i in given]


def row_integers(name: str, values: Tensor | Sequence[int], rows: int) -> Tensor:
    """int64 [rows]; ValueError, which calls them `name`, for another number of them."""
    result = torch.as_tensor(values).to("cpu", torch.int64)
    if result.shape != (rows,):
        raise ValueError(f"{name}: expected one integer for each of {rows} rows, got shape {tuple(result.shape)}")
    return result


def ragged_prompts(data: Mapping[str, Tensor]) -> RaggedBatch:
    """Prompts of `GenerationDatumSpec` without their padding. ValueError where lengths do not fit."""
    ids = data["input_ids"].to("cpu", torch.int64)
    if ids.dim() != 2 or ids.shape[0] == 0:
        raise ValueError(f"input_ids: expected [B, S] with at least one row, got shape {tuple(ids.shape)}")
    lengths = row_integers("input_lengths", data["input_lengths"], ids.shape[0])
    bad = ((lengths < 1) | (lengths > ids.shape[1])).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"input_lengths[{bad[0]}] = {int(lengths[bad[0]])}: expected 1 to {ids.shape[1]}, the width of input_ids"
        )
    return RaggedBatch(offsets_of(lengths), {"input_ids": ids[torch.arange(ids.shape[1]) < lengths[:, None]]}, {})


def the_stream(value: str | Sequence[str | None] | None, rows: int) -> str:
    """The one stream of all rows; ValueError for several, or an unknown one."""
    per_row = [value] * rows if value is None or isinstance(value, str) else list(value)
    streams = sorted({row or "train" for row in per_row})
    if len(per_row) != rows or len(streams) != 1 or streams[0] not in STREAMS:
        raise ValueError(f"stream: expected one of {', '.join(STREAMS)} for all {rows} rows, got {value!r}")
    return streams[0]
