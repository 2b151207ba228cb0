"""Many LoRA models on one base model. The native model computes with the adapters of one LoRA model at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.lora import MATRICES, LayerKinds, LoraConfig, adapted_modules
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.texts import token_bytes_table
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.hub.sources import TINY_RANDOM, find_policy_weights, findable_name
from nemo_rl_cpp.models.generation.native import native_runner
from nemo_rl_cpp.models.hf_config import max_positions
from nemo_rl_cpp.models.lora import Lora
from nemo_rl_cpp.models.model_folder import ModelFolder, open_model_folder
from nemo_rl_cpp.models.model_sizes import ModelSizes
from nemo_rl_cpp.models.policy.micro_batches import RowBatch, wanted_tokens
from nemo_rl_cpp.models.trained_model import DTYPES
from nemo_rl_cpp.serving.engine import score_sequence
from nemo_rl_cpp.serving.model import EngineSizes
from nemo_rl_cpp.tinker.types import Loss

ALPHA = 32
"""The alpha of all adapters: their product is scaled by ALPHA / rank, as in Tinker."""
_TOKENS_AT_ONCE = 4096  # per forward pass with kept activations; a longer datum forms its own micro-batch


@dataclass(frozen=True)
class Shape:
    """The shape of a LoRA model's adapters: rank and adapted matrices. `train_attn` includes recurrent layers."""

    rank: int
    train_mlp: bool = True
    train_attn: bool = True


@dataclass
class Base:
    """The base model with which the server was started. Clients may use any of `names`; the server lists the first.
    `cache_bytes` is the size of a sampler's KV cache."""

    names: tuple[str, ...]
    folder: ModelFolder
    tokenizer: TokenizerType
    precision: str
    sizes: EngineSizes
    cache_bytes: int
    max_length: int
    _native: WeakValueDictionary[Shape, AdaptedModel] = field(default_factory=WeakValueDictionary)
    newest: AdaptedModel | None = None  # kept even if no client uses it, because the next client often asks for it

    @classmethod
    def load(
        cls, name: str, served_name: str | None, precision: str, sizes: EngineSizes, quantization: str | None = None
    ) -> Base:
        """Load the base model `name`: a Hugging Face folder, a model name, a run's checkpoint, or "tiny-random".
        Clients may also call it `served_name`. `sizes` are those of each sampler's engine."""
        max_length = sizes.max_model_len
        place = name if name == TINY_RANDOM else find_policy_weights(name)
        folder = open_model_folder(str(place), max_length=max_length, length_key="--max-model-len", key="--model")
        folder = folder.quantised(quantization, "--quantization")
        folder.check_weights()
        tokenizer = tiny_tokenizer() if folder.path is None else Tokenizer.from_pretrained(folder.path, section="")
        names = tuple(dict.fromkeys(n for n in (served_name, name) if n))
        longest = min(max_length or 1 << 60, max_positions(folder.config))
        return cls(names, folder, tokenizer, precision, sizes, sizes.cache_bytes(), longest)

    @property
    def vocab_size(self) -> int:
        return int(self.folder.config["vocab_size"])

    @cached_property
    def end_token_ids(self) -> list[int]:
        return list(end_token_ids(self.folder.path, self.folder.config, self.tokenizer))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return token_bytes_table(self.tokenizer, self.vocab_size)

    def adapted(self, shape: Shape) -> AdaptedModel:
        """Return the native model for adapters of this shape, with its own copy of the base model's weights."""
        self.newest = self._native.get(shape) or AdaptedModel(self, shape)
        self._native[shape] = self.newest
        return self.newest

    def check_tokens(self, tokens: Sequence[int], what: str, room: int = 0) -> None:
        """Raise ValueError, in which `what` names the tokens, if there are none, if one is not in the vocabulary, or if
        so many are given that `room` more do not fit into a sequence."""
        if not tokens:
            raise ValueError(f"{what} has no token")
        self.check_vocabulary(min(tokens), max(tokens), what)
        if len(tokens) + room > self.max_length:
            raise ValueError(f"{what} has {len(tokens)} tokens, this model takes at most {self.max_length - room}")

    def check_vocabulary(self, least: int, most: int, what: str) -> None:
        """Raise ValueError, in which `what` names the tokens, if an id from `least` to `most` is no token."""
        if not 0 <= least <= most < self.vocab_size:
            raise ValueError(f"{what} holds a token that is not in the vocabulary of {self.vocab_size}")


