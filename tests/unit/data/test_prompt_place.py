import pytest
from nemo_rl_cpp.data.datasets.response_datasets import load_response_dataset
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.processors import fill_prompt

QUESTION = "{} \\boxed{x} {0}"


@pytest.mark.parametrize("prompt, expected", [
    ("{}", QUESTION),
    ("Q: {}\n", f"Q: {QUESTION}\n"),
    ("In \\boxed{{}}.\n{}", f"In \\boxed{{}}.\n{QUESTION}"),  # written for str.format
    ('Return {{"answer": {{"x": 1}}}}. {}', f'Return {{"answer": {{"x": 1}}}}. {QUESTION}'),
    ("Q: {0}", f"Q: {QUESTION}"),
    ("\\boxed{{{}}}", f"\\boxed{{{QUESTION}}}"),
    ("Answer in \\boxed{}.\n{}", f"Answer in \\boxed{{}}.\n{QUESTION}"),  # braces as they stand
    ("{}\nIn \\boxed{} or $x^{}$ or \\frac{}{} or \\sqrt[3]{}.", f"{QUESTION}\nIn \\boxed{{}} or $x^{{}}$ or \\frac{{}}{{}} or \\sqrt[3]{{}}."),
    ('Return {"answer": 1}. {}', f'Return {{"answer": 1}}. {QUESTION}'),
    ('{"a": {"b": 1}} {}', f'{{"a": {{"b": 1}}}} {QUESTION}'),
    ("def f(x): return {x: 1}\n{}", f"def f(x): return {{x: 1}}\n{QUESTION}"),
    ("A set {1, 2} or x^{0}. {}", f"A set {{1, 2}} or x^{{0}}. {QUESTION}"),
    ("{problem} {}", f"{{problem}} {QUESTION}"),
    ("An open { brace. {}", f"An open {{ brace. {QUESTION}"),
    ("Question:{}", f"Question:{QUESTION}"),
])  # fmt: skip
def test_question_replaces_only_the_placeholder_in_a_prompt_file(prompt, expected):
    assert fill_prompt(prompt, QUESTION) == expected


@pytest.mark.parametrize("prompt, message", [
    ("No place.", "no place for the question: write {} where it goes"),
    ("One \\boxed{{}} only.", "no place for the question"),
    ("a\nQuestion: {question}\n", r"write \{\} where it goes instead of \{question\} \(line 2\)"),
    ("{:>10}", "no place"),
    ("{!r}", "no place"),
    ("", "no place"),
    ("{} and\n{}", r"stands 2 times \(lines 1 and 2\)"),
    ("{0} {0}", "no place|stands 2 times"),
    ('{"a": {}} {}', "stands 2 times"),
    ("Write\n\\boxed{}.", r"line 2: the only \{\} is the argument of \\boxed.*write \\boxed\{\{\}\} for the LaTeX"),
    ("\\frac{}{}", "argument of"),
    ("x^{}", r"argument of \^"),
    ('Use \\boxed{{}} and {"x": 1}.\n{}', "line 1 has doubled braces"),
])  # fmt: skip
def test_error_for_an_ambiguous_placeholder_in_a_prompt_file_names_the_line(prompt, message):
    with pytest.raises(ValueError, match=message):
        fill_prompt(prompt, "q")


@pytest.mark.parametrize(
    "processor", ["math_data_processor", "math_hf_data_processor", "raw_completion_data_processor"]
)
def test_prompt_file_is_validated_when_the_data_set_is_loaded(tmp_path, processor):
    (tmp_path / "d.jsonl").write_text('{"input": "q", "output": "a"}\n')
    (tmp_path / "prompt.txt").write_text("Think.\nWrite \\boxed{}.\n")
    files = {"data_path": str(tmp_path / "d.jsonl"), "prompt_file": str(tmp_path / "prompt.txt")}
    section = {"dataset_name": "ResponseDataset", **files}
    with pytest.raises(ValueError, match=r"prompt_file: .*prompt\.txt: line 2: the only"):
        load_response_dataset({**section, "processor": processor})
    load_response_dataset({**section, "processor": "multichoice_qa_processor"})  # puts the question below the text


def test_prompt_file_that_is_not_utf8_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "p.txt").write_bytes("café {}".encode("latin-1"))
    with pytest.raises(ValueError, match=r"prompt_file: .*p\.txt is not UTF-8 text .* at byte 3"):
        TaskDataSpec(prompt_file=tmp_path / "p.txt")
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfQ {}")
    assert TaskDataSpec(prompt_file=tmp_path / "p.txt").prompt == "Q {}"
