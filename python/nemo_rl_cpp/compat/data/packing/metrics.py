"""How well sequences fill their bins."""

import math
import statistics
from typing import Any


class PackingMetrics:
    """Packing statistics of one call and over all calls since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all calls."""
        self._calls: list[dict[str, float]] = []
        self._utilizations: list[float] = []
        self._times: list[float] = []

    def update(
        self, sequence_lengths: list[int], bins: list[list[int]], bin_capacity: int, packing_time: float | None = None
    ) -> dict[str, float]:
        """Adds one packing and returns its statistics (with `packing_time` in seconds if given)."""
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        self._calls.append(stats)
        self._utilizations += [sum(sequence_lengths[i] for i in members) / bin_capacity for members in bins]
        if packing_time is None:
            return stats
        self._times.append(packing_time)
        return {**stats, "packing_time": packing_time}

    def calculate_stats_only(
        self, sequence_lengths: list[int], bins: list[list[int]], bin_capacity: int
    ) -> dict[str, float]:
        """Statistics of one packing, without adding it.

        bin_balance is 1 - stdev(utilization of the bins) / average utilization, 1 for a single bin; bin_efficiency is
        ceil(total length / capacity) / number of bins.
        """
        total = sum(sequence_lengths)
        space = len(bins) * bin_capacity
        used = [sum(sequence_lengths[i] for i in members) / bin_capacity for members in bins]
        average = total / space if space else 0.0
        fewest = math.ceil(total / bin_capacity)
        balance = 1.0 - statistics.stdev(used) / average if len(used) > 1 and average > 0 else 1.0
        return {
            "num_sequences": len(sequence_lengths),
            "num_bins": len(bins),
            "total_sequence_length": total,
            "total_bin_capacity": space,
            "total_waste": space - total,
            "average_utilization": average,
            "waste_ratio": (space - total) / space if space else 0.0,
            "bin_balance": balance if bins else 0.0,
            "theoretical_min_bins": fewest,
            "bin_efficiency": fewest / len(bins) if bins else 0.0,
        }

    def get_aggregated_stats(self) -> dict[str, float]:
        """Sums, means and extremes over all calls; empty before the first."""
        if not self._calls:
            return {}
        total = {key: sum(call[key] for call in self._calls) for key in self._calls[0]}
        wastes = [call["waste_ratio"] for call in self._calls]
        counts = [call["num_bins"] for call in self._calls]
        space = total["total_bin_capacity"]
        stats: dict[str, Any] = {
            "total_sequences": total["num_sequences"],
            "total_bins": total["num_bins"],
            "average_utilization": total["total_sequence_length"] / space if space else 0.0,
            "min_utilization": min(self._utilizations, default=0.0),
            "max_utilization": max(self._utilizations, default=0.0),
            "average_waste_ratio": total["total_waste"] / space if space else 0.0,
            "min_waste_ratio": min(wastes),
            "max_waste_ratio": max(wastes),
            "average_bin_count": statistics.mean(counts),
            "min_bin_count": min(counts),
            "max_bin_count": max(counts),
            "theoretical_min_bins": total["theoretical_min_bins"],
            "bin_efficiency": total["theoretical_min_bins"] / total["num_bins"] if total["num_bins"] else 0.0,
        }
        if self._times:
            stats |= {
                "average_packing_time": statistics.mean(self._times),
                "min_packing_time": min(self._times),
                "max_packing_time": max(self._times),
                "total_packing_time": sum(self._times),
            }
        return stats

    def print_aggregated_stats(self) -> None:
        """Prints the aggregated statistics, one a line."""
        stats = self.get_aggregated_stats()
        if not stats:
            print("No packing was measured.")
        for key, value in stats.items():
            print(f"{key}: {value:.4f}" if isinstance(value, float) else f"{key}: {value}")
