"""One global batch: micro-batches forward, loss, backward. The optimizer step is the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan, select_rows, wanted_tokens


class NonFiniteError(RuntimeError):
    """A loss or gradient is not a number: the run stops before the optimizer step."""


@dataclass(frozen=True)
class Scoring:
    """How generation sampled, and so how its tokens are scored: log-softmax of logits / temperature over what top-k and
    top-p keep (all tokens by default)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @staticmethod
    def of(generation: Any) -> Scoring:
        """From `policy.generation`. Greedy decoding (temperature 0) reports temperature 1 without a filter."""
        if generation.temperature == 0:
            return Scoring()
        top_p, top_k = generation.top_p, generation.top_k
        return Scoring(
            1.0 if generation.temperature is None else generation.temperature,
            1.0 if top_p is None else top_p,
            max(top_k or 0, 0),
        )

    @property
    def filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    def unfiltered(self) -> Scoring:
        return Scoring(self.temperature)


@dataclass
class Exactness:
    """Generation's log-probabilities against the training forward's, before the first update."""

    tokens: int = 0
    mismatched_tokens: int = 0
    max_gap: float = 0.0

    def compare(self, curr: Tensor, generation: Tensor, wanted: Tensor) -> None:
        differs = (curr != generation) & wanted
        self.tokens += int(wanted.sum())
        self.mismatched_tokens += int(differs.sum())
        if differs.any():
            self.max_gap = max(self.max_gap, float((curr - generation).abs()[differs].max()))


@dataclass
class GlobalBatchResult:
    """`outputs`: what the model's head said of each trained token, [B, S]; 0 elsewhere and in rows outside the batch.
    `zero_gradient_tokens`: of `packed_tokens` those that needed no backward."""

    outputs: Tensor
    loss: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list)
    packed_tokens: int = 0
    zero_gradient_tokens: int = 0


@dataclass(frozen=True)
class GlobalCounts:
    """Denominators over the whole global batch (and all ranks)."""

    valid_seqs: Tensor
    valid_toks: Tensor
    valid_positive_toks: Tensor | None

    @staticmethod
    def of(data: Mapping[str, Any]) -> GlobalCounts:
        sample_mask, token_mask = data["sample_mask"].float(), data["token_mask"].float()
        per_row = (token_mask[:, 1:] * sample_mask[:, None]).sum(1)
        positive = (per_row * (data["rewards"] > 0)).sum() if "rewards" in data else None
        return GlobalCounts(sample_mask.sum(), per_row.sum(), positive)


def run_global_batch(
    trainer: Any, data: Mapping[str, Any], loss_fn: Any, begin: int, end: int, batching: MicroBatching, scoring: Scoring,
    *, train: bool, on_policy: bool = False, exactness: Exactness | None = None, evaluate: Callable[..., LossResult] | None = None,
) -> GlobalBatchResult:  # fmt: skip
    """Forward, loss and (when `train`) backward of rows [begin, end); gradients add up in the trainer.

    Under top-k or top-p a loss with a KL term also gets `curr_logprobs_unfiltered` [b, S-1] in its data, and its gradient
    with respect to them is followed too.

    Where the loss's gradient is zero in a whole micro-batch there is no backward. Rows of which the loss says so beforehand
    (`zero_gradient_rows`) therefore get micro-batches of their own.

    Args:
        on_policy: the weights are those that generated: `prev_logprobs` are this very forward's log-probabilities.
        exactness: where to compare them with `generation_logprobs`; None: no comparison.
        evaluate: how the loss is asked, by default `evaluate_loss` (log-probabilities); for values `evaluate_value_loss`.
    """
    evaluate = evaluate or evaluate_loss
    counts = GlobalCounts.of(
        {
            k: v[begin:end]
            for k, v in data.items()
            if isinstance(v, Tensor) and v.dim() and len(v) == len(data["input_ids"])
        }
    )
    wanted = wanted_tokens(data)
    apart = loss_fn.zero_gradient_rows(data) if train and hasattr(loss_fn, "zero_gradient_rows") else None
    batch, micro_batches = plan(data, wanted, begin, end, batching, apart)
    outputs = torch.zeros(data["input_ids"].shape, dtype=trainer.out_dtype)
    d_outputs = torch.zeros_like(outputs)
    unfiltered = (
        torch.zeros_like(outputs)
        if scoring.filters and getattr(loss_fn, "reference_policy_kl_penalty", 0) != 0
        else None
    )
    d_unfiltered = None if unfiltered is None else torch.zeros_like(outputs)
    token_loss = fused_token_loss(trainer, loss_fn, data, counts, scoring) if train else None
    result = GlobalBatchResult(outputs)
    for rows in micro_batches:
        packed_tokens = C.packed_tokens(batch, rows, batching.share_prefix)
        result.packed_tokens += packed_tokens
        fused = token_loss is not None and (apart is None or not apart[rows[0]])
        if fused:
            trainer.forward_with_loss(
                batch, rows, scoring.temperature, batching.share_prefix, batching.checkpoint, outputs, token_loss
            )
        else:
            trainer.forward(batch, rows, scoring.temperature, batching.share_prefix, train, batching.checkpoint, outputs,
                            top_p=scoring.top_p, top_k=scoring.top_k, unfiltered=unfiltered)  # fmt: skip
        index = torch.tensor(rows)
        width = max(2, int(data["input_lengths"][index].max()))
        curr, removed = (
            without_removed_tokens(outputs[index, :width]) if scoring.filters else (outputs[index, :width], 0)
        )
        micro = select_rows(data, index, width)
        if exactness is not None:
            exactness.compare(curr, micro["generation_logprobs"].to(curr.dtype), wanted[index, :width])
        if on_policy:
            micro["prev_logprobs"] = curr.clone()
        if unfiltered is not None:
            micro["curr_logprobs_unfiltered"] = unfiltered[index, 1:width]
        loss = evaluate(loss_fn, curr, micro, counts, need_grad=train)
        check_finite(loss, rows, curr)
        if fused:
            trainer.finish_backward()
        elif train and loss.has_no_gradient():
            result.zero_gradient_tokens += packed_tokens
        elif train:
            d_outputs[index, loss.first_column : width] = loss.grad.to(d_outputs.dtype)
            if d_unfiltered is not None:
                d_unfiltered[index, 1:width] = (
                    0 if loss.grad_unfiltered is None else loss.grad_unfiltered.to(d_outputs.dtype)
                )
            trainer.backward(d_outputs, d_unfiltered)
        result.loss += loss.value
        metrics = {
            **loss.metrics,
            "global_valid_seqs": float(counts.valid_seqs),
            "global_valid_toks": float(counts.valid_toks),
        }
        result.metrics.append(metrics | {"num_filtered_out_tokens": float(removed)} if scoring.filters else metrics)
    if scoring.filters:
        result.outputs = without_removed_tokens(outputs)[0]
    return result


