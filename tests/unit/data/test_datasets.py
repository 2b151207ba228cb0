import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from nemo_rl_cpp.data.datasets import (
    AllTaskProcessedDataset,
    ListDataset,
    RawDataset,
    extract_necessary_env_names,
    load_dataset_from_path,
    load_eval_dataset,
    load_response_dataset,
    merge_datasets,
)
from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset, task_name_of
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.processors import math_data_processor, math_hf_data_processor

ROWS = [{"input": f'q{i}\n\u00e9,"x"', "output": str(i)} for i in range(10)]


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return str(path)


def test_missing_data_files_subsets_and_splits_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="data_path"):
        load_dataset_from_path(str(tmp_path / "none.jsonl"))
    path = write(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(ValueError, match="subset"):
        load_dataset_from_path(path, "main")
    with pytest.raises(ValueError, match="only the split 'train'"):
        load_dataset_from_path(path, None, "test")


@pytest.mark.parametrize("question", [{"messages": [{"role": "user", "content": "q"}]}, {"prompt": "q"}])
def test_rows_keep_tools_stop_strings_and_data_for_the_environment(tmp_path, question):
    """Otherwise the prompt would lack the tools, and the environment its data."""
    [name] = question
    read = {"tools": [{"type": "function"}], "stop_strings": ["."], "extra_env_info": {"code_prefix": "def f"}}
    path = write(tmp_path / "m.jsonl", [question | read | {"answer": "a"}])
    keys = {"input_key": name} if name == "prompt" else {}
    row = ResponseDataset(path, output_key="answer", **keys).dataset[0]
    assert {key: row.get(key) for key in read} == read


def test_validation_rows_split_from_training_rows_are_disjoint_and_seeded(tmp_path):
    path = write(tmp_path / "d.jsonl", ROWS)

    def answers(seed, size=0.25):
        data = ResponseDataset(path, split_validation_size=size, seed=seed)
        return [[row["messages"][1]["content"] for row in side] for side in (data.dataset, data.val_dataset)]

    train, val = answers(0)
    assert len(val) == 3 and sorted(train + val, key=int) == [str(i) for i in range(10)]  # ceil(0.25 * 10)
    assert answers(0) == [train, val] != answers(1)
    assert len(answers(0, size=4)[1]) == 4
    for size in (1.0, 10):
        with pytest.raises(ValueError, match="split_validation_size"):
            answers(0, size=size)


def test_load_response_dataset_sets_the_configured_processor_and_prompts(tmp_path):
    path = write(tmp_path / "d.jsonl", ROWS)
    (tmp_path / "p.txt").write_text("P {}")
    config = {
        "dataset_name": "ResponseDataset", "data_path": path, "processor": "math_data_processor",
        "prompt_file": str(tmp_path / "p.txt"), "env_name": "math",
    }  # fmt: skip
    data = load_response_dataset(config)
    assert data.processor is math_data_processor
    assert (data.task_spec.prompt, data.task_spec.system_prompt) == ("P {}", None)
    del config["processor"]
    assert load_response_dataset(config).processor is math_hf_data_processor


@pytest.mark.parametrize("config, message", [
    ({"dataset_name": "no.such.module.Class"}, "cannot be imported: there is no module no"),
    ({"dataset_name": "arithmetic", "processor": "none"}, "register_processor"),
    ({"dataset_name": "arithmetic", "processor": "no.such"}, "processor 'no.such' cannot be imported"),
    ({"dataset_name": "arithmetic", "split": "test"}, "split must be"),
    ({"dataset_name": "arithmetic", "max_number": 2}, "max_number >= 4"),
    ({"dataset_name": "reasoning_gym", "task": "letter_countin"}, "near are letter_counting"),
    ({"dataset_name": "reasoning_gym", "task": "gcd", "task_options": {"min_numbrs": 2}}, "task_options"),
    ({"dataset_name": "reverse_digits", "num_digits": 9}, "num_digits"),
])  # fmt: skip
def test_invalid_data_set_configuration_sections_are_errors(config, message):
    with pytest.raises(ValueError, match=message):
        load_response_dataset(config)


class MyDataset(RawDataset):
    """A class of the user's, named by its dotted path."""

    task_name = "mine"

    def __init__(self, greeting, **kwargs):
        self.dataset = ListDataset([{"greeting": greeting}])


def my_processor(row, spec, tokenizer, limit, index):
    raise NotImplementedError


def test_processor_is_loaded_by_its_dotted_python_name():
    section = {"dataset_name": "arithmetic", "processor": f"{__name__}.my_processor"}
    assert load_response_dataset(section).processor is my_processor


def test_data_set_class_is_loaded_by_its_dotted_python_name():
    section = {"dataset_name": f"{__name__}.MyDataset", "greeting": "hi"}
    assert load_response_dataset(section).dataset[0] == {"greeting": "hi"}


def test_load_eval_dataset_returns_the_held_out_split(tmp_path):
    data = load_eval_dataset({"dataset_name": "arithmetic", "max_input_seq_length": 100, "num_samples": 5})
    held_out = load_response_dataset({"dataset_name": "arithmetic", "split": "validation", "num_samples": 5})
    assert list(data.dataset) == list(held_out.dataset)
    path = write(tmp_path / "d.jsonl", ROWS)
    assert len(load_eval_dataset({"dataset_name": "ResponseDataset", "data_path": path}).dataset) == 10


def test_list_dataset_supports_select_and_map_and_returns_copies_of_rows():
    data = ListDataset({"a": number, "b": letter} for number, letter in zip((1, 2, 3), "xyz"))
    assert (len(data), data[-1], data.column_names) == (3, {"a": 3, "b": "z"}, ["a", "b"])
    data[0]["a"] = 99
    assert data[0]["a"] == 1, "a row is a copy"
    assert data.select([2])[0]["b"] == "z"
    assert data.map(lambda row: {"c": row["a"] * 2}, remove_columns=["a"])[0] == {"b": "x", "c": 2}
    with pytest.raises(IndexError):
        data[3]


def test_merge_datasets_concatenates_this_packages_and_hugging_face_data_sets():
    import datasets

    ours, theirs = ListDataset([{"x": 1}, {"x": 2}]), datasets.Dataset.from_list([{"x": 3}])
    assert merge_datasets([ours]) is ours
    assert [row["x"] for row in merge_datasets([ours, ours])] == [1, 2, 1, 2]
    assert isinstance(merge_datasets([theirs, theirs]), datasets.Dataset)
    mixed = merge_datasets([ours, theirs])
    assert [mixed[i]["x"] for i in (0, 1, 2, -1)] == [1, 2, 3, 3] and len(mixed) == 3
    with pytest.raises(IndexError):
        mixed[3]


def test_environment_names_are_collected_from_all_data_sections():
    config = {
        "train": [{"env_name": "a"}, None, {"env_name": "b"}, {"dataset_name": "c"}],
        "validation": {"env_name": "a"},
        "default": {"env_name": "c"},
    }
    assert extract_necessary_env_names(config) == ["a", "b", "c"]
    assert extract_necessary_env_names({"train": {}, "validation": None}) == []


def rows_of(*tasks):
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    return ListDataset([{"messages": messages, "task_name": task} for task in tasks])


def naming(name):
    def process(datum_dict, task_data_spec, tokenizer, max_seq_length, idx):
        return {"by": name, "prompt": task_data_spec.prompt, "limit": max_seq_length, "idx": idx}

    return process


def test_each_row_is_processed_by_the_processor_of_its_task(tiny):
    first, second, default = (TaskDataSpec(name) for name in "abd")
    second.prompt, default.prompt = "own", "default"
    table = {"a": (first, naming("A")), "b": (second, naming("B"))}
    data = AllTaskProcessedDataset(rows_of("b", "a"), tiny, default, table, max_seq_length=9)
    assert len(data) == 2
    assert data[0] == {"by": "B", "prompt": "own", "limit": 9, "idx": 0}
    assert data[1] == {"by": "A", "prompt": "default", "limit": 9, "idx": 1}


def test_task_without_a_data_processor_is_an_error_unless_a_defaultdict_has_a_default_processor(tiny):
    spec = TaskDataSpec()
    with pytest.raises(AssertionError, match="task processor not provided for b"):
        AllTaskProcessedDataset(rows_of("b"), tiny, spec, {"a": (spec, naming("A"))})[0]
    table = defaultdict(lambda: (spec, naming("else")))
    table["a"] = (spec, naming("A"))
    data = AllTaskProcessedDataset(rows_of("a", "b"), tiny, spec, table)
    assert [data[i]["by"] for i in range(2)] == ["A", "else"]


def test_row_preprocessors_apply_to_every_task_or_to_one_named_task(tiny):
    def changed(row):
        return {**row, "messages": [{"role": "user", "content": "2"}, row["messages"][1]]}

    data = AllTaskProcessedDataset(rows_of("a"), tiny, TaskDataSpec(), math_hf_data_processor, changed)
    assert data[0]["message_log"][0]["content"] == "2"
    renaming = {"a": lambda row: {**row, "task_name": "changed"}}
    by_task = AllTaskProcessedDataset(rows_of("a", "b"), tiny, TaskDataSpec(), math_hf_data_processor, renaming)
    assert [by_task[i]["task_name"] for i in range(2)] == ["changed", "b"]
    with pytest.raises(ValueError, match="default_task_data_spec"):
        AllTaskProcessedDataset(rows_of("a"), tiny, None, math_hf_data_processor)


@pytest.mark.parametrize(("path", "name"), [
    ("data/math/train.jsonl", "math-train"), ("train.jsonl", "train"), ("/train.jsonl", "train"), ("./train.jsonl", "train"),
    ("../a/train.jsonl", "a-train"), ("shards", "shards"), ("shards/", "shards"), ("data/shards//", "data-shards"), ("./shards/.", "shards"),
    ("../shards/", "shards"), ("~/rows.csv", "rows"), (".cache/rows.csv", "cache-rows"), ("org/set", "org-set"), ("v1.5/rows.csv", "v1"),
])  # fmt: skip
def test_default_task_name_is_derived_from_the_data_path(path, name):
    assert task_name_of(path) == name


@pytest.mark.parametrize(("pieces", "doubled"), [
    ([[1, 5], [1, 1, 6]], True), ([[1], [1, 6]], True), ([[1, 5], [1, 6]], False), ([[5], [5]], False), ([[1]], False), ([], False),
])  # fmt: skip
def test_two_consecutive_bos_tokens_in_any_message_of_a_prompt_are_an_error(tiny, pieces, doubled):
    """One BOS token at a later message is right: SmolLM2's begins each of its messages."""

    def process(row, spec, tokenizer, limit, idx):
        given = pieces if row["task_name"] == "b" else []
        return {"message_log": [{"token_ids": torch.tensor(ids)} for ids in given]}

    table = {name: (TaskDataSpec(), process) for name in "ab"}
    data = AllTaskProcessedDataset(rows_of("a", "b"), SimpleNamespace(bos_token_id=1), None, table)
    data[0]
    if doubled:
        with pytest.raises(AssertionError, match="double BOS"):
            data[1]
    else:
        data[1]
