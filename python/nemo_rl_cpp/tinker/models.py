"""The operations on the models over one base model, shared by the clients in this process and the server's routes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.argument_checks import LARGEST, SMALLEST, described, number, token_ids, whole_number
from nemo_rl_cpp.models.weight_files import ADAPTER
from nemo_rl_cpp.serving.engine import STOP_STRING, STOP_TOKEN, Sample
from nemo_rl_cpp.tinker import types
from nemo_rl_cpp.tinker.adapters import AdaptedModel, Base, Row, Shape, TrainingState
from nemo_rl_cpp.tinker.store import Facts, Place, Store
from nemo_rl_cpp.tinker.worker import Answers, Sampler, Worker

CustomLoss = Callable[[Sequence[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]
"""A loss of a client: takes the data and the log-probabilities of each datum's targets; returns the loss and metrics."""
_OPTIMIZER, _STEPS = "optimizer.safetensors", "optimizer.json"
_SEEDS, LONGEST_LIFE = 1 << 62, 1 << 32
TARGETS = "target_tokens"
_WIDEST = 4096  # targets per token
_LARGEST_BETA = 0.999999


@dataclass(eq=False)
class Model:
    """A LoRA model in training. `adapted` and `state` are None until `Models.create` sets them."""

    id: str
    facts: Facts
    adapted: AdaptedModel | None = None
    state: TrainingState | None = None

    @property
    def trained(self) -> TrainingState:
        if self.state is None:
            raise ValueError(f"{self.id} could not be made or loaded")
        return self.state


