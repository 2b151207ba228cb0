"""Data files of the kinds that users bring: each row's question and truth as expected, or a refusal with file and row.

Expected values are written by hand. The tokenizer's template writes `[role]content` for every message and `[assistant]`.
"""

import gzip
import io
import json
from decimal import Decimal

import pytest
from fakes import ByteTokenizer
from nemo_rl_cpp.data.datasets.response_datasets import load_response_dataset


def jsonl(*rows, ascii_only=False):
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows).encode()


def parquet(*rows):
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


def arrow(*rows):
    import pyarrow

    sink, table = io.BytesIO(), pyarrow.Table.from_pylist(list(rows))
    with pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return sink.getvalue()


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


QA = [{"input": "1+1?", "output": "2"}, {"input": "2+2?", "output": "4"}]
BOTH = [("[user]1+1?[assistant]", "2"), ("[user]2+2?[assistant]", "4")]
ONE = BOTH[:1]
TRL = {"input_key": "prompt", "output_key": "answer"}
VERL = {"input_key": "prompt", "output_key": "reward_model.ground_truth"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

# name, content (or files of a folder), keys of the section, (prompt, truth) of each row
READ = [
    ("bom.jsonl", b"\xef\xbb\xbf" + jsonl(*QA), {}, BOTH),
    ("crlf.jsonl", jsonl(*QA).replace(b"\n", b"\r\n"), {}, BOTH),
    ("blank_lines.jsonl", b"\n" + jsonl(QA[0]) + b"\n  \n" + jsonl(QA[1]), {}, BOTH),
    ("separators.jsonl", jsonl({"input": "a\u2028b\x85c", "output": "d"}), {}, [("[user]a\u2028b\x85c[assistant]", "d")]),
    ("list.json", json.dumps(QA, indent=1).encode(), {}, BOTH),
    ("one_object.json", json.dumps(QA[0], indent=2).encode(), {}, ONE),
    ("UPPER.JSONL", jsonl(*QA), {}, BOTH),
    ("extra_columns.jsonl", jsonl({**QA[0], "id": 7, "meta": {"a": [1]}}), {}, ONE),
    ("dots_in_names.jsonl", jsonl({"q.text": "1+1?", "a": "2"}), {"input_key": "q.text", "output_key": "a"}, ONE),
    ("numbers.jsonl", jsonl({"input": 12, "output": 34}, {"input": 1.5, "output": -2.5}), {}, [("[user]12[assistant]", "34"), ("[user]1.5[assistant]", "-2.5")]),
    ("small_and_large_numbers.jsonl", jsonl({"input": 1e-07, "output": 1e-05}, {"input": 3, "output": 1e20}), {}, [("[user]0.0000001[assistant]", "0.00001"), ("[user]3[assistant]", "100000000000000000000")]),
    ("one_row_of_lists.jsonl", jsonl({"input": [user("1+1?")], "output": ["assert f(1) == 2"]}), {}, [("[user]1+1?[assistant]", ["assert f(1) == 2"])]),
    ("braces.jsonl", jsonl({"input": "{} {{ messages }} {% x %}", "output": None}), {}, [("[user]{} {{ messages }} {% x %}[assistant]", None)]),
    ("spaces.jsonl", jsonl({"input": "  1+1?\n", "output": " 2 "}), {}, [("[user]  1+1?\n[assistant]", " 2 ")]),
    ("nan_truth.parquet", parquet({"input": "1+1?", "output": 2.0}, {"input": "2+2?", "output": float("nan")}), {}, [("[user]1+1?[assistant]", "2.0"), ("[user]2+2?[assistant]", None)]),
    ("decimals.parquet", parquet({"input": Decimal("1.50"), "output": Decimal("-0.00000001")}), {}, [("[user]1.50[assistant]", "-0.00000001")]),
    ("quoted.csv", b'input,output\n"a, ""b""\nc",2\n', {}, [('[user]a, "b"\nc[assistant]', "2")]),
    ("bom_crlf.csv", b"\xef\xbb\xbfinput,output\r\n1+1?,2\r\n", {}, ONE),
    ("long_field.csv", b"input,output\n" + b"a" * 200_000 + b",2\n", {}, [(f"[user]{'a' * 200_000}[assistant]", "2")]),
    ("separator.csv", "input,output\n\"a\u2028b\",2\n".encode(), {}, [("[user]a\u2028b[assistant]", "2")]),
    ("verl.parquet", parquet({"prompt": [user("1+1?")], "reward_model": {"style": "rule", "ground_truth": "2"}}), VERL, ONE),
    ("conversations.parquet", parquet({"messages": [system("S"), user("1+1?"), assistant("2")]}), {}, [("[system]S[user]1+1?[assistant]", "2")]),
    ("stream.arrow", arrow(*QA), {}, BOTH),
    ("text.txt", b"1+1?\n", {"input_key": "text", "output_key": "text"}, [("[user]1+1?[assistant]", "1+1?")]),
    ("messages.jsonl", jsonl({"messages": [user("1+1?"), assistant("2")]}), {}, ONE),
    ("messages.json", json.dumps({"messages": [user("1+1?"), assistant("2")]}).encode(), {}, ONE),
    ("developer.jsonl", jsonl({"messages": [{"role": "developer", "content": "D"}, user("1+1?"), assistant("2")]}), {}, [("[developer]D[user]1+1?[assistant]", "2")]),
    ("turns.jsonl", jsonl({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}), {}, [("[user]a[assistant]b[user]c[assistant]", "d")]),
    ("parts.jsonl", jsonl({"messages": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]}, assistant([{"type": "text", "text": "2"}])]}), {}, ONE),
    ("answer_column.jsonl", jsonl({"messages": [user("1+1?")], "answer": "2"}), {"output_key": "answer"}, ONE),
    ("solution_and_answer.jsonl", jsonl({"messages": [user("1+1?"), assistant("It is 2.")], "answer": "2"}), {"output_key": "answer"}, ONE),
    ("input_beside_messages.jsonl", jsonl({"messages": [user("1+1?"), assistant("2")], "input": "no", "output": "no"}), {"output_key": "output"}, [("[user]1+1?[assistant]", "2")]),
    ("trl_completion.jsonl", jsonl({"prompt": [system("S"), user("1+1?")], "completion": [assistant("2")]}), {"input_key": "prompt", "output_key": "completion"}, [("[system]S[user]1+1?[assistant]", "2")]),
    ("deep.jsonl", jsonl({"a": {"b": {"c": "1+1?"}}, "d": {"e": 2}}), {"input_key": "a.b.c", "output_key": "d.e"}, ONE),
    ("alpaca_by_name.jsonl", jsonl({"instruction": "1+1?", "input": "", "output": "2"}), {"input_key": "instruction"}, ONE),
    ("sharegpt_system.jsonl", jsonl({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}), {}, [("[system]S[user]1+1?[assistant]", "2")]),
    ("conversations_of_roles.jsonl", jsonl({"conversations": [user("1+1?"), assistant("2")]}), {}, ONE),
    ("tool_result.jsonl", jsonl({"messages": [user("q"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "3"}, assistant("4")]}), {}, [("[user]q[assistant][tool]3[assistant]", "4")]),
    ("shards", {"part-0.parquet": parquet(QA[0]), "part-1.parquet": parquet(QA[1])}, {}, BOTH),
    ("hub_folder", {"data/train-00000-of-00002.parquet": parquet(QA[0]), "data/train-00001-of-00002.parquet": parquet(QA[1]),
                    "data/test-00000-of-00001.parquet": parquet({"input": "no", "output": "no"}), "README.md": b"#"}, {}, BOTH),
    ("split_of_a_folder", {"train.jsonl": jsonl({"input": "no", "output": "no"}), "test.jsonl": jsonl(*QA)}, {"split": "test"}, BOTH),
    ("folder_with_notes", {"a.jsonl": jsonl(*QA), "notes.txt": b"x", "dataset_infos.json": b"{}"}, {}, BOTH),
]  # fmt: skip

