"""An agent's program for verifiers that asks once, in this process: verifiers' own start a process for each rollout."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["DigitHarness", "DigitHarnessConfig"]


class DigitHarnessConfig(vf.HarnessConfig):
    pass


class DigitHarness(vf.Harness[DigitHarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> ProgramResult:
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return ProgramResult(exit_code=0 if answer.is_success else 1, stdout=answer.text, stderr="")
