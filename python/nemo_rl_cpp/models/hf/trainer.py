"""The trainer of a transformers module, on one rank or several, with the interface of csrc/trainer/trainer.h."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ranks import OtherRankFailedError
from nemo_rl_cpp.models.hf.flat_model import FlatModel, ShardedModel
from nemo_rl_cpp.models.hf.outputs import ModelRows, Outputs, ValueNet, outputs_of, quietly
from nemo_rl_cpp.models.policy.micro_batches import RowBatch
from nemo_rl_cpp.models.policy.train_step import Scoring

_BLOCK = 1 << 22


class OptimizerStep(NamedTuple):
    """The gradient norm before clipping, and whether it was finite. If not, the step changed nothing."""

    grad_norm: float
    finite: bool


MomentDtypes = tuple[torch.dtype | None, torch.dtype | None]


class HfTrainer:
    """The trainer of a transformers module, trained or frozen, for `TrainedModel` and `MicroBatchRunner`.

    A forward pass keeps torch's autograd graph for `backward`. Gradients of micro-batches accumulate in float32.
    `packed` puts the samples of a micro-batch in one row; the architecture must keep them separate. Float32 logits
    exist for `chunk` tokens at a time (`policy.logprob_chunk_size`). `moments`: dtypes of AdamW's moments; None:
    float32."""

    out_dtype = torch.float32
    reused_tokens = 0
    """Tokens reused from generation's forward pass: 0, because generation keeps no activations."""

    def __init__(
        self, model: FlatModel, packed: bool, chunk: int | None = None, moments: MomentDtypes = (None, None)
    ) -> None:
        self.model, self.packed, self._chunk, self._moment_dtypes = model, packed, chunk, moments
        self.optimizer_steps = 0
        self._kept: tuple[Outputs, ModelRows] | None = None
        self._recomputing: list[nn.Module] = []
        if model.trainable:
            model.gradients_into(lambda: self.grads)

    # ---- the passes of a micro-batch

    def forward(
        self, batch: RowBatch, rows: list[int], temperature: float, share_prefix: bool, keep: bool, checkpoint: bool, out: Tensor, **more: object
    ) -> None:  # fmt: skip
        """For each token to score in the samples `rows`, write its log-probability (or critic's value) into `out` [T];
        -inf if top-k or top-p removes the token.

        Args:
            keep: a `backward` will follow.
            checkpoint: whether that `backward` recomputes activations, so that only the inputs of layers are kept.
            more: `top_p`, `top_k`, and `unfiltered` [T], which receives the log-probabilities without top-k and top-p.

        `share_prefix` has no effect: transformers computes every sample with its prompt."""
        scoring = Scoring(temperature, float(more.get("top_p", 1.0)), int(more.get("top_k", 0)))
        unfiltered = more.get("unfiltered")
        picked = ModelRows.of(batch, rows, packed=self.packed).to(self.model.device)
        outputs = self._pass(picked, scoring, keep, checkpoint, unfiltered is not None)
        scored = outputs.scored.detach()
        if outputs.removed is not None:
            scored = scored.masked_fill(outputs.removed, -torch.inf)
        out[picked.places] = scored.cpu()
        if unfiltered is not None:
            unfiltered[picked.places] = outputs.unfiltered.detach().cpu()

    def _pass(self, rows: ModelRows, scoring: Scoring, keep: bool, checkpoint: bool, unfiltered: bool) -> Outputs:
        """Run a forward pass. `keep` the autograd graph for `backward`, with `checkpoint` only the layers' inputs."""
        self._kept = None  # drop the graph of a micro-batch that got no backward pass
        self._checkpoint(checkpoint and keep)
        with quietly(), torch.set_grad_enabled(keep):
            outputs = outputs_of(self.model.module, rows, scoring, unfiltered=unfiltered, chunk=self._chunk)
        self._kept = (outputs, rows) if keep else None
        return outputs

    def _checkpoint(self, wanted: bool) -> None:
        """Switch activation checkpointing on or off. Only the layers are put in training mode, as checkpointing
        requires, and their dropout is set to 0, because training mode would enable it."""
        module = self.model.module
        base = module.backbone if isinstance(module, ValueNet) else module
        if wanted and not self._recomputing:
            if not base.supports_gradient_checkpointing:
                raise ValueError(
                    f"transformers cannot compute the activations of a {base.config.model_type} again: set "
                    "dtensor_cfg.activation_checkpointing=false (or that of megatron_cfg)"
                )
            # the name depends on transformers' version
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            self._recomputing = [layer for layer in base.modules() if getattr(layer, "gradient_checkpointing", False)]
            for layer in self._recomputing:
                for name, value in list(vars(layer).items()):
                    if isinstance(value, float) and ("dropout" in name or "layerdrop" in name):
                        setattr(layer, name, 0.0)
        for layer in self._recomputing:
            layer.gradient_checkpointing = layer.training = wanted

    def backward(self, d_out: Tensor, d_unfiltered: Tensor | None = None, d_entropy: None = None) -> None:
        """Run the backward pass of the last `forward`, and add the weights' gradients to the accumulated ones. `d_out`
        [T] and `d_unfiltered` [T] are the gradients of its outputs. `d_entropy` is always None."""
        outputs, picked = self._kept
        self._kept = None
        device = outputs.scored.device
        d_scored = d_out[picked.places].to(device)
        if outputs.removed is not None:
            d_scored = d_scored.masked_fill(outputs.removed, 0.0)
        roots, gradients = [outputs.scored], [d_scored]
        if d_unfiltered is not None and outputs.unfiltered is not None:
            roots.append(outputs.unfiltered)
            gradients.append(d_unfiltered[picked.places].to(device))
        torch.autograd.backward(roots, gradients)

    def zero_grad(self) -> None:
        self._kept = None
        self.grads.zero_()

    # ---- the optimizer

    @property
    def shard(self) -> tuple[int, int]:
        """Return the range (begin, end) of the flat buffers that this process updates: here all."""
        return 0, self.model.flat_layout.total

    @cached_property
    def grads(self) -> Tensor:
        """Return the accumulated gradients, float32 [n], in the layout of the model."""
        return self._zeros(None)

    @cached_property
    def exp_avg(self) -> Tensor:
        """Return AdamW's first moment [n], for the n elements that this process updates."""
        return self._zeros(self._moment_dtypes[0])

    @cached_property
    def exp_avg_sq(self) -> Tensor:
        return self._zeros(self._moment_dtypes[1])

    def _zeros(self, dtype: torch.dtype | None) -> Tensor:
        """Return zeros [n], one per weight, in `dtype`; None: in the dtype of the master weights."""
        model = self.model
        return torch.zeros(model.flat_layout.total, dtype=dtype or model.masters_dtype, device=model.device)

    def step(
        self, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, max_grad_norm: float
    ) -> OptimizerStep:
        """Take one AdamW step. If `max_grad_norm` is above 0, clip the gradients first, like
        torch.nn.utils.clip_grad_norm_. The arithmetic is torch.optim.AdamW's, as in the native trainer."""
        grads = self.grads
        norm = math.sqrt(self._squares(grads))
        if not math.isfinite(norm):
            return OptimizerStep(norm, False)
        if max_grad_norm > 0 and (scale := max_grad_norm / (norm + 1e-6)) < 1:
            grads.mul_(scale)
        self.optimizer_steps += 1
        for begin, end, masters, compute in self.model.pieces():
            C.adamw_step(
                masters, grads[begin:end], self.exp_avg[begin:end], self.exp_avg_sq[begin:end], compute, lr=lr, beta1=beta1,
                beta2=beta2, eps=eps, weight_decay=weight_decay, step=self.optimizer_steps, first=begin,
            )  # fmt: skip
        return OptimizerStep(norm, True)

    def _squares(self, grads: Tensor) -> float:
        """Return the sum of squares of the whole model's gradient, of which `grads` is this process's part."""
        return math.fsum(float(part.double().square().sum()) for part in grads.split(_BLOCK))


