"""Forward passes of transformers modules: make the input from a batch, and return for each token to score the
log-probability, or with a critic the value of the state before the token."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.policy.micro_batches import RowBatch
from nemo_rl_cpp.models.policy.train_step import Scoring
from nemo_rl_cpp.models.weight_files import raw_tensors, weight_files
from nemo_rl_cpp.models.weights import FILE_DTYPES

if TYPE_CHECKING:
    from torch import nn

INSTALL = "pip install 'nemo_rl_cpp[hf]'"
OLDEST = 5
"""The oldest supported major version of transformers: it is known to separate packed sequences."""


@lru_cache(maxsize=1)
def transformers() -> ModuleType:
    """Import and return transformers. If it is missing or too old, raise ValueError with the install command."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"backend hf: transformers is not installed: {INSTALL}")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ValueError(
            f"backend hf needs transformers {OLDEST} or newer, and {transformers.__version__} is installed: {INSTALL} --upgrade"
        )
    return transformers


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and notices inside the context."""
    logging = transformers().utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def accepts(module: nn.Module, *names: str) -> str | None:
    """Return the first of `names` that is a parameter of the module's forward method; None if none is."""
    known = inspect.signature(module.forward).parameters
    return next((name for name in names if name in known), None)


SCORE = "score.weight"


