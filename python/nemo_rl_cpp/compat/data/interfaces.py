"""The types that data sets, processors, environments and the training loop hand one another."""

from typing import TypedDict

import torch

from nemo_rl_cpp.data.interfaces import (
    DatumSpec,
    LLMMessageLogType,
    PathLike,
    TaskDataPreProcessFnCallable,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)

VLMMessageLogType = LLMMessageLogType
FlatMessagesType = dict[str, list[str] | torch.Tensor]
"""A conversation by key instead of by message: tensors joined, everything else as a list over messages."""


class PreferenceDatumSpec(TypedDict):
    """A preferred and a rejected conversation on one prompt."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int
