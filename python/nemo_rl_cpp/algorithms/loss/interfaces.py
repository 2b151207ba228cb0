"""What a loss function is to a trainer."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch


class LossType(enum.Enum):
    """Which global count a loss divides by."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class MetricNormalizer(enum.Enum):
    """Which global count a metric was divided by."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class LossInputType(enum.Enum):
    """What the loss wants from the model: `logits`, or `next_token_logprobs` [B, S-1]."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DISTILLATION_CROSS_TOKENIZER = "distillation_cross_tokenizer"
    DRAFT = "draft"


class LossFunction(Protocol):
    """A loss: called with its model output by keyword, the data and the global counts; returns (scalar, metrics). The base class
    of losses of one's own.

    Values of micro-batches and ranks are added, never averaged: a loss divides by the global counts itself.
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    input_type: LossInputType = LossInputType.LOGPROB

    @abstractmethod
    def __call__(
        self,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        **kwargs: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of the samples of one micro-batch, padded to the longest of them.

        `next_token_logprobs` [b, S-1] requires grad; entry t is the log-probability of token t+1. `data` has `token_mask` and
        `advantages` [b, S], `sample_mask` [b], `prev_logprobs` and `generation_logprobs` [b, S], and `reference_policy_logprobs`
        where there is a KL weight. The counts are those of the whole global batch.
        """
