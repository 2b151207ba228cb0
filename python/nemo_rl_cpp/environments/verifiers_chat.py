"""An in-process agent for the package `verifiers`, which chats and uses the task's tools: `env.verifiers.harness: {id:
nemo_rl_cpp_chat}`.

In a conversation with a user, verifiers' harness `null` starts a program for each response; every start takes a second
of processor time. This agent sends the same messages to the same endpoint and calls the same tools, without a program.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

if TYPE_CHECKING:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.runtimes import Runtime
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import Trace

__all__ = ["ChatHarness", "ChatHarnessConfig"]

Json = dict[str, object]


class ChatHarnessConfig(vf.HarnessConfig):
    """The configuration of `ChatHarness`: the settings that all harnesses of verifiers have."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """A harness (an agent, in verifiers' words) that calls the policy, and the tools that its responses call, until a
    response calls no tool. `verifiers` calls it for each user message."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = SUPPORTS_MCP = SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: ModelContext, trace: Trace, runtime: Runtime, endpoint: str, secret: str, mcp_urls: dict[str, str], data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:  # fmt: skip
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncExitStack() as open_ones:
            client = httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {secret}"})
            await open_ones.enter_async_context(client)  # no limit: verifiers' limit for the rollout applies
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            schemas, places, connections = await connect_mcp({"mcpServers": servers}, open_ones)
            tools = _Tools(client, places, connections, tool_interception_url)
            asked: Json = {"model": ctx.model, "messages": messages} | ({"tools": schemas} if schemas else {})
            while True:
                answer = await client.post(f"{endpoint}/chat/completions", json=asked)
                if not answer.is_success:
                    return ProgramResult(exit_code=1, stdout=answer.text, stderr="")
                message = answer.json()["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout=answer.text, stderr="")
                for call in message["tool_calls"]:
                    messages.append(await tools.result_of(call))


@dataclass
class _Tools:
    """The tools of a rollout. The URL `gate`, if any, is asked before each tool call whether to make it."""

    client: httpx.AsyncClient
    places: dict[str, tuple[str, str]]
    connections: dict[str, MCPConnection]
    gate: str | None

    async def result_of(self, call: Json) -> Json:
        """Make a tool call, and return the message with its result, or with its error, so that the model can retry."""
        function = call["function"]
        name, text = function["name"], function["arguments"] or "{}"
        try:
            arguments = json.loads(text)
        except json.JSONDecodeError as error:
            arguments, wrong = text, f"the arguments are no JSON ({error})"
        else:
            wrong = None if isinstance(arguments, dict) else "the arguments are no JSON object"
        if self.gate is not None:
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            decision = (await self.client.post(self.gate, json=asked)).raise_for_status().json()
            if decision["action"] == "stop":
                raise RuntimeError(decision["reason"])
            if decision["action"] == "deny":
                return decision["message"]
        if name not in self.places:
            wrong = f"there is no tool {name}, only {', '.join(self.places) or 'none'}"
        content = f"error: {wrong}" if wrong else await call_mcp(self.connections, self.places, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
