"""Gradients and optimizer steps of a module of transformers, as csrc/trainer/trainer.h offers them of a native model,
by one process or by ranks."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ranks import OtherRankFailedError, Ranks
from nemo_rl_cpp.models.hf.flat_model import FlatModel, ShardedModel
from nemo_rl_cpp.models.hf.library import quietly
from nemo_rl_cpp.models.hf.outputs import ModelRows, Outputs, ValueNet, outputs_of
from nemo_rl_cpp.models.policy.micro_batches import RowBatch
from nemo_rl_cpp.models.policy.train_step import Scoring

_BLOCK = 1 << 22


class OptimizerStep(NamedTuple):
    """The gradient's norm before clipping, and whether it was finite; where not, nothing was changed."""

    grad_norm: float
    finite: bool


MomentDtypes = tuple[torch.dtype | None, torch.dtype | None]


class HfTrainer:
    """What `MicroBatchRunner` and `TrainedModel` ask of a trainer.

    A forward pass keeps torch's tape, and `backward` goes back along it. Gradients of micro-batches add up in float32.

    Args:
        model: trained, or frozen (then only `forward` without keeping works).
        packed: lay the samples of a micro-batch end to end in one row, where the architecture keeps them apart.
        chunk: of how many tokens float32 logits exist at a time (`policy.logprob_chunk_size`).
        moments: what AdamW's two moments are kept in; None: float32.
    """

    out_dtype = torch.float32
    reused_tokens = 0
    """of generation's forward pass: none, it keeps no activations"""

    def __init__(
        self, model: FlatModel, packed: bool, chunk: int | None = None, moments: MomentDtypes = (None, None)
    ) -> None:
        self.model, self.packed, self._chunk, self._moment_dtypes = model, packed, chunk, moments
        self.optimizer_steps = 0
        self._grads: Tensor | None = None
        self._moments: tuple[Tensor, Tensor] | None = None
        self._kept: tuple[Outputs, ModelRows] | None = None
        self._recomputing: list[nn.Module] = []
        if model.trainable:
            model.gradients_into(lambda: self.grads)

    # ---- what a micro-batch needs

    def forward(
        self, batch: RowBatch, rows: list[int], temperature: float, share_prefix: bool, keep: bool, checkpoint: bool, out: Tensor, **more: object
    ) -> None:  # fmt: skip
        """Write what the model says of each wanted token of these samples into `out` [T]; -inf for a token that a filter removes.

        Args:
            keep: a `backward` will follow.
            more: `top_p`, `top_k`, and `unfiltered` [T], which gets the log-probabilities without filters.
        """
        if share_prefix:
            raise ValueError("transformers computes the prompt of each sample: share_prefix must be False")
        scoring = Scoring(temperature, float(more.get("top_p", 1.0)), int(more.get("top_k", 0)))
        unfiltered = more.get("unfiltered")
        picked = ModelRows.of(batch, rows, packed=self.packed).to(self.model.device)
        outputs = self._pass(picked, scoring, keep, checkpoint, unfiltered is not None)
        scored = outputs.scored.detach()
        out[picked.places] = (
            scored if outputs.removed is None else scored.masked_fill(outputs.removed, -torch.inf)
        ).cpu()
        if unfiltered is not None:
            unfiltered[picked.places] = outputs.unfiltered.detach().cpu()

    def _pass(self, rows: ModelRows, scoring: Scoring, keep: bool, checkpoint: bool, unfiltered: bool) -> Outputs:
        """Make a forward pass; with `keep` its tape is kept for `backward`."""
        self._kept = None  # the tape of a micro-batch without a gradient, which no `backward` has taken
        self._checkpoint(checkpoint and keep)
        with quietly(), torch.set_grad_enabled(keep):
            outputs = outputs_of(self.model.module, rows, scoring, unfiltered=unfiltered, chunk=self._chunk)
        self._kept = (outputs, rows) if keep else None
        return outputs

    def _checkpoint(self, wanted: bool) -> None:
        """Whether layers compute their activations again in the backward pass. Only the layers are told that this is training, and
        their dropouts are off, so that no dropout comes with it."""
        module = self.model.module
        base = module.backbone if isinstance(module, ValueNet) else module
        if wanted and not self._recomputing:
            if not base.supports_gradient_checkpointing:
                raise ValueError(
                    f"transformers cannot compute the activations of a {base.config.model_type} again: set "
                    "dtensor_cfg.activation_checkpointing=false (or that of megatron_cfg)"
                )
            enable = (
                getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            )  # by version
            enable({"use_reentrant": False})
            self._recomputing = [layer for layer in base.modules() if getattr(layer, "gradient_checkpointing", False)]
            for layer in self._recomputing:
                chances = ("dropout", "layerdrop")
                for name in [
                    n for n, v in vars(layer).items() if isinstance(v, float) and any(c in n for c in chances)
                ]:
                    setattr(layer, name, 0.0)
        for layer in self._recomputing:
            layer.gradient_checkpointing = layer.training = wanted

    def takes_token_loss(self, temperature: float, top_p: float, top_k: int) -> bool:
        """Return False: the loss is asked for the gradient of whole micro-batches."""
        return False

    def backward(self, d_out: Tensor, d_unfiltered: Tensor | None = None) -> None:
        """Add the gradients of the last `forward`, whose outputs have the gradients `d_out` [T] and `d_unfiltered` [T]."""
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
        """Begin a new sum of gradients."""
        self._kept = None
        self.grads.zero_()

    # ---- the optimizer

    @property
    def shard(self) -> tuple[int, int]:
        """This process has all of it."""
        return 0, self.model.compute.numel()

    @property
    def grads(self) -> Tensor:
        """float32 [n], in the layout of the model."""
        if self._grads is None:
            self._grads = torch.zeros_like(self.model.masters)
        return self._grads

    @property
    def exp_avg(self) -> Tensor:
        """AdamW's first moment [n]."""
        return self._both_moments()[0]

    @property
    def exp_avg_sq(self) -> Tensor:
        """AdamW's second moment [n]."""
        return self._both_moments()[1]

    def _both_moments(self) -> tuple[Tensor, Tensor]:
        if self._moments is None:
            self._moments = self._zero_moments(self.model.masters)
        return self._moments

    def _zero_moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._moment_dtypes
        return torch.zeros_like(like, dtype=first), torch.zeros_like(like, dtype=second)

    def step(
        self, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, max_grad_norm: float
    ) -> OptimizerStep:
        """Make one step of AdamW on the gradients, clipped as torch.nn.utils.clip_grad_norm_ does where `max_grad_norm` is above 0.
        The arithmetic is that of the native trainer, torch.optim.AdamW's."""
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
        """Sum the squares over the whole model."""
        return math.fsum(float(part.double().square().sum()) for part in grads.split(_BLOCK))

    def together(self) -> AbstractContextManager[None]:
        """Surround a turn over this process's micro-batches: nobody waits for it here."""
        return nullcontext()


