"""A gated delta net in plain torch, token by token: short convolution, gated delta rule and gated norm.

Autograd gives its gradients. Sequences are (start, length, parent). A sequence continues the last token of `parent`, an
earlier sequence, or starts from a zero state if `parent` is -1."""

import torch
import torch.nn.functional as F


def rows_of(sequences, index: int) -> list[int]:
    """Return the packed rows of a sequence: those of its parent, then its own."""
    start, length, parent = sequences[index][:3]
    before = rows_of(sequences, parent) if parent >= 0 else []
    return before + list(range(start, start + length))


def short_conv(
    x: torch.Tensor, w: torch.Tensor, sequences, bias: torch.Tensor | float = 0.0, silu: bool = True
) -> torch.Tensor:
    """Return the causal convolution of x [T, C] with w [C, W], plus `bias` [C], or silu of it."""
    out = [None] * len(x)
    for index, (_, length, *_) in enumerate(sequences):
        rows = rows_of(sequences, index)
        for position in range(len(rows) - length, len(rows)):
            terms = [
                w[:, w.shape[1] - 1 - back] * x[rows[position - back]] for back in range(min(position + 1, w.shape[1]))
            ]
            out[rows[position]] = F.silu(sum(terms) + bias) if silu else sum(terms) + bias
    return torch.stack(out)


def gated_delta(qkv, b, a, A_log, dt_bias, sequences, shape) -> torch.Tensor:
    """Return out [T, U*dv] of qkv [T, 2*P*dk + U*dv], and of b and a [T, U]. `shape` is (P, U, dk, dv)."""
    P, U, dk, dv = shape[:4]
    beta, log_decay = b.sigmoid(), -A_log.exp() * F.softplus(a + dt_bias)
    out = [None] * len(qkv)
    for index, (_, length, *_) in enumerate(sequences):
        rows = rows_of(sequences, index)
        state = torch.zeros(U, dk, dv, dtype=qkv.dtype)
        for position, row in enumerate(rows):
            q = qkv[row, : P * dk].view(P, dk).repeat_interleave(U // P, 0)
            k = qkv[row, P * dk : 2 * P * dk].view(P, dk).repeat_interleave(U // P, 0)
            v = qkv[row, 2 * P * dk :].view(U, dv)
            q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / dk**0.5
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            state = state * log_decay[row].exp()[:, None, None]
            delta = beta[row][:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * delta[:, None, :]
            if position >= len(rows) - length:
                out[row] = torch.einsum("hkv,hk->hv", state, q).reshape(-1)
    return torch.stack(out)


def gated_norm(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """Return w * x / rms(x) * silu(z) for each head [D] of x [T, heads*D]."""
    heads = x.view(len(x), -1, len(w))
    normed = w * heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normed.view(x.shape) * F.silu(z)
