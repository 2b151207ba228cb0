"""The parameters of a module as views of one buffer, as the native model has them: digest, optimizer and resume are then the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatSpec:
    """Where a parameter lies in a flat buffer."""

    name: str
    shape: list[int]
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """All parameters of a model, which has `total` elements: what `models/slices.py` reads of a native model's layout."""

    specs: list[FlatSpec]
    total: int


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
        parameters = [(name, p) for name, p in module.named_parameters()]
        total = sum(p.numel() for _, p in parameters)
        self.layout: list[tuple[str, list[int], int]] = []
        self.compute = torch.empty(total, dtype=dtype, device=device)
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        self.masters = (
            None if not trainable else self.compute if wide == dtype else torch.empty(total, dtype=wide, device=device)
        )
        offset = 0
        for name, parameter in parameters:
            size = parameter.numel()
            if self.masters is not None:
                self.masters[offset : offset + size] = parameter.data.reshape(-1)
            view = self.compute[offset : offset + size].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.requires_grad_(trainable and parameter.requires_grad)
            self.layout.append((name, list(parameter.shape), offset))
            offset += size

    @property
    def flat_layout(self) -> FlatLayout:
        return FlatLayout([FlatSpec(*place) for place in self.layout], self.compute.numel())

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

    def release_workspace(self) -> None:
        """Nothing to give back: torch frees what a pass needed."""
