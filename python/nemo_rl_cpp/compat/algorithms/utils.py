"""NeMo RL's small functions that its algorithms share."""

import math
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.utils import calculate_baseline_and_std_per_prompt, get_gdpo_reward_component_keys, set_seed
from nemo_rl_cpp.compat.algorithms.performance import print_performance_metrics
from nemo_rl_cpp.data import tokenizer


class _CalculateKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, reference, weights, kl_type, input_clamp, output_clamp):
        kl, d_r, d_weight = C.calculate_kl(logprobs, reference, kl_type, input_clamp, output_clamp, weights, True)
        ctx.save_for_backward(d_r, d_weight)
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        d_r, d_weight = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[2]
        return -grad * d_r, grad * d_r, (grad * d_weight if wants_weight else None), None, None, None


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(pi || reference): with r = clamp(reference - logprobs), k1 = -r, k2 = r^2/2,
    k3 = e^r - 1 - r, times the weights, clamped. Same shape and dtype as `logprobs`; differentiable in all three.

    Raises ValueError for an unknown kl_type.
    """
    input_clamp, output_clamp = (
        math.inf if value is None else value for value in (input_clamp_value, output_clamp_value)
    )
    if logprobs.dtype not in (torch.float32, torch.float64):
        logprobs = logprobs.float()
    logprobs, logprobs_reference = torch.broadcast_tensors(logprobs, logprobs_reference)
    weights = importance_sampling_weights
    inputs = [t for t in (logprobs, logprobs_reference, weights) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _CalculateKl.apply(
            logprobs,
            logprobs_reference,
            weights if weights is None else weights.expand_as(logprobs),
            kl_type,
            input_clamp,
            output_clamp,
        )
    return C.calculate_kl(logprobs, logprobs_reference, kl_type, input_clamp, output_clamp, weights, False)[0]


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, global_normalization_factor: Tensor | float | None = None
) -> Tensor:
    """sum(values * mask) / (N + 1e-8), over all or `dim`; N is the sum of the mask unless a global count is given."""
    count = global_normalization_factor
    if count is None:
        count = mask.sum() if dim is None else mask.sum(dim=dim)
    weighted = values * mask
    return (weighted.sum() if dim is None else weighted.sum(dim=dim)) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, mean: Tensor | float | None = None, unbiased: bool = True) -> Tensor:
    """masked_mean((values - mean)^2), times n / (n - 1) if unbiased. One valid value has no unbiased variance: NaN."""
    if mean is None:
        mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    if unbiased:
        count = mask.sum()
        variance = variance * (count / (count - 1))
    return variance


def mask_out_neg_inf_logprobs(logprobs: Tensor, mask: Tensor, logprobs_name: str) -> Tensor:
    """`logprobs` with 0 where they are infinite or the mask is 0; prints how many valid ones were infinite."""
    infinite = torch.isinf(logprobs)
    valid = mask.bool()
    count = int((infinite & valid).sum())
    if count:
        print(
            f"[WARNING]: {count} of {int(valid.sum())} valid tokens have -inf in {logprobs_name}: the training policy's "
            "top-k/top-p removed a token that was sampled. They are set to 0."
        )
    return torch.where(valid & ~infinite, logprobs, torch.zeros_like(logprobs))


def get_tokenizer(tokenizer_config: Any, get_processor: bool = False) -> Any:
    """The tokenizer of a `policy.tokenizer` section; see nemo_rl_cpp.data.tokenizer."""
    if get_processor:
        raise NotImplementedError(
            "multimodal processors are not supported; call get_tokenizer(config, get_processor=False)"
        )
    return tokenizer.get_tokenizer(tokenizer_config)


def maybe_pad_last_batch(batch: Any, dp_size: int, mbs: int) -> Any:
    """Pads a batch to a multiple of dp_size * mbs rows by repeating its last row; the new rows have sample_mask 0.

    Pads input_ids, input_lengths and sample_mask, and token_mask and reference_policy_logprobs when present.
    """
    size = batch["input_ids"].shape[0]
    unit = dp_size * mbs
    missing = math.ceil(size / unit) * unit - size
    if missing == 0:
        return batch
    print(f"Padding the last batch with {missing} masked samples")
    for key in ("input_ids", "input_lengths", "token_mask", "sample_mask", "reference_policy_logprobs"):
        if key in batch:
            last = batch[key][-1:]
            filler = torch.zeros_like(last) if key == "sample_mask" else last
            batch[key] = torch.cat([batch[key], filler.repeat(missing, *(1,) * (last.ndim - 1))])
    return batch
