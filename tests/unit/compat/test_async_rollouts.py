"""Rollouts in which every sample goes its own way: the same results as rollouts turn by turn."""

import asyncio
import inspect
from copy import deepcopy

import pytest
import torch
from fakes import ByteTokenizer, EchoEnvironment, FakeGeneration, prompts
from nemo_rl_cpp.compat.experience.rollouts import (
    async_generate_response_for_sample_turn,
    generate_responses_async,
    run_async_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from nemo_rl_cpp.experience.rollouts import repeat_prompts, run_multi_turn_rollout

TOKENIZER = ByteTokenizer()


def echo_batch(turns):
    return prompts([f"p{i}" for i in range(len(turns))], ["echo"] * len(turns), [{"turns": n} for n in turns])


def test_asynchronous_rollouts_give_the_same():
    turns = [1, 3, 2, 5, 1, 4]
    batch = repeat_prompts(echo_batch(turns), 2, first_draw_id=7)
    expected, metrics = run_multi_turn_rollout(
        FakeGeneration(), deepcopy(batch), TOKENIZER, {"echo": EchoEnvironment()}, 60, max_rollout_turns=4
    )
    engine = FakeGeneration()
    got, async_metrics = run_async_multi_turn_rollout(
        engine, deepcopy(batch), TOKENIZER, {"echo": EchoEnvironment.remote()}, 60, max_rollout_turns=4
    )
    assert set(got) == set(expected) and async_metrics == metrics
    for log, other in zip(expected["message_log"], got["message_log"]):
        assert [m["content"] for m in log] == [m["content"] for m in other]
        assert all(torch.equal(m["token_ids"], o["token_ids"]) for m, o in zip(log, other))
    for key in ("total_reward", "truncated", "group_id"):
        assert torch.equal(got[key], expected[key])
    assert got["extra_env_info"] == expected["extra_env_info"]
    assert len(engine.calls) < sum(len(c["input_lengths"]) for c in engine.calls)  # requests were joined


def test_coroutines_of_single_samples():
    batch = echo_batch([2])
    state = {key: value[0] for key, value in batch.items()}
    final, counts = asyncio.run(
        run_sample_multi_turn_rollout(
            0, state, FakeGeneration(lambda p, k: "ab"), TOKENIZER, {"echo": EchoEnvironment()}, 100
        )
    )
    assert [m["content"] for m in final["message_log"]] == ["p0", "ab", "AB", "ab", "AB"]
    assert float(final["total_reward"]) == pytest.approx(0.04)
    assert counts["turn_count"] == 2 and counts["assistant_tokens"] == 6 and counts["terminated"]
    log, ids, lengths, _ = asyncio.run(
        async_generate_response_for_sample_turn(
            FakeGeneration(lambda p, k: "ab"), batch["message_log"][0][:1], ["b"], TOKENIZER, 100
        )
    )
    assert ids.tolist() == list(b"ab") and lengths.tolist() == [2] and log[-1]["content"] == "ab"
    assert inspect.iscoroutinefunction(generate_responses_async)


def test_asynchronous_engine_and_errors():
    class Streaming(FakeGeneration):
        generate = None

        async def generate_async(self, data, greedy=False):
            yield 0, FakeGeneration.generate(self, data, greedy)

    batch = echo_batch([1, 2])
    got, _ = run_async_multi_turn_rollout(Streaming(), batch, TOKENIZER, {"echo": EchoEnvironment()}, 100)
    assert got["total_reward"].shape == (2,)

    def fail(prompt, key):
        raise OSError("engine is gone")

    with pytest.raises(OSError, match="engine is gone"):
        run_async_multi_turn_rollout(FakeGeneration(fail), echo_batch([1]), TOKENIZER, {"echo": EchoEnvironment()}, 100)

    async def in_a_notebook():
        return run_async_multi_turn_rollout(
            FakeGeneration(), echo_batch([1]), TOKENIZER, {"echo": EchoEnvironment()}, 100
        )

    assert asyncio.run(in_a_notebook())[1]["total_turns"] == 1
