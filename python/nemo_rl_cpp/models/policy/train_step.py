"""Forward pass, loss and backward pass of one global batch, one micro-batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.ranks import GradientSums, Move, Ranks
from nemo_rl_cpp.models.policy.micro_batches import MicroBatch, MicroBatching, plan, wanted_tokens
from nemo_rl_cpp.ops import LossCounts

Loss: TypeAlias = Callable[..., object]
"""A loss of this package, or any callable: see `evaluate_loss` and `evaluate_value_loss`."""


class NonFiniteError(RuntimeError):
    """Raised before the optimizer step if a loss or gradient is infinite or NaN; the run stops."""


@dataclass(frozen=True)
class Scoring:
    """The sampling settings under which log-probabilities are computed: the log-softmax of logits / temperature over
    the tokens that top-k and top-p keep (by default all tokens)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @staticmethod
    def of(generation: GenerationConfig) -> Scoring:
        """Return the settings of `policy.generation`; for greedy decoding temperature 1 without top-k and top-p."""
        if generation.temperature == 0:
            return Scoring()
        temperature, top_p = (1.0 if value is None else value for value in (generation.temperature, generation.top_p))
        return Scoring(temperature, top_p, max(generation.top_k or 0, 0))

    @property
    def filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    def unfiltered(self) -> Scoring:
        return Scoring(self.temperature)


@dataclass
class Exactness:
    """The comparison of generation's log-probabilities with those of the training forward pass before the first update:
    the number of compared tokens, how many differed, and the largest difference."""

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
    """The result of one global batch for this rank's samples. `outputs` [T] has the log-probability (or critic's value)
    of each trained token of this global batch, and 0 for the other tokens of the `train` call. `blocks` has the number
    of micro-batches of each gradient block (see `Ranks.blocks`); `losses` and `metrics` have an entry per micro-batch.
    `packed_tokens` tokens were in forward passes, `zero_gradient_tokens` of them in no backward pass."""

    outputs: Tensor
    blocks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    packed_tokens: int = 0
    zero_gradient_tokens: int = 0

    @property
    def loss(self) -> float:
        return sum(self.losses)


def global_counts(data: RaggedBatch, begin: int = 0, end: int | None = None) -> LossCounts:
    """Return the counts by which the loss of a global batch, the samples [begin, end) of `data`, is divided. Without
    rewards `valid_positive_toks` is None."""
    sample_mask, token_mask = data.samples["sample_mask"].float(), data.tokens["token_mask"].float()
    token_mask = token_mask.index_fill(0, data.starts, 0)  # a sample's first token has no log-probability
    per_row = (data.by_sample(token_mask) * sample_mask)[begin:end]
    rewards = data.samples.get("rewards")
    positive = None if rewards is None else (per_row * (torch.as_tensor(rewards)[begin:end] > 0)).sum()
    return LossCounts(per_row.sum(), sample_mask[begin:end].sum(), positive)


