"""Sequence packing."""

from nemo_rl_cpp.compat.data.packing.algorithms import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from nemo_rl_cpp.compat.data.packing.metrics import PackingMetrics
