"""Twelve kinds of user code, as reward functions, as an environment and as an agent.

Each returns the share of sevens in a response."""

import asyncio
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from digit_agent import ask, client_of
from nemo_rl_cpp.environments.agents import AgentResult
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn


def sevens(text):
    return text.count("7") / 3


def plain(completions, **columns):
    return [sevens(text) for text in completions]


async def coroutine(completions, **columns):
    await asyncio.sleep(0)
    return plain(completions)


class Callable:
    def __call__(self, completions, **columns):
        return plain(completions)


class _Client:
    """A client that, like HTTP clients, works only in the event loop that first used it."""

    loop = None

    async def post(self, text):
        self.loop = self.loop or asyncio.get_running_loop()
        assert asyncio.get_running_loop() is self.loop, "bound to a different event loop"
        await asyncio.sleep(0)
        return sevens(text)


CLIENT = _Client()
SLOTS = asyncio.Semaphore(2)


async def client_made_once(completions, **columns):
    async def one(text):
        async with SLOTS:
            return await CLIENT.post(text)

    return await asyncio.gather(*map(one, completions))


class LockInConstructor:
    def __init__(self):
        self.lock = asyncio.Lock()

    async def __call__(self, completions, **columns):
        async def one(text):
            async with self.lock:
                await asyncio.sleep(0)
                return sevens(text)

        return await asyncio.gather(*map(one, completions))


def signal_timeout(completions, **columns):
    """Limit the time by a signal, as math-verify does. A failure scores 0, as in users' code."""
    try:
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 60)
        try:
            return plain(completions)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    except ValueError:
        return [0.0] * len(completions)


def runs_a_program(completions, **columns):
    said = subprocess.run(["cat"], input="\n".join(completions), capture_output=True, text=True, check=True).stdout
    return plain(said.split("\n"))


def thread_pool(completions, **columns):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sevens, completions))


def changes_folder(completions, **columns):
    os.chdir("/")
    return plain(completions)


def changes_torch(completions, **columns):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.manual_seed(0)
    return torch.tensor(plain(completions))


def prints(completions, **columns):
    print(len(completions), "answers")
    return plain(completions)


def slow(completions, **columns):
    time.sleep(0.02)
    return plain(completions)


callable_object, lock_in_constructor = Callable(), LockInConstructor()
KINDS = {
    "plain": plain, "coroutine": coroutine, "callable_object": callable_object, "client_made_once": client_made_once,
    "lock_in_constructor": lock_in_constructor, "signal_timeout": signal_timeout, "runs_a_program": runs_a_program,
    "thread_pool": thread_pool, "changes_folder": changes_folder, "changes_torch": changes_torch, "prints": prints, "slow": slow,
}  # fmt: skip


async def by_kind(completions):
    """Return {kind: its scores}."""
    scores = {}
    for name, function in KINDS.items():
        given = function(completions=completions)
        scores[name] = [float(value) for value in (await given if asyncio.iscoroutine(given) else given)]
    return scores


class Environment(EnvironmentInterface):
    """An environment whose reward is the mean of all kinds' scores. The score of each kind is a metric."""

    def __init__(self, cfg):
        self.scores = {name: [] for name in KINDS}

    async def step(self, message_log_batch, metadata):
        scores = await by_kind([log[-1]["content"] for log in message_log_batch])
        for name, values in scores.items():
            self.scores[name] += values
        size = len(metadata)
        rewards = torch.tensor([sum(row) / len(row) for row in zip(*scores.values())])
        nothing = [{"role": "environment", "content": ""}] * size
        return EnvironmentReturn(nothing, metadata, [None] * size, rewards, torch.ones(size), None)

    def pop_metrics(self):
        metrics = {f"rewards/{name}": sum(values) / len(values) for name, values in self.scores.items() if values}
        self.scores = {name: [] for name in KINDS}
        return metrics


async def agent(task):
    """Request a response and score it with every kind."""
    async with client_of(task) as client:
        answer = await ask(task, client, task.messages[0]["content"], max_tokens=3)
    scores = {f"rewards/{name}": values[0] for name, values in (await by_kind([answer["text"]])).items()}
    return AgentResult(scores["rewards/plain"], metrics=scores)
