import pytest
import torch
from nemo_rl_cpp.algorithms.step import overwrite_advantages
from nemo_rl_cpp.config.loop import GRPOConfig
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.rollouts.agent_rollouts import flags_of
from nemo_rl_cpp.rollouts.batches import build_train_batch

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
BROKEN = '<tool_call>{"name": "add", "arg'
INVALID, MALFORMED = {"is_invalid_tool_call"}, {"has_malformed_thinking"}


@pytest.mark.parametrize(
    "text, opens_thinking, flags",
    [
        ("an answer", False, set()),
        (CALL, False, set()),
        (f"{BROKEN} {CALL}", False, set()),  # the response ends with a call
        (BROKEN, False, INVALID),
        ("a</function_call>", False, INVALID),
        ("<think>I write <tool_call></think>done", False, set()),  # reasoning is not searched if there is an answer
        (f"I think</think>{BROKEN}", True, INVALID),
        ("I think</think>a</think>", True, MALFORMED),
        ("a<think>b", False, MALFORMED),
        ("an answer</think>", False, set()),  # all of it is reasoning, closed once
        ("I think", True, set()),
        ("<think>I think <tool_call>", False, INVALID),
        ("<think> <think>", True, set()),  # the first is the opening tag
        ("<think>a<think>b<think>", False, MALFORMED),
        (f"a</think>{BROKEN}<think>", True, INVALID | MALFORMED),
    ],
)
def test_invalid_tool_calls_are_detected_in_the_reasoning_only_if_there_is_no_answer(text, opens_thinking, flags):
    assert flags_of(text, opens_thinking) == dict.fromkeys(flags, True)


def message(role, ids, *flags, sampled=True):
    made = {"role": role, "content": "", "token_ids": torch.tensor(ids), **dict.fromkeys(flags, True)}
    return made | ({"generation_logprobs": torch.zeros(len(ids))} if role == "assistant" and sampled else {})


def batch_of(*logs):
    size = len(logs)
    samples = BatchedDataDict(
        message_log=list(logs), length=torch.ones(size), loss_multiplier=torch.ones(size), truncated=torch.zeros(size),
        total_reward=torch.zeros(size),
    )  # fmt: skip
    batch = build_train_batch(samples, pad_token_id=0)
    batch.advantages = torch.arange(batch.num_tokens).float()
    return batch, logs


def both():
    invalid, malformed = "is_invalid_tool_call", "has_malformed_thinking"
    return batch_of(
        [message("user", [1, 2], invalid), message("assistant", [3, 4], invalid, malformed), message("assistant", [5])],
        [message("assistant", [6], invalid, sampled=False), message("assistant", [7, 8, 9], malformed)],
    )


@pytest.mark.parametrize(
    "keys, expected, counts",
    [
        ({"invalid_tool_call_advantage": -5.0, "malformed_thinking_advantage": -7.0}, [0, 1, -5, -5, 4, 5, -7, -7, -7], (1, 1)),
        ({"malformed_thinking_advantage": -7.0}, [0, 1, -7, -7, 4, 5, -7, -7, -7], (0, 2)),
        ({"invalid_tool_call_advantage": 0.0}, [0, 1, 0, 0, 4, 5, 6, 7, 8], (1, 0)),
    ],
)  # fmt: skip
def test_responses_with_invalid_tool_calls_or_thinking_tags_get_the_configured_advantage(keys, expected, counts):
    batch, logs = both()
    before = batch.advantages
    metrics = overwrite_advantages(batch, logs, GRPOConfig(**keys).message_advantages)
    assert batch.advantages.tolist() == expected and before.tolist() == list(range(9))
    assert metrics == {
        "num_invalid_tool_calls": counts[0], "num_malformed_thinking": counts[1], "num_assistant_messages": 3,
        "invalid_tool_call_rate": counts[0] / 3, "malformed_thinking_rate": counts[1] / 3,
    }  # fmt: skip


def test_advantages_are_unchanged_if_invalid_messages_have_no_configured_advantage():
    batch, logs = both()
    assert overwrite_advantages(batch, logs, GRPOConfig().message_advantages) == {}
    assert batch.advantages.tolist() == list(range(9))