@dataclass
class Models:
    """All LoRA models over one base model, their checkpoints, and the thread in which all methods run."""

    base: Base
    store: Store
    worker: Worker = field(default_factory=Worker)

    def create(self, model: Model, seed: int) -> None:
        """Initialise the adapters of a LoRA model: B is zero, so that its outputs equal the base model's. Raise
        ValueError for an invalid rank or seed."""
        rank = model.facts.shape.rank
        if not 1 <= rank <= 4096:
            raise ValueError(f"the rank of LoRA is {rank}, expected 1 to 4096")
        if not 0 <= seed < _SEEDS:
            raise ValueError(f"the seed of LoRA is {seed}, expected 0 to 2^62")
        model.adapted = self.base.adapted(model.facts.shape)
        model.state = TrainingState(model.adapted.new_adapter(seed), TemporaryFile(dir=self.store.root))

    # ---- training

    def forward(
        self, model: Model, data: Sequence[types.Datum], loss_fn: str, config: dict[str, float | str] | None, *, backward: bool
    ) -> types.ForwardBackwardOutput:  # fmt: skip
        """Compute a built-in loss, summed over all targets, and the log-probabilities of the targets. If `backward`,
        accumulate the gradient for the next optimizer step."""
        state = model.trained
        loss, needed, numbers = types.loss_of(loss_fn, config or {})
        rows, factor = rows_of(data, self.base, needed, tuple(numbers)), types.FACTORS.get(loss_fn)
        total, logprobs = model.adapted.forward(state, rows, loss, numbers, backward=backward, factor=factor)
        return _output(rows, logprobs, {"loss:sum": total})

    def forward_backward_custom(
        self, model: Model, data: Sequence[types.Datum], loss_fn: CustomLoss
    ) -> types.ForwardBackwardOutput:
        """Compute the loss `loss_fn(data, log-probabilities of each datum's targets)`, and accumulate its gradient.
        This needs one more forward pass than a built-in loss."""
        state = model.trained
        targets = [
            types.Datum(
                each.model_input, {name: value for name, value in each.loss_fn_inputs.items() if name == TARGETS}
            )
            for each in data
        ]
        rows = rows_of(targets, self.base, (), ())
        found = model.adapted.forward(state, rows, lambda logprobs, _: logprobs.new_zeros(()), {}, backward=False)[1]
        leaves = [logprobs.reshape(row.shape).clone().requires_grad_() for row, logprobs in zip(rows, found)]
        with torch.enable_grad():
            found = loss_fn(data, leaves)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise ValueError(f"the loss function gave {described(found)}, expected a loss and a dict of metrics")
        loss, metrics = found
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise ValueError("the loss is no scalar tensor that is computed from the log-probabilities")
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        weighted = [
            Row(row.tokens, row.targets, row.shape, {"weights": -gradient.float().view(row.targets.shape)})
            for row, gradient in zip(rows, gradients)
        ]
        _, logprobs = model.adapted.forward(
            state, weighted, types.LOSSES["cross_entropy"][0], {}, backward=True, factor=types.FACTORS["cross_entropy"]
        )
        return _output(rows, logprobs, {"loss:sum": loss.item(), **metrics})

    def step(self, model: Model, params: types.AdamParams) -> dict[str, float]:
        rate, decay = (number(name, getattr(params, name), 0, LARGEST) for name in ("learning_rate", "weight_decay"))
        betas = [number(name, getattr(params, name), 0, _LARGEST_BETA) for name in ("beta1", "beta2")]
        # with an eps of 0, a matrix without gradient, such as A before the first step, would become 0 / 0
        eps, limit = number("eps", params.eps, SMALLEST, LARGEST), max(params.grad_clip_norm, 0.0)
        norm = model.adapted.step(model.trained, rate, betas, eps, decay, limit)
        return {"unclipped_grad_l2:mean": norm}

    # ---- checkpoints

    def save(
        self, model: Model, kind: str, name: str, *, overwrite: bool = False, user_metadata: dict[str, str] | None = None,
        ttl_seconds: int | None = None, next_seq: int = 0,
    ) -> str:  # fmt: skip
        """Save a model, and return the path of the checkpoint.

        Args:
            kind: "weights" includes the optimizer state, "sampler_weights" are the adapters for sampling, and
                "external_weights" are adapters in PEFT's format for download.
            next_seq: the number of the model's next request."""
        state, adapted = model.trained, model.adapted
        if ttl_seconds is not None and not 0 < ttl_seconds <= LONGEST_LIFE:
            raise ValueError(f"ttl_seconds is {ttl_seconds}, expected 1 to 2^32")

        def write(folder: Path) -> None:
            adapted.save(folder, state.adapter)
            if kind == "weights":
                adapted.put_down()
                tensors = {name: torch.empty_like(state.adapter) for name in ("exp_avg", "exp_avg_sq")}
                state.read_moments(*tensors.values())
                if state.grads is not None:
                    tensors["grads"] = state.grads  # gradients that no optimizer step has used yet
                save_file(tensors, folder / _OPTIMIZER)
                (folder / _STEPS).write_text(json.dumps({"optimizer_steps": state.optimizer_steps}))
            elif kind == "external_weights":
                for file in (folder / ADAPTER).iterdir():
                    file.rename(folder / file.name)
                (folder / ADAPTER).rmdir()

        place = Place(model.id, kind, name)
        known = model.facts.shape, next_seq, user_metadata, ttl_seconds
        facts = Facts(self.base.names[0], *known, run_metadata=model.facts.run_metadata)
        self.store.save(place, facts, write, overwrite)
        return place.path

    def load(self, model: Model, place: Place, *, optimizer: bool, gradient: bool = False) -> None:
        """Load a checkpoint into a model of the same shape. If `optimizer`, also load the optimizer state, and if
        `gradient` is set as well, the gradient that was accumulated for the next step."""
        facts, folder = self.store.facts(place), self.store.folder(place)
        if facts.shape != model.facts.shape:
            raise ValueError(f"{place.path} has adapters {facts.shape}, this model {model.facts.shape}")
        if place.kind == "external_weights" or (optimizer and place.kind != "weights"):
            raise ValueError(f"{place.path} holds no {'optimizer state' if optimizer else 'state'}: it is a sampler's")
        adapted = self.base.adapted(facts.shape)
        state = TrainingState(adapted.load(folder), TemporaryFile(dir=self.store.root))
        if optimizer:
            saved = load_file(folder / _OPTIMIZER)
            state.write_moments(saved["exp_avg"], saved["exp_avg_sq"])
            state.optimizer_steps = json.loads((folder / _STEPS).read_text())["optimizer_steps"]
            if gradient:
                state.grads = saved.get("grads")
        model.adapted, model.state = adapted, state

    # ---- sampling

    def sampler(self, path: str | None) -> Sampler:
        if path is None:
            mlp = "experts" not in self.base.folder.native()
            adapted = self.base.newest or self.base.adapted(Shape(1, train_mlp=mlp))
            return Sampler(adapted, adapted.nothing)
        place = Place.of(path)
        adapted = self.base.adapted(self.store.facts(place).shape)
        if place.kind == "external_weights":
            raise ValueError(f"{place.path} is for download: sample from tinker://RUN/sampler_weights/NAME")
        return Sampler(adapted, adapted.load(self.store.folder(place)), path)

    def snapshot(self, model: Model) -> Sampler:
        """Return a sampler of a model's current weights, which later training does not change."""
        return Sampler(model.adapted, model.trained.adapter, snapshot_of=model.id)

    def prompt_logprobs(self, sampler: Sampler, prompt: list[int], last_n: int | None = None) -> list[float | None]:
        """Return the log-probability of each prompt token: None for the first token, and if `last_n` is given, for all
        tokens but the last `last_n`."""
        self.base.check_tokens(prompt, "the prompt")
        found = sampler.adapted.prompt_logprobs(sampler.adapter, prompt).tolist()
        first = max(1, len(found) - (len(found) if last_n is None else last_n))
        return [None if place < first else logprob for place, logprob in enumerate(found)]

    def sample(self, sampler: Sampler, request: types.SampleRequest, draws: str, future: Future) -> None:
        """Submit a request for samples of a prompt. `future` receives the SampleResponse. If the request has no seed,
        one is computed from the text `draws`."""
        prompt, params = request.prompt, request.params
        temperature = number("temperature", params.temperature, SMALLEST, LARGEST, zero_is="for greedy decoding")
        limit = None if params.max_tokens is None else whole_number("max_tokens", params.max_tokens, 1)
        seed = None if params.seed is None else whole_number("seed", params.seed, -(2**63))
        top_k = whole_number("top_k", params.top_k, -1)
        self.base.check_tokens(prompt, "the prompt", room=1)
        room, V = self.base.max_length - len(prompt), self.base.vocab_size
        stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        stop_tokens = token_ids("stop", [stop for stop in stops if not isinstance(stop, str)])
        if stop_tokens:
            self.base.check_vocabulary(min(stop_tokens), max(stop_tokens), "stop")
        top_k = top_k if 0 < top_k < V else 0
        rule = C.SamplingRule(temperature=temperature or 1.0, top_p=params.top_p, top_k=top_k, greedy=temperature == 0)
        adapted = sampler.adapted
        response = types.SampleResponse([])
        if request.prompt_logprobs:
            response.prompt_logprobs = self.prompt_logprobs(sampler, prompt, request.prompt_logprobs_last_n)
        if request.topk_prompt_logprobs > 0:
            found = adapted.likeliest_of_prompt(sampler.adapter, prompt, request.topk_prompt_logprobs)
            first = max(1, len(prompt) - (request.prompt_logprobs_last_n or len(prompt)))
            response.topk_prompt_logprobs = [None] * first + found[first - 1 :]
        is_plain = temperature == 1 and params.top_p == 1 and not top_k

        def finish(samples: list[Sample]) -> types.SampleResponse:
            for sample in samples:
                logprobs = sample.logprobs
                if not is_plain:  # the model's unfiltered log-probabilities, as in training
                    scored = adapted.prompt_logprobs(sampler.adapter, prompt + sample.token_ids)
                    logprobs = scored[len(prompt) :].tolist()
                reason = "stop" if sample.reason in (STOP_TOKEN, STOP_STRING) else "length"
                likeliest = sample.likeliest if request.topk_sample_logprobs else []
                if likeliest and not is_plain:
                    whole = prompt + sample.token_ids
                    found = adapted.likeliest_of_prompt(sampler.adapter, whole, request.topk_sample_logprobs)
                    likeliest = found[len(prompt) - 1 :]
                response.sequences.append(types.SampledSequence(sample.token_ids, logprobs, reason, likeliest))
            return response

        ends = [] if params.stop == [] else self.base.end_token_ids
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(draws.encode()).digest()[:8], "little")
        sampler.submit(
            Answers(future, finish, [Sample() for _ in range(request.num_samples)]), prompt, rule=rule,
            max_new_tokens=room if limit is None else min(limit, room),
            stop_token_ids=[*ends, *stop_tokens], stop_strings=[stop.encode() for stop in stops if isinstance(stop, str)],
            num_likeliest=min(request.topk_sample_logprobs, V), seed=seed & 0xFFFFFFFF, stream=2,
            draw_id=(seed >> 32) & 0xFFFFFFFF, first_sample=0,
        )  # fmt: skip
        self.worker.join_in(sampler)


