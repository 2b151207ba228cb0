"""The contract between rollouts and a generation engine: token ids in, token ids out."""

from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

if TYPE_CHECKING:
    import torch

    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict


class GenerationDatumSpec(TypedDict):
    """What `generate` takes.

    input_ids: int64 [B, S], prompts padded on the right.
    input_lengths: [B] tokens of each prompt.
    stop_strings: [B] a list of stop strings, or None, for each sample; they add to those of the configuration.
    draw_ids: int64 [B] counts prompts over the whole run: part of the key of every random draw, so that a prompt that
        comes twice gets fresh samples. Counted by the engine itself when missing.
    sample_index: int64 [B] which of the generations of its prompt a row is (0 when missing).
    stream: "train", "val" or "eval", one a row or one for all ("train" when missing): streams never share draws.
    """

    input_ids: "torch.Tensor"
    input_lengths: "torch.Tensor"
    stop_strings: NotRequired[list[str]]
    draw_ids: "NotRequired[torch.Tensor]"
    sample_index: "NotRequired[torch.Tensor]"
    stream: NotRequired[list[str] | str]
    __extra__: Any


class GenerationOutputSpec(TypedDict):
    """What `generate` gives.

    output_ids: int64 [B, S'] prompt and response, padded on the right.
    generation_lengths: [B] tokens of the response.
    unpadded_sequence_lengths: [B] tokens of prompt and response.
    logprobs: float32 [B, S'] log-probability of every sampled token under the distribution it was drawn from; 0 on
        prompt and padding.
    truncated: bool [B] whether the response ended for want of room, not by a stop token or string.
    """

    output_ids: "torch.Tensor"
    generation_lengths: "torch.Tensor"
    unpadded_sequence_lengths: "torch.Tensor"
    logprobs: "torch.Tensor"
    truncated: "NotRequired[torch.Tensor]"
    __extra__: Any


class GenerationInterface(Protocol):
    """A generation engine. What a row yields depends on its prompt, its sampling settings and its random key alone, never on
    the rest of the batch."""

    reports_finished: bool = False
    """Whether `generate` takes `on_finished`, a callable `(rows, token ids of each)` that is told of responses as they end."""

    def prepare_for_generation(self) -> bool:
        """Called before `generate`: makes room and wakes up what generation needs."""

    def generate(
        self, data: "BatchedDataDict[GenerationDatumSpec]", greedy: bool = False, **beside: Any
    ) -> "BatchedDataDict[GenerationOutputSpec]":
        """A response for every prompt, under the weights of the last `sync_weights`. Greedy: temperature 0, top_k 1.

        `beside` is `on_finished` for engines that say `reports_finished`, and empty for all others.
        """

    def finish_generation(self) -> bool:
        """Called after the last `generate` of a step: gives back what only generation needs."""

    def invalidate_kv_cache(self) -> bool:
        """Forgets cached keys and values, since the weights are new; whether there was such a cache."""

    def weight_digest(self) -> str:
        """The digest of the weights that the engine reads, comparable with `PolicyInterface.weight_digest`."""
