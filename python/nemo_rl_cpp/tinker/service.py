"""The service behind the routes: sessions, models, samplers and their checkpoints."""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.lora import ADAPTER
from nemo_rl_cpp.serving.engine import STOP_STRING, STOP_TOKEN
from nemo_rl_cpp.tinker import wire
from nemo_rl_cpp.tinker.adapters import Base, Shape, TrainingState
from nemo_rl_cpp.tinker.errors import UserError
from nemo_rl_cpp.tinker.losses import loss_of
from nemo_rl_cpp.tinker.store import Facts, Place, Store
from nemo_rl_cpp.tinker.worker import Answers, Result, Sampled, Sampler, TrainedModel, Worker

_SESSION_SECONDS = 3600.0  # time without a heartbeat after which a session's memory is dropped
_MOST_SNAPSHOTS = 8  # unnamed snapshots per model; older ones are dropped
_OPTIMIZER = "optimizer.safetensors"
_STEPS = "optimizer.json"
_MOST_SAMPLES = 1024


class NotFoundError(UserError):
    """Raised if a model, sampler or checkpoint does not exist on this server."""


@dataclass
class Session:
    """The session of one ServiceClient."""

    metadata: dict | None = None
    seen: float = field(default_factory=time.monotonic)


class Service:
    """The state of a server. Methods that begin with `do_` run in the worker's thread."""

    def __init__(self, base: Base, store: Store) -> None:
        self.base, self.store, self.worker = base, store, Worker()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, Sampler] = {}
        self.tokenizer_id = str(base.folder.path or store.root.absolute() / "tokenizer")
        if base.folder.path is None:
            base.tokenizer.save_pretrained(self.tokenizer_id)

    # ---- sessions

    def create_session(self, metadata: dict | None) -> str:
        """Create a session, and drop sessions without recent heartbeats."""
        for old, session in list(self.sessions.items()):
            if time.monotonic() - session.seen > _SESSION_SECONDS:
                self.end_session(old)
        session_id = str(uuid.uuid4())
        self.sessions[session_id] = Session(metadata)
        return session_id

    def heartbeat(self, session_id: str) -> None:
        """Record that a client is alive; an unknown session was created before the server started."""
        self.sessions.setdefault(session_id, Session()).seen = time.monotonic()

    def end_session(self, session_id: str) -> None:
        """Drop a session's models, samplers and results; its checkpoints stay."""
        self.sessions.pop(session_id, None)
        for kept in (self.models, self.samplers, self.worker.futures):
            for name in [name for name in list(kept) if name.startswith(f"{session_id}:")]:
                kept.pop(name, None)

    # ---- models

    def check_base(self, name: str) -> None:
        """Raise UserError if the base model is not this server's."""
        if name not in self.base.names:
            raise UserError(f"the base model {name!r} is not here: this server has {self.base.names[0]!r}")

    def create_model(self, request: types.CreateModelRequest) -> str:
        """Create a model equal to the base. Return the request's id."""
        lora = request.lora_config or types.LoraConfig(rank=32)
        shape = Shape(lora.rank, lora.train_mlp, lora.train_attn)
        model = self._new_model(request.session_id, request.model_seq_id, shape)

        def run() -> Result:
            self.check_base(request.base_model)
            if request.optimizer_config.type != "adamw":
                raise UserError(f"the optimizer {request.optimizer_config.type!r} is not here: take adamw")
            if not 1 <= lora.rank <= 4096:
                raise UserError(f"the rank of LoRA is {lora.rank}, expected 1 to 4096")
            model.adapted = self.base.adapted(shape)
            model.state = TrainingState.beginning(model.adapted.new_adapter(lora.seed or 0))
            return types.CreateModelResponse(model_id=model.id).model_dump()

        return self.worker.submit_in_turn(model, 0, run)

    def _new_model(self, session_id: str, number: int, shape: Shape) -> TrainedModel:
        model_id = f"{session_id}:train:{number}"
        Place.of(f"tinker://{model_id}/weights/x")  # part of its checkpoints' names
        facts = Facts(self.base.names[0], shape)
        return self.models.setdefault(model_id, TrainedModel(model_id, session_id, facts))

    def model(self, model_id: str) -> TrainedModel:
        """Return a model; after a restart of the server, restore it from its last checkpoint."""
        if model_id not in self.models:
            place = self.store.last_training(model_id) if re.fullmatch(r"[\w-]+:train:\d+", model_id) else None
            if place is None:
                raise NotFoundError(f"there is no model {model_id}, and no checkpoint of it from which it could go on")
            facts = self.store.facts(place)
            model = TrainedModel(model_id, model_id.partition(":")[0], facts, next_seq=facts.next_seq)
            self.models[model_id] = model
            self.worker.do(lambda: self._do_load(model, place, optimizer=True, gradient=True))
        return self.models[model_id]

    def unload(self, model_id: str) -> None:
        """Drop a model; its checkpoints stay."""
        if self.models.pop(model_id, None) is None:
            raise NotFoundError(f"there is no model {model_id}")

    def info(self, model_id: str) -> types.GetInfoResponse:
        """Describe a model."""
        data = {
            "arch": self.base.folder.config.get("model_type"),
            "model_name": self.base.names[0],
            "tokenizer_id": self.tokenizer_id,
        }
        shape = self.model(model_id).facts.shape
        return types.GetInfoResponse(
            type="get_info",
            model_data=data,
            model_id=model_id,
            is_lora=True,
            lora_rank=shape.rank,
            model_name=self.base.names[0],
        )

    def _in_turn(self, model_id: str, seq: int | None, run: Callable[[TrainedModel], Result]) -> str:
        if seq is None or not 0 <= seq < 1 << 62:
            raise UserError(f"seq_id is {seq}, expected the number of this request of its model")
        model = self.model(model_id)

        def run_if_made() -> Result:
            if model.state is None:
                raise UserError(f"{model_id} could not be made or loaded")
            return run(model)

        return self.worker.submit_in_turn(model, seq, run_if_made)

    # ---- training

    def forward(self, request: pb.ForwardBackwardRequest) -> str:
        """Compute a loss, with its gradient unless `forward_only`."""

        def run(model: TrainedModel) -> Result:
            loss, needed, config = loss_of(request.loss_fn, wire.config_of(request))
            data = wire.data_of(request, self.base, needed, tuple(config))
            total, logprobs = model.adapted.forward(model.state, data, loss, config, backward=not request.forward_only)
            return wire.forward_output(logprobs, {"loss:sum": total})

        return self._in_turn(request.model_id, request.seq_id, run)

    def optim_step(self, request: types.OptimStepRequest) -> str:
        """Take a step of AdamW."""

        def run(model: TrainedModel) -> Result:
            asked = request.optim_params
            if not isinstance(asked, types.AdamParams):
                raise UserError(f"the optimizer {asked.type!r} is not here: give AdamParams")
            norm = model.adapted.step(
                model.state, asked.learning_rate, (asked.beta1, asked.beta2), asked.eps, asked.weight_decay, max(asked.grad_clip_norm, 0.0)
            )  # fmt: skip
            return types.OptimStepResponse(metrics={"unclipped_grad_l2:mean": norm}).model_dump()

        return self._in_turn(request.model_id, request.seq_id, run)

    # ---- checkpoints

    def save_weights(self, request: types.SaveWeightsRequest) -> str:
        """Save a model with its optimizer state."""

        def run(model: TrainedModel) -> Result:
            state, next_seq = model.state, request.seq_id + 1
            tensors = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
            if state.grads.any():
                tensors["grads"] = state.grads  # between a backward pass and its step

            def write(folder: Path) -> None:
                model.adapted.save(folder, state.adapter)
                save_file(tensors, folder / _OPTIMIZER)
                (folder / _STEPS).write_text(json.dumps({"optimizer_steps": state.optimizer_steps}))

            path = self._save(model, "weights", request, write, next_seq, request.overwrite)
            return types.SaveWeightsResponse(path=path, type="save_weights").model_dump()

        return self._in_turn(request.model_id, request.seq_id, run)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> str:
        """Save a model's adapters for sampling: on disk under a name, otherwise in memory in a new sampling session."""

        def run(model: TrainedModel) -> Result:
            if request.kind != "snapshot":
                raise UserError(f"samplers of kind {request.kind!r} are not here: take snapshots")
            if request.path is not None:
                path = self._save(
                    model, "sampler_weights", request, lambda folder: model.adapted.save(folder, model.state.adapter)
                )
                return {"type": "save_weights_for_sampler", "path": path}
            name = f"{model.session}:sample:{request.sampling_session_seq_id or 0}"
            self._keep_snapshot(name, model)
            return {"type": "save_weights_for_sampler", "sampling_session_id": name}

        return self._in_turn(request.model_id, request.seq_id, run)

    def _keep_snapshot(self, name: str, model: TrainedModel) -> None:
        mine = [n for n, sampler in self.samplers.items() if sampler.snapshot_of == model.id]
        for old in mine[: max(len(mine) - _MOST_SNAPSHOTS + 1, 0)]:
            del self.samplers[old]
        self.samplers[name] = Sampler(model.adapted, model.state.adapter.clone(), snapshot_of=model.id)

    def save_external(self, request: types.SaveWeightsExternalRequest) -> str:
        """Save a model's adapters in PEFT's format for download."""

        def run(model: TrainedModel) -> Result:
            if request.age_encryption_recipients:
                raise UserError("checkpoints are not encrypted here: leave age_encryption_recipients out")

            def write(folder: Path) -> None:
                model.adapted.save(folder, model.state.adapter)
                for file in (folder / ADAPTER).iterdir():
                    file.rename(folder / file.name)
                (folder / ADAPTER).rmdir()

            path = self._save(model, "external_weights", request, write)
            return {"type": "save_weights_external", "path": path}

        return self._in_turn(request.model_id, request.seq_id, run)

    def _save(
        self, model: TrainedModel, kind: str, request: types.SaveWeightsRequest, write: Callable[[Path], None], next_seq: int = 0,
        overwrite: bool = False,
    ) -> str:  # fmt: skip
        place = Place(model.id, kind, request.path or f"step-{request.seq_id}")
        facts = Facts(
            self.base.names[0],
            model.facts.shape,
            next_seq,
            getattr(request, "user_metadata", None),
            request.ttl_seconds,
        )
        self.store.save(place, facts, write, overwrite)
        return place.path

    def load_weights(self, request: types.LoadWeightsRequest) -> str:
        """Load a checkpoint into a model, or into a new model."""
        place = Place.of(request.path)
        if request.session_id is not None:
            if request.base_model is not None:
                self.check_base(request.base_model)
            facts = self.store.facts(place)
            model, seq = self._new_model(request.session_id, request.model_seq_id or 0, facts.shape), 0
        else:
            model, seq = self.model(request.model_id or ""), request.seq_id
        if seq is None:
            raise UserError("load_weights has no seq_id")

        def run() -> Result:
            self._do_load(model, place, optimizer=request.optimizer)
            return types.LoadWeightsResponse(path=place.path, model_id=model.id, type="load_weights").model_dump()

        return self.worker.submit_in_turn(model, seq, run)

    def _do_load(self, model: TrainedModel, place: Place, *, optimizer: bool, gradient: bool = False) -> None:
        facts, folder = self.store.facts(place), self.store.folder(place)
        if facts.shape != model.facts.shape:
            raise UserError(f"{place.path} has adapters {facts.shape}, this model {model.facts.shape}")
        if place.kind == "external_weights" or (optimizer and place.kind != "weights"):
            raise UserError(
                f"{place.path} holds no {'optimizer state' if optimizer else 'state'}: it is for sampling alone"
            )
        adapted = self.base.adapted(facts.shape)
        state = TrainingState.beginning(adapted.load(folder))
        if optimizer:
            saved = load_file(folder / _OPTIMIZER)
            state.exp_avg.copy_(saved["exp_avg"])
            state.exp_avg_sq.copy_(saved["exp_avg_sq"])
            state.optimizer_steps = json.loads((folder / _STEPS).read_text())["optimizer_steps"]
            if gradient and "grads" in saved:
                state.grads.copy_(saved["grads"])
        model.adapted, model.state = adapted, state

    # ---- sampling

    def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> Future:
        """Create a sampler of the base or of a checkpoint; its future returns its id."""
        name = f"{request.session_id}:sample:{request.sampling_session_seq_id}"

        def run() -> str:
            if request.model_path is None:
                self.check_base(request.base_model or "")
                adapted = self.base.any_adapted()
                adapter = adapted.nothing
            else:
                place = Place.of(request.model_path)
                adapted = self.base.adapted(self.store.facts(place).shape)
                if place.kind == "external_weights":
                    raise UserError(f"{place.path} is for download: sample from tinker://RUN/sampler_weights/NAME")
                adapter = adapted.load(self.store.folder(place))
            self.samplers[name] = Sampler(adapted, adapter, request.model_path)
            return name

        return self.worker.do(run)

    def sampler(self, name: str) -> Sampler:
        """Return the sampler of a sampling session's id."""
        if name not in self.samplers:
            raise NotFoundError(
                f"there is no sampling session {name}: make a new sampling client. (Of those without a name a model keeps {_MOST_SNAPSHOTS}.)"
            )
        return self.samplers[name]

    def sample(self, request: types.SampleRequest) -> tuple[str, list[str]]:
        """Submit a request to a sampler. Return the request's id and an id per sample."""
        name, count = request.sampling_session_id, request.num_samples
        if name is None or request.seq_id is None:
            raise UserError("a request for samples needs sampling_session_id and seq_id")
        if not 1 <= count <= _MOST_SAMPLES:
            raise UserError(f"num_samples is {count}, expected 1 to {_MOST_SAMPLES}")
        sampler, request_id = self.sampler(name), f"{name}:{request.seq_id}"
        self.worker.submit(request_id, lambda future: self._do_sample(sampler, request, future), is_short=True)
        return request_id, [f"{request_id}:{k}" for k in range(count)]

    def _do_sample(self, sampler: Sampler, request: types.SampleRequest, future: Future) -> None:
        for unknown in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(request, unknown):
                raise UserError(f"{unknown} is not here: leave it out")
        prompt, params = wire.prompt_of(request.prompt), request.sampling_params
        self.base.check_tokens(prompt, "the prompt", room=1)
        room = self.base.max_length - len(prompt)
        stops = stops_of(params.stop)
        rule = C.SamplingRule(
            temperature=params.temperature or 1.0, top_p=params.top_p, top_k=max(params.top_k, 0), greedy=params.temperature == 0
        )  # fmt: skip
        adapted, k = sampler.adapted, request.topk_prompt_logprobs
        logprobs = adapted.prompt_logprobs(sampler.adapter, prompt) if request.prompt_logprobs else None
        if logprobs is not None and request.prompt_logprobs_last_n is not None:
            logprobs[: -request.prompt_logprobs_last_n] = torch.nan
        likeliest = adapted.likeliest_of_prompt(sampler.adapter, prompt, k) if k > 0 else None

        is_plain = params.temperature == 1 and params.top_p == 1 and params.top_k <= 0

        def finish(samples: list[Sampled]) -> Result:
            if not is_plain:  # the model's unfiltered log-probabilities, as in training
                for sample in samples:
                    scored = adapted.prompt_logprobs(sampler.adapter, prompt + sample.tokens)
                    sample.logprobs = scored[len(prompt) :].tolist()
            return wire.sample_response(
                samples, (STOP_TOKEN, STOP_STRING), logprobs, likeliest, request.topk_sample_logprobs
            )

        answers = Answers(future, finish, [Sampled() for _ in range(request.num_samples)])
        ends = [] if params.stop == [] else self.base.end_token_ids
        sampler.submit(
            answers, prompt, rule=rule, max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=[*ends, *stops[0]], stop_strings=stops[1], num_likeliest=request.topk_sample_logprobs,
            **_draw(params.seed, f"{request.sampling_session_id}:{request.seq_id}"),
        )  # fmt: skip
        self.worker.join_in(sampler)

    def cancel(self, request_id: str) -> None:
        """Cancel a request for samples whose result is no longer needed."""
        future, name = self.worker.futures.get(request_id), request_id.rpartition(":")[0]
        sampler = self.samplers.get(name)
        if sampler is None or future is None or future.done():
            return

        def run() -> None:
            sampler.cancel(future)
            if not future.done():
                future.set_exception(UserError("the request was cancelled"))

        self.worker.do(run)


def stops_of(stop: str | list[str] | list[int] | None) -> tuple[list[int], list[bytes]]:
    """Return the stop tokens and stop strings of a request."""
    given = [stop] if isinstance(stop, str) else list(stop or ())
    return [s for s in given if isinstance(s, int)], [s.encode() for s in given if isinstance(s, str)]


def _draw(seed: int | None, request_id: str) -> dict[str, int]:
    """Return the key of a request's random draws, from its seed or otherwise its id."""
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little") if seed is None else seed
    return {"seed": number & 0xFFFFFFFF, "stream": 2, "draw_id": (number >> 32) & 0xFFFFFFFF, "first_sample": 0}
