"""The HTTP routes that Tinker's SDK calls, as a Starlette application."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.try_again_response import TryAgainResponse

from nemo_rl_cpp.argument_checks import whole_number
from nemo_rl_cpp.files.durable import MANIFEST
from nemo_rl_cpp.serving.http_server import HttpServer, listen, read_json, read_raw, serve_until_ended
from nemo_rl_cpp.serving.model import EngineSizes
from nemo_rl_cpp.tinker.adapters import Base
from nemo_rl_cpp.tinker.models import LONGEST_LIFE
from nemo_rl_cpp.tinker.service import NotFoundError, Service, encoded
from nemo_rl_cpp.tinker.store import KINDS, Place, Store

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
_POLL_SECONDS = 20.0  # the time a client waits for a result before it repeats the request
_URL_LIFE = timedelta(days=1)
_NO_CONTENT, _INVALID = 204, 422
_BODY_SECONDS = 60.0  # the time for a body to arrive


class Routes:
    """The handlers of the routes that Tinker's SDK calls. Requests must send `api_key` as the header `X-API-Key` (None:
    any key is accepted), and a body of at most `max_body_bytes` bytes."""

    def __init__(self, service: Service, api_key: str | None, max_body_bytes: int) -> None:
        self.service, self._api_key, self._most = service, api_key, max_body_bytes
        self._secret = secrets.token_bytes(32)  # signs download URLs, which contain no key

    # ---- the service

    async def health(self, request: Request) -> Response:
        alive = self.service.worker.is_alive()
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 500)

    async def capabilities(self, request: Request) -> Response:
        base = self.service.base
        models = [
            types.SupportedModel(model_name=name, max_context_length=base.max_length, trainable=True, sampleable=True)
            for name in base.names
        ]
        return _json(types.GetServerCapabilitiesResponse(supported_models=models))

    def constant(self, answer: BaseModel) -> Handler:
        """Return a handler that reads and ignores the body, and responds with `answer`."""

        async def handle(request: Request) -> Response:
            await self._raw(request)
            return _json(answer)

        return handle

    def parsed(self, kind: type[M], ask: Callable[[M], BaseModel]) -> Handler:
        """Return a handler that parses the body as `kind`, passes it to `ask`, and responds with the result. An invalid
        request of a model has had its turn: the model's later requests do not wait for it."""

        async def handle(request: Request) -> Response:
            given = await self._json_body(request)
            try:
                return _json(ask(_valid(kind, given)))
            except ValueError as error:
                self.service.skip(given.get("model_id"), given.get("seq_id"), error)
                raise

        return handle

    async def finish_session(self, request: Request) -> Response:
        session = request.path_params["session"]
        await asyncio.wrap_future(self.service.worker.do(lambda: self.service.end_session(session)))
        return Response(status_code=_NO_CONTENT)

    # ---- futures

    async def retrieve_future(self, request: Request) -> Response:
        """Return the result of a request, or `try_again` if it is not complete within 20 seconds."""
        request_id = (await self._body(request, types.FutureRetrieveRequest)).request_id
        future = self.service.worker.futures.get(request_id)
        if future is None:
            return _error(410, f"there is no request {request_id}: the server was started again, or its result is gone")
        wrapped = asyncio.wrap_future(future)
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio prints the exception
        await asyncio.wait({wrapped}, timeout=_POLL_SECONDS)
        if not future.done():
            return _json(TryAgainResponse(request_id=request_id, queue_state="active"))
        self.service.worker.was_retrieved(request_id)
        error = future.exception()
        if error is not None:
            kinds = types.RequestErrorCategory  # a ValueError is the client's to mend
            category = kinds.User if isinstance(error, ValueError) else kinds.Server
            return _json(types.RequestFailedResponse(error=str(error) or type(error).__name__, category=category))
        result = encoded(future.result())
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    async def cancel_future(self, request: Request) -> Response:
        self.service.cancel(str((await self._json_body(request)).get("request_id")))
        return Response(status_code=_NO_CONTENT)

    # ---- models

    async def forward_backward(self, request: Request) -> Response:
        message = pb.ForwardBackwardRequest()
        if not request.headers.get("content-type", "").startswith("application/x-protobuf"):
            raise ValueError("forward_backward takes application/x-protobuf, as the SDK sends it since 0.38")
        try:
            message.ParseFromString(await self._raw(request))
        except DecodeError as error:
            raise ValueError(f"the body is no ForwardBackwardRequest: {error}") from None
        return _json(self.service.forward(message))

    # ---- sampling

    async def create_sampling_session(self, request: Request) -> Response:
        body = await self._body(request, types.CreateSamplingSessionRequest)
        name = await asyncio.wrap_future(self.service.create_sampling_session(body))
        return _json(types.CreateSamplingSessionResponse(sampling_session_id=name))

    async def get_sampler(self, request: Request) -> Response:
        name = request.path_params["sampler"]
        path = self.service.sampler(name).path
        return _json(types.GetSamplerResponse(sampler_id=name, base_model=self.service.base.names[0], model_path=path))

    # ---- checkpoints and runs

    async def weights_info(self, request: Request) -> Response:
        facts = self.service.store.facts(Place.of(str((await self._json_body(request)).get("tinker_path"))))
        shape = facts.shape
        return _json(types.WeightsInfoResponse(
            base_model=facts.base_model, is_lora=True, lora_rank=shape.rank, train_unembed=False, train_mlp=shape.train_mlp,
            train_attn=shape.train_attn,
        ))  # fmt: skip

    async def checkpoints(self, request: Request) -> Response:
        store, run = self.service.store, request.path_params.get("run")
        places = store.places(None if run is None else Place.of(f"tinker://{run}/weights/x").run)
        part, cursor = _page(request, places)
        return _json(types.CheckpointsListResponse(checkpoints=[_checkpoint(store, p) for p in part], cursor=cursor))

    def _place(self, request: Request) -> Place:
        return Place.of("tinker://" + "/".join(request.path_params[name] for name in ("run", "kind", "name")))

    async def delete_checkpoint(self, request: Request) -> Response:
        await asyncio.wrap_future(self.service.worker.do(lambda: self.service.store.delete(self._place(request))))
        return Response(status_code=_NO_CONTENT)

    async def set_ttl(self, request: Request) -> Response:
        """Record when a checkpoint expires, in seconds from now; null: never. Nothing is deleted."""
        given, place = (await self._json_body(request)).get("ttl_seconds"), self._place(request)
        seconds = None if given is None else whole_number("ttl_seconds", given, 1, LONGEST_LIFE)
        await asyncio.wrap_future(self.service.worker.do(lambda: self.service.store.set_ttl(place, seconds)))
        return Response(status_code=_NO_CONTENT)

    async def download_urls(self, request: Request) -> Response:
        """Return a URL for each file of a checkpoint."""
        place = self._place(request)
        self.service.store.facts(place)
        folder = self.service.store.folder(place)
        urls = {}
        for name in (f.name for f in folder.iterdir() if f.is_file() and f.name != MANIFEST):
            path = f"/api/v1/files/{place.run}/{place.kind}/{place.name}/{name}"
            urls[name] = f"{str(request.base_url).rstrip('/')}{path}?signature={self._signature(path)}"
        return _json(types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.now(UTC) + _URL_LIFE))

    async def download(self, request: Request) -> Response:
        given = request.query_params.get("signature", "")
        if not hmac.compare_digest(given.encode(), self._signature(request.url.path).encode()):
            return _error(403, "the signature of this URL is wrong, or the server was started again: ask for new URLs")
        file = self.service.store.folder(self._place(request)) / request.path_params["file"]
        return FileResponse(file) if file.is_file() else _error(404, f"{file.name} is not there any more")

    def _signature(self, path: str) -> str:
        return hmac.new(self._secret, path.encode(), "sha256").hexdigest()

    async def training_runs(self, request: Request) -> Response:
        runs = list(dict.fromkeys([*self.service.models, *(place.run for place in self.service.store.places())]))
        part, cursor = _page(request, runs)
        return _json(types.TrainingRunsResponse(training_runs=[self._run(run) for run in part], cursor=cursor))

    async def training_run(self, request: Request) -> Response:
        return _json(self._run(request.path_params["run"]))

    def _run(self, run: str) -> types.TrainingRun:
        store = self.service.store
        places = store.places(Place.of(f"tinker://{run}/weights/x").run)
        model = self.service.models.get(run)
        if model is None and not places:
            raise NotFoundError(f"there is no training run {run}")
        facts = store.facts(places[-1]) if places else model.facts
        last = {place.kind: _checkpoint(store, place) for place in places}
        return types.TrainingRun(
            training_run_id=run, base_model=facts.base_model, model_owner="local", is_lora=True, lora_rank=facts.shape.rank,
            last_request_time=datetime.fromtimestamp(facts.time, UTC), last_checkpoint=last.get("weights"),
            last_sampler_checkpoint=last.get("sampler_weights"), user_metadata=facts.run_metadata,
        )  # fmt: skip

    async def session(self, request: Request) -> Response:
        name = request.path_params["session"]
        if name not in self.service.sessions:
            raise NotFoundError(f"there is no session {name}")
        both = self.service.models, self.service.samplers
        of_session = [[i for i in kept if i.startswith(f"{name}:")] for kept in both]
        metadata = self.service.sessions[name].metadata
        return _json(
            types.GetSessionResponse(training_run_ids=of_session[0], sampler_ids=of_session[1], user_metadata=metadata)
        )

    async def sessions(self, request: Request) -> Response:
        return _json(types.ListSessionsResponse(sessions=_page(request, list(self.service.sessions))[0]))

    # ---- bodies

    async def _raw(self, request: Request) -> bytes:
        return await read_raw(request, self._most, _BODY_SECONDS)

    async def _json_body(self, request: Request) -> dict:
        body = await read_json(request, self._most, _BODY_SECONDS)
        if not isinstance(body, dict):
            raise ValueError("the body is no JSON object")
        return body

    async def _body(self, request: Request, kind: type[M]) -> M:
        return _valid(kind, await self._json_body(request))

    def guarded(self, handler: Handler) -> Handler:
        """Return a handler that checks the API key before it calls `handler`."""

        async def handle(request: Request) -> Response:
            given, key = request.headers.get("x-api-key", ""), self._api_key
            if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
                return _error(401, "the API key is missing or wrong")
            return await handler(request)

        return handle


