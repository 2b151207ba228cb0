"""The routes of the server, as a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import sys
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_rl_cpp.data.chat_template import ChatTemplateError
from nemo_rl_cpp.serving.answers import (
    ChatAnswer,
    CompletionAnswer,
    GenerateAnswer,
    Header,
    Json,
    TextAnswer,
    error_body,
    event,
)
from nemo_rl_cpp.serving.bodies import Body, ChatBody, CompletionBody, GenerateBody, RequestError, read_body
from nemo_rl_cpp.serving.engine import Draw, PendingRequest, Progress, Sample, ServingError
from nemo_rl_cpp.serving.rollouts import HEADER, Call, Rollout

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from nemo_rl_cpp.serving.model import ServedModel

Answer = CompletionAnswer | ChatAnswer | GenerateAnswer
_GONE = 499  # nobody reads it


class _Gone(Exception):
    """The client has gone away."""


class Conversation:
    """One request: the way of its tickets, one for each prompt, through the engine, and what the client is told."""

    def __init__(self, service: Service, request: Request, answer: Answer, rollout: Rollout | None) -> None:
        self.service, self.request, self.answer, self.rollout = service, request, answer, rollout
        self.news: asyncio.Queue[Progress] = asyncio.Queue()
        self.samples: list[Sample] = []
        self._kept = False

    def _ticket(self, number: int) -> PendingRequest:
        loop, answer = asyncio.get_running_loop(), self.answer

        def tell(progress: Progress) -> None:
            choice = number * answer.samples + progress.sample
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(self.news.put_nowait, replace(progress, sample=choice))

        draw = self.service.draw(answer.prompts[number], answer.seed, self.rollout)
        return PendingRequest(
            answer.prompts[number], answer.sampling, draw, tell, samples=answer.samples, every_token=answer.streams
        )

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """In the engine; out of it at the end, however that comes."""
        service, n = self.service, len(self.answer.prompts) * self.answer.samples
        if service.under_way + n > service.model.limits.max_queue:
            raise RequestError(
                f"{n} answers are asked for, {service.under_way} are under way, and the server takes {service.model.limits.max_queue}: "
                "ask for fewer, or later",
                503,
            )
        self.samples = [Sample() for _ in range(n)]
        # a request that was refused has drawn nothing
        self.tickets = [self._ticket(number) for number in range(len(self.answer.prompts))]
        service.under_way += n
        try:
            service.model.engine.submit(*self.tickets)
            yield
        finally:
            service.under_way -= n
            for ticket in self.tickets:
                if not self.complete:
                    service.model.engine.cancel(ticket)
                if self.rollout is not None and not self._kept:
                    service.model.rollouts.gave_up(self.rollout, ticket.prompt_ids, ticket.draw)

    @property
    def complete(self) -> bool:
        return all(sample.reason for sample in self.samples)

    async def next(self) -> Progress:
        """The next thing that the engine tells. Raises what has failed."""
        progress = await self.news.get()
        if progress.error is not None:
            raise progress.error
        sample = self.samples[progress.sample]
        sample.token_ids += progress.token_ids
        sample.logprobs += progress.logprobs
        sample.likeliest += progress.likeliest
        sample.reason = progress.reason
        return progress

    async def unless_gone(self, work: Awaitable[None]) -> None:
        """Waits for `work`; _Gone where the client goes away meanwhile."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(self.request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Gone
            task.result()
        finally:
            for pending in (task, gone):
                pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def header(self) -> Header:
        return Header(self.answer.id, self.answer.model, self.tickets[0].version or 0)

    def keep(self) -> None:
        """Lets the rollout remember the answer."""
        self._kept = True
        if self.rollout is not None:
            for choice, sample in enumerate(self.samples):
                ticket = self.tickets[choice // self.answer.samples]
                call = Call(ticket.prompt_ids, sample, ticket.version or 0)
                self.service.model.rollouts.answered(self.rollout, call)
            self.answer.remember(self.rollout, self.samples)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer as server-sent events, while the engine makes it."""

    media_type = "text/event-stream"

    def __init__(self, conversation: Conversation, began: float) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        self.conversation, self._began, self._started = conversation, began, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it; what cannot be said by a status any more is an event."""
        limits = self.conversation.service.model.limits
        try:
            async with asyncio.timeout_at(self._began + limits.request_timeout_s), self.conversation.under_way():
                with contextlib.suppress(_Gone):
                    await self.conversation.unless_gone(self._send(send))
        except RequestError as error:
            await _refusal(error)(scope, receive, send)
        except TimeoutError:
            if not self._started:
                await _refusal(_too_late(limits.request_timeout_s))(scope, receive, send)
            # else it has no end: the connection is cut

    async def _send(self, send: Send) -> None:
        c = self.conversation
        try:
            progress = await c.next()
        except (ValueError, ServingError) as error:
            await _refusal(error)({"type": "http"}, _nothing, send)
            return
        header, answer = c.header(), c.answer
        raw = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        raw += [(b"x-weight-version", str(header.version).encode()), (b"x-request-id", answer.id.encode())]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})

        async def say(body: Json | str) -> None:
            await send({"type": "http.response.body", "body": event(body), "more_body": True})

        try:
            for first in answer.opening(header):
                await say(first)
            while True:
                for body in answer.chunk(header, progress):
                    await say(body)
                if c.complete:
                    break
                progress = await c.next()
            c.keep()
            for body in answer.closing(header, c.samples):
                await say(body)
            await say("[DONE]")
        except ServingError as error:
            await say(error_body(str(error), "server_error", code=503))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _too_late(seconds: float) -> RequestError:
    return RequestError(f"the answer was not complete within {seconds:g} s, the server's time for a request", 504)


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