class NextCollective(IntEnum):
    """The kind of collective pass that a rank needs next. If the ranks need different kinds, all ranks first run the
    kind with the largest value in this enum."""

    END = 0
    SCORE = 1
    FORWARD = 2
    FORWARD_AGAIN = 3
    """a forward pass whose activations the backward pass recomputes"""
    BACKWARD = 4
    FAIL = 5


class ShardedTrainer(HfTrainer):
    """An `HfTrainer` for a model that is sharded over ranks (`ShardedModel`).

    Every pass gathers weights from all ranks, but ranks have different numbers of micro-batches, and some micro-batches
    have no backward pass. So before each pass the ranks tell each other which pass they need, and a rank takes part in
    the passes of other ranks: in a forward pass with two dummy tokens, in a backward pass with a gradient of 0."""

    model: ShardedModel

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context for a loop over this rank's micro-batches. The context ends once all ranks have finished
        their loops. If a rank fails, the context raises an error on every rank."""
        try:
            yield
            self._agree(NextCollective.END)
        except OtherRankFailedError:
            raise
        except Exception:
            self._say(NextCollective.FAIL)
            raise

    def _say(self, wish: NextCollective) -> list[int]:
        """Tell all ranks the next pass of this rank, `wish`, and return the next passes of all ranks."""
        every = torch.empty(self.model.ranks.size, 1, dtype=torch.int64)
        self.model.ranks.communicator.all_gather(every, torch.tensor([int(wish)]), phase="agreeing on the next pass")
        return every.flatten().tolist()

    def _agree(self, wish: NextCollective) -> None:
        """Join the passes that other ranks need first, until all are ready for `wish`."""
        while True:
            first = NextCollective(max(self._say(wish)))
            if first == NextCollective.FAIL:
                raise OtherRankFailedError(f"rank {self.model.ranks.rank} stopped: another rank failed")
            if first == wish:
                return
            if first == NextCollective.BACKWARD:
                super().backward(torch.zeros(1 + int(self._kept[1].places.max()), dtype=torch.float32))
            else:
                keep = first > NextCollective.SCORE
                self._kept = None
                smallest = ModelRows.smallest().to(self.model.device)
                super()._pass(smallest, Scoring(), keep, first == NextCollective.FORWARD_AGAIN, False)

    def _pass(self, rows: ModelRows, scoring: Scoring, keep: bool, checkpoint: bool, unfiltered: bool) -> Outputs:
        forward = NextCollective.FORWARD_AGAIN if checkpoint else NextCollective.FORWARD
        self._agree(forward if keep else NextCollective.SCORE)
        return super()._pass(rows, scoring, keep, checkpoint, unfiltered)

    def backward(self, d_out: Tensor, d_unfiltered: Tensor | None = None, d_entropy: None = None) -> None:
        self._agree(NextCollective.BACKWARD)
        super().backward(d_out, d_unfiltered, d_entropy)

    def zero_grad(self) -> None:
        self._kept = None
        self.model.forget()

    grads = property(attrgetter("model.grads"))
    """A copy of the accumulated gradients of this rank's parameter rows, float32 [n], in its buffers' layout."""

    def _squares(self, grads: Tensor) -> float:
        return self.model.ranks.sum(super()._squares(grads))