def _valid(kind: type[M], given: dict) -> M:
    """Return a request's JSON object as `kind`. Raise ValueError for the first invalid field."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None


def _checkpoint(store: Store, place: Place) -> types.Checkpoint:
    facts, files = store.facts(place), [file for file in store.folder(place).rglob("*") if file.is_file()]
    expires = None if facts.ttl_seconds is None else datetime.fromtimestamp(facts.time + facts.ttl_seconds, UTC)
    return types.Checkpoint(
        checkpoint_id=f"{place.kind}/{place.name}", checkpoint_type=KINDS[place.kind], time=datetime.fromtimestamp(facts.time, UTC),
        tinker_path=place.path, size_bytes=sum(file.stat().st_size for file in files), user_metadata=facts.user_metadata, expires_at=expires,
    )  # fmt: skip


def _json(answer: BaseModel) -> JSONResponse:
    return JSONResponse(answer.model_dump(mode="json"))


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"detail": text}, status)


async def _refused(request: Request, error: Exception) -> Response:
    """Return the response to a request that is invalid, or whose client has disconnected."""
    status = 499 if isinstance(error, ClientDisconnect) else getattr(error, "status", _INVALID)
    return _error(status, str(error))


def _page(request: Request, found: list) -> tuple[list, types.Cursor]:
    """Return the part of `found` that the query parameters `limit` and `offset` select, and its `types.Cursor`."""
    query = request.query_params
    try:
        limit, offset = int(query.get("limit", 1000)), int(query.get("offset", 0))
    except ValueError:
        raise ValueError("limit and offset are whole numbers") from None
    if limit < 0 or offset < 0:
        raise ValueError("limit and offset are at least 0")
    return found[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(found))


def make_app(service: Service, api_key: str | None = None, max_body_bytes: int = 64 << 20) -> Starlette:
    r = Routes(service, api_key, max_body_bytes)
    checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
    posts = {
        "client/config": r.constant(types.ClientConfigResponse()),
        "client/dynamic_config": r.constant(types.ClientDynamicConfigResponse(sample_cancel_enabled=True)),
        "telemetry": r.constant(types.TelemetryResponse(status="accepted")),  # the events are discarded
        "create_session": r.parsed(types.CreateSessionRequest, service.create_session),
        "session_heartbeat": r.parsed(types.SessionHeartbeatRequest, service.heartbeat),
        "sessions/{session}/finish": r.finish_session,
        "retrieve_future": r.retrieve_future,
        "cancel_future": r.cancel_future,
        "create_model": r.parsed(types.CreateModelRequest, service.create_model),
        "get_info": r.parsed(types.GetInfoRequest, service.info),
        "unload_model": r.parsed(types.UnloadModelRequest, service.unload),
        "forward_backward": r.forward_backward,
        "optim_step": r.parsed(types.OptimStepRequest, service.optim_step),
        "save_weights": r.parsed(types.SaveWeightsRequest, service.save_weights),
        "save_weights_for_sampler": r.parsed(types.SaveWeightsForSamplerRequest, service.save_for_sampler),
        "save_weights_external": r.parsed(types.SaveWeightsExternalRequest, service.save_external),
        "load_weights": r.parsed(types.LoadWeightsRequest, service.load_weights),
        "create_sampling_session": r.create_sampling_session,
        "asample": r.parsed(types.SampleRequest, service.sample),
        "weights_info": r.weights_info,
    }
    gets = {
        "get_server_capabilities": r.capabilities,
        "samplers/{sampler}": r.get_sampler,
        "checkpoints": r.checkpoints,
        "training_runs": r.training_runs,
        "training_runs/{run}": r.training_run,
        "training_runs/{run}/checkpoints": r.checkpoints,
        f"{checkpoint}/external_weights_urls": r.download_urls,
        "sessions": r.sessions,
        "sessions/{session}": r.session,
    }
    routes = [Route(f"/api/v1/{path}", r.guarded(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(f"/api/v1/{path}", r.guarded(handler)) for path, handler in gets.items()]
    routes += [
        Route("/api/v1/healthz", r.health),
        Route("/api/v1/files/{run}/{kind}/{name}/{file}", r.download),
        Route(f"/api/v1/{checkpoint}", r.guarded(r.delete_checkpoint), methods=["DELETE"]),
        Route(f"/api/v1/{checkpoint}/ttl", r.guarded(r.set_ttl), methods=["PUT"]),
    ]
    return Starlette(routes=routes, exception_handlers=dict.fromkeys((ValueError, ClientDisconnect), _refused))


def serve_tinker(arguments: argparse.Namespace, key: str | None) -> int:
    """Run `nemo-rl-cpp serve --tinker` until Ctrl-C or SIGTERM. Clients must send `key`, if any."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    listener = listen(arguments.host, arguments.port)
    sizes = EngineSizes(arguments.max_model_len, arguments.kv_cache_gb, arguments.max_batch_size)
    base = Base.load(arguments.model, arguments.served_model_name, arguments.precision, sizes, arguments.quantization)
    service = Service(base, Store(Path(arguments.tinker), "--tinker"))
    app = make_app(service, key, int(arguments.max_body_mb * (1 << 20)))
    server = HttpServer(app, listener, log_level="warning", most_connections=None)  # clients poll for many results

    def greet() -> None:
        print(
            f"Tinker's API for {base.names[0]} at {server.url}, checkpoints in {arguments.tinker}; Ctrl-C ends it. Clients:\n"
            f"  TINKER_BASE_URL={server.url} TINKER_API_KEY={'tml-...' if key else 'tml-none'}",
            flush=True,
        )

    serve_until_ended(server, service.worker, greet)
    return 0