class Service:
    """The handlers of the routes.

    Args:
        model: what is served.
        api_key: that requests must carry as `Authorization: Bearer`; None: none.
    """

    def __init__(self, model: ServedModel, api_key: str | None = None) -> None:
        self.model, self._api_key = model, api_key
        self.under_way = 0  # answers, over all clients

    # ---- what there is

    async def health(self, request: Request) -> Response:
        """Whether the server lives, and what it is at."""
        state = self.model.engine.state
        return JSONResponse(
            {
                "status": "ok", "weight_version": state.version, "weights_in_place": state.is_open, "answers_under_way": self.under_way,
                "requests_running": state.running, "requests_waiting": state.waiting, "cache_blocks_used": state.used_blocks,
                "cache_blocks": state.num_blocks, "generated_tokens": state.generated_tokens,
            }
        )  # fmt: skip

    async def models(self, request: Request) -> Response:
        """OpenAI's list of models, with vLLM's `max_model_len`."""
        self._check_key(request)
        card = {
            "object": "model", "created": 0, "owned_by": "nemo_rl_cpp", "root": self.model.names[0], "parent": None,
            "max_model_len": self.model.max_model_len, "weight_version": self.model.engine.state.version,
            "weight_digest": self.model.digest,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [{"id": name, **card} for name in self.model.names]})

    # ---- what is generated

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, CompletionAnswer)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, ChatAnswer)

    async def generate(self, request: Request) -> Response:
        """`POST /inference/v1/generate`, vLLM's route of token ids."""
        return await self._generate(request, GenerateBody, GenerateAnswer)

    async def _generate(self, request: Request, kind: type[Body], make: type[TextAnswer]) -> Response:
        self._check_key(request)
        body = read_body(kind, await self._json(request))
        began = asyncio.get_running_loop().time()
        rollout = self.model.rollout_of(body, request.headers.get(HEADER))
        # text becomes tokens on another thread, so that a long one keeps nobody waiting
        answer: Answer = await asyncio.to_thread(make, self.model, body, rollout, uuid.uuid4().hex)
        conversation = Conversation(self, request, answer, rollout)
        if answer.streams:
            return EventStream(conversation, began)
        try:
            async with asyncio.timeout_at(began + self.model.limits.request_timeout_s), conversation.under_way():
                await conversation.unless_gone(self._all(conversation))
                conversation.keep()
        except TimeoutError:
            raise _too_late(self.model.limits.request_timeout_s) from None
        header = conversation.header()
        body_of = await asyncio.to_thread(answer.whole, header, conversation.samples)
        return JSONResponse(
            body_of, headers={"x-weight-version": str(header.version), "x-request-id": answer.id}
        )  # fmt: skip

    async def _all(self, conversation: Conversation) -> None:
        while not conversation.complete:
            await conversation.next()

    def draw(self, prompt: list[int], seed: int | None, rollout: Rollout | None) -> Draw:
        """The key of the draws of the answers to a prompt."""
        if rollout is not None:
            return self.model.rollouts.draw(rollout, prompt, seed)
        seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        return Draw(seed & 0xFFFFFFFF, draw_id=seed >> 32)

    # ---- what is refused

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
            raise RequestError("the key is missing or wrong: send it as `Authorization: Bearer KEY`", 401)

    async def _json(self, request: Request) -> object:
        limit = self.model.limits.max_body_bytes
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self.model.limits.body_timeout_s):
                async for piece in request.stream():
                    size += len(piece)
                    if size > limit:
                        raise RequestError(f"the body has more than {limit} bytes, the server's limit", 413)
                    pieces.append(piece)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {self.model.limits.body_timeout_s:g} s", 408) from None
        try:
            raw = b"".join(pieces)
            data = json.loads(raw, parse_constant=_no_constant)
            if b"\\ud" in raw.lower():  # half a character by itself is no text
                json.dumps(data, ensure_ascii=False).encode()
            return data
        except (ValueError, RecursionError) as error:
            text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RequestError(f"the body is no JSON: {text[:200]}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _refusal(error: Exception) -> JSONResponse:
    """The answer to a request that gets none."""
    status = getattr(error, "status", 503 if isinstance(error, ServingError) else 400)
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        500: "server_error",
        503: "server_error",
        504: "server_error",
    }
    headers = {"retry-after": "1"} if status == 503 else {"www-authenticate": "Bearer"} if status == 401 else None
    if status in (408, 413):  # the rest of the body is not read
        headers = {"connection": "close"}
    body = error_body(str(error), kinds.get(status, "invalid_request_error"), getattr(error, "param", None), status)
    return JSONResponse(body, status, headers)


