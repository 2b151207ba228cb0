"""The `cluster` section."""

from __future__ import annotations

from typing import Literal

from .base import Int, Positive, Section, key, no_effect


class ClusterConfig(Section):
    """How many devices, and who runs them."""

    gpus_per_node: Positive = key(
        1, "devices of a machine that the file was written for; they are folded onto the one at hand, see strict_sizes"
    )
    device: Literal["cpu", "cuda"] = key(
        "cpu", "where models, optimizer and engine lie; cuda has been compiled but not yet run on a GPU"
    )
    num_nodes: Positive = key(1, "machines that the file was written for; folded likewise")
    strict_sizes: bool = key(
        False,
        "true: device counts and parallel sizes above 1 are errors; false: they are folded onto the one device with a notice",
    )
    executor: Literal["auto", "in_process", "ray"] = key(
        "auto", "in_process: everything in this process; ray is not supported yet"
    )
    master_port_range_low: Int = no_effect(1400)
    master_port_range_high: Int = no_effect(1999)
    segment_size: Int | None = no_effect(None)
