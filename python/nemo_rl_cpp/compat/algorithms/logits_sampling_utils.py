"""Top-k and top-p filtering of logits during training, so that it sees the distribution that was sampled from."""

from dataclasses import dataclass

import torch
from torch import Tensor

TOP_K_TOP_P_CHUNK_SIZE = 256


@dataclass
class TrainingSamplingParams:
    """How the generations were sampled. top_k None (or <= 0) and top_p 1 filter nothing."""

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def _limits_k(top_k: int | None) -> bool:
    return top_k is not None and top_k > 0


def _limits_p(top_p: float | None) -> bool:
    return top_p is not None and top_p < 1.0


def need_top_k_or_top_p_filtering(sampling_params: TrainingSamplingParams | None) -> bool:
    """Whether these parameters remove any token."""
    return sampling_params is not None and (_limits_k(sampling_params.top_k) or _limits_p(sampling_params.top_p))


def apply_top_k_top_p(
    logits: Tensor, top_k: int | None, top_p: float, chunk_size: int | None = TOP_K_TOP_P_CHUNK_SIZE
) -> tuple[Tensor, Tensor | None]:
    """(logits with removed entries at -inf, bool mask of kept entries), or (logits, None) when nothing is filtered.

    Top-k first: all values >= the k-th largest stay (ties too). Then top-p: the smallest set of most probable tokens
    whose mass reaches top_p (at least one). logits [..., V]; gradients of removed entries are 0. `chunk_size` rows
    are sorted at a time.
    """
    if not (_limits_k(top_k) or _limits_p(top_p)):
        return logits, None
    flat = logits.detach().reshape(-1, logits.shape[-1])
    step = chunk_size or max(1, flat.shape[0])
    parts = [_kept(flat[i : i + step], top_k, top_p) for i in range(0, flat.shape[0], step)]
    keep = torch.cat(parts).reshape(logits.shape) if parts else torch.ones_like(logits, dtype=torch.bool)
    return logits.masked_fill(~keep, float("-inf")), keep


def _kept(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    keep = torch.ones_like(logits, dtype=torch.bool)
    if _limits_k(top_k):
        threshold = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        keep = logits >= threshold
    if _limits_p(top_p):
        ascending, order = logits.masked_fill(~keep, float("-inf")).sort(dim=-1)
        inside = ascending.softmax(-1).cumsum(-1) > 1.0 - top_p
        inside[:, -1] = True
        keep = keep & torch.zeros_like(keep).scatter(-1, order, inside)
    return keep