def _told(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler, whose exceptions become answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except (_Gone, ClientDisconnect):
            return Response(status_code=_GONE)
        except (RequestError, ServingError, ChatTemplateError) as error:
            return _refusal(error)
        except ValueError as error:  # what the engine refuses
            return _refusal(RequestError(str(error)))
        except Exception as error:  # noqa: BLE001 - one request must not end the server
            traceback.print_exc(file=sys.stderr)
            return JSONResponse(error_body(f"the server failed: {type(error).__name__}", "server_error", code=500), 500)

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "there is GET /v1/models and /health, POST /v1/completions, /v1/chat/completions and /inference/v1/generate"
    return JSONResponse(
        error_body(f"{request.method} {request.url.path[:200]}: {error.detail}; {hint}", "invalid_request_error", code=error.status_code),
        error.status_code,
        error.headers,
    )  # fmt: skip


def make_app(model: ServedModel, api_key: str | None = None) -> Starlette:
    service = Service(model, api_key)
    routes = [
        Route("/health", _told(service.health), methods=["GET"]),
        Route("/v1/models", _told(service.models), methods=["GET"]),
        Route("/v1/completions", _told(service.completions), methods=["POST"]),
        Route("/v1/chat/completions", _told(service.chat), methods=["POST"]),
        Route("/inference/v1/generate", _told(service.generate), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
