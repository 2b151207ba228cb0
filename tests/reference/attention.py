"""Causal attention of packed sequences with shared prefixes, in plain numpy float64, one query row at a time.

A row attends to the last `window` keys, including its own; 0 means all. If `softcap` is not 0, a score s becomes
softcap * tanh(s / softcap). `sinks` [N] adds one term without a value to each head's softmax."""

import numpy as np


def _rows(sequence: tuple[int, int, int, int]) -> np.ndarray:
    """Return the packed rows of a sequence by absolute position: those of its shared prefix, then its own."""
    start, length, prefix_start, prefix_length = sequence
    return np.concatenate([np.arange(prefix_start, prefix_start + prefix_length), np.arange(start, start + length)])


def attention(
    qkv: np.ndarray, sequences, n: int, k: int, h: int, scale: float, window: int = 0, softcap: float = 0.0, sinks=None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out [T, N*H], lse [T, N]) of qkv [T, (N+2K)*H]."""
    x = qkv.astype(np.float64).reshape(len(qkv), n + 2 * k, h)
    out, lse = np.zeros((len(qkv), n, h)), np.zeros((len(qkv), n))
    for sequence in sequences:
        rows = _rows(sequence)
        for position in range(sequence[3], len(rows)):
            row, seen = rows[position], rows[max(0, position + 1 - window) if window else 0 : position + 1]
            for head in range(n):
                kv = head // (n // k)
                scores = scale * (x[seen, n + kv] @ x[row, head])
                scores = softcap * np.tanh(scores / softcap) if softcap else scores
                terms = scores if sinks is None else np.append(scores, sinks[head])
                lse[row, head] = terms.max() + np.log(np.exp(terms - terms.max()).sum())
                out[row, head] = np.exp(scores - lse[row, head]) @ x[seen, n + k + kv]
    return out.reshape(len(qkv), n * h), lse


def attention_backward(
    qkv: np.ndarray,
    d_out: np.ndarray,
    sequences,
    n: int,
    k: int,
    h: int,
    scale: float,
    window=0,
    softcap=0.0,
    sinks=None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (d_qkv [T, (N+2K)*H], d_sinks [N]).

    Rows of a shared prefix sum up the gradients of every sequence that reads them."""
    x = qkv.astype(np.float64).reshape(len(qkv), n + 2 * k, h)
    g = d_out.astype(np.float64).reshape(len(qkv), n, h)
    d, d_sinks = np.zeros_like(x), np.zeros(n)
    for sequence in sequences:
        rows = _rows(sequence)
        for position in range(sequence[3], len(rows)):
            row, seen = rows[position], rows[max(0, position + 1 - window) if window else 0 : position + 1]
            for head in range(n):
                kv = head // (n // k)
                keys, values, query = x[seen, n + kv], x[seen, n + k + kv], x[row, head]
                scores = scale * (keys @ query)
                tanh = np.tanh(scores / softcap) if softcap else 0.0
                scores = softcap * tanh if softcap else scores
                terms = np.append(scores, -np.inf if sinks is None else sinks[head])
                weights = np.exp(terms - terms.max())
                weights /= weights.sum()
                d_weights = np.append(values @ g[row, head], 0.0)
                d_terms = weights * (d_weights - weights @ d_weights)
                d_sinks[head] += d_terms[-1]
                weights, d_scores = weights[:-1], d_terms[:-1] * (1 - tanh * tanh)
                d[row, head] += scale * (d_scores @ keys)
                d[seen, n + kv] += scale * np.outer(d_scores, query)
                d[seen, n + k + kv] += np.outer(weights, g[row, head])
    return d.reshape(len(qkv), -1), d_sinks
