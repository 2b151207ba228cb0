import json
import pathlib

import numpy as np
import pytest
import torch
from nemo_rl_cpp.api.arguments import rows_of

pandas = pytest.importorskip("pandas")
datasets = pytest.importorskip("datasets")

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
COLUMNS = {"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]}


class TorchRows(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index % len(ROWS)]  # no IndexError ends it: only its length does


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1=,2\n2+2=,4\n")
    (tmp_path / "notes.md").write_text("1+1=\n")
    (tmp_path / "questions.jsonl").write_text('{"question": "1+1="}\n')
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [iter(ROWS), (dict(row) for row in ROWS), TorchRows(), *({key: kind(values) for key, values in COLUMNS.items()} for kind in (list, tuple, pandas.Series, np.array))],
    ids=["iterator", "generator", "torch data set", "columns", "columns of tuples", "series", "arrays"],
)  # fmt: skip
def test_train_grpo_accepts_prompts_from_iterators_data_sets_and_columns_of_every_type(given):
    assert rows_of(given, "prompts") == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_train_grpo_accepts_the_path_of_a_data_file_as_prompts(files, name):
    assert rows_of(name, "prompts") == rows_of(files / name, "prompts") == rows_of(str(files / name), "prompts") == ROWS


def test_each_line_of_a_text_file_is_one_prompt_and_only_newlines_end_lines(tmp_path):
    (tmp_path / "lines.txt").write_bytes("a\u2028b\x85c\x0cd\r\ne".encode())
    assert rows_of(tmp_path / "lines.txt", "prompts") == [{"prompt": "a\u2028b\x85c\x0cd"}, {"prompt": "e"}]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("1+1=", ["1+1="]), ("Read data.jsonl and sum it up.", ["Read data.jsonl and sum it up."]), (["rows.jsonl"], ["rows.jsonl"]),
        (["1+1=", "2+2="], ["1+1=", "2+2="]), (TALK, [TALK]), ([TALK, "1+1="], [TALK, "1+1="]), ([tuple(TALK)], [TALK]),
        ([{"from": "human", "value": "1+1="}], [[{"from": "human", "value": "1+1="}]]), ({"prompt": "1+1="}, ["1+1="]), ({"prompt": TALK}, [TALK]), (pandas.Series(["a", "b"]), ["a", "b"]), (np.array(["a", "b"]), ["a", "b"]),
        (datasets.Dataset.from_list(ROWS)["prompt"], ["1+1=", "2+2="]), ("7" * 5000, ["7" * 5000]), ("a\0b", ["a\0b"]), ("1/2", ["1/2"]), ("What is in rows.jsonl?\n", ["What is in rows.jsonl?\n"]),
        ("Is 3.5 > 2.txt\nor not", ["Is 3.5 > 2.txt\nor not"]), (" 1+1= ", [" 1+1= "]),
    ],
)  # fmt: skip
def test_each_string_or_conversation_in_a_list_is_one_prompt(files, given, prompts):
    assert [row["prompt"] for row in rows_of(given, "prompts")] == prompts


def function(*args):
    raise AssertionError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "prompts is missing"), ([], "prompts is empty"), ({}, "without the key 'prompt'"), (3, "prompts is 3"),
        (b"1+1=", "prompts is a bytes"), ({"1+1="}, "prompts is a set"), (function, "prompts is a function.* the order of arguments is model"),
        ([1], "row 0 of prompts is 1"), (["a", None], "row 1 of prompts is None"), (np.array("a"), "prompts is a"),
        ([("1+1=", "2")], 'row 0 of prompts is a tuple; a row is a text, .* such as {"prompt": "1[+]1=", "answer": "2"}'),
        ([["1+1="]], "row 0 of prompts is a list"), ([{"question": "1+1="}], r"row 0 of prompts has no key 'prompt', it has \['question'\]"),
        (pandas.DataFrame({"q": ["a"]}), r"has no key 'prompt', it has \['q'\]"), (pandas.DataFrame({"prompt": ["a", None]}), "row 1 of prompts: the prompt is"),
        ({"train": ROWS, "test": ROWS}, r"without the key 'prompt', it has \['test', 'train'\]"),
        ({"prompt": ["a", "b"], "answer": ["1"]}, "lists of one length: 'prompt' has 2, 'answer' has 1"),
        ({"prompt": ["a", "b"], "answer": "12"}, "lists of one length: 'prompt' has 2, 'answer' has '12'"), ({"prompt": 3}, "'prompt' has 3"),
        ("missing.jsonl", r"names the file missing.jsonl, which does not exist \(if it is a prompt, write \['missing.jsonl'\]\)"),
        (pathlib.Path("gone.csv"), "is the path 'gone.csv' .* does not exist"), ("notes.md", r"is the path 'notes.md' \(if it is a prompt"),
        ("questions.jsonl", r"row 0 of prompts \(questions.jsonl\) has no key 'prompt', it has \['question'\]"), ("", "row 0 of prompts is an empty text"),
        (["\ud800"], "holds half a character"), ([{"prompt": []}], "row 0 of prompts is an empty conversation"), ([{"prompt": "a", 1: 2}], "has the key 1"),
        ([{"prompt": [{"role": "user"}]}], r"row 0 of prompts: messages\[0\].content must be a text, not null"),
        ([{"prompt": [{"role": "User", "content": "a"}]}], "role is 'User'; known are system, "),
        ([{"prompt": [{"role": "system", "content": "a"}]}], "holds no message of the user"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}], "part of type 'image': only text is supported"),
        ([[*TALK, {"role": "assistant", "content": "2"}]], "ends with a message of the assistant"),
        ([{"prompt": "a", "completions": "x"}], "has the key 'completions', under which reward functions"),
    ],
)  # fmt: skip
def test_invalid_prompts_raise_a_one_line_error(files, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        rows_of(given, "prompts")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
