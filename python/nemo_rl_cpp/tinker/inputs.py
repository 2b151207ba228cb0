"""Checks the training data of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_rl_cpp.tinker.adapters import Base, Row
from nemo_rl_cpp.tinker.errors import UserError
from nemo_rl_cpp.tinker.types import Datum, tensor_of, tokens_of

if TYPE_CHECKING:
    from nemo_rl_cpp.tinker.types import Tokens

TARGETS = "target_tokens"
_WIDEST = 4096


def rows_of(data: Sequence[Datum], base: Base, needed: Sequence[str], known: Sequence[str]) -> list[Row]:
    """Check the data of a request and return it as rows.

    Args:
        needed: the inputs that each datum must have in addition to target_tokens.
        known: the inputs that a datum may have.

    Raise UserError with the index of the invalid datum and its fault.
    """
    if not data:
        raise UserError("the request has no datum")
    return [
        _row(f"datum {number}", datum.model_input, datum.loss_fn_inputs, base, needed, known)
        for number, datum in enumerate(data)
    ]


def _row(
    here: str, model_input: Tokens, given: Mapping[str, object], base: Base, needed: Sequence[str], known: Sequence[str]
) -> Row:
    tokens = tokens_of(model_input, here)
    base.check_tokens(tokens, here, room=1)
    for name in (TARGETS, *needed):
        if name not in given:
            raise UserError(f"{here} has no {name} in loss_fn_inputs")
    for name in given:
        if name not in (TARGETS, *needed, *known):
            raise UserError(f"{here} has {name} in loss_fn_inputs, which this loss does not read")
    tensors = {name: _whole(value, f"{here}: {name}", len(tokens)) for name, value in given.items()}
    targets = tensors.pop(TARGETS)
    if targets.is_floating_point():
        raise UserError(f"target_tokens of {here} are {targets.dtype}, expected whole numbers")
    base.check_vocabulary(int(targets.min()), int(targets.max()), f"target_tokens of {here}")
    for name, tensor in tensors.items():
        if tensor.shape != targets.shape:
            raise UserError(
                f"{here}: {name} has the shape {tuple(tensor.shape)}, expected that of target_tokens, {tuple(targets.shape)}"
            )
    matrix = targets.to(torch.int64).view(len(tokens), -1)
    return Row(tokens, matrix, targets.shape, {name: _as_float(tensor) for name, tensor in tensors.items()})


def _whole(given: object, what: str, length: int) -> Tensor:
    """Return a loss input as a dense tensor, [N] or [N, K]. Elements missing from a sparse tensor are 0."""
    tensor = tensor_of(given, what)
    shape = tuple(tensor.shape)
    if len(shape) not in (1, 2) or shape[0] != length or not 1 <= shape[-1] <= max(length, _WIDEST):
        raise UserError(
            f"{what} has the shape {shape}, expected [N] or [N, K] for N = {length} input tokens and K up to {_WIDEST}"
        )
    return tensor.to_dense()


def _as_float(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()
