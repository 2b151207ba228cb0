"""Prompts in every form that a caller brings: taken as what they are, or refused in one sentence."""

import io
import json
import pathlib

import numpy as np
import pytest
from nemo_rl_cpp.api.rows import rows_of

pandas = pytest.importorskip("pandas")
datasets = pytest.importorskip("datasets")

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
COLUMNS = {"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1=,2\n2+2=,4\n")
    pandas.DataFrame(ROWS).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "lines.txt").write_text("1+1=\n2+2=\n")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "disk")
    (tmp_path / "notes.md").write_text("1+1=\n")
    (tmp_path / "questions.jsonl").write_text('{"question": "1+1="}\n')
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        ROWS, tuple(ROWS), iter(ROWS), (dict(row) for row in ROWS), COLUMNS, {key: tuple(values) for key, values in COLUMNS.items()},
        pandas.DataFrame(COLUMNS), datasets.Dataset.from_list(ROWS), {key: pandas.Series(values) for key, values in COLUMNS.items()},
        {key: np.array(values) for key, values in COLUMNS.items()}, datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
    ids=["list", "tuple", "iterator", "generator", "columns", "columns of tuples", "frame", "dataset", "series", "arrays", "iterable dataset"],
)  # fmt: skip
def test_rows_with_columns(given):
    assert rows_of(given, "prompts") == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "disk"])
def test_a_path_is_read(files, name):
    assert rows_of(name, "prompts") == rows_of(files / name, "prompts") == rows_of(str(files / name), "prompts") == ROWS


def test_lines_of_a_text_file_are_prompts(files):
    assert rows_of("lines.txt", "prompts") == [{"prompt": "1+1="}, {"prompt": "2+2="}]


def test_a_line_of_a_text_file_ends_at_a_line_end_alone(tmp_path):
    (tmp_path / "lines.txt").write_bytes("a\u2028b\x85c\x0cd\r\ne".encode())
    assert [row["prompt"] for row in rows_of(tmp_path / "lines.txt", "prompts")] == ["a\u2028b\x85c\x0cd", "e"]


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
def test_one_item_is_one_prompt(files, given, prompts):
    assert [row["prompt"] for row in rows_of(given, "prompts")] == prompts


def gone(*args):
    raise AssertionError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "prompts is missing"), ([], "prompts is empty"), ({}, "without the key 'prompt'"), (3, "prompts is 3"), (0.5, "prompts is 0.5"),
        (True, "prompts is True"), (b"1+1=", "prompts is a bytes"), ({"1+1="}, "prompts is a set"), (gone, "prompts is a function"),
        (object(), "prompts is an object"), ([1], "row 0 of prompts is 1"), (["a", None], "row 1 of prompts is a NoneType"),
        ([("1+1=", "2")], 'row 0 of prompts is a tuple of 2; a row is a text, .* such as {"prompt": "1[+]1=", "answer": "2"}'),
        ([["1+1="]], "row 0 of prompts is a list of 1"), (np.array([1, 2]), "row 0 of prompts is 1"), (np.array([["a"]]), "of 2 dimensions"),
        (np.array("a"), "of 0 dimensions"), ([{"question": "1+1="}], r"row 0 of prompts has no key 'prompt', it has \['question'\]"),
        (pandas.DataFrame({"q": ["a"]}), r"has no key 'prompt', it has \['q'\]"), (pandas.DataFrame({"prompt": []}), "prompts is empty"),
        (pandas.DataFrame({"prompt": ["a", None]}), "row 1 of prompts: the prompt is"), ([{"prompt": 3}], "row 0 of prompts: the prompt is 3"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), r"DatasetDict of data sets: give one of them, prompts\['train'\]"),
        ({"train": ROWS, "test": ROWS}, r"without the key 'prompt', it has \['test', 'train'\]"),
        ({"prompt": ["a", "b"], "answer": ["1"]}, "columns of different lengths: 'prompt' has 2, 'answer' has 1"),
        ({"prompt": ["a", "b"], "answer": "1"}, "whose column 'answer' is '1': each must be a list"),
        ({"prompt": ["a"], "answer": 1}, "whose column 'answer' is 1"), ({"prompt": 3}, "whose column 'prompt' is 3"),
        ("missing.jsonl", r"names the file missing.jsonl, which does not exist \(if it is a prompt, write \['missing.jsonl'\]\)"),
        ("no/such.csv", "which does not exist"), (pathlib.Path("gone.csv"), "is the path 'gone.csv' .* does not exist"), ("notes.md", r"is the path 'notes.md' \(if it is a prompt"), (".", "is the path '.'"),
        ("rows.jsonl\n", "a path with spaces or line ends around it"), (" rows.csv", "a path with spaces"), ("my data/rows.jsonl", "which does not exist"),
        ("rows.xlsx", "names the file rows.xlsx"), ("a/b.yaml", "which does not exist"), ("hf://datasets/a/b", "is the address hf://datasets/a/b"),
        ("https://x.y/z", "is the address"), (io.StringIO("1+1=\n"), "is an open file: give its path"), (io.BytesIO(b"1"), "is an open file"),
        ("openai/gsm8k", r"looks like a path or the name of a data set: .* if it is a prompt, \['openai/gsm8k'\]"),
        ("questions.jsonl", r"row 0 of prompts \(questions.jsonl\) has no key 'prompt', it has \['question'\]"), ("", "row 0 of prompts is an empty text"),
        (["\ud800"], "holds half a character"), ([[]], "row 0 of prompts is a list of 0"), ([{"prompt": []}], "row 0 of prompts is an empty conversation"),
        ([{"prompt": [{"role": "user"}]}], r"row 0 of prompts: messages\[0\].content must be a text, not null"),
        ([{"prompt": [{"role": 1, "content": "a"}]}], r"messages\[0\].role is 1; known are system, "), ([{"prompt": [{"role": "User", "content": "a"}]}], "role is 'User'"),
        ([{"prompt": [{"role": "user", "content": 3}]}], r"messages\[0\].content must be a text, not a number"), ([{"prompt": [{"role": "user", "content": " "}]}], "is an empty text"),
        ([{"prompt": [{"role": "system", "content": "a"}]}], "holds no message of the user"), ([{"prompt": [{"role": "user", "content": "a\ud800"}]}], "half a character at position 1"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}], "part of type 'image': only text is supported"),
        ([{"prompt": [*TALK, {"role": "system", "content": "b"}]}], "must end with the user's question"), ([{"prompt": "a", 1: 2}], "has the key 1"),
        ([[*TALK, {"role": "assistant", "content": "2"}]], "ends with a message of the assistant"),
        ([{"prompt": "a", "completions": "x"}], "has the key 'completions', under which reward functions"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(files, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        rows_of(given, "prompts")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
