"""The parameters of a module as views of one buffer, as the native model has them: digest, optimizer and resume are then the same."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatSpec:
    """Where a parameter, or a process's rows of it, lies in a flat buffer.

    Attributes:
        split: the dimension along which it is cut, -1: it is whole; `begin` is the first of the rows along it.
    """

    name: str
    shape: list[int]
    offset: int
    split: int = -1
    begin: int = 0


@dataclass(frozen=True)
class FlatLayout:
    """All parameters of a model, which has `total` elements: what `models/slices.py` reads of a native model's layout."""

    specs: list[FlatSpec]
    total: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, list[int], int]]) -> FlatLayout:
        """Of (name, shape, first row), one behind the other; the first row is -1 where a parameter is whole."""
        specs, offset = [], 0
        for name, shape, begin in parameters:
            specs.append(FlatSpec(name, shape, offset) if begin < 0 else FlatSpec(name, shape, offset, 0, begin))
            offset += math.prod(shape)
        return cls(specs, offset)

    @property
    def places(self) -> list[tuple[str, list[int], int]]:
        """(name, shape, offset) of each."""
        return [(spec.name, spec.shape, spec.offset) for spec in self.specs]


class Piece(NamedTuple):
    """A run of a model's weights that the optimizer changes: [begin, end) of the flat buffers of gradients and moments.

    Attributes:
        masters: flat, what is changed.
        compute: flat, the rounded copy that products read; None where they read the masters.
    """

    begin: int
    end: int
    masters: Tensor
    compute: Tensor | None


class FlatModel:
    """What `TrainedModel` asks of a model, for a module of transformers.

    Attributes:
        module: in `dtype`; its parameters are views of `compute`.
        layout: (name, shape, offset) of each parameter, in the module's order; tied ones once.
        compute: [n] the weights that products read.
        masters: [n] float32, what the optimizer changes; `compute` itself where that is float32; None for a frozen model.
    """

    masters_begin = 0

    def __init__(self, module: nn.Module, dtype: torch.dtype, trainable: bool, device: str = "cpu") -> None:
        self.module = module.to(device)
        parameters = list(module.named_parameters())
        self.flat_layout = FlatLayout.of((name, list(p.shape), -1) for name, p in parameters)
        self.layout, total, self.trainable = self.flat_layout.places, self.flat_layout.total, trainable
        self._trained: list[list[int]] = []  # [begin, end) of neighbours that are trained
        self.compute = torch.empty(total, dtype=dtype, device=device)
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        self.masters = (
            None if not trainable else self.compute if wide == dtype else torch.empty(total, dtype=wide, device=device)
        )
        for (_, _, offset), (_, parameter) in zip(self.layout, parameters):
            size = parameter.numel()
            if self.masters is not None:
                self.masters[offset : offset + size] = parameter.data.reshape(-1)
            view = self.compute[offset : offset + size].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.requires_grad_(trainable and parameter.requires_grad)
            if parameter.requires_grad:
                self._trained += [[offset, offset]] if not self._trained or self._trained[-1][1] < offset else []
                self._trained[-1][1] = offset + size

    def pieces(self) -> list[Piece]:
        """All that the optimizer changes: parameters that are frozen, by their architecture or a user's code, are not decayed either."""
        alone = self.masters is self.compute
        return [
            Piece(begin, end, self.masters[begin:end], None if alone else self.compute[begin:end])
            for begin, end in self._trained
        ]

    @property
    def device(self) -> str:
        return str(self.compute.device)

    def masters_changed(self) -> None:
        """The masters have been written: the weights follow."""
        if self.masters is not None and self.masters is not self.compute:
            self.compute.copy_(self.masters)

    def digest(self) -> int:
        """64 bits of BLAKE2b over the bytes of the weights that products read."""
        raw = self.compute.detach().cpu().view(torch.uint8).numpy()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")

    def gradients_into(self, buffer: Callable[[], Tensor]) -> None:
        """From now on a backward pass adds the gradient of each parameter to its place in `buffer()` [n], float32."""

        def adder(offset: int, size: int) -> Callable[[Tensor], None]:
            def add(parameter: Tensor) -> None:
                buffer()[offset : offset + size].add_(parameter.grad.reshape(-1))
                parameter.grad = None

            return add

        for (_, _, offset), parameter in zip(self.layout, self.module.parameters()):
            if not parameter.requires_grad:  # frozen by its architecture
                continue
            parameter.register_post_accumulate_grad_hook(adder(offset, parameter.numel()))

    def gathered(self) -> AbstractContextManager[None]:
        """For generation: the weights are whole here at all times."""
        return nullcontext()

    def release_workspace(self) -> None:
        """Nothing to give back: torch frees what a pass needed."""