def rows_of(data: Sequence[types.Datum], base: Base, needed: Sequence[str], known: Sequence[str]) -> list[Row]:
    """Check the training data of a request, and return one `Row` of tensors per datum. Each datum must have the inputs
    `needed`, and may have the inputs `known`. Raise ValueError with the index of the invalid datum and its fault."""
    if not data:
        raise ValueError("the request has no datum")
    rows = []
    for index, datum in enumerate(data):
        here, given = f"datum {index}", datum.loss_fn_inputs
        tokens = types.tokens_of(datum.model_input, here)
        base.check_tokens(tokens, here, room=1)
        for name in (TARGETS, *needed):
            if name not in given:
                raise ValueError(f"{here} has no {name} in loss_fn_inputs")
        for name in given:
            if name not in (TARGETS, *needed, *known):
                raise ValueError(f"{here} has {name} in loss_fn_inputs, which this loss does not read")
        tensors = {name: _tensor(value, f"{here}: {name}", len(tokens)) for name, value in given.items()}
        targets = tensors.pop(TARGETS)
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"target_tokens of {here} are {targets.dtype}, expected whole numbers")
        base.check_vocabulary(int(targets.min()), int(targets.max()), f"target_tokens of {here}")
        for name, tensor in tensors.items():
            if tensor.shape != targets.shape:
                shape, expected = tuple(tensor.shape), tuple(targets.shape)
                raise ValueError(f"{here}: {name} has the shape {shape}, expected that of target_tokens, {expected}")
        inputs = {name: tensor.to(torch.float32).contiguous() for name, tensor in tensors.items()}
        rows.append(Row(tokens, targets.to(torch.int64).view(len(tokens), -1), targets.shape, inputs))
    return rows


def _tensor(given: object, what: str, length: int) -> Tensor:
    """Return a loss input as a dense tensor [N] or [N, K], where N = `length`. The elements that a sparse tensor lacks
    are 0."""
    try:
        tensor = given.to_torch() if hasattr(given, "to_torch") else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is no tensor: {error}") from None
    shape = tuple(tensor.shape)
    if len(shape) not in (1, 2) or shape[0] != length or not 1 <= shape[-1] <= max(length, _WIDEST):
        raise ValueError(f"{what} has the shape {shape}, not [N] or [N, K], N = {length} tokens, K up to {_WIDEST}")
    return tensor.to_dense()


def _output(rows: list[Row], logprobs: list[Tensor], metrics: dict[str, float]) -> types.ForwardBackwardOutput:
    outputs = [{"logprobs": found.reshape(row.shape)} for row, found in zip(rows, logprobs)]
    return types.ForwardBackwardOutput(outputs, metrics)
