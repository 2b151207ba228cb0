"""NeMo RL's functions on message logs, with values that can be read off by hand."""

import pytest
import torch
from nemo_rl_cpp.compat.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.compat.data.interfaces import TaskDataSpec
from nemo_rl_cpp.compat.data.llm_message_utils import (
    add_loss_mask_to_message_log,
    get_first_index_that_differs,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_shape,
    remap_dataset_keys,
)


def turn(role, ids, **more):
    return {"role": role, "content": role[0], "token_ids": torch.tensor(ids), **more}


def test_loss_masks():
    log = [turn("user", [1, 2]), turn("assistant", [3]), turn("environment", [4])]
    add_loss_mask_to_message_log([log])
    assert [m["token_loss_mask"].tolist() for m in log] == [[0, 0], [1], [0]]
    add_loss_mask_to_message_log([log], roles_to_train_on=["USER"])
    assert [m["token_loss_mask"].tolist() for m in log] == [[1, 1], [0], [0]]
    add_loss_mask_to_message_log([log], only_unmask_final=True)
    assert [m["token_loss_mask"].tolist() for m in log] == [[0, 0], [0], [1]]


def test_small_helpers():
    log = [turn("user", [1, 2])]
    assert get_keys_from_message_log(log, ["role", "none"]) == [{"role": "user"}]
    assert message_log_shape(log) == [{"token_ids": torch.Size([2])}]
    assert [get_first_index_that_differs(*pair) for pair in (("abc", "abd"), ("ab", "abc"), ("", "x"), ("q", "r"))] == [
        2,
        2,
        0,
        0,
    ]


def test_remap_dataset_keys():
    from nemo_rl_cpp.data.datasets import ListDataset

    dataset = ListDataset([{"q": "1", "a": "2", "rest": 3}])
    assert remap_dataset_keys(dataset, {"q": "q"}) is dataset
    assert remap_dataset_keys(dataset, {"q": "problem", "a": "answer"})[0] == {"rest": 3, "problem": "1", "answer": "2"}


def test_formatted_log_pieces_join_to_the_template_text(smollm2):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    log = get_formatted_message_log(messages, smollm2, TaskDataSpec(), add_bos_token=False, add_eos_token=False)
    text = smollm2.apply_chat_template(messages, tokenize=False)
    assert "".join(m["content"] for m in log) == text
    assert [m["role"] for m in log] == ["system", "user", "assistant"]
    for message in log:
        assert message["token_ids"].dtype == torch.int64
        assert smollm2.decode(message["token_ids"]) == message["content"]
    assert [m["content"] for m in messages] == ["S", "Q", "A"], "the log that was given stays as it is"


def test_formatted_log_prompts_bos_eos_and_generation_prompt(tiny, tmp_path):
    (tmp_path / "p.txt").write_text("1{}1")
    (tmp_path / "s.txt").write_text("00")
    spec = TaskDataSpec(prompt_file=tmp_path / "p.txt", system_prompt_file=tmp_path / "s.txt")
    log = get_formatted_message_log(
        [{"role": "user", "content": "5"}, {"role": "assistant", "content": "7\n\n"}], tiny, spec
    )
    assert [m["content"] for m in log] == ["<bos>00", "151", "7\n\n<eos>"]
    assert log[0]["token_ids"].tolist() == [1, 4, 4]
    again = get_formatted_message_log([{"role": "user", "content": "<bos>5<eos>"}], tiny, TaskDataSpec())
    assert again[0]["content"] == "<bos>5<eos>", "no second BOS or EOS"

    tiny.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    log = get_formatted_message_log(
        [{"role": "user", "content": "5"}, {"role": "assistant", "content": "7"}],
        tiny,
        TaskDataSpec(),
        add_bos_token=False,
        add_eos_token=False,
        add_generation_prompt=True,
    )
    assert [m["content"] for m in log] == ["5=", "7"]


def test_formatted_log_warns_without_bos_and_keeps_empty_messages_integer(tiny):
    tiny.bos_token = None
    with pytest.warns(UserWarning, match="BOS"):
        log = get_formatted_message_log([{"role": "user", "content": ""}], tiny, TaskDataSpec(), add_eos_token=False)
    assert log[0]["token_ids"].dtype == torch.int64 and log[0]["token_ids"].shape == (0,)


def test_texts_of_a_processed_dataset_are_encoded_without_special_tokens(tiny):
    data = AllTaskProcessedDataset([], tiny, TaskDataSpec(), {})
    assert data.encode_single("12") == ([5, 6], 2) and data.encode_single(["1", "2"]) == ([5, 6], 2)
