"""Processors on the 16-token tokenizer, whose ids can be read: digit d is d + 4, <unk> 3, `=` 15."""

import pytest
import torch
from nemo_rl_cpp.data import processors
from nemo_rl_cpp.data.dataloader import rl_collate_fn
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.processors import (
    math_data_processor,
    math_hf_data_processor,
    multichoice_qa_processor,
    raw_completion_data_processor,
    register_processor,
)

QA = {"messages": [{"role": "user", "content": "12="}, {"role": "assistant", "content": "21"}], "task_name": "t"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "prompt.txt").write_text("Q: {} \\boxed{{}}")
    (tmp_path / "system.txt").write_text("Sys")
    return TaskDataSpec("t", tmp_path / "prompt.txt", tmp_path / "system.txt")


@pytest.fixture
def chat(tiny):
    tiny.chat_template = TEMPLATE
    return tiny


def contents(datum):
    return [(m["role"], m["content"]) for m in datum["message_log"]]


def test_math_hf_processor_tokenizes_the_prompt_and_keeps_the_ground_truth(tiny):
    datum = math_hf_data_processor(QA, TaskDataSpec(), tiny, 10, 7)
    ids = datum["message_log"][0]["token_ids"]
    assert ids.tolist() == [5, 6, 15] and ids.dtype == torch.int64
    assert (datum["length"], datum["loss_multiplier"], datum["idx"], datum["task_name"]) == (3, 1.0, 7, "t")
    assert datum["extra_env_info"] == {"ground_truth": "21"} and "stop_strings" not in datum


def test_math_hf_processor_merges_system_and_user_into_one_message(chat, spec):
    datum = math_hf_data_processor(QA, spec, chat, None, 0)
    assert contents(datum) == [("user", "[system]Sys[user]Q: 12= \\boxed{}>")]


def test_math_processor_keeps_system_and_user_messages_separate(chat, spec):
    datum = math_data_processor({"problem": "5", "expected_answer": 7}, spec, chat, 1000, 0)
    assert contents(datum) == [("system", "[system]Sys"), ("user", "[user]Q: 5 \\boxed{}>")]
    assert datum["extra_env_info"] == {"ground_truth": "7"} and "task_name" not in datum
    assert datum["length"] == sum(len(m["token_ids"]) for m in datum["message_log"])


def test_multichoice_processor_lists_the_options_in_the_prompt(chat, spec):
    row = {
        "question": "5?", "options": {"A": "x", "B": "y", "C": None}, "answer": "B", "subject": "s", "task_name": "m",
    }  # fmt: skip
    datum = multichoice_qa_processor(row, spec, chat, 1000, 0)
    assert contents(datum)[1][1] == "[user]Q: {} \\boxed{{}}\n\nQuestion: 5?\nOptions:\nA) x\nB) y>"
    assert datum["extra_env_info"] == {"ground_truth": "B", "subject": "s"}
    assert contents(multichoice_qa_processor(row, TaskDataSpec(), chat, 1000, 0)) == [("user", "[user]5?>")]


def test_raw_completion_processor_applies_no_chat_template(chat, spec):
    row = {**QA, "stop_strings": ["\n"], "extra_env_info": {"more": 1}}
    datum = raw_completion_data_processor(row, TaskDataSpec(), chat, 10, 0)
    assert contents(datum) == [("user", "12=")] and datum["stop_strings"] == ["\n"]
    assert datum["extra_env_info"] == {"ground_truth": "21", "more": 1}
    assert contents(raw_completion_data_processor(row, spec, chat, 100, 0)) == [("user", "SysQ: 12= \\boxed{}")]


@pytest.mark.parametrize("limit, kept, weight", [(4, 3, 1.0), (3, 3, 0.0), (2, 2, 0.0), (None, 3, 1.0)])
def test_prompt_that_leaves_no_room_for_a_response_is_truncated_and_excluded_from_the_loss(tiny, limit, kept, weight):
    datum = math_hf_data_processor(QA, TaskDataSpec(), tiny, limit, 0)
    assert (len(datum["message_log"][0]["token_ids"]), datum["loss_multiplier"], datum["length"]) == (kept, weight, 3)


def test_overlong_prompt_is_truncated_to_at_most_four_tokens_per_message(chat, spec):
    for limit, kept in ((20, 4), (6, 3)):
        datum = math_data_processor({"problem": "5" * 50, "expected_answer": ""}, spec, chat, limit, 0)
        assert [len(m["token_ids"]) for m in datum["message_log"]] == [kept] * 2 and datum["loss_multiplier"] == 0.0


def test_registering_the_name_of_a_data_processor_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(processors, "PROCESSOR_REGISTRY", dict(processors.PROCESSOR_REGISTRY))
    register_processor("mine", math_data_processor)
    with pytest.raises(ValueError, match="already"):
        register_processor("mine", math_data_processor)


def test_collate_function_makes_tensors_of_lengths_and_fills_missing_fields_with_none(tiny):
    data = [math_hf_data_processor(QA, TaskDataSpec(), tiny, limit, i) for i, limit in enumerate((10, 2))]
    data[1]["stop_strings"] = ["x"]
    del data[1]["task_name"]
    batch = rl_collate_fn(data)
    assert batch["length"].tolist() == [3, 3] and batch["batch_max_length"].tolist() == [3, 3]
    assert batch["loss_multiplier"].tolist() == [1.0, 0.0]
    assert batch["task_name"] == ["t", None] and batch["idx"] == [0, 1] and batch["stop_strings"] == [None, ["x"]]
    assert batch["extra_env_info"][0] == {"ground_truth": "21"} and batch.size == 2