@dataclass(eq=False)
class TrainingState:
    """A LoRA model in training: its adapters (A and B), their gradient, and AdamW's moments.

    Attributes:
        adapter: an optimizer step replaces this tensor instead of changing it, so that samplers can share it.
        moments: a file with the moments; out of date while a trainer holds them. In memory they would take most of the
            space of an idle model.
        grads: None if it is zero, and while the trainer of the AdaptedModel holds it (see `AdaptedModel.put_down`).
        optimizer_steps: the number of steps so far. Before the first, the moments are zero."""

    adapter: Tensor
    moments: BinaryIO
    grads: Tensor | None = None
    optimizer_steps: int = 0

    def write_moments(self, *moments: Tensor) -> None:
        """Overwrite the file `moments` with AdamW's exp_avg and exp_avg_sq, in this order."""
        self.moments.seek(0)
        for moment in moments:
            self.moments.write(moment.numpy())

    def read_moments(self, *moments: Tensor) -> None:
        """Fill the given tensors with AdamW's exp_avg and exp_avg_sq, in this order: with zeros before the first
        optimizer step, otherwise from the file `moments`."""
        self.moments.seek(0)
        for moment in moments:
            if self.optimizer_steps == 0:
                moment.zero_()
            elif self.moments.readinto(moment.numpy()) != moment.nbytes:
                raise OSError("the file that holds the optimizer's moments is too short")


@dataclass
class Row:
    """A checked training sequence of a request.

    Attributes:
        tokens: the N input tokens.
        targets: int64 [N, K], the tokens to score after each input token.
        shape: the shape in which the targets were given, [N] or [N, K].
        inputs: the other inputs by name, float32 of that shape."""

    tokens: list[int]
    targets: Tensor
    shape: torch.Size
    inputs: dict[str, Tensor]


