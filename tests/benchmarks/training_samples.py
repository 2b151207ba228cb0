"""The samples that benchmarks train on, and the batch layouts that a peer can use."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

COUNT, MEAN_LENGTH, GROUP = 16, 128, 8
TOKENS = COUNT * MEAN_LENGTH
# below every benchmark's vocabulary, and above padding, whose embedding transformers does not train
IDS = range(16, 8192)
SORTED_ROWS = 4  # rows per micro-batch of samples with similar lengths


def equal_lengths() -> list[int]:
    return [MEAN_LENGTH] * COUNT


def mixed_lengths() -> list[int]:
    """Return the quantile midpoints of a log-normal distribution (sigma 0.5), in shuffled order.

    A batch padded to the longest sample is 56 % padding. Rollouts have 50 to 70 % (NeMo RL's guide to sequence
    packing)."""
    weights = [math.exp(0.5 * NormalDist().inv_cdf((i + 0.5) / COUNT)) for i in range(COUNT)]
    lengths = [round(w / sum(weights) * COUNT * MEAN_LENGTH) for w in weights]
    lengths[-1] += COUNT * MEAN_LENGTH - sum(lengths)
    return [lengths[i * 7 % COUNT] for i in range(COUNT)]


LENGTHS = {"equal": equal_lengths, "mixed": mixed_lengths}


@dataclass(frozen=True)
class Samples:
    """Rows of tokens, padded with 0. With a prompt, the rows of each GROUP begin with the same tokens, and later tokens
    are trained."""

    ids: Tensor  # [B, S]
    lengths: Tensor  # [B]
    prompt: int = 0

    @staticmethod
    def whole(ids: Tensor) -> "Samples":
        return Samples(ids, torch.full((len(ids),), ids.shape[1]))

    @staticmethod
    def random(lengths: list[int], prompt: int, seed: int) -> "Samples":
        ids = torch.randint(
            IDS.start, IDS.stop, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed)
        )
        ids[:, :prompt] = ids[::GROUP, :prompt].repeat_interleave(GROUP, 0)
        samples = Samples(ids, torch.tensor(lengths), prompt)
        return Samples(ids * samples.real, samples.lengths, prompt)

    @property
    def real(self) -> Tensor:
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    @property
    def trained(self) -> Tensor:
        """Return the mask of trained tokens, bool [B, S]. A row's first token is never trained, because nothing
        predicts it."""
        return self.real & (torch.arange(self.ids.shape[1]) >= max(self.prompt, 1))

    @property
    def computed(self) -> int:
        """Return the number of tokens, with each prompt counted once per group."""
        return int(self.lengths.sum()) - (len(self.ids) - len(self.ids) // GROUP) * self.prompt


@dataclass(frozen=True)
class PeerBatch:
    """The arguments for a model of transformers, and the mask of tokens [b, s] whose log-probabilities are the loss."""

    input_ids: Tensor
    trained: Tensor
    options: dict[str, Tensor]


def padded(samples: Samples) -> list[PeerBatch]:
    """Return one batch, padded to the longest sample."""
    options = {} if bool(samples.real.all()) else {"attention_mask": samples.real.long()}
    return [PeerBatch(samples.ids, samples.trained, options)]


def sorted_by_length(samples: Samples) -> list[PeerBatch]:
    """Return micro-batches of samples with similar lengths, each padded to its longest sample."""
    rows = samples.lengths.argsort(stable=True).split(SORTED_ROWS)
    return [
        padded(Samples(samples.ids[r, : samples.lengths[r].max()], samples.lengths[r], samples.prompt))[0] for r in rows
    ]


def packed(samples: Samples) -> list[PeerBatch]:
    """Return one row without padding, in which positions restart at each sample."""
    real = samples.real
    positions = torch.arange(samples.ids.shape[1]).expand_as(real)[real]
    return [PeerBatch(samples.ids[real][None], samples.trained[real][None], {"position_ids": positions[None]})]


Layout = Callable[[Samples], list[PeerBatch]]
