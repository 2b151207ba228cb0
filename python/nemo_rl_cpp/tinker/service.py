"""The service behind the routes. It finds sessions, models and samplers by name, runs each request once and in order,
and converts between the messages of Tinker's SDK and this package's types."""

from __future__ import annotations

import functools
import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB
from torch import Tensor

from nemo_rl_cpp.tinker.adapters import Base, Shape
from nemo_rl_cpp.tinker.models import Model, Models
from nemo_rl_cpp.tinker.store import Facts, Place, Store
from nemo_rl_cpp.tinker.types import Datum, ForwardBackwardOutput, SampleRequest, SampleResponse, tokens_of
from nemo_rl_cpp.tinker.worker import Sampler, Turns

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


def sample_request_of(request: types.SampleRequest) -> SampleRequest:
    """Return the SDK's request for samples as a `SampleRequest`. Raise ValueError for an unsupported option."""
    for unknown in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(request, unknown):
            raise ValueError(f"{unknown} is not here: leave it out")
    return SampleRequest(
        tokens_of(request.prompt, "the prompt"), request.num_samples, request.sampling_params, bool(request.prompt_logprobs),
        request.prompt_logprobs_last_n, request.topk_prompt_logprobs, request.topk_sample_logprobs,
    )  # fmt: skip


def data_of(request: pb.ForwardBackwardRequest) -> list[Datum]:
    data = []
    for number, datum in enumerate(request.data):
        here, tokens = f"datum {number}", []
        for chunk in datum.model_input:
            if not chunk.HasField("encoded_text"):
                raise ValueError(f"{here} holds something else than tokens: images and audio are not here")
            tokens += _numbers(chunk.encoded_text.tokens, np.int32, here).tolist()
        inputs = {name: _tensor(given, f"{here}: {name}") for name, given in datum.loss_fn_inputs.items()}
        data.append(Datum(tokens, inputs))
    return data


def _tensor(tensor: pb.Tensor, what: str) -> Tensor:
    """Return the tensor in a request: dense, or a sparse matrix in the CSR format."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{what} is no tensor of float32 or int64")
    dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
    if tensor.HasField("dense"):
        values = torch.from_numpy(_numbers(tensor.dense, dtype, what).copy())
        if shape and (min(shape) < 0 or math.prod(shape) != len(values)):
            raise ValueError(f"{what} has {len(values)} elements, expected those of the shape {shape}")
        return values.view(shape or [len(values)])
    if not tensor.HasField("sparse_csr") or len(shape) != 2:
        raise ValueError(f"{what} is neither a dense tensor nor a sparse matrix")
    csr = tensor.sparse_csr
    parts = [_numbers(data, kind, what) for data, kind in (
        (csr.crow_indices, np.int64), (csr.col_indices, np.int64), (csr.values, dtype)
    )]  # fmt: skip
    try:
        return torch.sparse_csr_tensor(
            *(torch.from_numpy(part.copy()) for part in parts), size=shape, check_invariants=True
        )
    except RuntimeError:
        raise ValueError(f"{what} is no sparse matrix of the shape {shape} in the CSR format") from None


def _numbers(data: bytes, dtype: type[np.generic], what: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{what}: {len(data)} bytes are no whole number of elements")
    return np.frombuffer(data, dtype)


def config_of(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Return the loss settings of a request, which are in the field `loss_fn_config_v2` or `loss_fn_config`."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    return {k: getattr(v, v.WhichOneof("value") or "number") for k, v in request.loss_fn_config_v2.items()}


def encoded(result: object) -> bytes | dict:
    """Return a result as the SDK reads it: a serialized protobuf message, or a dictionary to be sent as JSON."""
    if isinstance(result, SampleResponse):
        return _sample_response(result)
    if not isinstance(result, ForwardBackwardOutput):
        return result
    logprobs = (each["logprobs"] for each in result.loss_fn_outputs)
    records = [_record(list(rows), shape) for shape, rows in groupby(logprobs, lambda row: row.shape[1:])]
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=result.metrics
    )
    return message.SerializeToString()


def _record(rows: list[Tensor], trailing: torch.Size) -> pb.ArrayRecord:
    """Pack the log-probabilities of several training sequences, a tensor [N, *trailing] each, into one protobuf
    message."""
    offsets = np.cumsum([0] + [4 * row.numel() for row in rows]).astype(np.int64)
    data = torch.cat([row.flatten() for row in rows]).numpy().astype(np.float32).tobytes()
    field = pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32, trailing_shape=trailing)
    return pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(rows))


def _sample_response(response: SampleResponse) -> bytes:
    message = pb.SampleResponse()
    for sequence in response.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if sequence.topk_logprobs:
            added.topk_sampled_logprobs.CopyFrom(_top(sequence.topk_logprobs))
    if response.prompt_logprobs is not None:
        numbers = [np.nan if logprob is None else logprob for logprob in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(numbers, np.float32).tobytes()
    if response.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_top([row or () for row in response.topk_prompt_logprobs]))
    return message.SerializeToString()


def _top(rows: Sequence[Sequence[tuple[int, float]]]) -> pb.TopkLogprobs:
    k = max(len(row) for row in rows)
    tokens, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), MASK_LOGPROB, np.float32)
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row):
            tokens[place, column], logprobs[place, column] = token, logprob
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))


R = TypeVar("R")  # a request of the SDK
_SESSION_SECONDS = 3600.0  # a session without a heartbeat for this long is dropped from memory
_MOST_SEQ = 1 << 62
_MOST_SNAPSHOTS = 8  # unnamed snapshots per model; older ones are dropped


class NotFoundError(ValueError):
    """Raised if a model, sampler or checkpoint does not exist on this server."""

    status = 404


@dataclass
class Session:
    """The server's record of one ServiceClient of Tinker's SDK."""

    metadata: dict | None = None
    seen: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class TrainedModel(Turns, Model):
    """A LoRA model that the client of the session `session` trains."""

    session: str = ""


def _in_turn(call: Callable[[Service, TrainedModel, R], object]) -> Callable[[Service, R], types.UntypedAPIFuture]:
    """Return a method that queues `call(self, model, request)` for the request's model."""

    @functools.wraps(call)
    def queue(self: Service, request: R) -> types.UntypedAPIFuture:
        model = self.model(request.model_id or "")
        return self.queue(model, request.seq_id, lambda: call(self, model, request))

    return queue


