"""Agents for the tiny model, which request a digit over HTTP and score the response."""

import asyncio
import threading

import httpx
from nemo_rl_cpp.environments.agents import AgentResult, AgentTask

SEEN: list[tuple[str, int, list[int]]] = []
"""(rollout key, version of the weights, token ids of prompt and response) of every call, as received by the client."""
_LOCK = threading.Lock()


async def ask(task: AgentTask, client: httpx.AsyncClient, prompt: list[int] | str, max_tokens: int = 1) -> dict:
    """Request one completion, and append what the client receives to SEEN."""
    body = {
        "model": task.model, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    answer = (await client.post("/completions", json=body)).raise_for_status().json()
    choice = answer["choices"][0]
    with _LOCK:
        SEEN.append((task.key, answer["weight_version"], answer["prompt_token_ids"] + choice["token_ids"]))
    return choice | {"prompt_token_ids": answer["prompt_token_ids"]}


def client_of(task: AgentTask) -> httpx.AsyncClient:
    """Return a client whose requests belong to the task's rollout."""
    return httpx.AsyncClient(
        base_url=task.base_url, headers={**task.headers, "Authorization": f"Bearer {task.api_key}"}, timeout=60,
        verify=False,  # loading the certificates takes longer than all requests, which are not encrypted
    )  # fmt: skip


async def two_turns(task: AgentTask) -> AgentResult:
    """Ask for the digit 7 twice, with the agent's text "+" in between.

    A third call, outside the conversation, is not trained on."""
    async with client_of(task) as client:
        first = await ask(task, client, task.messages[0]["content"])
        ids = [*first["prompt_token_ids"], *first["token_ids"], 14]
        aside, second = await asyncio.gather(ask(task, client, "99"), ask(task, client, ids))
        right = sum(choice["text"] == "7" for choice in (first, second)) / 2
        return AgentResult(right, metrics={"aside": float(aside["text"] == "7")})


def fails(task: AgentTask) -> float:
    """Request a completion, then raise KeyError in every second rollout. A plain function, not a coroutine."""
    asyncio.run(_once(task))
    if int(task.key.rsplit("-", 1)[1]) % 2:
        raise KeyError("no such tool")
    return 1.0


async def begins_in_vain(task: AgentTask) -> float:
    """In every second rollout raise OSError before the first request."""
    if int(task.key.rsplit("-", 1)[1]) % 2:
        raise OSError("no tool server")
    await _once(task)
    return 1.0


async def _once(task: AgentTask) -> None:
    async with client_of(task) as client:
        await ask(task, client, task.messages[0]["content"])


async def sleeps(task: AgentTask) -> float:
    """Never return."""
    await asyncio.Event().wait()
    return 1.0


async def wants_another_temperature(task: AgentTask) -> float:
    """Request a temperature that differs from training's, which is an error, and raise ValueError with its message."""
    async with client_of(task) as client:
        answer = await client.post("/completions", json={"prompt": "1=", "temperature": 0.5})
        raise ValueError(answer.json()["error"]["message"])
