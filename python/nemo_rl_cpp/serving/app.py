"""The HTTP routes of the server, as a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import sys
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_rl_cpp.data.chat_template import ChatTemplateError
from nemo_rl_cpp.serving.answers import Answer, ChatAnswer, CompletionAnswer, GenerateAnswer, Header, error_body, event
from nemo_rl_cpp.serving.bodies import Body, ChatBody, CompletionBody, GenerateBody, RequestError, read_body
from nemo_rl_cpp.serving.engine import Draw, PendingRequest, Progress, Sample, ServingError
from nemo_rl_cpp.serving.http_server import read_json
from nemo_rl_cpp.serving.rollouts import HEADER, Call, Rollout

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from nemo_rl_cpp.serving.model import ServedModel

_BODIES: dict[type[Answer], type[Body]] = {
    CompletionAnswer: CompletionBody,
    ChatAnswer: ChatBody,
    GenerateAnswer: GenerateBody,
}
_GONE = 499  # the status if the client has disconnected; nobody reads it


class Conversation:
    """One HTTP request that is being answered: its engine requests, one per prompt, and the tokens sampled so far."""

    def __init__(self, service: Service, answer: Answer, rollout: Rollout | None) -> None:
        self.service, self.answer, self.rollout = service, answer, rollout
        self.samples = [Sample() for _ in range(len(answer.prompts) * answer.samples)]
        self._news: asyncio.Queue[Progress] = asyncio.Queue()
        self._kept = False

    def _pending(self, number: int) -> PendingRequest:
        loop, answer = asyncio.get_running_loop(), self.answer

        def tell(progress: Progress) -> None:
            choice = number * answer.samples + progress.sample
            with contextlib.suppress(RuntimeError):  # the event loop ended with the server
                loop.call_soon_threadsafe(self._news.put_nowait, progress._replace(sample=choice))

        prompt = answer.prompts[number]
        draw = self.service.draw(prompt, answer.seed, self.rollout)
        return PendingRequest(prompt, answer.sampling, draw, tell, samples=answer.samples, every_token=answer.streams)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """In the `with` block, the engine works on the requests; they are submitted when the block begins, and those
        that are unfinished when it ends are cancelled. Raise RequestError with status 503 if the queue is full, and 400
        if the request has more responses than an empty queue takes."""
        service, n, most = self.service, len(self.samples), self.service.model.limits.max_queue
        if n > most:
            prompts, samples = len(self.answer.prompts), self.answer.samples
            text = f"n is {samples} for {prompts} prompt{'s' if prompts > 1 else ''}: the server takes at most {most} answers at a time"
            raise RequestError(
                f"{text} (max_queue): ask for fewer in a request", param="n" if samples > 1 else "prompt"
            )
        if service.under_way + n > most:
            raise RequestError(
                f"{n} answers are asked for, {service.under_way} are under way, and the server takes {most}: ask for fewer, or later",
                503,
            )
        # a rejected request has no seed yet
        self.pending = [self._pending(number) for number in range(len(self.answer.prompts))]
        service.under_way += n
        try:
            service.model.engine.submit(*self.pending)
            yield
        finally:
            service.under_way -= n
            for request in self.pending:
                if not self.complete:
                    service.model.engine.cancel(request)
                if self.rollout is not None and not self._kept:
                    service.model.rollouts.gave_up(self.rollout, request.prompt_ids, request.draw)

    @property
    def complete(self) -> bool:
        return all(sample.reason for sample in self.samples)

    async def next(self) -> Progress:
        """Wait for the next tokens from the engine. Raise the error of a request that failed."""
        progress = await self._news.get()
        if progress.error is not None:
            raise progress.error
        self.samples[progress.sample].extend(progress.part)
        return progress

    async def all(self) -> None:
        """Wait until all responses are complete."""
        while not self.complete:
            await self.next()

    def keep(self) -> None:
        """Record the engine's requests and responses in the rollout, if there is one."""
        self._kept = True
        if self.rollout is not None:
            for choice, sample in enumerate(self.samples):
                request = self.pending[choice // self.answer.samples]
                call = Call(request.prompt_ids, sample, request.version or 0)
                self.service.model.rollouts.answered(self.rollout, call)
            self.answer.remember(self.rollout, self.samples)

    async def events(self, header: Header, progress: Progress) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events while it is generated. `progress` has its first tokens."""
        answer = self.answer
        for body in answer.opening(header):
            yield event(body)
        try:
            for body in answer.chunk(header, progress):
                yield event(body)
            while not self.complete:
                for body in answer.chunk(header, await self.next()):
                    yield event(body)
        except ServingError as error:  # too late for an error status
            yield event(error_body(str(error), "server_error", code=503))
            return
        self.keep()
        for body in answer.closing(header, self.samples):
            yield event(body)
        yield event("[DONE]")


class EventStream(StreamingResponse):
    """A streamed HTTP response of the `events`. It ends when complete, at the deadline (a time of the event loop's
    clock), or if the client disconnects, and then closes `stack`, which holds what the request uses."""

    def __init__(
        self, events: AsyncIterator[bytes], headers: dict[str, str], stack: contextlib.AsyncExitStack, deadline: float
    ) -> None:
        super().__init__(events, headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")
        self._stack, self._deadline = stack, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            with contextlib.suppress(TimeoutError, ClientDisconnect):  # the connection is cut
                async with asyncio.timeout_at(self._deadline):
                    await super().__call__(scope, receive, send)


@dataclass
class Service:
    """The handlers of the server's routes. Requests must send `api_key` (None: no key) as `Authorization: Bearer`."""

    model: ServedModel
    api_key: str | None = None
    under_way: int = 0  # responses in flight, over all clients

    async def health(self, request: Request) -> Response:
        state = self.model.engine.state
        return JSONResponse({
            "status": "ok", "weight_version": state.version, "weights_in_place": state.is_open,
            "answers_under_way": self.under_way, "requests_running": state.running, "requests_waiting": state.waiting,
            "cache_blocks_used": state.used_blocks, "cache_blocks": state.num_blocks,
            "generated_tokens": state.generated_tokens,
        })  # fmt: skip

    async def models(self, request: Request) -> Response:
        """Handle `GET /v1/models`, OpenAI's list of models, and `GET /v1/models/NAME`, one of them. The field
        `max_model_len` is vLLM's."""
        self._check_key(request)
        model, name = self.model, request.path_params.get("name")
        card = {
            "object": "model", "created": 0, "owned_by": "nemo_rl_cpp", "root": model.names[0], "parent": None,
            "max_model_len": model.max_model_len, "weight_version": model.engine.state.version,
            "weight_digest": model.digest,
        }  # fmt: skip
        if name is not None:
            return JSONResponse({"id": model.check_name(name), **card})
        return JSONResponse({"object": "list", "data": [{"id": each, **card} for each in model.names]})

    async def answer(self, request: Request, make: type[Answer]) -> Response:
        """Handle an HTTP request for a response. `make` is the class of the response for the route."""
        self._check_key(request)
        limits = self.model.limits
        given = await read_json(request, limits.max_body_bytes, limits.body_timeout_s)
        body, limit = read_body(_BODIES[make], given), limits.request_timeout_s
        deadline = asyncio.get_running_loop().time() + limit
        rollout = self.model.rollout_of(body, request.headers.get(HEADER))
        # texts are tokenized in another thread, so that a long text does not block other requests
        answer = await asyncio.to_thread(make, self.model, body, rollout, body.request_id or uuid.uuid4().hex)
        conversation = Conversation(self, answer, rollout)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(conversation.under_way())
            try:
                async with asyncio.timeout_at(deadline):
                    wait = conversation.next() if answer.streams else conversation.all()
                    first = await _unless_gone(request, wait)
            except TimeoutError:
                text = f"the answer was not complete within {limit:g} s, the server's time for a request"
                raise RequestError(text, 504) from None
            header = Header(answer.id, answer.model, conversation.pending[0].version or 0)
            headers = {"x-weight-version": str(header.version), "x-request-id": answer.id}
            if answer.streams:
                return EventStream(conversation.events(header, first), headers, stack.pop_all(), deadline)
            conversation.keep()
        return JSONResponse(await asyncio.to_thread(answer.whole, header, conversation.samples), headers=headers)

    def draw(self, prompt: list[int], seed: int | None, rollout: Rollout | None) -> Draw:
        """Return the seed for sampling the responses to `prompt`. In a rollout it follows from the run's seed, the
        rollout and the prompt; otherwise it is `seed`, or random if `seed` is None."""
        if rollout is not None:
            return self.model.rollouts.draw(rollout, prompt, seed)
        seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        return Draw(seed & 0xFFFFFFFF, draw_id=seed >> 32)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.api_key and not hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            raise RequestError("the key is missing or wrong: send it as `Authorization: Bearer KEY`", 401)


async def _unless_gone(request: Request, work: Awaitable[Progress | None]) -> Progress | None:
    """Return the result of `work`. Raise ClientDisconnect if the client disconnects before `work` has ended."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel(), gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


# ---- error responses

_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "server_error", 504: "server_error"}
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    503: {"retry-after": "1"},
    408: {"connection": "close"},  # the rest of the body is not read
    413: {"connection": "close"},
}


async def _refused(request: Request, error: Exception) -> Response:
    """Return the error response for an invalid request, or one that the server cannot answer now."""
    of_kind = _GONE if isinstance(error, ClientDisconnect) else 503 if isinstance(error, ServingError) else 400
    status = getattr(error, "status", of_kind)
    body = error_body(str(error), _KINDS.get(status, "invalid_request_error"), getattr(error, "param", None), status)
    return JSONResponse(body, status, _HEADERS.get(status))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "there is GET /v1/models and /health, POST /v1/completions, /v1/chat/completions and /inference/v1/generate"
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; {hint}"
    body = error_body(text, "invalid_request_error", code=error.status_code)
    return JSONResponse(body, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return JSONResponse(error_body(f"the server failed: {type(error).__name__}", "server_error", code=500), 500)


def make_app(model: ServedModel, api_key: str | None = None) -> Starlette:
    service = Service(model, api_key)
    routes = [
        Route("/health", service.health, methods=["GET"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{name:path}", service.models, methods=["GET"]),
        Route("/v1/completions", functools.partial(service.answer, make=CompletionAnswer), methods=["POST"]),
        Route("/v1/chat/completions", functools.partial(service.answer, make=ChatAnswer), methods=["POST"]),
        Route("/inference/v1/generate", functools.partial(service.answer, make=GenerateAnswer), methods=["POST"]),
    ]
    # a ValueError is an invalid request found by the engine
    handlers = dict.fromkeys((ValueError, ServingError, ChatTemplateError, ClientDisconnect), _refused)
    return Starlette(routes=routes, exception_handlers={**handlers, HTTPException: _no_route, Exception: _failed})
