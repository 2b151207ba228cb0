"""Message logs to flat tensors, with values that can be read off by hand."""

import pytest
import torch
from nemo_rl_cpp.compat.data.llm_message_utils import batched_message_log_to_flat_message, message_log_to_flat_messages


def turn(role, ids, **more):
    return {"role": role, "content": role[0], "token_ids": torch.tensor(ids), **more}


def test_flat_messages():
    flat = message_log_to_flat_messages(
        [turn("user", [1, 2]), turn("assistant", [3], generation_logprobs=torch.tensor([0.5]))]
    )
    assert flat["role"] == ["user", "assistant"] and flat["content"] == ["u", "a"]
    assert flat["token_ids"].tolist() == [1, 2, 3] and flat["generation_logprobs"].tolist() == [0.5]
    assert message_log_to_flat_messages([]) == {}
    with pytest.raises(RuntimeError, match="number of dimensions"):
        message_log_to_flat_messages([{"x": torch.zeros(2)}, {"x": torch.zeros(2, 2)}])


def test_batch_pads_to_the_right_and_keeps_lengths():
    logs = [[turn("user", [1, 2]), turn("assistant", [3])], [turn("user", [4])]]
    batch, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 9})
    assert batch["token_ids"].tolist() == [[1, 2, 3], [4, 9, 9]] and batch["token_ids"].dtype == torch.int64
    assert lengths.tolist() == [3, 1] and lengths.dtype == torch.int32
    assert batch["role"] == [["user", "assistant"], ["user"]]


def test_divisible_length_pads_the_batch_and_not_the_lengths():
    logs = [[turn("user", [1] * 5)], [turn("user", [2] * 2)]]
    batch, lengths = batched_message_log_to_flat_message(logs, make_sequence_length_divisible_by=4)
    assert batch["token_ids"].shape == (2, 8) and lengths.tolist() == [5, 2]
    assert batch["token_ids"][0].tolist() == [1] * 5 + [0] * 3


def test_a_key_that_some_conversations_lack_is_padding_there():
    logs = [[turn("user", [1, 2], generation_logprobs=torch.tensor([0.5, 0.25]))], [turn("user", [3])]]
    batch, _ = batched_message_log_to_flat_message(logs)
    assert batch["generation_logprobs"].tolist() == [[0.5, 0.25], [0.0, 0.0]]


def test_empty_batches_and_mixed_types():
    batch, lengths = batched_message_log_to_flat_message([])
    assert dict(batch) == {} and lengths.numel() == 0 and lengths.dtype == torch.float32
    with pytest.raises(RuntimeError, match="expected consistent types"):
        batched_message_log_to_flat_message([[turn("user", [1])], [turn("user", [1.0])]])
    with pytest.raises(RuntimeError, match="'x'"):
        batched_message_log_to_flat_message([[{"x": torch.ones(1)}], [{"x": "text"}]])
