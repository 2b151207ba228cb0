"""A transformers module's parameters in flat buffers: all in one process, or sharded over ranks by torch's FSDP2."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.models.hf.outputs import ModelRows, ValueNet, outputs_of, quietly
from nemo_rl_cpp.models.policy.train_step import Scoring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class FlatSpec:
    """The position of a parameter in a flat buffer, from element `offset` on. If `split` is -1, the buffer holds the
    whole parameter; if 0, only some of its rows (of a parameter sharded over ranks), from its row `begin` on."""

    name: str
    shape: list[int]
    offset: int
    split: int = -1
    begin: int = 0


@dataclass(frozen=True)
class FlatLayout:
    """The positions of all parameters in a flat buffer, with the members of the native `ParameterLayout` that
    models/weights.py uses."""

    specs: list[FlatSpec]
    total: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, list[int], int]]) -> FlatLayout:
        """Return the layout that places parameters, given as (name, shape, first row), one after the other. The first
        row is the index in the whole parameter of this rank's first row; -1: the rank holds the whole parameter."""
        specs, offset = [], 0
        for name, shape, begin in parameters:
            specs.append(FlatSpec(name, shape, offset) if begin < 0 else FlatSpec(name, shape, offset, 0, begin))
            offset += math.prod(shape)
        return cls(specs, offset)


class Piece(NamedTuple):
    """A range [begin, end) of a flat buffer that the optimizer updates: its float32 master weights, and their copy
    rounded to the precision of matrix products, if there is one."""

    begin: int
    end: int
    masters: Tensor
    compute: Tensor | None


class FlatModel:
    """A transformers module with the interface that `TrainedModel` needs, in one process: `module` in `dtype`, whose n
    weights (tied ones counted once) are views of the flat tensor `compute` [n], in the order of `flat_layout`.
    `masters` [n] are float32 master weights: `compute` itself if that is float32, None for a frozen model."""

    masters_begin = 0
    blocks = ()  # a module's buffers are read from the module

    def __init__(self, module: nn.Module, dtype: torch.dtype, trainable: bool, device: str = "cpu") -> None:
        self.module = module.to(device)
        parameters = list(module.named_parameters())
        self.flat_layout = FlatLayout.of((name, list(p.shape), -1) for name, p in parameters)
        total, self.trainable = self.flat_layout.total, trainable
        self._trained: list[list[int]] = []  # [begin, end) of consecutive trained parameters
        self.compute = torch.empty(total, dtype=dtype, device=device)
        self.masters_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.masters = self.compute if trainable else None
        if trainable and self.masters_dtype != dtype:
            self.masters = torch.empty(total, dtype=self.masters_dtype, device=device)
        for spec, (_, parameter) in zip(self.flat_layout.specs, parameters):
            begin, end = spec.offset, spec.offset + parameter.numel()
            if self.masters is not None:
                self.masters[begin:end] = parameter.data.reshape(-1)
            view = self.compute[begin:end].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.requires_grad_(trainable and parameter.requires_grad)
            if parameter.requires_grad:
                self._trained += [[begin, begin]] if not self._trained or self._trained[-1][1] < begin else []
                self._trained[-1][1] = end

    def pieces(self) -> list[Piece]:
        """Return all ranges that the optimizer updates. They exclude parameters that the architecture or the user's
        code has frozen, which therefore get no weight decay either."""
        compute = None if self.masters is self.compute else self.compute
        return [
            Piece(begin, end, self.masters[begin:end], None if compute is None else compute[begin:end])
            for begin, end in self._trained
        ]

    @property
    def device(self) -> str:
        return str(self.compute.device)

    def masters_changed(self) -> None:
        """Copy the master weights into `compute`, the weights that matrix products read, rounded to its dtype. Called
        after each write to the master weights."""
        if self.masters is not None and self.masters is not self.compute:
            self.compute.copy_(self.masters)

    def digest(self) -> int:
        """Return a 64-bit BLAKE2b digest of the weights that matrix products read."""
        raw = self.compute.detach().cpu().view(torch.uint8).numpy()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")

    def gradients_into(self, buffer: Callable[[], Tensor]) -> None:
        """Make each backward pass add trained parameters' gradients to `buffer()`, flat float32, and free them."""

        def add(offset: int, parameter: Tensor) -> None:
            buffer()[offset : offset + parameter.numel()].add_(parameter.grad.reshape(-1))
            parameter.grad = None

        for spec, parameter in zip(self.flat_layout.specs, self.module.parameters()):
            if parameter.requires_grad:  # the architecture may have frozen it
                parameter.register_post_accumulate_grad_hook(partial(add, spec.offset))

    def gathered(self) -> AbstractContextManager[None]:
        """Do nothing: this process always holds all weights."""
        return nullcontext()


