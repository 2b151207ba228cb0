"""LoRA with autograd: any module of transformers, with W + (alpha / dim) · B · A in place of some weights."""

import torch
from torch import nn


def adapted_call(model: nn.Module, adapters: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: float):
    """Return a function like `model`, in which these modules have the weights W + scale · B · A.

    Everything else is constant. `adapters` maps a module to (A [dim, in], B [out, dim]), which may be leaf tensors."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for module, (a, b) in adapters.items():
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (b @ a)

    def call(**inputs):
        return torch.func.functional_call(model, weights, (), inputs)

    return call


def effective(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale · B · A, computed in float64 and rounded once to W's type."""
    return (w.double() + scale * (b.double() @ a.double())).to(w.dtype)