class AdaptedModel:
    """The native base model with adapters of one shape, which several LoRA models (`TrainingState`) share. Before one
    of them computes, its adapters are loaded here."""

    def __init__(self, base: Base, shape: Shape) -> None:
        self.base, self.shape = base, shape
        native = base.folder.native()
        layers = LayerKinds.of(ModelSizes.of(native))
        if "experts" in native and shape.train_mlp:
            raise ValueError(f"{base.names[0]} is a mixture of experts, which get no adapters: set train_mlp=False")
        wanted = {"mlp"} if shape.train_mlp else set()
        wanted |= {"self_attn", "linear_attn"} if shape.train_attn else set()
        default = adapted_modules(LoraConfig(), layers)
        parts = ((layer, name) for layer in range(layers.count) for name in layers.matrices(layer))
        chosen = {layers.module(layer, name) for layer, name in parts if MATRICES[name] in wanted}
        modules = [module for module in default if module in chosen]
        if not modules:
            raise ValueError("no matrix of this model would be trained: set train_attn or train_mlp")
        name, key = findable_name(base.names[-1]), "base.dtensor_cfg.lora_cfg"
        settings = LoraConfig(dim=shape.rank, alpha=ALPHA, merge=base.folder.quantization is None)
        self.lora = Lora("base", tuple(modules), layers, settings, name, base.folder, key)
        self.native = C.DecoderModel(native, DTYPES[base.precision], False)
        base.folder.fill(self.native)
        self.lora.begin(self.native, 0, None, is_whole=True)
        self.trainer = C.Trainer(self.native)
        self._idle_engines: list[C.ResidentEngine] = []
        self._shown: Tensor | None = None  # the adapters with which the native model computes
        self._owner: TrainingState | None = None  # the state whose gradient and moments the trainer holds
        self._read_steps = 0  # optimizer_steps of that state when its moments were read

    @cached_property
    def nothing(self) -> Tensor:
        """Return adapters that are all zero, with which the model equals the base model."""
        return torch.zeros_like(self.native.masters)

    def new_adapter(self, seed: int) -> Tensor:
        """Return a new adapter: A is random from the seed, B is zero."""
        self._shown = None
        self.lora.draw(self.native, seed)
        return self.native.masters.clone()

    def show(self, adapter: Tensor) -> None:
        """Load `adapter` into the native model, unless it is loaded already."""
        if self._shown is adapter:
            return
        if not torch.equal(self.native.masters, adapter):
            self.native.masters.copy_(adapter)
            self.native.masters_changed()
        self._shown = adapter

    def _take_up(self, state: TrainingState) -> None:
        self.show(state.adapter)
        if self._owner is state:
            return
        self.put_down()
        state.read_moments(self.trainer.exp_avg, self.trainer.exp_avg_sq)
        grads = self.trainer.grads
        grads.zero_() if state.grads is None else grads.copy_(state.grads)
        state.grads = None
        self.trainer.optimizer_steps = self._read_steps = state.optimizer_steps
        self._owner = state

    def put_down(self) -> None:
        """Store the gradient and the moments that the trainer holds in the `TrainingState` of their model."""
        state = self._owner
        if state is None:
            return
        if state.optimizer_steps != self._read_steps:
            state.write_moments(self.trainer.exp_avg, self.trainer.exp_avg_sq)
        if self.trainer.grads.any():
            state.grads = self.trainer.grads.clone()
        self._owner = None

    # ---- training

    def forward(
        self, state: TrainingState, rows: Sequence[Row], loss: Loss, config: dict[str, float], *, backward: bool, factor: str | None = None
    ) -> tuple[float, list[Tensor]]:  # fmt: skip
        """Compute a loss on `rows`, and return (the loss, the log-probabilities of each row's targets, float32 [N, K]
        per row). If `backward`, accumulate the gradient for the next optimizer step.

        `config` gives loss inputs that are the same for all targets. `factor` names the loss input that multiplies the
        gradient of each target. If consecutive rows share a prompt on which this input is 0, the prompt is computed
        once (see `prompt_groups`).

        Raise ValueError if the loss is not finite; in that case no gradient is accumulated."""
        self._take_up(state)
        width = max(row.targets.shape[1] for row in rows)
        groups = prompt_groups(rows, factor)
        batch, targets = _packed(rows, width, groups)
        wanted, places = wanted_tokens(batch), batch.offsets.tolist()
        trained, prompts = wanted.clone(), self._score_prompts(rows, groups, width)
        scored, shared = torch.zeros((batch.num_tokens, width), dtype=self.trainer.out_dtype), [0] * len(rows)
        for group, logprobs in zip(groups, prompts):
            for row in range(group.begin, group.end):
                places_of_prompt = slice(places[row] + 1, places[row] + 1 + group.length)
                scored[places_of_prompt], trained[places_of_prompt] = logprobs, False
                shared[row] = 0 if row == group.begin else group.length + 1
        view = RowBatch(batch, trained, targets)
        micro_batches = list(_micro_batches([len(row.tokens) for row in rows], shared))
        before = self.trainer.grads.clone() if backward and len(micro_batches) > 1 else None
        total = 0.0
        for begin, end in micro_batches:
            self.trainer.forward(view, list(range(begin, end)), 1.0, True, backward, False, scored)
            chosen = torch.arange(places[begin], places[end])[wanted[places[begin] : places[end]]]
            logprobs = scored[chosen].requires_grad_(backward)
            of_rows = _of_rows(rows[begin:end], logprobs)
            value = loss(torch.cat([row.flatten() for row in of_rows]), _inputs_of(rows[begin:end], config))
            if not torch.isfinite(value):
                if before is not None:
                    self.trainer.grads.copy_(before)
                raise ValueError(f"the loss is {value.item()}, expected a finite number: no gradient was added")
            if backward:
                gradient = torch.zeros_like(scored)
                gradient[chosen] = torch.autograd.grad(value, logprobs)[0]
                self.trainer.backward(gradient)
            total += value.item()
        return total, [row.float() for row in _of_rows(rows, scored[wanted])]

    def _score_prompts(self, rows: Sequence[Row], groups: Sequence[PromptGroup], width: int) -> list[Tensor]:
        """Return, for each group, the log-probabilities [length, width] of the targets in its shared prompt."""
        prompts = [
            Row(rows[group.begin].tokens[: group.length], rows[group.begin].targets[: group.length], torch.Size(), {})
            for group in groups
        ]
        if not prompts:
            return []
        batch, targets = _packed(prompts, width, [])
        scored = torch.zeros((batch.num_tokens, width), dtype=self.trainer.out_dtype)
        wanted = wanted_tokens(batch)
        view = RowBatch(batch, wanted, targets)
        for begin, end in _micro_batches([group.length for group in groups], [0] * len(groups)):
            self.trainer.forward(view, list(range(begin, end)), 1.0, True, False, False, scored)
        return list(scored[wanted].split([group.length for group in groups]))

    def step(
        self, state: TrainingState, learning_rate: float, betas: Sequence[float], eps: float, weight_decay: float, max_grad_norm: float
    ) -> float:  # fmt: skip
        """Update the adapters with AdamW, and reset the gradient to zero. Return the gradient's norm before clipping.

        Raise ValueError if the norm is not finite; in that case the adapters are unchanged."""
        self._take_up(state)
        done = self.trainer.step(learning_rate, *betas, eps, weight_decay, max_grad_norm)
        self.trainer.zero_grad()
        if not done.finite:
            raise ValueError(f"the gradient's norm is {done.grad_norm}: the weights are unchanged, the gradient is 0")
        state.adapter = self._shown = self.native.masters.clone()
        state.optimizer_steps = self.trainer.optimizer_steps
        return done.grad_norm

    # ---- files

    def save(self, folder: Path, adapter: Tensor) -> None:
        """Write the weights `adapter` of the adapters to `folder`/adapter in PEFT's format."""
        self.lora.save(folder, self.native.trained_layout, adapter)

    def load(self, folder: Path) -> Tensor:
        """Load and return adapters written by `save`. Raise ValueError for another base model or shape."""
        self._shown = None
        self.lora.load(folder, self.native)
        return self.native.masters.clone()

    # ---- sampling

    def prompt_logprobs(self, adapter: Tensor, prompt: list[int]) -> Tensor:
        """Return the log-probabilities of a prompt's P tokens, float32 [P], with NaN for the first."""
        self.show(adapter)
        return score_sequence(self.trainer, prompt, torch.full((len(prompt),), torch.nan))

    def likeliest_of_prompt(self, adapter: Tensor, prompt: list[int], k: int) -> list[list[tuple[int, float]]]:
        """Return the `k` most likely tokens with their log-probabilities at each position of a prompt but the first."""
        self.show(adapter)
        logits = self.trainer.logits(torch.tensor(prompt))[:-1].float()
        values, tokens = logits.log_softmax(-1).topk(min(k, logits.shape[-1]))
        return [list(zip(*row)) for row in zip(tokens.tolist(), values.tolist())]

    def engine(self) -> C.ResidentEngine:
        """Return an idle engine for one sampler, with its own KV cache, because samplers take turns while their
        responses are unfinished."""
        if self._idle_engines:
            return self._idle_engines.pop()
        base, runner = self.base, native_runner(self.native, {})
        fits = runner.longest_sequence(base.sizes.prefill_chunk_tokens, base.cache_bytes)
        sizes = replace(base.sizes, max_model_len=min(base.max_length, fits))
        return sizes.engine(runner, base.cache_bytes, base.token_bytes)

    def return_engine(self, engine: C.ResidentEngine) -> None:
        """Take back an engine that has no request left, and free its KV cache."""
        engine.release_cache()
        self._idle_engines.append(engine)