class ValueNet(nn.Module):
    """A critic on `backbone`, transformers' AutoModel: the value of a position is score · h, where h [..., D] is the
    last hidden state (after the final norm), and D the hidden size. The head `score` starts at zero, as in `Value`."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = backbone.config
        width = backbone.config.get_text_config().hidden_size
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    @classmethod
    def of(cls, backbone: nn.Module, folder: Path | None) -> Self:
        """Return a critic on `backbone`, with the single-label head that `folder` holds, if any. Raise ModelFolderError
        for a head of another shape."""
        made = cls(backbone)
        for name, raw in () if folder is None else raw_tensors(weight_files(folder)):
            if name != SCORE:
                continue
            if tuple(raw.shape) != tuple(made.score.weight.shape):
                raise ModelFolderError(
                    f"{folder}: {SCORE} has the shape {list(raw.shape)}, but a critic's is {list(made.score.weight.shape)} (one label)"
                )
            head = torch.frombuffer(bytearray(raw.data), dtype=FILE_DTYPES[raw.dtype])  # valid in this iteration alone
            made.score.weight.data.copy_(head.view(raw.shape))
        return made

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def forward(self, row: Tensor, column: Tensor, **inputs: object) -> Tensor:
        """Run the backbone on `inputs` of b rows; return the values at the W positions (row, column), [W, 1]."""
        hidden = self.backbone(**inputs).last_hidden_state
        return self.score(hidden[row, column])


@dataclass(frozen=True)
class ModelRows:
    """The input of one forward pass, and the positions of the W tokens to score (see `wanted_tokens`).

    The model predicts a token at the position before it. So a sample is computed up to the token before its last token
    to score.

    Attributes:
        input_ids, position_ids: int64 [1, T'] if packed: the T' computed tokens of all samples, with positions that
            restart in each sample. Otherwise int64 [b, S']: b samples, padded on the right to S' tokens.
        row, column: int64 [W] position in `input_ids` of the token before each token to score.
        targets: int64 [W] ids of the tokens to score.
        places: int64 [W] indices of the tokens to score among the tokens of the batch."""

    input_ids: Tensor
    position_ids: Tensor
    row: Tensor
    column: Tensor
    targets: Tensor
    places: Tensor

    @classmethod
    def of(cls, batch: RowBatch, rows: list[int], *, packed: bool) -> Self:
        """Return the input for the samples `rows` of the batch, each of which has a token to score: one row of all
        samples if `packed`, otherwise one row per sample."""
        ids, starts = batch.data.tokens["input_ids"].to(torch.int64), batch.data.starts[torch.tensor(rows)]
        of_samples = batch.data.rows(batch.wanted)
        wanted = [of_samples[row].nonzero().flatten() for row in rows]
        lengths = torch.tensor([int(w[-1]) for w in wanted])
        counts = torch.tensor([len(w) for w in wanted])
        inside = torch.cat(wanted)
        sample = torch.arange(len(rows)).repeat_interleave(counts)
        places = starts[sample] + inside
        position = torch.arange(int(lengths.max()))[None].expand(len(rows), -1)
        used = position < lengths[:, None]
        if packed:
            at = (starts[:, None] + position)[used]
            column = (lengths.cumsum(0) - lengths)[sample] + inside - 1
            return cls(ids[at][None], position[used][None], torch.zeros_like(places), column, ids[places], places)
        at = torch.where(used, starts[:, None] + position, starts[:, None])
        return cls(ids[at].masked_fill(~used, 0), position.contiguous(), sample, inside - 1, ids[places], places)

    @classmethod
    def smallest(cls) -> Self:
        """Return the shortest possible input: one sample of two tokens, of which the second is scored."""
        ids, zero = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return cls(ids, torch.arange(2)[None], zero, zero, zero, zero)

    def to(self, device: str) -> Self:
        """Return a copy whose tensors for the module (all but `places`) are on `device`."""
        moved = (t.to(device) for t in (self.input_ids, self.position_ids, self.row, self.column, self.targets))
        return ModelRows(*moved, self.places)


_CHUNK_BYTES = 1 << 26


@dataclass
class Outputs:
    """The model's outputs for the W tokens to score, float32 [W], with a gradient if requested: `scored`, the
    log-probability under generation's temperature, top-k and top-p, or the critic's value; bool `removed`, the tokens
    that top-k or top-p removes, whose `scored` must get no gradient; and, if requested, `unfiltered`, the
    log-probability under the temperature only."""

    scored: Tensor
    removed: Tensor | None = None
    unfiltered: Tensor | None = None


def outputs_of(
    module: nn.Module, rows: ModelRows, scoring: Scoring, *, unfiltered: bool, chunk: int | None = None
) -> Outputs:
    """Run one forward pass and return its outputs under the sampling settings `scoring`. If `unfiltered`, they include
    the log-probabilities without top-k and top-p. Logits in float32 exist for only `chunk` tokens at a time, also in
    the backward pass; None: for as many as fit in 64 MB."""
    if isinstance(module, ValueNet):
        values = module(rows.row, rows.column, **_inputs(module.backbone, rows))
        return Outputs(values.squeeze(-1).float())
    inputs, column = _inputs(module, rows), rows.column
    if accepts(module, "logits_to_keep") is not None:  # only at positions where some row has a token to score
        inputs["logits_to_keep"], column = rows.column.unique(return_inverse=True)
    logits = module(**inputs).logits
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * logits.shape[-1]))
    picks = list(zip(*(part.split(chunk) for part in (rows.row, column, rows.targets))))
    scored, raw, removed = _InChunks.apply(logits, picks, scoring, unfiltered)
    if not scoring.filters:
        return Outputs(scored, None, scored if unfiltered else None)
    return Outputs(scored, removed, raw if unfiltered else None)


class _InChunks(torch.autograd.Function):
    """Log-probabilities at some positions of the logits, computed in chunks that the backward pass recomputes, so that
    only the logits and their gradient exist in full size."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, picks: list[tuple[Tensor, Tensor, Tensor]], scoring: Scoring, unfiltered: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (scored, unfiltered, removed) of `Outputs`, [W] each. Without top-k and top-p the last two are empty;
        without the argument `unfiltered` the second is. `picks` has for each chunk of w tokens (rows, columns, token
        ids), int64 [w] each: token i is scored by `logits[row, column]`."""
        made = [_of_places(logits[row, column], targets, scoring, unfiltered) for row, column, targets in picks]
        ctx.save_for_backward(logits)
        ctx.picks, ctx.scoring, ctx.unfiltered = picks, scoring, unfiltered
        nothing = logits.new_empty(0, dtype=torch.float32)
        scored = torch.cat([part.scored for part in made])
        raw = torch.cat([part.unfiltered if unfiltered and scoring.filters else nothing for part in made])
        removed = torch.cat([nothing.bool() if part.removed is None else part.removed for part in made])
        ctx.mark_non_differentiable(removed)
        return scored, raw, removed

    @staticmethod
    def backward(ctx: FunctionCtx, d_scored: Tensor, d_raw: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        gradient, begin = torch.zeros_like(logits), 0
        for row, column, targets in ctx.picks:
            end = begin + len(targets)
            with torch.enable_grad():
                chunk = logits[row, column].detach().requires_grad_()
                part = _of_places(chunk, targets, ctx.scoring, ctx.unfiltered)
                roots, slopes = [part.scored], [d_scored[begin:end]]
                if ctx.scoring.filters and part.unfiltered is not None:
                    roots.append(part.unfiltered)
                    slopes.append(d_raw[begin:end])
                (gradient[row, column],) = torch.autograd.grad(roots, chunk, slopes)
            begin = end
        return gradient, None, None, None


def _of_places(logits: Tensor, targets: Tensor, scoring: Scoring, unfiltered: bool) -> Outputs:
    """Return the `Outputs` [w] of w tokens with the ids `targets` [w] and the logits [w, V]: log-probabilities with the
    temperature and the filters (top-k, top-p) of `scoring`, and with `unfiltered` also those without the filters."""
    logits = logits.float()
    if scoring.temperature != 1:
        logits = logits / scoring.temperature
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    if not scoring.filters:
        scored = chosen - logits.logsumexp(-1)
        return Outputs(scored, None, scored if unfiltered else None)
    kept = kept_tokens(logits.detach(), scoring.top_k, scoring.top_p)
    scored = chosen - logits.masked_fill(~kept, -torch.inf).logsumexp(-1)
    removed = ~kept.gather(-1, targets[:, None]).squeeze(-1)
    return Outputs(scored, removed, chosen - logits.logsumexp(-1) if unfiltered else None)


def _inputs(module: nn.Module, rows: ModelRows) -> dict[str, object]:
    """Return the keyword arguments for the module's forward method. Packed samples are told apart only by their
    position ids, which restart in each sample."""
    inputs: dict[str, object] = {"input_ids": rows.input_ids, "use_cache": False}
    if accepts(module, "position_ids") is not None:
        inputs["position_ids"] = rows.position_ids
    return inputs


def kept_tokens(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return bool [W, V]: the tokens that top-k and then top-p keep, by the rule of csrc/kernels/sampling.h.

    Top-k keeps all logits that are at least the k-th largest. Top-p sorts the rest ascending by (logit, token id), and
    keeps a token if the cumulative probability up to and including it is above 1 - top_p. It always keeps the last."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        kept = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        ascending, order = logits.masked_fill(~kept, -torch.inf).sort(dim=-1, stable=True)
        inside = ascending.softmax(-1).cumsum(-1) > 1.0 - top_p
        inside[:, -1] = True
        kept = kept & torch.zeros_like(kept).scatter(-1, order, inside)
    return kept


def keeps_packed_samples_apart(module: nn.Module) -> bool:
    """Return whether this architecture keeps samples apart that are packed into one row, given that positions restart
    in each: whether the second sample's output has no gradient with respect to the first's embeddings."""
    base = module.backbone if isinstance(module, ValueNet) else module
    if accepts(base, "position_ids") is None or accepts(base, "inputs_embeds") is None:
        return False
    embedding = base.get_input_embeddings()
    vocabulary = embedding.weight.shape[0]
    device = embedding.weight.device
    ids = torch.arange(8, device=device)[None] % vocabulary
    positions = (torch.arange(8, device=device) % 4)[None]
    try:
        with torch.enable_grad():
            embedded = embedding(ids).detach().requires_grad_()
            out = base(inputs_embeds=embedded, position_ids=positions, use_cache=False)
            second = (out.last_hidden_state if isinstance(module, ValueNet) else out.logits)[:, 4:].float()
            weights = torch.linspace(-1, 1, second.shape[-1], device=device).sin()
            (gradient,) = torch.autograd.grad((second * weights).sum(), embedded)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError):
        return False  # an architecture that does not accept embeddings
    first, own = gradient[:, :4], gradient[:, 4:]
    return bool(own.any()) and not bool(first.any())
