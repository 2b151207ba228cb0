"""Environments with agents: an agent makes a rollout by calling the policy over HTTP, and returns a reward."""

from __future__ import annotations

import abc
import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import AgentEnvConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, ServerAddress
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl_cpp.environments.loading import import_object
from nemo_rl_cpp.environments.reward_environment import finite_number
from nemo_rl_cpp.errors import one_sentence, user_code
from nemo_rl_cpp.user_code import call_user


@dataclass(frozen=True)
class AgentTask:
    """The task of one rollout, which an agent receives: the `messages` of the prompt, the sample's metadata `info`, the
    `address` of the policy's server, and the `key` that marks requests of this rollout."""

    key: str
    messages: list[dict[str, str]]
    info: Mapping[str, object]
    address: ServerAddress

    base_url = property(lambda self: self.address.base_url, doc="The base URL for an OpenAI client.")
    api_key = property(lambda self: self.address.api_key, doc="The API key for an OpenAI client.")
    model = property(lambda self: self.address.model, doc="The policy's model name.")
    headers = property(
        lambda self: {self.address.header: self.key}, doc="The headers that every request of this rollout must send."
    )


@dataclass(frozen=True)
class AgentResult:
    """The result of one rollout, which an agent returns: its reward, or components of the reward by name; the error if
    it failed; metrics by name, whose means are logged; and whether the policy is trained on the rollout."""

    reward: float | dict[str, float] = 0.0
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trained: bool = True


class AgentEnvironment(EnvironmentInterface[dict], abc.ABC):
    """The base class of environments whose rollouts an agent makes. A rollout that fails or times out gets reward 0 and
    is not trained on. Metrics: means of the agents' metrics, and the numbers of failed rollouts (`agent_errors`) and of
    those that timed out (`agent_timeouts`)."""

    runs_rollouts = True

    def __init__(self, max_concurrency: int, timeout_s: float) -> None:
        self._max_concurrency, self._timeout_s = max_concurrency, timeout_s
        self._errors = self._timeouts = 0
        self._said = False

    @abc.abstractmethod
    async def roll_out(self, task: AgentTask) -> AgentResult:
        """Make one rollout of `task` with the agent, and return its result. An exception counts as a failed rollout."""

    def run_rollouts(self, tasks: Sequence[AgentTask]) -> list[AgentResult]:
        """Make all rollouts, at most `max_concurrency` at a time, and return their results in order."""
        results = call_user(self._all, tasks)
        for result in results:
            for name, value in result.metrics.items():
                self._means.add(name, value)
        return results

    async def _all(self, tasks: Sequence[AgentTask]) -> list[AgentResult]:
        slots = asyncio.Semaphore(self._max_concurrency)
        return list(await asyncio.gather(*(self._one(task, slots) for task in tasks)))

    async def _one(self, task: AgentTask, slots: asyncio.Semaphore) -> AgentResult:
        async with slots:
            limit, late = asyncio.timeout(self._timeout_s), False
            try:
                async with limit:
                    result = await self.roll_out(task)
                result = result if result.error is not None else _checked(result)
            except Exception as error:  # noqa: BLE001 - one rollout must not end the run
                late = isinstance(error, TimeoutError) and limit.expired()  # the agent, too, may raise TimeoutError
                said = f"it was not over within {self._timeout_s:g} s (timeout_s)" if late else one_sentence(error)
                result = AgentResult(error=said)
        if result.error is not None:
            self._timeouts += late
            self._errors += not late
            if not self._said:
                self._said = True
                print(f"warning: the rollout {task.key} failed and is not trained: {result.error}", flush=True)
        return result

    def pop_metrics(self) -> dict[str, float]:
        counts = {"agent_errors": float(self._errors), "agent_timeouts": float(self._timeouts)}
        self._errors = self._timeouts = 0
        return counts | super().pop_metrics()

    def step(self, message_log_batch: list[LLMMessageLogType], metadata: list[dict]) -> EnvironmentReturn[dict]:
        raise ValueError(
            "this environment makes its rollouts itself, through the policy's server: set policy.generation.expose_http_server=true"
        )


AgentFunction = Callable[[AgentTask], "Awaitable[float | AgentResult] | float | AgentResult"]


class AgentFunctionEnvironment(AgentEnvironment):
    """An environment whose rollouts the user's function `env.agent.function` makes: it gets an `AgentTask`, calls the
    policy with a client, and returns the reward or an `AgentResult`.

    Async functions run concurrently on the run's event loop (`user_code.py`). A plain function blocks its thread, so
    each call runs in a new thread. With `max_concurrency` 1, however, all calls run in the thread of user code, where
    the function may set signal handlers."""

    def __init__(self, cfg: Mapping[str, object]) -> None:
        config = as_model(cfg, AgentEnvConfig, "env.agent")
        super().__init__(config.max_concurrency, config.timeout_s)
        self._function: AgentFunction = import_object(config.function, "agent")
        if not callable(self._function):
            raise ValueError(f"env.agent.function is {config.function}, which cannot be called: name a function")

    async def roll_out(self, task: AgentTask) -> AgentResult:
        try:
            if inspect.iscoroutinefunction(self._function):
                given = await self._function(task)
            else:
                alone = self._max_concurrency == 1
                given = call_user(self._function, task) if alone else await _in_thread(self._function, task)
                if inspect.isawaitable(given):
                    given = await given
        except Exception:  # a rollout at its time limit is cancelled instead, which is no Exception
            with user_code(f"the agent {getattr(self._function, '__name__', 'function')}"):
                raise
        return given if isinstance(given, AgentResult) else AgentResult(given)


def _checked(result: AgentResult) -> AgentResult:
    """Return the result with its reward and metrics as floats. Raise ValueError if one of them is not finite."""

    def numbers(given: Mapping[str, object], what: str) -> dict[str, float]:
        return {str(name): finite_number(value, f"the agent's {what} {name}") for name, value in given.items()}

    parts = isinstance(result.reward, Mapping)
    reward = numbers(result.reward, "reward") if parts else finite_number(result.reward, "the agent's reward")
    return replace(result, reward=reward, metrics=numbers(result.metrics, "metric"))


def _in_thread(function: AgentFunction, task: AgentTask) -> asyncio.Future:
    """Call `function(task)` in a new daemon thread, so that only its own rollout waits for a function that hangs."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def put(result: object, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def work() -> None:
        result = error = None
        try:
            result = function(task)
        except Exception as raised:  # noqa: BLE001 - raised in the caller
            error = raised
        try:
            loop.call_soon_threadsafe(put, result, error)
        except RuntimeError:  # the event loop is closed, because the step is over
            return

    threading.Thread(target=work, daemon=True, name="agent").start()
    return future