class NextCollective(IntEnum):
    """What a rank is about to do. Of different wishes the largest comes first, and all ranks take part in it."""

    END = 0
    SCORE = 1
    FORWARD = 2
    FORWARD_AGAIN = 3
    """with activations that the backward computes again"""
    BACKWARD = 4
    FAIL = 5


class ShardedTrainer(HfTrainer):
    """As `HfTrainer`, whose model is a `ShardedModel`.

    A pass gathers weights of all ranks, and ranks have different numbers of micro-batches, some of which have no
    gradient. So a rank says before each pass what it wants, and takes part in what others want: in a forward pass with
    two tokens of its own that nobody reads, in a backward pass with a gradient of 0.
    """

    model: ShardedModel

    def __init__(
        self,
        model: ShardedModel | FlatModel,
        packed: bool,
        ranks: Ranks,
        chunk: int | None = None,
        moments: MomentDtypes = (None, None),
    ) -> None:
        super().__init__(model, packed, chunk, moments)
        self._ranks = ranks

    @contextmanager
    def together(self) -> Iterator[None]:
        """Surround a turn over this rank's micro-batches. It ends when all ranks are through with theirs, or by an
        error on each of them where one has failed."""
        try:
            yield
            self._agree(NextCollective.END)
        except OtherRankFailedError:
            raise
        except Exception:
            self._say(NextCollective.FAIL)
            raise

    def _say(self, wish: NextCollective) -> list[int]:
        """Tell what this rank wants, and return what all ranks want."""
        every = torch.empty(self._ranks.size, 1, dtype=torch.int64)
        self._ranks.communicator.all_gather(every, torch.tensor([int(wish)]), phase="agreeing on the next pass")
        return every.flatten().tolist()

    def _agree(self, wish: NextCollective) -> None:
        """Take part in what comes before `wish`, until it is what all others take part in."""
        while True:
            first = NextCollective(max(self._say(wish)))
            if first == NextCollective.FAIL:
                raise OtherRankFailedError(f"rank {self._ranks.rank} stopped: another rank failed")
            if first == wish:
                return
            if first == NextCollective.BACKWARD:
                super().backward(torch.zeros(1 + int(self._kept[1].places.max()), dtype=torch.float32))
            else:
                keep = first > NextCollective.SCORE
                self._kept = None
                super()._pass(ModelRows.smallest(), Scoring(), keep, first == NextCollective.FORWARD_AGAIN, False)

    def _pass(self, rows: ModelRows, scoring: Scoring, keep: bool, checkpoint: bool, unfiltered: bool) -> Outputs:
        self._agree(
            (NextCollective.FORWARD_AGAIN if checkpoint else NextCollective.FORWARD) if keep else NextCollective.SCORE
        )
        return super()._pass(rows, scoring, keep, checkpoint, unfiltered)

    def backward(self, d_out: Tensor, d_unfiltered: Tensor | None = None) -> None:
        self._agree(NextCollective.BACKWARD)
        super().backward(d_out, d_unfiltered)

    def zero_grad(self) -> None:
        """Begin a new sum of gradients."""
        self._kept = None
        self.model.forget()

    @property
    def shard(self) -> tuple[int, int]:
        """This rank's rows are all of its flat buffers."""
        return 0, self.model.flat_layout.total

    @property
    def grads(self) -> Tensor:
        """float32 [n] of this rank's rows, a copy."""
        return self.model.grads

    def _squares(self, grads: Tensor) -> float:
        return self._ranks.sum(super()._squares(grads))

    def _both_moments(self) -> tuple[Tensor, Tensor]:
        if self._moments is None:
            total = self.model.flat_layout.total
            self._moments = self._zero_moments(torch.empty(total, dtype=torch.float32))
        return self._moments
