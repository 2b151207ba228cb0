"""An agent for verifiers that only talks, in this process: `env.verifiers.harness: {id: nemo_rl_cpp_chat}`.

Verifiers' own harness `null` starts a program for each answer of a conversation with a user, which takes a second of a processor. This
one sends the same messages to the same endpoint. It has no tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

if TYPE_CHECKING:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.runtimes import Runtime
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import Trace

__all__ = ["ChatHarness", "ChatHarnessConfig"]


class ChatHarnessConfig(vf.HarnessConfig):
    """It has no settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """One answer to the conversation so far; verifiers comes again with the user's next message."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: ModelContext, trace: Trace, runtime: Runtime, endpoint: str, secret: str, mcp_urls: dict[str, str], data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:  # fmt: skip
        """Asks once. What the endpoint refuses is verifiers' to judge, which has refused it.

        Raises ValueError for a task with tools.
        """
        if mcp_urls:
            raise ValueError(
                f"the agent nemo_rl_cpp_chat has no tools, but the task gives it {', '.join(mcp_urls)}: set env.verifiers.harness to "
                "{id: null}, which has them"
            )
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with httpx.AsyncClient(timeout=None) as client:  # verifiers' own limit of the rollout ends it
            answer = await client.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}, headers={"Authorization": f"Bearer {secret}"}
            )  # fmt: skip
        return ProgramResult(exit_code=0 if answer.is_success else 1, stdout=answer.text, stderr="")