@dataclass(frozen=True)
class PromptGroup:
    """Consecutive training rows, from `begin` to `end` (exclusive), that share a prompt, which is computed once. Their
    first `length` targets, and the first `length` + 1 tokens, are equal, and these targets have no gradient."""

    begin: int
    end: int
    length: int


def prompt_groups(rows: Sequence[Row], factor: str | None) -> list[PromptGroup]:
    """Return the groups of at least two consecutive rows with a common prompt, in order. The prompt of a row is its
    leading tokens whose value in the loss input named `factor`, such as "advantages", is 0. If `factor` is None, the
    prompts are unknown: return no groups."""
    if factor is None:
        return []
    groups: list[PromptGroup] = []
    first, free, end = 0, 0, 0  # the group that is being formed: its first row, its prompt's length, its end
    for number, row in enumerate(rows):
        has_gradient = row.inputs[factor].view(len(row.tokens), -1).any(dim=1)
        leading = int(has_gradient.int().argmax()) if has_gradient.any() else len(row.tokens) - 1
        is_alone = end - first == 1
        length = min(free, leading)
        may_join = end and (is_alone or leading >= free) and length > 0
        if may_join and _has_prompt(row, rows[first], length):
            free, end = length, number + 1
            continue
        if end - first > 1:
            groups.append(PromptGroup(first, end, free))
        first, free, end = number, leading, number + 1
    if end - first > 1:
        groups.append(PromptGroup(first, end, free))
    return groups


