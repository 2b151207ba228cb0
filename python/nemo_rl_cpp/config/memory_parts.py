"""Parts of the forecast of memory: gradients, mixtures of experts, and what torch's tape keeps of a model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from .known_models import ModelSizes

if TYPE_CHECKING:
    from .policy import TrainedModelConfig

_CHUNK = 2**24
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def chunk_bytes(tokens: int, vocab_size: int, chunk: int | None) -> float:
    """Float32 logits of `chunk` tokens (`policy.logprob_chunk_size`), and three arrays of their size that a backward pass makes
    (models/hf/outputs.py)."""
    return 16.0 * min(tokens * vocab_size, _CHUNK if chunk is None else chunk * vocab_size)


def expert_sizes(known: Mapping[str, object]) -> dict[str, int]:
    """What config.json says about experts, by the names of `ModelSizes`; empty where there are none."""
    count = next((value for name in _EXPERTS if is_count(value := known.get(name))), None)
    if count is None:
        return {}
    chosen = known.get("num_experts_per_tok")
    found = {"experts": count, "experts_per_token": chosen if is_count(chosen) else 1}
    if is_count(width := known.get("moe_intermediate_size")):
        found["intermediate_size"] = width
    return found


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value of config.json is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def tape_bytes(sizes: ModelSizes, width: int) -> int:
    """Of a token in a layer what torch keeps for the backward pass: the input of each norm, its normed form and its result; queries, keys,
    values and the attention's result, twice; gate, its activation, up and their product. Norms of bfloat16 are computed in float32."""
    query, key_value = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    norms = 6 * sizes.hidden_size * width + (0 if width == 4 else 2 * sizes.hidden_size * 4)
    return norms + (3 * query + 2 * key_value + 4 * sizes.experts_per_token * sizes.intermediate_size) * width


def gradient_bytes(model: TrainedModelConfig, sizes: ModelSizes, parameters: int, processes: int) -> float:
    """Bytes of gradients that one of so many processes holds while it adds its blocks along the tree."""
    blocks = model.gradient_blocks or processes
    sums = parameters * 4.0 * max(1, blocks // processes).bit_length()
    if processes == 1 or not model.shards_gradients:
        return sums
    # shards of the sums, and the block at work: of one micro-batch the embedding, two layers and those on their way
    by_tokens = model.sequence_packing.enabled or model.dynamic_batching.enabled
    alone = not by_tokens and (model.train_global_batch_size or 0) <= blocks * (model.train_micro_batch_size or 0)
    few = sizes.embedding_parameters + 4 * sizes.layer_parameters
    return sums / processes + 4.0 * (min(parameters, few) if alone else parameters)