def _check_optimizer(config: types.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise ValueError(f"the optimizer {config.type!r} is not here: take adamw")


class Service:
    """The server's sessions, models, samplers and checkpoints. An `UntypedAPIFuture` refers to a queued request."""

    def __init__(self, base: Base, store: Store) -> None:
        self.core = Models(base, store)
        self.base, self.store, self.worker = base, store, self.core.worker
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, Sampler] = {}
        self.tokenizer_id = str((base.folder.path or store.root / "tokenizer").absolute())
        if base.folder.path is None:
            base.tokenizer.save_pretrained(self.tokenizer_id)

    # ---- sessions

    def create_session(self, request: types.CreateSessionRequest) -> types.CreateSessionResponse:
        """Create a session. Drop sessions that sent no heartbeat for some time."""
        for old, session in list(self.sessions.items()):
            if time.monotonic() - session.seen > _SESSION_SECONDS:
                self.end_session(old)
        session_id = str(uuid.uuid4())
        self.sessions[session_id] = Session(request.user_metadata)
        return types.CreateSessionResponse(session_id=session_id)

    def heartbeat(self, request: types.SessionHeartbeatRequest) -> types.SessionHeartbeatResponse:
        """Record that a session's client is alive, and create an unknown session, as after the server's restart."""
        self.sessions.setdefault(request.session_id, Session()).seen = time.monotonic()
        return types.SessionHeartbeatResponse()

    def end_session(self, session_id: str) -> None:
        """Drop a session's models, samplers and results; keep its checkpoints."""
        self.sessions.pop(session_id, None)
        for kept in (self.models, self.samplers, self.worker.futures):
            for name in [name for name in list(kept) if name.startswith(f"{session_id}:")]:
                kept.pop(name, None)

    # ---- models

    def check_base(self, name: str) -> None:
        """Raise ValueError unless the server has the base model `name`."""
        if name not in self.base.names:
            raise ValueError(f"the base model {name!r} is not here: this server has {self.base.names[0]!r}")

    def create_model(self, request: types.CreateModelRequest) -> types.UntypedAPIFuture:
        """Queue the creation of a model: the base model with a new adapter."""
        lora = request.lora_config or types.LoraConfig(rank=32)
        shape = Shape(lora.rank, lora.train_mlp, lora.train_attn)

        model = self._new_model(request.session_id, request.model_seq_id, shape, request.user_metadata)

        def run() -> dict:
            self.check_base(request.base_model)
            _check_optimizer(request.optimizer_config)
            self.core.create(model, lora.seed or 0)
            return types.CreateModelResponse(model_id=model.id).model_dump()

        return self.queue(model, 0, run)

    def _new_model(self, session_id: str, number: int, shape: Shape, metadata: dict[str, str] | None) -> TrainedModel:
        model_id = f"{session_id}:train:{number}"
        Place.of(f"tinker://{model_id}/weights/x")  # part of its checkpoints' names
        model = TrainedModel(model_id, Facts(self.base.names[0], shape, run_metadata=metadata), session=session_id)
        return self.models.setdefault(model_id, model)

    def model(self, model_id: str) -> TrainedModel:
        """Return a model. After a restart of the server, first restore it from its last checkpoint.

        Raise NotFoundError if there is neither the model nor such a checkpoint."""
        if model_id not in self.models:
            places = self.store.places(model_id) if re.fullmatch(r"[\w-]+:train:\d+", model_id) else []
            place = next((place for place in reversed(places) if place.kind == "weights"), None)
            if place is None:
                raise NotFoundError(f"there is no model {model_id}, and no checkpoint of it from which it could go on")
            facts, session = self.store.facts(place), model_id.partition(":")[0]
            self.models[model_id] = model = TrainedModel(model_id, facts, session=session, next_seq=facts.next_seq)
            self.worker.do(lambda: self.core.load(model, place, optimizer=True, gradient=True))
        return self.models[model_id]

    def unload(self, request: types.UnloadModelRequest) -> types.UntypedAPIFuture:
        """Drop a model; keep its checkpoints."""
        model_id = request.model_id
        if self.models.pop(model_id, None) is None:
            raise NotFoundError(f"there is no model {model_id}")
        answer, request_id = types.UnloadModelResponse(model_id=model_id, type="unload_model"), f"{model_id}:unload"
        self.worker.submit(request_id, answer.model_dump)
        return types.UntypedAPIFuture(request_id=request_id, model_id=model_id)

    def info(self, request: types.GetInfoRequest) -> types.GetInfoResponse:
        """Return the description of a model: its base model and LoRA rank."""
        name, shape = self.base.names[0], self.model(request.model_id).facts.shape
        arch = self.base.folder.config.get("model_type")
        return types.GetInfoResponse(
            type="get_info", model_data={"arch": arch, "model_name": name, "tokenizer_id": self.tokenizer_id},
            model_id=request.model_id, is_lora=True, lora_rank=shape.rank, model_name=name,
        )  # fmt: skip

    def queue(self, model: TrainedModel, seq: int | None, run: Callable[[], object]) -> types.UntypedAPIFuture:
        """Queue `run` as the model's request number `seq`. A model's requests run in the order of their numbers."""
        if seq is None or not 0 <= seq < _MOST_SEQ:
            raise ValueError(f"seq_id is {seq}, expected the number of this request of its model")
        request_id = self.worker.submit_in_turn(model, seq, run)
        return types.UntypedAPIFuture(request_id=request_id, model_id=model.id)

    def skip(self, model_id: object, seq: object, error: ValueError) -> None:
        """Let the invalid request number `seq` of a model fail with `error` in its turn, because the client counts it,
        too. Do nothing without a known model and a valid number."""
        model = self.models.get(model_id) if isinstance(model_id, str) else None

        def fail() -> None:
            raise error

        if model is not None and isinstance(seq, int) and 0 <= seq < _MOST_SEQ:
            self.worker.submit_in_turn(model, seq, fail)

    # ---- training

    @_in_turn
    def forward(self, model: TrainedModel, request: pb.ForwardBackwardRequest) -> ForwardBackwardOutput:
        """Compute a model's loss and, unless the request sets `forward_only`, its gradient."""
        data, config = data_of(request), config_of(request)
        return self.core.forward(model, data, request.loss_fn, config, backward=not request.forward_only)

    @_in_turn
    def optim_step(self, model: TrainedModel, request: types.OptimStepRequest) -> dict:
        params = request.optim_params
        if not isinstance(params, types.AdamParams):
            raise ValueError(f"the optimizer {params.type!r} is not here: give AdamParams")
        return types.OptimStepResponse(metrics=self.core.step(model, params)).model_dump()

    # ---- checkpoints

    @_in_turn
    def save_weights(self, model: TrainedModel, request: types.SaveWeightsRequest) -> dict:
        """Save a model with its optimizer state, and return the path of the checkpoint."""
        path = self.core.save(
            model, "weights", request.path or f"step-{request.seq_id}", overwrite=request.overwrite,
            user_metadata=request.user_metadata, ttl_seconds=request.ttl_seconds, next_seq=request.seq_id + 1,
        )  # fmt: skip
        return types.SaveWeightsResponse(path=path, type="save_weights").model_dump()

    @_in_turn
    def save_for_sampler(self, model: TrainedModel, request: types.SaveWeightsForSamplerRequest) -> dict:
        """Save a model's adapters for sampling. Without a name, keep them in memory for a new sampling session."""
        if request.kind != "snapshot":
            raise ValueError(f"samplers of kind {request.kind!r} are not here: take snapshots")
        if request.path is not None:
            options = {"ttl_seconds": request.ttl_seconds, "user_metadata": request.user_metadata}
            path = self.core.save(model, "sampler_weights", request.path, **options)
            return {"type": "save_weights_for_sampler", "path": path}
        name = f"{model.session}:sample:{request.sampling_session_seq_id or 0}"
        mine = [n for n, sampler in self.samplers.items() if sampler.snapshot_of == model.id]
        for old in mine[: max(len(mine) - _MOST_SNAPSHOTS + 1, 0)]:
            del self.samplers[old]
        self.samplers[name] = self.core.snapshot(model)
        return {"type": "save_weights_for_sampler", "sampling_session_id": name}

    @_in_turn
    def save_external(self, model: TrainedModel, request: types.SaveWeightsExternalRequest) -> dict:
        """Save a model's adapters in PEFT's format for download, and return the checkpoint's path."""
        if request.age_encryption_recipients:
            raise ValueError("checkpoints are not encrypted here: leave age_encryption_recipients out")
        name = request.path or f"step-{request.seq_id}"
        path = self.core.save(model, "external_weights", name, ttl_seconds=request.ttl_seconds)
        return {"type": "save_weights_external", "path": path}

    def load_weights(self, request: types.LoadWeightsRequest) -> types.UntypedAPIFuture:
        """Queue the loading of a checkpoint into the request's model, or into a new model if the request names a
        session."""
        place = Place.of(request.path)
        if request.session_id is None:
            model, seq = self.model(request.model_id or ""), request.seq_id
        else:
            if request.base_model is not None:
                self.check_base(request.base_model)
            shape = self.store.facts(place).shape
            number, metadata = request.model_seq_id or 0, request.user_metadata
            model, seq = self._new_model(request.session_id, number, shape, metadata), 0

        def run() -> dict:
            _check_optimizer(request.optimizer_config)
            self.core.load(model, place, optimizer=request.optimizer)
            return types.LoadWeightsResponse(path=place.path, model_id=model.id, type="load_weights").model_dump()

        return self.queue(model, seq, run)

    # ---- sampling

    def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> Future:
        """Create a sampler of the base model or of a checkpoint. The result of the future is the sampler's name."""
        name = f"{request.session_id}:sample:{request.sampling_session_seq_id}"

        def run() -> str:
            if request.model_path is None:
                self.check_base(request.base_model or "")
            self.samplers[name] = self.core.sampler(request.model_path)
            return name

        return self.worker.do(run)

    def sampler(self, name: str) -> Sampler:
        """Return the sampler of a sampling session. Raise NotFoundError if it does not exist."""
        if name not in self.samplers:
            raise NotFoundError(
                f"there is no sampling session {name}: make a new sampling client. (Of those without a name a model keeps {_MOST_SNAPSHOTS}.)"
            )
        return self.samplers[name]

    def sample(self, request: types.SampleRequest) -> types.UntypedAPIFuture:
        """Queue a request for samples of a prompt. Each sample gets an id."""
        name = request.sampling_session_id
        if name is None or request.seq_id is None:
            raise ValueError("a request for samples needs sampling_session_id and seq_id")
        asked = sample_request_of(request)
        sampler, request_id = self.sampler(name), f"{name}:{request.seq_id}"
        job = functools.partial(self.core.sample, sampler, asked, request_id)
        self.worker.submit(request_id, job, is_short=True)
        samples = [f"{request_id}:{k}" for k in range(asked.num_samples)]
        return types.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=samples)

    def cancel(self, request_id: str) -> None:
        """Cancel a request for samples whose result the client no longer needs."""
        future, name = self.worker.futures.get(request_id), request_id.rpartition(":")[0]
        sampler = self.samplers.get(name)
        if sampler is not None and future is not None:
            self.worker.cancel(sampler, future)