def _has_prompt(row: Row, other: Row, length: int) -> bool:
    """Return whether two rows are equal in their first `length` targets and their first `length` + 1 tokens."""
    has_tokens = row.tokens[: length + 1] == other.tokens[: length + 1]
    return has_tokens and torch.equal(row.targets[:length], other.targets[:length])


def _micro_batches(lengths: list[int], shared: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of consecutive rows with at most _TOKENS_AT_ONCE tokens, or of one longer row. The first
    `shared[i]` tokens of row i, which the row before it has too, count once in a micro-batch."""
    begin, tokens = 0, 0
    for row, length in enumerate(lengths):
        more = length - shared[row]
        if tokens and tokens + more > _TOKENS_AT_ONCE:
            yield begin, row
            begin, tokens, more = row, 0, length
        tokens += more
    yield begin, len(lengths)


def _packed(rows: Sequence[Row], width: int, groups: Sequence[PromptGroup]) -> tuple[RaggedBatch, Tensor]:
    """Pack rows, each with a dummy last token, into a batch in which the rows of a group have one `group_id`. Return
    the batch and the targets [T, width], where places without a target have 0."""
    group_of_row = torch.full((len(rows),), -1)
    for number, group in enumerate(groups):
        group_of_row[group.begin : group.end] = number
    lengths = torch.tensor([len(row.tokens) + 1 for row in rows])
    tokens = torch.tensor([token for row in rows for token in (*row.tokens, 0)])
    targets = torch.zeros((len(tokens), width), dtype=torch.int64)
    begin = 0
    for row in rows:
        targets[begin + 1 : begin + 1 + len(row.tokens), : row.targets.shape[1]] = row.targets
        begin += len(row.tokens) + 1
    return RaggedBatch(offsets_of(lengths), {"input_ids": tokens}, {"group_id": group_of_row}), targets


def _of_rows(rows: Sequence[Row], scored: Tensor) -> list[Tensor]:
    """Split log-probabilities [sum of N, width] of consecutive rows into one tensor [N, K] per row."""
    parts = scored.split([len(row.tokens) for row in rows])
    return [part[:, : row.targets.shape[1]] for part, row in zip(parts, rows)]


def _inputs_of(rows: Sequence[Row], config: dict[str, float]) -> dict[str, Tensor]:
    """Return each input of the loss for the targets of all rows, concatenated: the row's input, or else the number in
    `config`. Add `row`, the index of each target's row."""
    sizes = [row.targets.numel() for row in rows]
    names = {name for row in rows for name in row.inputs} | set(config)
    found = {
        name: torch.cat([
            row.inputs[name].flatten() if name in row.inputs else torch.full((size,), config[name])
            for row, size in zip(rows, sizes)
        ])
        for name in names
    }  # fmt: skip
    return found | {"row": torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes))}