class ShardedModel:
    """A transformers module sharded over several ranks by FSDP2, with the interface of `FlatModel`. Each rank holds
    some rows of every parameter in float32. A forward pass gathers a layer's weights in the run's precision, and its
    backward pass sums the gradients of each rank's rows over all ranks. So all ranks must run the same passes, except
    inside the context `gathered`. `flat_layout` has this rank's rows, `layouts` those of all ranks, `whole` the model
    in one process."""

    masters_begin = 0
    blocks = ()  # a module's buffers are read from the module
    masters_dtype = torch.float32

    def __init__(self, module: nn.Module, dtype: torch.dtype, trainable: bool, ranks: Ranks) -> None:
        self.module, self._dtype, self.trainable, self.ranks = module, dtype, trainable, ranks
        self.device = ranks.device
        self.whole = FlatLayout.of((name, list(p.shape), -1) for name, p in module.named_parameters())
        self.layouts = [_rows_of(self.whole, rank, ranks.size) for rank in range(ranks.size)]
        self.flat_layout = self.layouts[ranks.rank]
        for parameter in module.parameters():
            parameter.requires_grad_(trainable and parameter.requires_grad)
        self._units = _shard(module, ranks.mesh(), dtype)
        self._parameters: list[DTensor] = list(module.parameters())
        with quietly(), torch.no_grad():  # FSDP2 learns in the first pass which module is the outermost
            outputs_of(module, ModelRows.smallest().to(self.device), Scoring(), unfiltered=False)
        self.forget()

    # ---- the rows of this rank

    def _local(self) -> list[Tensor]:
        """Return flat views of this rank's weights, in the order of the layout."""
        with torch.no_grad():
            return [parameter.to_local().view(-1) for parameter in self._parameters]

    @property
    def masters(self) -> Tensor | None:
        """Return a copy of this rank's n float32 master weights, [n]; None for a frozen model."""
        return torch.cat(self._local()) if self.trainable else None

    @property
    def compute(self) -> Tensor:
        """Return a copy of this rank's weights [n] in the run's precision."""
        return torch.cat(self._local()).to(self._dtype)

    def write(self, masters: Tensor) -> None:
        """Overwrite this rank's weights with `masters` [n], its float32 master weights."""
        self.reshard()
        for piece, spec in zip(self._local(), self.flat_layout.specs):
            piece.copy_(masters[spec.offset : spec.offset + piece.numel()])

    def pieces(self) -> list[Piece]:
        """Return the ranges of this rank's parameter rows that the optimizer updates."""
        self.reshard()
        return [
            Piece(spec.offset, spec.offset + local.numel(), local, None)
            for local, parameter, spec in zip(self._local(), self._parameters, self.flat_layout.specs)
            if parameter.requires_grad and local.numel()
        ]

    def masters_changed(self) -> None:
        """Do nothing: each forward pass rounds the weights as it gathers them."""

    @property
    def grads(self) -> Tensor:
        """Return a copy of the gradients, float32 [n], of this rank's n weights, summed over all ranks."""
        with torch.no_grad():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            return torch.cat([grad.to_local().reshape(-1) for grad in grads])

    def gradients_into(self, buffer: Callable[[], Tensor]) -> None:
        """Do nothing: FSDP2 accumulates gradients itself."""

    # ---- the whole model

    def digest(self) -> int:
        """Return a digest of the whole model's weights, equal for any number of ranks. All ranks must call it."""
        hashed = hashlib.blake2b(digest_size=8)
        with torch.no_grad():
            for parameter in self._parameters:
                whole = parameter.detach().to(self._dtype).full_tensor()
                hashed.update(whole.contiguous().view(-1).view(torch.uint8).cpu().numpy())
        return int.from_bytes(hashed.digest(), "big")

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which this rank holds all weights, for forward passes that other ranks do not join. All
        ranks must enter it."""
        self.forget()
        self.module.set_reshard_after_forward(False)
        for unit in self._units:
            unit.unshard()
        try:
            yield
        finally:
            self.module.set_reshard_after_forward(True)
            self.module.set_reshard_after_forward(False, recurse=False)  # FSDP2's default for the outermost module
            self.forget()

    def reshard(self) -> None:
        """Free the gathered weights, which become stale when a rank changes the rows of the weights that it holds."""
        for unit in self._units:
            unit.reshard()

    def forget(self) -> None:
        """Free the gathered weights, the gradients and the state of unfinished passes."""
        self.module.reset_iter_state()


def _rows_of(whole: FlatLayout, rank: int, size: int) -> FlatLayout:
    """Return the layout of a rank under FSDP2: ceil(d / size) of a parameter's d rows, fewer on the last ranks."""
    parts = []
    for spec in whole.specs:
        if not spec.shape:
            raise ValueError(f"{spec.name} is a single number, which FSDP2 cannot shard: train in one process")
        rows = -(-spec.shape[0] // size)
        begin, end = (min(place * rows, spec.shape[0]) for place in (rank, rank + 1))
        parts.append((spec.name, [end - begin, *spec.shape[1:]], begin))
    return FlatLayout.of(parts)


def _shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> list[nn.Module]:
    """Apply FSDP2 to each layer and to the rest; return the submodules whose weights are gathered together."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    base = module.backbone if isinstance(module, ValueNet) else module
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers = [m for m in base.modules() if type(m).__name__ in names and m is not base]
    low = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*reversed([m for m in layers if not _shares_weights(m, module)]), module):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    units = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for unit in units:
        # losses are divided by the number of tokens of all ranks, so gradients must be summed
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # Gloo cannot average
        unit.set_reduce_scatter_unused_params(True)  # for an expert that received no token of this rank
    return units


def _shares_weights(part: nn.Module, module: nn.Module) -> bool:
    own = set(part.modules())
    rest = {p for m in module.modules() if m not in own for p in m.parameters(recurse=False)}
    return any(p in rest for p in part.parameters())
