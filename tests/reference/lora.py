"""LoRA with autograd: any module of transformers, with W + (alpha / dim) · B · A in place of some weights."""

import torch
from torch import nn


def adapted_call(model: nn.Module, adapters: dict[str, tuple[torch.Tensor, torch.Tensor]], scale: float):
    """Return a function like `model`, in which these modules have the weights W + scale · B · A.

    Everything else is constant. `adapters` maps a module to (A [dim, in], B [out, dim]), which may be leaf tensors. The
    experts of a layer are two modules, experts.base_layer (gate_up_proj) and experts (down_proj), with A [experts · dim,
    in] and B [out, experts · dim], one expert after the other."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for module, (a, b) in adapters.items():
        if module.endswith((".experts", ".experts.base_layer")):
            first = "up_proj" if model.config.model_type == "nemotron_h" else "gate_up_proj"
            matrix = first if module.endswith(".base_layer") else "down_proj"
            name = f"{module.removesuffix('.base_layer')}.{matrix}"
            weights[name] = weights[name] + scale * _of_experts(weights[name], a, b, model.config.model_type, matrix)
        else:
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (b @ a)

    def call(**inputs):
        return torch.func.functional_call(model, weights, (), inputs)

    return call


def _of_experts(w, a, b, model_type: str, matrix: str) -> torch.Tensor:
    """Return B · A of every expert in the layout of w: [E, out, in], or in gpt-oss [E, in, out], where the columns of
    gate_up_proj are gate, up, gate, up, ..."""
    dim, found = len(a) // len(w), []
    for e in range(len(w)):
        product = b[:, e * dim : (e + 1) * dim] @ a[e * dim : (e + 1) * dim]
        if model_type == "gpt_oss":
            if matrix == "gate_up_proj":
                gate, up = product.chunk(2)
                product = torch.stack([row for pair in zip(gate, up, strict=True) for row in pair])
            product = product.t()
        found.append(product)
    return torch.stack(found)


def effective(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale · B · A, computed in float64 and rounded once to W's type."""
    return (w.double() + scale * (b.double() @ a.double())).to(w.dtype)
