"""Mamba-2 in plain torch, token by token: its recurrence and its norm. The short convolution is that of gated_delta.py.

Autograd gives the gradients. Sequences are as in gated_delta.py."""

import torch
import torch.nn.functional as F
from reference.gated_delta import rows_of


def mamba2(vkq, a, A_log, dt_bias, D, sequences, shape, limits) -> torch.Tensor:
    """Return out [T, U*dv] of vkq [T, U*dv + 2*P*dk], and of a [T, U]. `shape` is (P, U, dk, dv)."""
    P, U, dk, dv = shape[:4]
    step = F.softplus(a + dt_bias).clamp(*limits)
    out = [None] * len(vkq)
    for index, (_, length, *_) in enumerate(sequences):
        rows = rows_of(sequences, index)
        state = torch.zeros(U, dk, dv, dtype=vkq.dtype)
        for position, row in enumerate(rows):
            v = vkq[row, : U * dv].view(U, dv)
            k, q = (x.view(P, dk).repeat_interleave(U // P, 0) for x in vkq[row, U * dv :].chunk(2))
            state = state * (-A_log.exp() * step[row]).exp()[:, None, None]
            state = state + k[:, :, None] * (step[row][:, None] * v)[:, None, :]
            if position >= len(rows) - length:
                out[row] = (torch.einsum("hkv,hk->hv", state, q) + D[:, None] * v).reshape(-1)
    return torch.stack(out)


def gated_norm(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """Return w * g / rms(g) with g = x * silu(z), for each of `groups` parts of a row."""
    gated = (x * F.silu(z)).view(len(x), groups, -1)
    return w * (gated * (gated.square().mean(-1, keepdim=True) + eps).rsqrt()).view(x.shape)
