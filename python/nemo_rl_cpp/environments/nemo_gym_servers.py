"""Start NeMo Gym's servers and make rollouts with them, in the interpreter that has the package nemo-gym.

This file runs as a program: it imports nothing of nemo_rl_cpp. Its first line of standard input is the configuration of
NeMo Gym as JSON. It then prints {"ready": true}. Each further line of input, {"id", "row"}, is a row of NeMo Gym's data,
and gives one line of output: {"id", "result"}, or {"id", "error"}. The end of the input ends the servers."""

import asyncio
import json
import os
import sys
from typing import Any, TextIO


async def answer(line: str, collect: Any, head: Any, out: TextIO) -> None:
    asked = json.loads(line)
    try:
        for task in collect.run_examples([asked["row"]], head_server_config=head):
            _, result = await task
        reply = {"id": asked["id"], "result": result}
    except Exception as error:  # noqa: BLE001 - the run decides what a failed rollout means
        detail = getattr(error, "response_content", b"") or b""
        detail = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        reply = {"id": asked["id"], "error": f"{type(error).__name__}: {error} {detail[:500]}".strip()}
    print(json.dumps(reply), file=out, flush=True)


async def serve(collect: Any, head: Any, out: TextIO) -> None:
    running: set[asyncio.Task[None]] = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.create_task(answer(line, collect, head, out))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what NeMo Gym and its servers print goes to the log, not between the answers
    from nemo_gym.cli import GlobalConfigDictParserConfig, RunHelper
    from nemo_gym.rollout_collection import RolloutCollectionHelper
    from nemo_gym.server_utils import HEAD_SERVER_KEY_NAME, BaseServerConfig
    from omegaconf import DictConfig

    given = json.loads(sys.stdin.readline())
    helper = RunHelper()
    helper.start(GlobalConfigDictParserConfig(initial_global_config_dict=DictConfig(given), skip_load_from_cli=True))
    try:
        print(json.dumps({"ready": True}), file=out, flush=True)
        asyncio.run(serve(RolloutCollectionHelper(), BaseServerConfig(**given[HEAD_SERVER_KEY_NAME]), out))
    finally:
        helper.shutdown()


if __name__ == "__main__":
    main()
