import json

import pytest
from nemo_rl_cpp import errors
from nemo_rl_cpp.checks import data
from nemo_rl_cpp.config import load_eval_config, load_grpo_config
from nemo_rl_cpp.config.data import DataConfig, DatasetConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.environments.response_data import Limits, inspect_rows, load_response_data


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def found(tmp_path, tokenizer_folder):
    """The findings about a data file (rows) under overrides: [(level, key, message)]."""

    def of(rows, *overrides, name="data.jsonl", load=load_grpo_config, config="grpo_tiny.yaml", section="data.train"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = {"dataset_name": "ResponseDataset", "env_name": "math", "processor": "math_hf_data_processor"}
        own["data_path"] = str(tmp_path / name)
        lines = [f"++{section}.{key}={json.dumps(value)}" for key, value in own.items()]
        prefix = "" if load is load_eval_config else "policy."
        lines += [f"{prefix}tokenizer.name={tokenizer_folder}", f"++{prefix}tokenizer.chat_template=default"]
        if load is load_grpo_config:
            lines += ["~data.train.num_digits", "data.validation=null", "++data.default.env_name=math"]
            lines += [
                "policy.max_total_sequence_length=64",
                "grpo.num_prompts_per_step=1",
                "policy.train_global_batch_size=8",
            ]
        checked = load(config, [*lines, "++env.math.num_workers=1", *overrides])
        return [(finding.level, finding.key, finding.message) for finding in data.check(checked)]

    return of


def rows(*pairs):
    return [{"input": question, "output": answer} for question, answer in pairs]


THREE = ("grpo.num_prompts_per_step=3", "policy.train_global_batch_size=24")
SHORT = ("policy.max_total_sequence_length=32", "policy.generation.max_new_tokens=8", "data.max_input_seq_length=null")
HASHES = [(f"{i}=", f"so it is\n#### {i}") for i in range(2)]
CHOICES = {"input": "1=", "output": "1", "choices": ["1", "2"], "id": 3}
# (rows, overrides, level of the only finding, its beginning, further words); level None: nothing is found
FINDINGS = {
    "valid": (rows(("1+1=", "2"), ("2+2=", "4")), (), None),
    "one batch": (rows(*[("1+1=", "2")] * 3), THREE, None),
    "less than a batch": (rows(*[("1+1=", "2")] * 2), THREE, "error", "has 2 rows, fewer than one batch of 3: lower grpo.num_prompts_per_step"),
    "one row": (rows(("1+1=", "2")), THREE, "error", "has 1 row, fewer than one batch of 3"),
    "overlong prompts": (
        rows(*(("1" * n, "2") for n in (40, 41, 45))), ("data.max_input_seq_length=40",), "error",
        "3 of 3 prompts reach 40 tokens (data.max_input_seq_length): they are cut to a few tokens",
        "the longest is row 3 with 45 tokens; raise data.max_input_seq_length"),
    "no room for a response": (
        rows(("1" * 32, "2")), SHORT, "error", "1 of 1 prompts reach 32 tokens (policy.max_total_sequence_length): they leave no room for a response"),
    "no room for one of two responses": (rows(("1" * 32, "2"), ("1" * 31, "2")), SHORT, "warning", "1 of 2 prompts reach 32 tokens"),
    "truths of GSM8K": (
        rows(("1=", "1"), ("2=", "\\frac{1}{2}"), *HASHES), (), "warning",
        "2 of 4 truths cannot be parsed (env.math): the first is row 3, 'so it is\\n#### 0'", "give what follows ####", "GSM8K"),
    "truths of GSM8K alone": (rows(*HASHES), (), "error", "2 of 2 truths cannot be parsed"),
    "truths that are no letters": (
        rows(("1=", "A"), ("2=", "(B) two")), ("++env.math.verifier_type=english_multichoice",), "warning",
        "1 of 2 truths cannot be parsed (env.math): the first is row 2, '(B) two'", "letter"),
    "any truths for functions": (
        rows(("1=", None), ("2=", ["1", "2"])), ("++data.train.env_name=reward_functions", "++env.reward_functions.functions=[operator.eq]"), None),
    "columns that are not used": ([CHOICES], (), "warning", "has the columns choices, which are not part of the prompts"),
    "columns that are used": ([CHOICES | {"choices": "1="}], ("++data.train.input_key=choices",), None),
    "a row without a truth": ([{"input": "1=", "output": "1"}, {"input": "2="}], (), "error", "", "row 2: the key 'output' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", FINDINGS)
def test_preflight_check_reports_problems_of_the_rows_and_nothing_else(found, case):
    given, overrides, level, *words = FINDINGS[case]
    findings = found(given, *overrides)
    assert [(found, key) for found, key, _ in findings] == ([] if level is None else [(level, "data.train")])
    for _, _, message in findings:
        assert message.startswith(words[0]) and all(word in message for word in words)


@pytest.mark.parametrize(
    "overrides, key, words",
    [("data.train.num_digits=abc", "data.train", "num_digits must be an integer, not 'abc'"),
     ("data.train.num_digits=null", "data.train", "num_digits must be an integer, not null"),
     ("+data.train.split=3", "data.train", "split must be a text, not 3"),
     ("data.default.env_name=null data.validation=null", "data.train.env_name", "is missing: name the section of env"),
     ("data.use_multiple_dataloader=true data.custom_dataloader=no_module.function", "data.custom_dataloader", "no module no_module")],
)  # fmt: skip
def test_invalid_data_and_environment_keys_are_reported_before_the_run(overrides, key, words):
    config = load_grpo_config("grpo_tiny.yaml", overrides.split())
    ((level, found, message),) = [
        (f.level, f.key, f.message) for f in (*data.check_environments(config), *data.check(config))
    ]
    assert (level, found) == ("error", key) and words in message


def test_data_path_of_wrong_type_is_reported_by_the_preflight_check():
    overrides = ["data.train.data_path=[a.jsonl]", "env.reward_functions.functions=[m.f]"]
    (finding,) = data.check(load_grpo_config("grpo_jsonl.yaml", overrides))
    assert finding.message == "data_path must be a text, not ['a.jsonl']"


ERRORS, WARNINGS = (
    ("", None, "#### 10", "  ", "\\boxed{}"),
    ("5元", "{", "The answer is 5", "He has 3 + 4 = 7 apples.", "1.5e6", "1E-05"),
)


@pytest.mark.parametrize(
    "truth, level", [(t, level) for level, ts in (("error", ERRORS), ("warning", WARNINGS)) for t in ts]
)
def test_each_kind_of_unparsable_ground_truth_gives_a_warning(found, truth, level):
    [(given, _, message)] = found(rows(("1=", truth)))
    assert given == level and message.startswith("1 of 1 truths cannot be parsed (env.math): the first is row 1")


@pytest.mark.parametrize(
    "truth",
    [
        5, 1e-05, "-3", "2e", "1,234", "50%", "x^2+1", "(1, 2)", "\\frac{\\pi}{2}", "1/2", "Paris", "$5", "12 apples",
        "The answer is \\boxed{5}", "x=1 or x=2 or x=3", "\\{1, 2\\}", "π",
    ],
)  # fmt: skip
def test_ground_truths_that_a_response_can_match_give_no_warning(found, truth):
    assert found(rows(("1=", truth))) == []


@pytest.mark.parametrize("name", ["math", "math_multi_reward", "arithmetic", "reverse_digits"])
@pytest.mark.parametrize("truth", [["1", "2"], ["1"], [], {"value": "1"}, True])
def test_single_ground_truth_that_is_not_a_string_is_an_error(found, name, truth):
    environment = f"++data.train.env_name={name}", f"++env.{name}={{}}"
    [(level, key, message)] = found(rows(("1=", "1"), ("2=", truth)), *environment)
    assert (level, key) == ("error", "data.train")
    assert message.startswith(f"1 of 2 truths cannot be parsed (env.{name}): the first is row 2, {truth!r}; ")


@pytest.mark.parametrize(
    "name, wrong, right",
    [
        ("arithmetic", "two", "1,234.5"),
        ("arithmetic", None, 2),
        ("reverse_digits", None, "#### 1"),
        ("code", "2", ["assert f(1) == 2"]),
        ("code", {"inputs": ["1"], "outputs": []}, {"inputs": ["1"], "outputs": ["2"]}),
        ("code", [], '{"asserts": ["assert f(1) == 2"]}'),
    ],
)
def test_ground_truths_that_the_environment_rejects_are_an_error(found, name, wrong, right):
    environment = f"++data.train.env_name={name}", f"++env.{name}={{}}"
    [(level, _, message)] = found(rows(("1=", right), ("2=", wrong)), *environment)
    assert level == "error" and message.startswith(f"1 of 2 truths cannot be parsed (env.{name}): the first is row 2")
    assert found(rows(("1=", right)), *environment) == []


@pytest.mark.parametrize("template", ["chatml", "Question: {question}", "{{ bos_token }}", "gone.j2"])
def test_preflight_check_reports_an_invalid_chat_template(found, template):
    findings = found(rows(("1=", "1")), f"policy.tokenizer.chat_template={json.dumps(template)}")
    assert [(level, key) for level, key, _ in findings] == [("error", "policy.tokenizer.chat_template")]


def test_configured_chat_template_of_a_randomly_initialised_model_is_checked_and_used():
    from nemo_rl_cpp.algorithms.parts import make_tokenizer

    [finding] = data.check(load_grpo_config("grpo_tiny.yaml", ["policy.tokenizer.chat_template=chatml"]))
    assert (finding.level, finding.key) == ("error", "policy.tokenizer.chat_template")
    config = load_grpo_config("grpo_tiny.yaml", ["policy.tokenizer.chat_template='0{{ messages[0].content }}'"])
    assert make_tokenizer(config.policy).apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "01"


def test_preflight_check_tests_the_chat_template_even_without_an_available_model(found):
    wrong, right = ("gone.j2", "Question: {question}"), ("tool_use", "default", "{{ messages[0].content }}")
    for template in wrong + right:
        given = f"policy.tokenizer.chat_template={json.dumps(template)}"
        findings = found(rows(("1=", "1")), "policy.tokenizer.name=someone/some-model", given)
        assert len(findings) == (template in wrong)


def test_preflight_check_reports_a_chat_template_that_drops_the_question(found, tokenizer_folder):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}"
    tokenizer.save_pretrained(tokenizer_folder)
    [(level, key, message)] = found(rows(("1=", "1")))
    assert (level, key) == ("error", "data.train")
    assert "row 1: the chat template leaves out message 0 (user, '1=')" in message


def test_preflight_check_reports_missing_data_files_and_prompt_placeholders(found, tmp_path):
    [(level, _, message)] = found(rows(("1=", "1")), f"data.train.data_path={tmp_path}/none.jsonl")
    assert level == "error" and "none.jsonl' (data_path) does not exist" in message
    (tmp_path / "p.txt").write_text("Think.")
    [(level, _, message)] = found(rows(("1=", "1")), f"++data.train.prompt_file={tmp_path}/p.txt")
    assert level == "error" and "p.txt: there is no place for the question" in message


def test_prompt_file_of_a_hub_data_set_is_checked_without_downloading_the_data(tmp_path):
    (tmp_path / "p.txt").write_text("Think.")
    config = load_grpo_config("grpo_math_1B.yaml", [f"data.default.prompt_file={tmp_path}/p.txt"])
    findings = list(data.check(config))
    assert findings and {(f.level, f.key.rpartition(".")[0]) for f in findings} == {("error", "data")}
    assert all("p.txt: there is no place" in f.message for f in findings)


def test_preflight_check_of_an_evaluation_reports_prompts_that_would_be_truncated(found):
    options = {"load": load_eval_config, "config": "evals/reverse_digits.yaml", "section": "data"}
    less = ("~data.num_digits", "~data.split", "generation.model_name=tiny-random", "++env.math.num_workers=1")
    assert found(rows(("1=", "1")), *less, **options) == []
    [(level, key, message)] = found(
        rows(("1" * 50, "1")), *less, "data.max_input_seq_length=20", "generation.vllm_cfg.max_model_len=60", **options
    )
    assert (level, key) == ("error", "data") and "1 of 1 prompts reach 20 tokens (data.max_input_seq_length)" in message


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(errors, "_SAID", set())


def section_of(tmp_path, pairs):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(*pairs)))
    own = {"dataset_name": "ResponseDataset", "processor": "raw_completion_data_processor"}
    return own | {"data_path": str(tmp_path / "d.jsonl")}