# name, content, keys of the section, what the refusal says beside the file's name
REFUSED = [
    ("alpaca.jsonl", jsonl({"instruction": "Add.", "input": "1+1", "output": "2"}), {}, ["the columns instruction and input", "input_key"]),
    ("utf16_without_mark.csv", "input,output\na,1\n".encode("utf-16-le"), {}, ["byte 1 is zero", "UTF-16"]),
    ("broken.jsonl", jsonl(QA[0]) + b'{"input": \n', {}, [":2"]),
    ("not_rows.jsonl", b'{"input": "a", "output": "b"}\n[1]\n', {}, ["row 2", "expected a JSON object"]),
    ("key_twice.jsonl", b'{"input": "a", "output": "b"}\n{"input": "c", "output": "d", "input": "e"}\n', {}, [":2", "'input' twice"]),
    ("key_twice.json", b'[{"input": "a", "output": "b", "output": "c"}]', {}, ["'output' twice"]),
    ("python_repr.jsonl", b"{'input': 'a', 'output': 'b'}\n", {}, [":1", "not a JSON object"]),
    ("deep_nesting.json", b"[" * 100_000, {}, ["nested too deeply"]),
    ("columns.json", b'{"input": ["a", "b"], "output": ["c", "d"]}', {}, ["row 1", "input[0] must be a message"]),
    ("utf16.jsonl", jsonl(*QA).decode().encode("utf-16"), {}, ["UTF-16", "save it as UTF-8"]),
    ("latin1.csv", "input,output\ncafé,1\n".encode("latin-1"), {}, ["byte 16", "Latin-1"]),
    ("missing_answer.jsonl", jsonl(QA[0], {"input": "2+2?"}), {}, ["row 2", "'output' is missing"]),
    ("missing_nested.jsonl", jsonl({"prompt": "q", "reward_model": {"style": "rule"}}), VERL, ["row 1", "'reward_model.ground_truth' is missing", "['style']"]),
    ("other_columns.jsonl", jsonl({"question": "q", "answer": "a"}), {}, ["input_key is 'input'", "perhaps input_key: question and output_key: answer"]),
    ("verl_columns.jsonl", jsonl({"prompt": [user("q")], "reward_model": {"ground_truth": "2"}}), {}, ["output_key: reward_model.ground_truth"]),
    ("null_question.jsonl", jsonl(QA[0], {"input": None, "output": "4"}), {}, ["row 2", "'input'", "not null"]),
    ("nan_question.parquet", parquet({"input": 1.5, "output": "a"}, {"input": float("nan"), "output": "b"}), {}, ["row 2", "not null"]),
    ("nan_truth.jsonl", jsonl({"input": "1+1?", "output": 2.0}, {"input": "2+2?", "output": float("nan")}), {}, ["row 2", "'output' is nan", "or null if there is no answer"]),
    ("infinite_truth.parquet", parquet({"input": "1+1?", "output": float("inf")}), {}, ["row 1", "'output' is inf"]),
    ("boolean_question.jsonl", jsonl({"input": True, "output": "4"}), {}, ["row 1", "not a truth value"]),
    ("mapping_question.jsonl", jsonl({"input": {"text": "q"}, "output": "4"}), {}, ["row 1", "a mapping with the keys ['text']"]),
    ("list_of_texts.jsonl", jsonl({"input": ["a", "b"], "output": "4"}), {}, ["row 1", "input[0] must be a message"]),
    ("empty_cell.csv", b"input,output\n1+1?,2\n,4\n", {}, ["row 2", "'input' is an empty text"]),
    ("ragged.csv", b"input,output\n1+1?,2\n2+2?\n", {}, ["row 3", "another number of fields"]),
    ("open_quote.csv", b'input,output\n1,2\n3,"4\n5,6\n', {}, ["line 3", "unexpected end of data"]),
    ("column_twice.csv", b"input,output,output\n1,2,3\n", {}, ["'output' twice"]),
    ("damaged.parquet", parquet(*QA)[:-20], {}, ["not a readable .parquet file"]),
    ("damaged.arrow", b"nothing", {}, ["not a readable .arrow file"]),
    ("header_only.csv", b"input,output\n", {}, ["holds no rows"]),
    ("packed.jsonl.gz", gzip.compress(jsonl(*QA)), {}, ["must be a file ending in"]),
    ("unknown_role.jsonl", jsonl({"messages": [{"role": "human", "content": "q"}, assistant("a")]}), {}, ["row 1", "messages[0].role is 'human'", "known are system"]),
    ("unknown_from.jsonl", jsonl({"conversations": [{"from": "bing", "value": "q"}, {"from": "gpt", "value": "a"}]}), {}, ["row 1", "conversations[0].from is 'bing'"]),
    ("from_is_a_list.jsonl", jsonl({"conversations": [{"from": ["human"], "value": "q"}]}), {}, ["row 1", "conversations[0].from is ['human']"]),
    ("no_role.jsonl", jsonl({"messages": [{"content": "q"}, assistant("a")]}), {}, ["row 1", "messages[0] has no 'role'"]),
    ("no_content.jsonl", jsonl({"messages": [{"role": "user"}, assistant("a")]}), {}, ["row 1", "messages[0].content must be a text"]),
    ("null_content.jsonl", jsonl({"messages": [user(None), assistant("a")]}), {}, ["row 1", "messages[0].content", "not null"]),
    ("image.jsonl", jsonl({"messages": [user([{"type": "image", "url": "x"}]), assistant("a")]}), {}, ["row 1", "type 'image'", "only text"]),
    ("half_a_character.jsonl", b'{"input": "a\\ud83d", "output": "b"}\n', {}, ["row 1", "'input' holds half a character at position 1"]),
    ("half_a_character_of_a_message.jsonl", b'{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "b"}]}\n', {}, ["row 1", "messages[0].content holds half a character"]),
    ("half_a_character_of_an_answer.jsonl", b'{"input": "a", "output": "\\udc00"}\n', {}, ["row 1", "'output' holds half a character"]),
    ("messages_as_text.jsonl", jsonl({"messages": json.dumps([user("q"), assistant("a")])}), {}, ["row 1", "'messages' is a text"]),
    ("prompt_as_text.jsonl", jsonl({"prompt": str([user("q")]), "answer": "a"}), TRL, ["row 1", "'prompt' is a text, expected a list"]),
    ("empty_messages.jsonl", jsonl({"messages": []}), {}, ["row 1", "empty list"]),
    ("null_messages.jsonl", jsonl({"messages": [user("q"), assistant("a")]}, {"messages": None}), {}, ["row 2", "not null"]),
    ("only_question.jsonl", jsonl({"messages": [user("q")]}), {}, ["row 1", "ends with user and holds no answer", "output_key"]),
    ("only_system.jsonl", jsonl({"messages": [system("S"), assistant("a")]}), {}, ["row 1", "no message of the user"]),
    ("two_answers.jsonl", jsonl({"messages": [user("q"), assistant("a"), assistant("b")]}), {}, ["row 1", "must end with the user's question"]),
    ("mixed_folder", {"a.jsonl": jsonl(*QA), "b.csv": b"input,output\n1,2\n"}, {}, [".csv, .jsonl"]),
    ("folder_without_data", {"model.bin": b"x"}, {}, ["no file ending in"]),
    ("folder_without_split", {"test-0.parquet": parquet(*QA)}, {}, ["splits ['test']", "split is 'train'"]),
    ("folder_with_stray", {"train.jsonl": jsonl(*QA), "more.jsonl": jsonl(*QA)}, {}, ["'more.jsonl', which belongs to none"]),
]  # fmt: skip