def fused_token_loss(
    trainer: Any, loss_fn: Any, data: Mapping[str, Any], counts: GlobalCounts, scoring: Scoring
) -> Any:
    """The loss for the head to ask while it holds a token's logits, which saves computing them again; None where the loss
    looks at whole sequences or is a plain callable, and where the head does not allow it."""
    if not hasattr(loss_fn, "token_loss") or not trainer.takes_token_loss(
        scoring.temperature, scoring.top_p, scoring.top_k
    ):
        return None
    return loss_fn.token_loss(data, counts.valid_seqs, counts.valid_toks, counts.valid_positive_toks)


def without_removed_tokens(logprobs: Tensor) -> tuple[Tensor, int]:
    """(log-probabilities with 0 for -inf, how many were): tokens that top-k or top-p removes under the present weights. As
    in NeMo RL they stay in the loss, as constants. NaN stays NaN."""
    removed = logprobs == -torch.inf
    count = int(removed.sum())
    return (logprobs.masked_fill(removed, 0.0) if count else logprobs), count


@dataclass(frozen=True)
class LossResult:
    """A loss of one micro-batch; the gradients [b, width - first_column] are with respect to the head's outputs and the
    unfiltered log-probabilities."""

    value: float
    metrics: dict[str, float]
    grad: Tensor | None = None
    grad_unfiltered: Tensor | None = None
    first_column: int = 1
    what: str = "log-probability"
    nonfinite: tuple[int, int] | None = (
        None  # (row, column of grad) of the first term that is not finite, where the loss says so
    )

    def has_no_gradient(self) -> bool:
        return all(grad is None or not grad.any() for grad in (self.grad, self.grad_unfiltered))