def test_run_warns_once_about_truncated_prompts_and_fails_if_all_prompts_are_truncated(tmp_path, tiny, capsys):
    config = DataConfig(max_input_seq_length=10, train=section_of(tmp_path, [("1" * 10, "1"), ("1", "1")]))
    for _ in range(2):
        train = load_response_data(tiny, config).train
    said = capsys.readouterr().err
    assert said.count("warning: data.train 1 of 2 prompts reach 10 tokens (data.max_input_seq_length)") == 1
    assert [train[i]["loss_multiplier"] for i in range(2)] == [0.0, 1.0]
    config.train = [DatasetConfig(**section_of(tmp_path, [("1" * 10, "1"), ("1" * 12, "1")]))]
    with pytest.raises(ValueError, match=r"data\.train\.0 2 of 2 prompts reach 10 tokens"):
        load_response_data(tiny, config)
    config = DataConfig(train=section_of(tmp_path, [("1" * 10, "1")]))
    with pytest.raises(ValueError, match=r"1 of 1 prompts reach 8 tokens \(policy.max_total_sequence_length\)"):
        load_response_data(tiny, config, max_total_sequence_length=8)


def test_run_does_not_repeat_warnings_of_the_preflight_check(tmp_path, tiny, capsys):
    from nemo_rl_cpp.data.datasets import load_response_dataset

    section = section_of(tmp_path, [("1" * 10, "1"), ("1", "1")])
    raw = load_response_dataset(section)
    for remark in inspect_rows(raw, raw.dataset, tiny, Limits(10), "data.train"):
        errors.note_as_said(str(remark))
    load_response_data(tiny, DataConfig(max_input_seq_length=10, train=section))
    assert capsys.readouterr().err == ""


