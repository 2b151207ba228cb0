"""Rollouts with the package `verifiers`. Its task sets, environments, agents, tools and scores are used unchanged; the
model is this run's policy.

Verifiers' training client does its own tokenization and calls the policy with token ids (`/inference/v1/generate`). The
policy's server samples the tokens on which the policy is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import VerifiersEnvConfig
from nemo_rl_cpp.data.datasets.response_datasets.agent_tasks import tasks_of
from nemo_rl_cpp.environments.agents import AgentEnvironment, AgentResult, AgentTask

if TYPE_CHECKING:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.env import Env
    from verifiers.v1.trace import Trace

CHAT = "nemo_rl_cpp_chat"
"""The id of `verifiers_chat.ChatHarness`. Verifiers imports a harness as a module of this name, so it has no dots."""
_NO_KEY = "NEMO_RL_CPP_NO_KEY"  # this variable is not set, because a header contains the key


class VerifiersEnvironment(AgentEnvironment):
    """An environment that runs one episode of the package `verifiers` per rollout. The reward is that of the episode,
    the weighted sum of the task's rewards. Metrics: the task's rewards and metrics by name."""

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self._config = as_model(cfg, VerifiersEnvConfig, "env.verifiers")
        self._envs: dict[str, Env] = {}
        from nemo_rl_cpp.environments.verifiers_chat import ChatHarness  # imports verifiers

        sys.modules.setdefault(CHAT, sys.modules[ChatHarness.__module__])
        super().__init__(self._config.max_concurrency, self._config.timeout_s)

    async def _all(self, tasks: Sequence[AgentTask]) -> list[AgentResult]:
        async with AsyncExitStack() as open_ones:  # servers for tools, and for the requests of the agents' programs
            for taskset in dict.fromkeys(str(task.info["taskset"]) for task in tasks):
                await open_ones.enter_async_context(self._env(taskset).serving())
            return await super()._all(tasks)

    async def roll_out(self, task: AgentTask) -> AgentResult:
        taskset = str(task.info["taskset"])
        chosen = tasks_of(taskset, task.info["taskset_limit"])[task.info["task"]]
        episode = await self._env(taskset).run_episode(chosen, self._context(task))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) > 1:
            raise ValueError(
                f"the environment of {task.info['taskset_id']} has {len(traces)} agents that are trained in an episode: one is supported"
            )
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if not episode.ok or not traces:
            return AgentResult(error=f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent was run")
        return AgentResult(traces[0].reward, metrics=_metrics(traces[0]))

    def _env(self, taskset: str) -> Env:
        if taskset not in self._envs:
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config

            given: dict[str, Any] = {**self._config.env, "taskset": json.loads(taskset)}
            roles = agent_config_fields(resolve_env_config(dict(given)))
            names = ("runtime", "harness", "max_turns")
            ours = {name: value for name in names if (value := getattr(self._config, name)) is not None}
            for role in roles:
                given[role] = ours | dict(given.get(role) or {})
            self._envs[taskset] = load_environment(resolve_env_config(given))
        return self._envs[taskset]

    def _context(self, task: AgentTask) -> ModelContext:
        from verifiers.v1.clients import ModelContext, TrainClientConfig
        from verifiers.v1.types import SamplingConfig

        client = TrainClientConfig.model_validate(
            {
                "base_url": task.base_url,
                "api_key_var": _NO_KEY,
                "renderer": self._config.renderer,
                "headers": {**task.headers, "Authorization": f"Bearer {task.api_key}"},
                "renderer_model_name": task.address.tokenizer,
            }  # fmt: skip
        )
        limit = self._config.max_tokens
        return ModelContext(task.model, client, SamplingConfig(**({} if limit is None else {"max_tokens": limit})))


def _metrics(trace: Trace) -> dict[str, float]:
    metrics = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {name: float(value) for name, value in metrics.items()}