def evaluate_loss(
    loss_fn: Any, curr_logprobs: Tensor, micro: Mapping[str, Any], counts: GlobalCounts, *, need_grad: bool
) -> LossResult:
    """Of log-probabilities [b, width]: the native loss, or any callable on log-probabilities that require grad. A loss
    sees them without column 0, whose token has none."""
    curr_logprobs = curr_logprobs[:, 1:]
    if hasattr(loss_fn, "native"):
        result = loss_fn.native(
            curr_logprobs.contiguous(), micro, counts.valid_seqs, counts.valid_toks, counts.valid_positive_toks
        )
        return LossResult(
            float(result.loss), dict(result.metrics), result.grad_logprobs, getattr(result, "grad_unfiltered", None),
            nonfinite=getattr(result, "nonfinite", None),
        )  # fmt: skip
    leaf = curr_logprobs.detach().clone().requires_grad_(need_grad)
    leaves = [leaf]
    if "curr_logprobs_unfiltered" in micro:
        leaves.append(micro["curr_logprobs_unfiltered"].detach().clone().requires_grad_(need_grad))
        micro = {**micro, "curr_logprobs_unfiltered": leaves[1]}
    with torch.set_grad_enabled(need_grad):
        out = loss_fn(
            next_token_logprobs=leaf,
            data=micro,
            global_valid_seqs=counts.valid_seqs,
            global_valid_toks=counts.valid_toks,
        )
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ValueError(f"a loss must return a scalar tensor or (scalar tensor, metrics), got {type(loss).__name__}")
    metrics = {k: float(v) for k, v in metrics.items()}
    metrics.setdefault("loss", float(loss.detach()))
    metrics.setdefault("num_valid_samples", float(micro["sample_mask"].sum()))
    if not need_grad:
        return LossResult(float(loss), metrics)
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on next_token_logprobs: its gradient would be zero everywhere")
    grads = torch.autograd.grad(loss, leaves, allow_unused=len(leaves) > 1)
    grad = torch.zeros_like(leaf) if grads[0] is None else grads[0]
    return LossResult(float(loss.detach()), metrics, grad, grads[1] if len(leaves) > 1 else None)


def evaluate_value_loss(
    loss_fn: Any, values: Tensor, micro: Mapping[str, Any], counts: GlobalCounts, *, need_grad: bool
) -> LossResult:
    """Of values [b, width], column t the value of the state before token t (column 0 is 0): the native loss, or any
    callable (values, data, global_valid_seqs, global_valid_toks) -> (loss, metrics) on values that require grad."""
    if hasattr(loss_fn, "native"):
        result = loss_fn.native(values.contiguous(), micro, counts.valid_seqs, counts.valid_toks)
        return LossResult(float(result.loss), dict(result.metrics), result.grad_values, first_column=0, what="value")
    leaf = values.detach().clone().requires_grad_(need_grad)
    with torch.set_grad_enabled(need_grad):
        loss, metrics = loss_fn(leaf, micro, counts.valid_seqs, counts.valid_toks)
    grad = torch.autograd.grad(loss, leaf)[0] if need_grad else None
    return LossResult(
        float(loss.detach()), {k: float(v) for k, v in metrics.items()}, grad, first_column=0, what="value"
    )


def check_finite(loss: LossResult, rows: list[int], curr: Tensor) -> None:
    """Raises NonFiniteError naming the first bad sample and token."""
    for grad in (loss.grad, loss.grad_unfiltered):
        bad = None if grad is None else ~torch.isfinite(grad)
        if bad is not None and bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            raise NonFiniteError(
                f"the gradient of the loss is {float(grad[row, column])} at sample {rows[row]}, token {column + loss.first_column} "
                f"(its {loss.what} is {float(curr[row, column + loss.first_column]):.6g}); the weights were not updated"
            )
    if not math.isfinite(loss.value):
        if loss.nonfinite is not None:
            row, token = loss.nonfinite[0], loss.nonfinite[1] + loss.first_column
            raise NonFiniteError(
                f"the loss is {loss.value} at sample {rows[row]}, token {token} (its {loss.what} is {float(curr[row, token]):.6g}); "
                "the weights were not updated"
            )
        raise NonFiniteError(
            f"the loss is {loss.value} in the micro-batch of samples {rows}; the weights were not updated"
        )


def first_bad_gradient(trainer: Any, data: Mapping[str, Any], begin: int, end: int, run: Callable[..., Any]) -> str:
    """Where a gradient that is not finite comes from: " (it comes from sample 3, token 7)", or "" where no sample alone gives one.

    Samples, then tokens, are tried by halves, `run(data, begin, end)` forward and backward each, since the sum over a batch does
    not say it. The trainer's gradients are lost.
    """

    def is_bad(rows: range, mask: Tensor) -> bool:
        trainer.zero_grad()
        try:
            run({**data, "token_mask": mask}, rows.start, rows.stop)
        except NonFiniteError:
            return True
        return not bool(torch.isfinite(trainer.grads.sum(dtype=torch.float64)))

    rows, mask = range(begin, end), data["token_mask"]
    if not is_bad(rows, mask):
        return ""
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if is_bad(half, mask) else rows[len(half) :]
    columns = (wanted_tokens(data)[rows.start]).nonzero().flatten()
    while len(columns) > 1:
        half = columns[: len(columns) // 2]
        only = torch.zeros_like(mask)
        only[rows.start, half] = mask[rows.start, half]
        columns = half if is_bad(rows, only) else columns[len(half) :]
    return f" (it comes from sample {rows.start}, token {int(columns[0])})" if len(columns) else ""
