"""Reads the body of a request, up to a size and a time limit."""

import asyncio
import json

from starlette.requests import Request

from nemo_rl_cpp.serving.bodies import RequestError


async def read_raw(request: Request, most_bytes: int, seconds: float) -> bytes:
    """Return the body as bytes. Raise RequestError if it is too long (413) or does not arrive in time (408)."""
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most_bytes:
                    raise RequestError(f"the body has more than {most_bytes} bytes, the server's limit", 413)
                pieces.append(piece)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {seconds:g} s", 408) from None
    return b"".join(pieces)


async def read_json(request: Request, most_bytes: int, seconds: float) -> object:
    """Parse the body as JSON. Raise RequestError if it is invalid, or holds a lone surrogate or a non-finite number."""
    raw = await read_raw(request, most_bytes, seconds)
    try:
        data = json.loads(raw, parse_constant=_no_constant)
        if b"\\ud" in raw.lower():  # a lone surrogate cannot be encoded
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except (ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is no JSON: {text[:200]}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
