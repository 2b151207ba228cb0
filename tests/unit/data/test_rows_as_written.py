import json
from types import MappingProxyType

import numpy as np
import pytest
from nemo_rl_cpp.api.arguments import rows_of
from nemo_rl_cpp.data.chat_template import render_chat_template
from nemo_rl_cpp.data.conversation import prompts_of
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, ListDataset, load_dataset_from_path, merge_datasets
from nemo_rl_cpp.data.datasets.response_datasets.response_dataset import ResponseDataset
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")


def tool(name):
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def talk(name):
    call = {"type": "function", "function": {"name": name, "arguments": {name: "1"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": name}, called, {"role": "tool", "content": "2"}]


ROWS = [
    {"prompt": talk(name), "tools": [tool(name)], "answer": answer, "extra_info": {"index": i, "of": {name: ["1"]}}}
    for i, (name, answer) in enumerate([("city", "7"), ("x", None), ("y", "9")])
]
"""The tools, the arguments of calls and extra_info of each row have other keys; the second answer is null."""


def parquet(folder):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def feather(folder):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    return folder / "rows.arrow"


def jsonl(folder):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "rows.jsonl"


def on_disk(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "disk")
    return folder / "disk"


def frame(folder):
    read = pandas.read_parquet(parquet(folder))
    return read.astype(object).where(read.notna(), None)


WAYS = {
    "list": lambda folder: ROWS,
    "jsonl": jsonl,
    "parquet": parquet,
    "arrow file": feather,
    "saved data set": on_disk,
    "data set": lambda folder: datasets.Dataset.from_list(ROWS),
    "data set of arrays": lambda folder: datasets.Dataset.from_list(ROWS).with_format("numpy"),
    "streamed data set": lambda folder: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "arrow table": lambda folder: pyarrow.Table.from_pylist(ROWS),
    "frame": lambda folder: pandas.read_parquet(parquet(folder)),
    "frame's dictionaries": lambda folder: frame(folder).to_dict("records"),
    "frame's columns": lambda folder: dict(frame(folder).items()),
    "frame's series": lambda folder: [row for _, row in frame(folder).iterrows()],
    "tuples and mappings": lambda folder: tuple(MappingProxyType({**row, "tools": tuple(row["tools"])}) for row in ROWS),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_lists_tables_and_data_files_of_every_kind_give_equal_rows(tmp_path, way):
    assert rows_of(WAYS[way](tmp_path), "prompts") == ROWS


def test_row_taken_from_a_dataframe_is_accepted_as_a_prompt(tmp_path):
    assert rows_of(frame(tmp_path).iloc[0].to_dict(), "prompts") == ROWS[:1]


def test_named_tuples_of_a_dataframe_are_accepted_as_rows():
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1, 2]})
    expected = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    assert rows_of(frame.itertuples(index=False), "prompts") == expected


def test_arrow_table_columns_are_accepted_as_data_columns():
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [1, 2]})
    columns = {name: table[name] for name in table.column_names}
    assert rows_of(columns, "prompts") == table.to_pylist()
    assert rows_of(list(table["prompt"]), "prompts") == [{"prompt": "a"}, {"prompt": "b"}]


def test_nan_and_na_in_a_dataframe_become_null():
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1.5, float("nan")], "note": ["x", pandas.NA]})
    assert [(row["answer"], row["note"]) for row in rows_of(frame, "prompts")] == [(1.5, "x"), (None, None)]


@pytest.mark.parametrize("given", ["list", "jsonl"])
def test_null_values_in_data_rows_are_kept(tmp_path, given):
    schema = {"type": "string", "default": None, "enum": ["a", None]}
    row = {"prompt": "a", "answer": None, "tools": [{"parameters": {"properties": {"x": schema}}}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert rows_of([row] if given == "list" else tmp_path / "rows.jsonl", "prompts") == [row]


def test_null_items_and_empty_structs_of_a_parquet_file_are_kept(tmp_path):
    rows = [{"a": [1, None], "b": {"c": {}}, "d": None}, {"a": [], "b": {"c": {"x": 1}}, "d": {"e": 1}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(load_dataset_from_path(tmp_path / "rows.parquet")) == rows


def test_arrow_column_of_type_map_is_read_as_a_mapping(tmp_path):
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table({"scores": pyarrow.array([[("a", 1), ("b", 2)]], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert list(load_dataset_from_path(tmp_path / "rows.parquet")) == [{"scores": {"a": 1, "b": 2}}]


@pytest.mark.parametrize("way", ["jsonl", "parquet", "saved data set"])
def test_tool_definitions_read_from_files_have_no_keys_added_by_the_file_format(tmp_path, way):
    answer = {"role": "assistant", "content": "7"}
    rows = [{"messages": [*talk(name), answer], "tools": [tool(name)]} for name in ("city", "x")]
    path, given = tmp_path / f"rows.{way}", datasets.Dataset.from_list(rows)
    if way == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        given.to_parquet(path) if way == "parquet" else given.save_to_disk(path)
    raw, seen = ResponseDataset(str(path)), []

    def process(row, spec, tokenizer, limit, idx):
        seen.append(row)
        return {"message_log": []}

    for several in ([raw.dataset], [raw.dataset, raw.dataset], [raw.dataset, ListDataset(rows)]):
        made = AllTaskProcessedDataset(merge_datasets(several), tiny_tokenizer(), TaskDataSpec("rows"), process)
        seen.clear()
        for i in range(2):
            made[i]
        assert [{key: row[key] for key in ("messages", "tools")} for row in seen] == rows


def test_conversation_of_a_saved_data_set_may_have_keys_that_its_first_rows_lack(tmp_path):
    prompts = [talk("city")[:1]] * 1000 + [talk("x")]
    datasets.Dataset.from_list([{"prompt": prompt, "answer": "7"} for prompt in prompts]).save_to_disk(tmp_path)
    rows = ResponseDataset(str(tmp_path), input_key="prompt", output_key="answer").dataset
    answer = {"role": "assistant", "content": "7"}
    assert [row["messages"] for row in (rows[0], rows[1000])] == [[*prompts[0], answer], [*prompts[1000], answer]]


def test_conversations_stored_as_arrays_are_read_as_prompts(tmp_path):
    column = pandas.read_parquet(parquet(tmp_path))["prompt"]
    assert prompts_of(column) == prompts_of([row["prompt"] for row in ROWS]) == [talk(n) for n in ("city", "x", "y")]
    assert prompts_of(column[0]) == [talk("city")]


def test_numpy_arrays_in_messages_are_passed_to_the_chat_template_as_lists():
    content = np.array([{"type": "text", "text": np.str_("a")}], dtype=object)
    text = render_chat_template("{{ messages[0].content | tojson }}", [{"role": "user", "content": content}])
    assert json.loads(text) == [{"type": "text", "text": "a"}]