def test_preflight_check_reads_at_most_a_thousand_rows_of_a_large_data_set(tmp_path, tiny):
    from nemo_rl_cpp.data.datasets import ListDataset, load_response_dataset

    raw = load_response_dataset(section_of(tmp_path, [("1" * 10, "1")]))
    [remark] = inspect_rows(raw, ListDataset(list(raw.dataset) * 2500), tiny, Limits(10), "data.train")
    assert remark.level == "error" and "834 of 834 prompts looked at (of 2,500) reach 10 tokens" in remark.message


def test_preflight_check_reports_a_row_whose_task_name_has_no_data_processor(tmp_path, tiny):
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "1"}], "output": "2", "task_name": "mine"}) + "\n"
    )
    section = {"dataset_name": "ResponseDataset", "data_path": str(tmp_path / "d.jsonl")}
    with pytest.raises(ValueError, match=r"data\.train row 1: its task_name 'mine' has no processor"):
        load_response_data(tiny, DataConfig(train=section))


def test_preflight_check_does_not_run_a_custom_data_processor(tmp_path, tiny):
    from nemo_rl_cpp.data.datasets import load_response_dataset

    raw = load_response_dataset(section_of(tmp_path, [("1" * 10, "1")]))
    raw.processor = lambda *_: pytest.fail("called")
    assert list(inspect_rows(raw, raw.dataset, tiny, Limits(1), "data.train")) == []


def test_multiple_choice_options_missing_from_the_prompt_give_a_warning(tiny):
    from types import SimpleNamespace

    from nemo_rl_cpp.data.interfaces import TaskDataSpec
    from nemo_rl_cpp.data.processors import multichoice_qa_processor

    raw = SimpleNamespace(processor=multichoice_qa_processor, task_spec=TaskDataSpec(), task_name="t")
    rows = [{"question": "1", "options": {"A": "1"}, "answer": "A"}]
    tiny.chat_template = "{{ messages[0].content }}"
    [remark] = inspect_rows(raw, rows, tiny, Limits(), "data.train")
    assert remark.level == "warning" and "no prompt_file, so prompts show the questions alone" in remark.message
    raw.task_spec.prompt = "Choose."
    assert list(inspect_rows(raw, rows, tiny, Limits(), "data.train")) == []
