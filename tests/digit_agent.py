"""Agents for the tiny model: they ask for a digit, over HTTP, and score the answer."""

import asyncio
import threading

import httpx
from nemo_rl_cpp.environments.agents import AgentResult, AgentTask

SEEN: list[tuple[str, int, list[int]]] = []
"""(rollout, version of the weights, token ids of prompt and answer) of every call, as the client was told."""
_LOCK = threading.Lock()


async def ask(task: AgentTask, client: httpx.AsyncClient, prompt: list[int] | str, max_tokens: int = 1) -> dict:
    """One completion; what the client sees of it goes to SEEN."""
    body = {
        "model": task.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = (await client.post("/completions", json=body)).raise_for_status().json()
    choice = answer["choices"][0]
    with _LOCK:
        SEEN.append((task.key, answer["weight_version"], answer["prompt_token_ids"] + choice["token_ids"]))
    return choice | {"prompt_token_ids": answer["prompt_token_ids"]}


def client_of(task: AgentTask) -> httpx.AsyncClient:
    """A client whose requests belong to the rollout."""
    return httpx.AsyncClient(
        base_url=task.base_url, headers={**task.headers, "Authorization": f"Bearer {task.api_key}"}, timeout=60,
        verify=False,  # reading the certificates takes longer than all its requests, which are not encrypted
    )  # fmt: skip


async def two_turns(task: AgentTask) -> AgentResult:
    """The answer is to be 7, twice; between the two the agent says "+". A third call beside the conversation is not trained."""
    async with client_of(task) as client:
        first = await ask(task, client, task.messages[0]["content"])
        ids = [*first["prompt_token_ids"], *first["token_ids"], 14]
        aside, second = await asyncio.gather(ask(task, client, "99"), ask(task, client, ids))
        right = sum(choice["text"] == "7" for choice in (first, second)) / 2
        return AgentResult(right, metrics={"aside": float(aside["text"] == "7")})


def fails(task: AgentTask) -> float:
    """Every second rollout fails after its call; it is no coroutine."""
    asyncio.run(_once(task))
    if int(task.key.rsplit("-", 1)[1]) % 2:
        raise KeyError("no such tool")
    return 1.0


async def _once(task: AgentTask) -> None:
    async with client_of(task) as client:
        await ask(task, client, task.messages[0]["content"])


async def sleeps(task: AgentTask) -> float:
    """Never ends."""
    await asyncio.Event().wait()
    return 1.0


async def wants_another_temperature(task: AgentTask) -> float:
    """Is refused, since its samples would be of another distribution than training's."""
    async with client_of(task) as client:
        answer = await client.post("/completions", json={"prompt": "1=", "temperature": 0.5})
        raise ValueError(answer.json()["error"]["message"])
