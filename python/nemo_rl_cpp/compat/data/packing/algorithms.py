"""Sequence packers: lengths in, lists of indices (bins) out. Each index comes once; no bin exceeds the capacity."""

import enum
import random
import time
from abc import ABC, abstractmethod

from nemo_rl_cpp._native import C
from nemo_rl_cpp.compat.data.packing.metrics import PackingMetrics
from nemo_rl_cpp.config.policy import PACKERS

PackingAlgorithm = enum.Enum("PackingAlgorithm", {name.upper(): name for name in PACKERS})
"""Names of the packers, those of the house's table."""


class SequencePacker(ABC):
    """Packs sequences into bins of `bin_capacity` tokens.

    Args:
        bin_capacity: most tokens in a bin.
        collect_metrics: gather PackingMetrics in `metrics` at every call.
        min_bin_count: at least so many bins (sequences are moved into bins of their own).
        bin_count_multiple: the number of bins is a multiple of this.

    Raises ValueError when min_bin_count < 0 or bin_count_multiple < 1; `pack` raises it for a sequence longer than
    the capacity, a capacity <= 0, and fewer sequences than bins asked for.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        if min_bin_count is not None and min_bin_count < 0:
            raise ValueError(f"min_bin_count is {min_bin_count}; it must not be negative")
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise ValueError(f"bin_count_multiple is {bin_count_multiple}; it must be at least 1")
        self.bin_capacity = bin_capacity
        self.collect_metrics = collect_metrics
        self.min_bin_count = min_bin_count
        self.bin_count_multiple = bin_count_multiple
        self.metrics = PackingMetrics() if collect_metrics else None

    @abstractmethod
    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        """Bins before their count is adjusted."""

    def pack(self, sequence_lengths: list[int]) -> list[list[int]]:
        """The bins: lists of indices into `sequence_lengths`."""
        start = time.perf_counter()
        bins = self._pack_implementation(sequence_lengths)
        if self.min_bin_count is not None or self.bin_count_multiple is not None:
            bins = C.adjust_bin_count(bins, self.min_bin_count or 0, self.bin_count_multiple or 1)
        if self.metrics is not None:
            self.metrics.update(sequence_lengths, bins, self.bin_capacity, time.perf_counter() - start)
        return bins

    def reset_metrics(self) -> None:
        """Forgets the metrics gathered so far."""
        if self.metrics is not None:
            self.metrics.reset()

    def compute_metrics(self, sequence_lengths: list[int], bins: list[list[int]]) -> dict[str, float]:
        """Statistics of these bins, added to `metrics` when metrics are collected."""
        if self.metrics is not None:
            return self.metrics.update(sequence_lengths, bins, self.bin_capacity)
        return PackingMetrics().calculate_stats_only(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Statistics over all calls; empty unless metrics are collected."""
        return self.metrics.get_aggregated_stats() if self.metrics is not None else {}

    def print_metrics(self) -> None:
        """Prints the statistics over all calls."""
        if self.metrics is not None:
            self.metrics.print_aggregated_stats()
        else:
            print("Packing metrics are off: construct the packer with collect_metrics=True.")


class ConcatenativePacker(SequencePacker):
    """Sequences in their order; a new bin where the next one would overflow."""

    algorithm = "concatenative"

    max_sequences_per_bin = -1
    """most sequences in a bin; -1: no limit"""

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        return C.pack_concatenative(sequence_lengths, self.bin_capacity, self.max_sequences_per_bin)


class FirstFitPacker(SequencePacker):
    """Each sequence, in the order of `_prepare_sequences`, into the first bin with room for it."""

    @abstractmethod
    def _prepare_sequences(self, sequence_lengths: list[int]) -> list[tuple[int, int]]:
        """(length, index) pairs in the order in which they are placed."""

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        order = [index for _, index in self._prepare_sequences(sequence_lengths)]
        return C.pack_first_fit(sequence_lengths, order, self.bin_capacity)


class FirstFitDecreasingPacker(FirstFitPacker):
    """First fit, longest first; among equal lengths the larger index first."""

    algorithm = "first_fit_decreasing"

    def _prepare_sequences(self, sequence_lengths: list[int]) -> list[tuple[int, int]]:
        return sorted(((length, i) for i, length in enumerate(sequence_lengths)), reverse=True)

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        return PACKERS[self.algorithm](sequence_lengths, self.bin_capacity)


class FirstFitShufflePacker(FirstFitPacker):
    """First fit in the order that Python's `random.shuffle` gives (seed it with `random.seed`)."""

    algorithm = "first_fit_shuffle"

    def _prepare_sequences(self, sequence_lengths: list[int]) -> list[tuple[int, int]]:
        pairs = [(length, i) for i, length in enumerate(sequence_lengths)]
        random.shuffle(pairs)
        return pairs


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first fit decreasing (Johnson and Garey, 1985): near-optimal fill; lengths must be positive."""

    algorithm = "modified_first_fit_decreasing"

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        return PACKERS[self.algorithm](sequence_lengths, self.bin_capacity)


_CLASSES = {
    cls.algorithm: cls
    for cls in (ConcatenativePacker, FirstFitDecreasingPacker, FirstFitShufflePacker, ModifiedFirstFitDecreasingPacker)
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """The packer of that name (any case). Raises ValueError for an unknown one."""
    known = PackingAlgorithm.__members__.get(algorithm.upper()) if isinstance(algorithm, str) else algorithm
    if not isinstance(known, PackingAlgorithm):
        names = ", ".join(member.value for member in PackingAlgorithm)
        raise ValueError(f"sequence_packing.algorithm is {algorithm!r}; it must be one of {names}")
    return _CLASSES[known.value](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
