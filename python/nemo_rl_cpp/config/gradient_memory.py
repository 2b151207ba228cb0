"""How much memory gradients take in a process, by how they are added and shared out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .known_models import ModelSizes
    from .policy import TrainedModelConfig


def gradient_bytes(model: TrainedModelConfig, sizes: ModelSizes, parameters: int, processes: int) -> float:
    """Bytes of gradients that one of so many processes holds while it adds its blocks along the tree."""
    blocks = model.gradient_blocks or processes
    sums = parameters * 4.0 * max(1, blocks // processes).bit_length()
    if processes == 1 or not model.shards_gradients or model.backend == "hf":
        return sums
    # shards of the sums, and the block at work: of one micro-batch the embedding, two layers and those on their way
    by_tokens = model.sequence_packing.enabled or model.dynamic_batching.enabled
    alone = not by_tokens and (model.train_global_batch_size or 0) <= blocks * (model.train_micro_batch_size or 0)
    few = sizes.embedding_parameters + 4 * sizes.layer_parameters
    return sums / processes + 4.0 * (min(parameters, few) if alone else parameters)
