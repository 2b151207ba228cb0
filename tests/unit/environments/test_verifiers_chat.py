import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("verifiers")
pytestmark = pytest.mark.slow  # verifiers and mcp are imported

SECRET = "word"


def call(name, arguments, number=0):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]}  # fmt: skip


class Scripted:
    """A fake policy server that returns the responses of `script`, and decides about tool calls as `gate` says."""

    def __init__(self, script, gate=()):
        self.script, self.gate = list(script), list(gate)
        self.asked, self.gated = [], []

    async def complete(self, request):
        from starlette.responses import JSONResponse

        assert request.headers["authorization"] == f"Bearer {SECRET}"
        self.asked.append(await request.json())
        said = self.script.pop(0)
        if isinstance(said, int):
            return JSONResponse({"error": "refused"}, said)
        return JSONResponse({"choices": [{"message": said, "finish_reason": "stop"}]})

    async def decide(self, request):
        from starlette.responses import JSONResponse

        self.gated.append(await request.json())
        return JSONResponse(self.gate.pop(0))


@pytest.fixture
def launch():
    """Return a function that runs the agent against a scripted model and returns the agent's result."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer
    from nemo_rl_cpp.environments.verifiers_chat import ChatHarness, ChatHarnessConfig
    from starlette.routing import Route

    def add(a: int, b: int) -> str:
        """The sum."""
        return str(a + b)

    def play(model, prompt="2 + 3?", tools=True, gate=False):
        mcp = MCPServer("sums")
        mcp.add_tool(add, name="add")
        app = mcp.streamable_http_app(json_response=True, stateless_http=True)
        app.router.routes += [
            Route("/v1/chat/completions", model.complete, methods=["POST"]),
            Route("/tool", model.decide, methods=["POST"]),
        ]
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started and time.monotonic() < deadline:
                thread.join(0.01)
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            data = SimpleNamespace(prompt=prompt, system_prompt="Be brief.")
            urls = {"sums": f"{url}/mcp"} if tools else {}
            agent = ChatHarness(ChatHarnessConfig(id="nemo_rl_cpp_chat"))
            return asyncio.run(
                agent.launch(SimpleNamespace(model="m"), None, None, f"{url}/v1", SECRET, urls, data, f"{url}/tool" if gate else None)
            )  # fmt: skip
        finally:
            server.should_exit = True
            thread.join(30)

    return play


def test_chat_agent_runs_tool_calls_until_a_response_contains_no_tool_call(launch):
    model = Scripted(
        [
            call("sums_add", '{"a": 2, "b": 3}'), call("sums_add", "[1]", 1), call("sums_add", "{", 2), call("sums_sub", "{}", 3),
            {"role": "assistant", "content": "5"},
        ]
    )  # fmt: skip
    result = launch(model)
    assert result.exit_code == 0 and json.loads(result.stdout)["choices"][0]["message"]["content"] == "5"
    (tool,) = model.asked[0]["tools"]
    assert tool["function"]["name"] == "sums_add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    assert model.asked[0]["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}
    ]  # fmt: skip
    told = [message for message in model.asked[-1]["messages"] if message["role"] == "tool"]
    assert told[0] == {"role": "tool", "tool_call_id": "c0", "name": "sums_add", "content": "5"}
    for message, said in zip(told[1:], ("no JSON object", "are no JSON", "there is no tool sums_sub, only sums_add")):
        assert said in message["content"]
    assert all(later["messages"][: len(earlier["messages"])] == earlier["messages"] for earlier, later in zip(model.asked, model.asked[1:]))  # fmt: skip


def test_tool_call_gate_of_the_chat_agent_can_deny_a_call_or_end_the_rollout(launch):
    denied = {"role": "tool", "tool_call_id": "c0", "content": "not now"}
    model = Scripted(
        [call("sums_add", '{"a": 2, "b": 3}'), call("sums_add", '{"a": 1, "b": 1}', 1), call("sums_add", "{}", 2)],
        [{"action": "deny", "message": denied}, {"action": "allow"}, {"action": "stop", "reason": "enough of that"}],
    )
    with pytest.raises(RuntimeError, match="enough of that"):
        launch(model, gate=True)
    assert model.asked[1]["messages"][-1] == denied and model.asked[2]["messages"][-1]["content"] == "2"
    assert model.gated[0] == {"tool_call_id": "c0", "name": "sums_add", "arguments": {"a": 2, "b": 3}}


def test_chat_agent_without_tools_makes_one_request_and_fails_if_the_request_is_rejected(launch):
    model = Scripted([{"role": "assistant", "content": "hello"}])
    assert launch(model, tools=False).exit_code == 0 and "tools" not in model.asked[0]
    refused = launch(Scripted([400]), tools=False)
    assert refused.exit_code == 1 and "refused" in refused.stdout