@dataclass
class MicroBatchRunner:
    """Run forward pass, loss and backward pass of each micro-batch of a batch. Gradients accumulate in the trainer.

    With top-k or top-p, a loss with a KL term also receives `curr_logprobs_unfiltered` [b, S-1], log-probabilities
    without top-k and top-p, and their gradient is propagated too.

    A micro-batch whose loss has zero gradient gets no backward pass. Samples whose gradient will be zero according to
    the loss (`zero_gradient_rows`) are therefore placed in separate micro-batches.

    Attributes:
        scoring: the sampling settings of generation.
        evaluate: `evaluate_loss` for log-probabilities (the default), `evaluate_value_loss` for values.
        ranks: the processes that share a global batch.
        blocks: number of gradient blocks, the parts of a global batch whose gradients are added along a fixed tree (see
            `Ranks.blocks`); None: one per rank.
        sums: how gradients are summed over the ranks.
        counts_loads: routers count each expert's tokens, in backward passes; so every sample gets a backward pass.
        balance_weight: weight of the loss that balances experts; if above 0, every sample gets a backward pass."""

    trainer: C.Trainer
    loss_fn: Loss
    batching: MicroBatching
    scoring: Scoring = Scoring()
    evaluate: Callable[..., LossResult] | None = None
    ranks: Ranks = Ranks()
    blocks: int | None = None
    sums: GradientSums = GradientSums()
    counts_loads: bool = False
    balance_weight: float = 0.0

    @property
    def visits_all(self) -> bool:
        """Return whether every sample gets a backward pass, also if the gradient of its loss is 0."""
        return self.counts_loads or self.balance_weight > 0

    @property
    def own_blocks(self) -> int:
        """Return how many gradient blocks (see `Ranks.blocks`) this rank computes."""
        return 1 if self.blocks is None else self.blocks // self.ranks.size

    @property
    def evens_out(self) -> bool:
        """Return whether samples may move to another rank to balance backward passes: never with `gradient_blocks`."""
        asked = hasattr(self.loss_fn, "zero_gradient_rows") and hasattr(self.trainer, "move_kept")
        return asked and not self.visits_all and self.blocks is None and self.ranks.size > 1

    def abandon_sum(self) -> None:
        """After a rank has failed, join a sum of gradients that other ranks may have started, so that they do not wait
        forever, and discard its result. Do nothing if gradients are summed only after the backward passes, or if
        `end_block` has joined every sum already."""
        if self.sums.beside and not (self.sums.sharded and self.own_blocks > 1):
            self.trainer.abandon_sum()

    def forward_backward(
        self,
        data: RaggedBatch,
        begin: int,
        end: int,
        *,
        on_policy: bool = False,
        exactness: Exactness | None = None,
        backward: bool = True,
    ) -> GlobalBatchResult:
        """Run forward pass, loss and, if `backward`, backward pass of this rank's part of the samples [begin, end), one
        micro-batch at a time. Return outputs, losses and metrics. `on_policy`: the current weights generated the
        samples, so this pass provides `prev_logprobs`. `exactness` collects the comparison with
        `generation_logprobs`."""
        guard = _RankGuard(self, self.sums if backward else GradientSums())
        options = data, begin, end, backward, on_policy, exactness
        batch = guard.planned(options) if backward else _GlobalBatch(self, *options)
        for number, micro_batches in enumerate(batch.blocks):
            # the gradient sum starts during the last backward pass of each block (sharded) or of the last block
            adds = guard.sums.beside and (guard.sums.sharded or number + 1 == len(batch.blocks))
            with_gradient = [rows for rows in micro_batches if adds and not batch.is_apart(rows)]
            with guard.holding():
                for rows in micro_batches if guard.failed is None else []:
                    if with_gradient and rows is with_gradient[-1]:
                        self.trainer.begin_sum()
                    self._micro_batch(batch, rows)
            # after a failure this rank only takes part in sums for which other ranks wait
            if backward and len(batch.blocks) > 1 and (guard.failed is None or guard.sums.sharded):
                self.trainer.end_block()
        guard.raise_failure()
        outputs = batch.result.outputs.contiguous()
        batch.result.outputs = without_removed_tokens(outputs)[0] if self.scoring.filters else outputs
        return batch.result

    def _micro_batch(self, batch: _GlobalBatch, rows: list[int]) -> None:
        """Run forward pass, loss and, unless the loss has zero gradient, backward pass for the samples `rows`."""
        trainer, batching, scoring, result = self.trainer, self.batching, self.scoring, batch.result
        packed_tokens = C.packed_tokens(batch.packed, rows, batching.share_prefix)
        result.packed_tokens += packed_tokens
        fused = batch.token_loss is not None and not batch.is_apart(rows)
        common = batch.packed, rows, scoring.temperature, batching.share_prefix
        if fused:
            trainer.forward_with_loss(*common, batching.checkpoint, result.outputs, batch.token_loss)
        else:
            trainer.forward(
                *common, batch.backward, batching.checkpoint, batch.scored, top_p=scoring.top_p, top_k=scoring.top_k,
                unfiltered=batch.unfiltered, entropy=batch.entropies,
            )  # fmt: skip
        micro = MicroBatch.of(batch.data, rows)
        curr, removed = micro.padded(result.outputs), 0
        if scoring.filters:
            curr, removed = without_removed_tokens(curr)
        loss = batch.loss(micro, curr)
        check_finite(loss, rows, curr)
        if fused:
            trainer.finish_backward()
        elif batch.backward and not (self.visits_all or any(grad.any() for grad in loss.grads)):
            result.zero_gradient_tokens += packed_tokens
        elif batch.backward:
            trainer.backward(*batch.gradients(micro, loss))
        seqs, toks = float(batch.counts.valid_seqs), float(batch.counts.valid_toks)
        metrics = dict(loss.metrics, global_valid_seqs=seqs, global_valid_toks=toks)
        if scoring.filters:
            metrics["num_filtered_out_tokens"] = float(removed)
        if batch.backward and self.balance_weight:
            metrics["moe/load_balancing_loss"] = trainer.take_balance_loss() / self.balance_weight
        result.losses.append(loss.value)
        result.metrics.append(metrics)


