"""The slices that several processes have of one model (tensor parallelism), and the whole tensors that they are cut from.

Checkpoints hold whole tensors and one optimizer state in the layout of the whole model, so they do not depend on the number of
slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from nemo_rl_cpp._native import C

if TYPE_CHECKING:
    from nemo_rl_cpp.distributed.ranks import Ranks
    from nemo_rl_cpp.models.json_values import JsonObject


def own_part(spec: C.ParameterSpec, whole: Tensor) -> Tensor:
    """What a process has of a parameter [spec.whole], as a view."""
    if spec.split < 0:
        return whole
    return whole.narrow(spec.split, spec.begin, spec.shape[spec.split])


class Slices:
    """Of one model, as this process and its tensor-parallel peers have it.

    Args:
        ranks: its `tensor` communicator connects the peers.
        layouts: of the flat buffers of all peers.
        whole: of the whole model's.
    """

    def __init__(self, ranks: Ranks, layouts: Sequence[C.ParameterLayout], whole: C.ParameterLayout) -> None:
        self.ranks, self.layouts, self.whole = ranks, layouts, whole

    @classmethod
    def of(cls, native: JsonObject, ranks: Ranks) -> Slices:
        """Of the whole model `native`, see `ModelFolder.native`."""
        count = ranks.tensor_size
        return cls(ranks, [C.ParameterLayout(native, rank, count) for rank in range(count)], C.ParameterLayout(native))

    @property
    def own(self) -> C.ParameterLayout:
        """The layout of this process's flat buffers."""
        return self.layouts[self.ranks.tensor_rank]

    def take(self, whole: Tensor) -> Tensor:
        """A flat buffer in the layout of this process from one in that of the whole model."""
        if self.ranks.tensor_size == 1:
            return whole
        flat = whole.new_zeros(self.own.total)
        for spec, part in zip(self.whole.specs, self.own.specs):
            _view(flat, part).copy_(own_part(part, _view(whole, spec)))
        return flat

    def gather(self, flat: Tensor | None, what: str) -> Tensor | None:
        """The flat buffer of the whole model from the flat buffers of all slices, on the first of them; None on the others, and
        where this process takes no part (`flat` is None)."""
        if self.ranks.tensor_size == 1 or flat is None:
            return flat
        peers, phase = self.ranks.tensor, f"gathering the slices of {what}"
        if self.ranks.tensor_rank > 0:
            peers.send(flat.contiguous(), to=0, phase=phase)
            return None
        whole = flat.new_zeros(self.whole.total)
        for rank, layout in enumerate(self.layouts):
            theirs = flat if rank == 0 else flat.new_empty(layout.total)
            if rank > 0:
                peers.receive(theirs, source=rank, phase=phase)
            for spec, part in zip(self.whole.specs, layout.specs):
                own_part(part, _view(whole, spec)).copy_(_view(theirs, part))
        return whole


def _view(flat: Tensor, spec: C.ParameterSpec) -> Tensor:
    return flat[spec.offset : spec.offset + prod(spec.shape)].view(spec.shape)


def named_whole(layout: C.ParameterLayout, flat: Tensor) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name, as a view of a flat buffer in this layout."""
    return {spec.name: _view(flat, spec) for spec in layout.specs}


__all__ = ["Slices", "named_whole", "own_part"]