def section(tmp_path, name, content, keys):
    path = tmp_path / name
    for file, data in content.items() if isinstance(content, dict) else [("", content)]:
        target = path / file if file else path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return {"dataset_name": "ResponseDataset", "data_path": str(path), **keys}


@pytest.mark.parametrize("name, content, keys, expected", READ, ids=[case[0] for case in READ])
def test_question_and_ground_truth_are_read_from_every_supported_data_file(tmp_path, name, content, keys, expected):
    raw = load_response_dataset(section(tmp_path, name, content, keys))
    data = [raw.processor(raw.dataset[i], raw.task_spec, ByteTokenizer(), None, i) for i in range(len(raw.dataset))]
    assert [
        ("".join(m["content"] for m in d["message_log"]), d["extra_env_info"]["ground_truth"]) for d in data
    ] == expected
    assert all(m["token_ids"].tolist() == list(m["content"].encode()) for d in data for m in d["message_log"])


@pytest.mark.parametrize("name, content, keys, words", REFUSED, ids=[case[0] for case in REFUSED])
def test_error_for_an_invalid_data_file_names_the_file_the_row_and_the_key(tmp_path, name, content, keys, words):
    with pytest.raises(ValueError) as refused:
        load_response_dataset(section(tmp_path, name, content, keys))
    assert type(refused.value) is ValueError and "\n" not in str(refused.value)
    for word in (name, *words):
        assert word in str(refused.value), refused.value
