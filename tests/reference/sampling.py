"""Top-k, top-p and log-softmax of one row of logits, in float64 by sorting: slow, but directly the definition."""

import numpy as np


def kept_tokens(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Return a mask, bool [V], of the tokens that top-k and top-p keep.

    Top-k keeps values >= the k-th largest, including ties. Then top-p sorts ascending by (value, index), and keeps
    tokens whose cumulative probability exceeds 1 - p, and always the last."""
    z = logits.astype(np.float64) / temperature
    keep = np.isfinite(z)
    if 0 < top_k < len(z):
        keep &= z >= np.sort(z)[-top_k]
    if top_p < 1:
        z = np.where(keep, z, -np.inf)
        order = np.argsort(z, kind="stable")
        p = np.exp(z - z.max())
        cumulative = np.cumsum(p[order] / p.sum())
        chosen = cumulative > 1 - top_p
        chosen[-1] = True
        keep &= np.isin(np.arange(len(z)), order[chosen])
    return keep


def processed_logprobs(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Return the log-softmax over the kept tokens, float64 [V]; -inf for all other tokens."""
    keep = kept_tokens(logits, temperature, top_k, top_p)
    z = np.where(keep, logits.astype(np.float64) / temperature, -np.inf)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def inverse_cdf(logprobs: np.ndarray, u: float) -> int:
    """Return the first token, in vocabulary order, whose cumulative probability exceeds u."""
    cumulative = np.cumsum(np.exp(logprobs))
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def entropy(logprobs: np.ndarray) -> float:
    p = np.exp(logprobs)
    return float(-(p[p > 0] * logprobs[p > 0]).sum())
