"""The types that data sets, processors, environments and the training loop hand one another."""

from typing import TypedDict

from nemo_rl_cpp.data.interfaces import (
    DatumSpec,
    FlatMessagesType,
    LLMMessageLogType,
    PathLike,
    TaskDataPreProcessFnCallable,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)

__all__ = [
    "DatumSpec",
    "FlatMessagesType",
    "LLMMessageLogType",
    "PathLike",
    "PreferenceDatumSpec",
    "TaskDataPreProcessFnCallable",
    "TaskDataProcessFnCallable",
    "TaskDataSpec",
    "TokenizerType",
    "VLMMessageLogType",
]

VLMMessageLogType = LLMMessageLogType


class PreferenceDatumSpec(TypedDict):
    """A preferred and a rejected conversation on one prompt."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int