@dataclass
class _RankGuard:
    """The error handling of one rank in a global batch. If gradients are summed during the backward passes, other ranks
    wait for this rank's part of each sum; so an error inside the context `holding` is stored, and `raise_failure`
    raises it after the global batch. Otherwise an error is raised at once."""

    runner: MicroBatchRunner
    sums: GradientSums
    failed: Exception | None = None

    def planned(self, options: tuple[object, ...]) -> _GlobalBatch:
        """Return `_GlobalBatch(runner, *options)`. If creating it fails, join the gradient sums for which other ranks
        wait, then raise the error. If samples move between ranks (`MicroBatchRunner.evens_out`) and no rank has failed,
        also send the activations that generation kept of them."""
        runner, batch = self.runner, None
        try:
            batch = _GlobalBatch(runner, *options)
        except Exception as error:
            self.failed = error
        if runner.evens_out and runner.ranks.sum(0.0 if self.failed is None else 1.0) == 0:
            runner.trainer.move_kept(batch.packed, batch.moves)
        if self.failed is not None and self.sums.sharded and runner.own_blocks > 1:
            for _ in range(runner.own_blocks):  # the other ranks wait for this rank's part of each block's sum
                runner.trainer.end_block()
        self.raise_failure()
        return batch

    @contextmanager
    def holding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self.sums.beside:
                raise
            self.failed = error

    def raise_failure(self) -> None:
        if self.failed is not None:
            self.runner.abandon_sum()
            raise self.failed


class _GlobalBatch:
    """One global batch: its micro-batches, the counts that its loss is divided by, and its results."""

    def __init__(
        self, way: MicroBatchRunner, data: RaggedBatch, begin: int, end: int, backward: bool, on_policy: bool, exactness: Exactness | None
    ) -> None:  # fmt: skip
        self.way, self.data, self.backward, self.on_policy, self.exactness = way, data, backward, on_policy, exactness
        self.counts = global_counts(data, begin, end)
        self.wanted = wanted_tokens(data)
        if backward and way.balance_weight:
            sequences = data.by_sample(self.wanted.float())[begin:end].count_nonzero()
            way.trainer.balance_experts(way.balance_weight / max(1, int(sequences)))
        self.apart: Tensor | None = None
        if backward and hasattr(way.loss_fn, "zero_gradient_rows") and not way.visits_all:
            self.apart = way.loss_fn.zero_gradient_rows(data)
        self.moves: list[Move] = []
        if way.evens_out and self.apart is not None:
            own, self.moves = way.ranks.even_block(data, begin, end, self.apart)
            blocks = [own]
        else:
            blocks = way.ranks.blocks(data, begin, end, way.blocks, way.sums.sharded)
        targets = None
        if getattr(way.loss_fn, "takes_candidates", False):
            targets = torch.cat([data.tokens["input_ids"][:, None], data.tokens["candidate_ids"]], 1)
        plans = [plan(data, self.wanted, rows, way.batching, self.apart, targets) for rows in blocks]
        self.packed, self.blocks = plans[0][0], [micro_batches for _, micro_batches in plans]
        # outputs of the forward pass: [T], or [T, 1 + k] for each token and its candidates
        self.scored = torch.zeros(data.num_tokens if targets is None else targets.shape, dtype=way.trainer.out_dtype)
        outputs, self.candidates = (self.scored, None) if targets is None else (self.scored[:, 0], self.scored[:, 1:])
        self.result = GlobalBatchResult(outputs, [len(micro_batches) for micro_batches in self.blocks])
        self.token_loss: C.TokenLoss | None = None
        if backward:
            self.token_loss = fused_token_loss(way.trainer, way.loss_fn, data, self.counts, way.scoring)
        # a top_k of the whole vocabulary filters nothing: the LM head then evaluates the loss, on its only outputs
        has_kl = getattr(way.loss_fn, "reference_policy_kl_penalty", 0) != 0 and self.token_loss is None
        self.unfiltered = torch.zeros_like(self.scored) if way.scoring.filters and has_kl else None
        takes_entropies = getattr(way.loss_fn, "takes_entropies", False)
        self.entropies = outputs.new_zeros(data.num_tokens) if takes_entropies else None

    def is_apart(self, rows: list[int]) -> bool:
        """Return whether the loss has declared before the forward pass (`zero_gradient_rows`) that the samples `rows`
        get no gradient. Such samples form separate micro-batches."""
        return self.apart is not None and bool(self.apart[rows[0]])

    def loss(self, micro: MicroBatch, curr: Tensor) -> LossResult:
        """Return the loss of a micro-batch from `curr` [b, width], the log-probabilities or values of its samples."""
        data = micro.data(self.data)
        if self.exactness is not None:
            self.exactness.compare(curr, data["generation_logprobs"].to(curr.dtype), micro.padded(self.wanted))
        if self.on_policy:
            data["prev_logprobs"] = curr.clone()
        if self.unfiltered is not None:
            data["curr_logprobs_unfiltered"] = micro.padded(self.unfiltered)[:, 1:]
        if self.entropies is not None:
            data["curr_entropies"] = micro.padded(self.entropies)[:, 1:]
        if self.candidates is not None:
            data["curr_candidates"] = micro.padded(self.candidates)[:, 1:]
        evaluate = self.way.evaluate or evaluate_loss
        return evaluate(self.way.loss_fn, curr, data, self.counts, need_grad=self.backward)

    def gradients(self, micro: MicroBatch, loss: LossResult) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return three gradients of the loss: with respect to the log-probabilities, to those without top-k and top-p,
        and to the entropies. The last two are None if not computed. Each gradient has the shape of its tensor."""
        if self.way.sums.beside and self.is_apart(micro.rows):
            raise ValueError(
                f"zero_gradient_rows of the loss names sample {micro.rows[0]}, whose micro-batch has a gradient, when the sum over "
                "ranks has begun: leave such samples out of it"
            )
        d_scored = torch.zeros_like(self.scored)
        d_unfiltered = None if self.unfiltered is None else torch.zeros_like(self.unfiltered)
        d_entropies = None if loss.grad_entropy is None else torch.zeros_like(self.entropies)
        micro.write(loss.grad, d_scored if self.candidates is None else d_scored[:, 0], loss.first_column)
        if loss.grad_candidates is not None:
            micro.write(loss.grad_candidates, d_scored[:, 1:], 1)
        for grad, into in ((loss.grad_unfiltered, d_unfiltered), (loss.grad_entropy, d_entropies)):
            if grad is not None:
                micro.write(grad, into, 1)
        return d_scored, d_unfiltered, d_entropies


def fused_token_loss(
    trainer: C.Trainer, loss_fn: Loss, data: RaggedBatch, counts: LossCounts, scoring: Scoring
) -> C.TokenLoss | None:
    """Return `loss_fn` as an object that the LM head evaluates while it holds a token's logits; None if the loss, or
    the trainer under the sampling settings `scoring`, does not support this. `counts`: the counts by which the loss is
    divided."""
    sampling = scoring.temperature, scoring.top_p, scoring.top_k
    fuses = hasattr(loss_fn, "token_loss") and hasattr(trainer, "takes_token_loss")
    return loss_fn.token_loss(data, counts) if fuses and trainer.takes_token_loss(*sampling) else None


def without_removed_tokens(logprobs: Tensor) -> tuple[Tensor, int]:
    """Return the log-probabilities with -inf (of a token that top-k or top-p removes under the current weights)
    replaced by 0, and the number of replacements. As in NeMo RL, such tokens stay in the loss as constants; NaN
    stays."""
    removed = logprobs == -torch.inf
    count = int(removed.sum())
    return (logprobs.masked_fill(removed, 0.0) if count else logprobs), count


@dataclass(frozen=True)
class LossResult:
    """The loss of one micro-batch (b samples, padded to `width` tokens), its metrics and its gradients. `grad` [b,
    width - first_column] belongs to the log-probabilities (`first_column` 1) or values (0), `grad_unfiltered` to the
    log-probabilities without top-k and top-p, `grad_entropy` to the entropies, `grad_candidates` [b, width - 1, k] to
    those of k candidate tokens. `nonfinite`: (row, column of grad) of the first non-finite term, if reported."""

    value: float
    metrics: dict[str, float]
    grad: Tensor | None = None
    grad_unfiltered: Tensor | None = None
    first_column: int = 1
    what: str = "log-probability"
    nonfinite: tuple[int, int] | None = None
    grad_entropy: Tensor | None = None
    grad_candidates: Tensor | None = None

    @property
    def grads(self) -> list[Tensor]:
        grads = self.grad, self.grad_unfiltered, self.grad_entropy, self.grad_candidates
        return [grad for grad in grads if grad is not None]


def evaluate_loss(
    loss_fn: Loss, curr_logprobs: Tensor, micro: Mapping[str, object], counts: LossCounts, *, need_grad: bool
) -> LossResult:
    """Return the value, metrics and (if `need_grad`) gradients of a loss on a micro-batch `micro`: b samples, padded to
    `width` tokens. `curr_logprobs` is [b, width]; its column 0, whose token has no log-probability, is not passed to
    the loss. `counts` are the counts by which the loss is divided. The loss is native, or any callable, which gets a
    tensor that requires grad."""
    curr_logprobs, seqs, toks = curr_logprobs[:, 1:], counts.valid_seqs, counts.valid_toks
    if hasattr(loss_fn, "native"):
        result = loss_fn.native(curr_logprobs.contiguous(), micro, seqs, toks, counts.valid_positive_toks)
        metrics = dict(result.metrics)
        if result.mult_prob_error_sum is not None:
            metrics["token_mult_prob_error_sum"] = result.mult_prob_error_sum
        optional = ("grad_unfiltered", "nonfinite", "grad_entropy", "grad_candidates")
        found = {name: getattr(result, name) for name in optional}
        return LossResult(float(result.loss), metrics, result.grad_logprobs, **found)
    leaf = curr_logprobs.detach().clone().requires_grad_(need_grad)
    leaves = [leaf]
    if "curr_logprobs_unfiltered" in micro:
        leaves.append(micro["curr_logprobs_unfiltered"].detach().clone().requires_grad_(need_grad))
        micro = {**micro, "curr_logprobs_unfiltered": leaves[1]}
    with torch.set_grad_enabled(need_grad):
        out = loss_fn(next_token_logprobs=leaf, data=micro, global_valid_seqs=seqs, global_valid_toks=toks)
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
    loss_fn: Loss, values: Tensor, micro: Mapping[str, object], counts: LossCounts, *, need_grad: bool
) -> LossResult:
    """Return the value, metrics and (if `need_grad`) gradient of a loss on the critic's values of a micro-batch
    `micro`: b samples, padded to the width w. In `values` [b, w] column t is the value of the state before token t;
    column 0 is 0. The loss is native, or any differentiable callable (values, data, global_valid_seqs,
    global_valid_toks) -> (loss, metrics)."""
    if hasattr(loss_fn, "native"):
        result = loss_fn.native(values.contiguous(), micro, counts.valid_seqs, counts.valid_toks)
        return LossResult(float(result.loss), dict(result.metrics), result.grad_values, first_column=0, what="value")
    leaf = values.detach().clone().requires_grad_(need_grad)
    with torch.set_grad_enabled(need_grad):
        loss, metrics = loss_fn(leaf, micro, counts.valid_seqs, counts.valid_toks)
    grad = torch.autograd.grad(loss, leaf)[0] if need_grad else None
    metrics = {k: float(v) for k, v in metrics.items()}
    return LossResult(float(loss.detach()), metrics, grad, first_column=0, what="value")


def check_finite(loss: LossResult, rows: list[int], curr: Tensor) -> None:
    """Raise NonFiniteError, which names the first sample and token concerned, if the loss or its gradient is not
    finite. `rows` are the samples of the micro-batch, and `curr` their log-probabilities or values."""
    what = None if math.isfinite(loss.value) else f"the loss is {loss.value}"
    where, place = f"in the micro-batch of samples {rows}", loss.nonfinite
    if place is not None:
        what = what or "a term of the loss is not finite"
    for grad in loss.grads:
        bad = ~torch.isfinite(grad)
        if bad.any():
            place = tuple(bad.nonzero()[0].tolist())
            what = f"the gradient of the loss is {float(grad[place])}"
            break
    if place is not None:
        row, token = place[0], place[1] + loss.first_column
        where = f"at sample {rows[row]}, token {token} (its {loss.what} is {float(curr[row, token]):.6g})"
    if what is not None:
        raise NonFiniteError(f"{what} {where}; the weights were not updated")
