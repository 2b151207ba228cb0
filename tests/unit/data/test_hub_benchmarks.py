import pytest
from nemo_rl_cpp.config.data import defaults_for
from nemo_rl_cpp.data.datasets import ListDataset, load_eval_dataset, load_response_dataset
from nemo_rl_cpp.data.datasets.response_datasets import dataset_class, hub_math
from nemo_rl_cpp.data.datasets.response_datasets.hub_math import last_boxed
from nemo_rl_cpp.dotted_names import is_dotted

GPQA = {"Question": "Q", "Correct Answer": "yes", **{f"Incorrect Answer {i}": f"no{i}" for i in (1, 2, 3)}}
DAPO = {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "34"}, "extra": 0}
TABLES = {
    "nvidia/OpenMathInstruct-2": {"problem": "Q", "generated_solution": "long", "expected_answer": "34"},
    "BytedTsinghua-SIA/DAPO-Math-17k": DAPO,
    "BytedTsinghua-SIA/AIME-2024": DAPO,
    "agentica-org/DeepScaleR-Preview-Dataset": {"problem": "Q", "answer": "34"},
    "HuggingFaceH4/aime_2024": {"problem": "Q", "answer": "34"},
    "opencompass/AIME2025": {"question": "Q", "answer": "34"},
    "EleutherAI/hendrycks_math": {"problem": "Q", "solution": r"so \boxed{1}, no: \boxed{\frac{1}{2}}."},
    "MathArena/aime_2026": {"problem": "Q", "answer": 34},
    "cais/mmlu": {"question": "Q", "choices": ["a", "b", "c", "d"], "answer": 2},
    "TIGER-Lab/MMLU-Pro": {"question": "Q", "options": list("abcdef"), "answer_index": 5},
    "Idavidrein/gpqa": GPQA,
    "openai/gsm8k": {"question": "Q", "answer": "because\n#### 3,4"},
}


@pytest.fixture
def asked(monkeypatch):
    calls = []

    def fake(name, subset, split):
        calls.append((name, subset, split))
        return ListDataset([TABLES[name]] * 2)

    monkeypatch.setattr(hub_math, "load_hub_dataset", fake)
    return calls


def first(name):
    return load_eval_dataset({"dataset_name": name}).dataset[0]


@pytest.mark.parametrize(("name", "size", "call"), [
    ("OpenMathInstruct-2", 2, (None, "train_1M")), ("DAPOMath17K", 2, (None, "train")), ("DAPOMathAIME2024", 2, (None, "train")),
    ("DeepScaler", 2, (None, "train")), ("AIME2024", 32, (None, "train")), ("AIME2025", 64, ("AIME2025-II", "test")),
    ("AIME2026", 32, (None, "train")), ("GSM8K", 2, ("main", "train")),
])  # fmt: skip
def test_all_hub_benchmark_data_sets_give_questions_and_ground_truths_in_one_format(asked, name, size, call):
    data = load_response_dataset({"dataset_name": name})
    assert len(data.dataset) == size and data.task_name == name and asked[-1][1:] == call
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "34"}]
    assert data.dataset[0] == {"messages": messages, "task_name": name}


def test_hub_data_sets_accept_the_keys_of_their_data_section(asked):
    solution = load_response_dataset({"dataset_name": "OpenMathInstruct-2", "output_key": "generated_solution"})
    assert solution.dataset[0]["messages"][1]["content"] == "long"
    assert len(load_eval_dataset({"dataset_name": "AIME2024"}).dataset) == 2
    assert len(load_eval_dataset({"dataset_name": "AIME2024", "repeat": 3}).dataset) == 6
    load_eval_dataset({"dataset_name": "gsm8k"})
    assert asked[-1] == ("openai/gsm8k", "main", "test")
    split = load_response_dataset({"dataset_name": "DeepScaler", "split_validation_size": 0.5})
    assert (len(split.dataset), len(split.val_dataset)) == (1, 1)


def test_math_benchmark_answers_are_extracted_from_the_solutions(asked):
    assert first("math")["messages"][1]["content"] == r"\frac{1}{2}"
    assert len(asked) == 7 and {split for _, _, split in asked} == {"test"}


@pytest.mark.parametrize(
    ("name", "right", "shown"), [("mmlu", "C", 4), ("mmlu_pro", "F", 6), ("gpqa", None, 4), ("gpqa_diamond", None, 4)]
)
def test_multiple_choice_benchmark_prompts_list_their_options(asked, name, right, shown):
    row = first(name)
    user, assistant = (message["content"] for message in row["messages"])
    options = {letter: text for letter, text in row["options"].items() if text is not None}
    assert user == "Q\n" + "\n".join(f"{letter}) {text}" for letter, text in options.items()) and len(options) == shown
    assert assistant == row["answer"] == (right or next(letter for letter, text in options.items() if text == "yes"))
    assert first(name) == row


def test_last_boxed_returns_the_content_of_the_last_balanced_boxed_command():
    texts = (" no box", " no box"), (r"\boxed{a{b}c} x", "a{b}c"), (r"\boxed{open", r"\boxed{open")
    for text, content in (*texts, (r"root is $\boxed 2$.", "2")):  # of the training problems of MATH
        assert last_boxed(text) == content


def test_data_set_name_with_a_version_number_is_not_mistaken_for_a_dotted_class_name():
    assert is_dotted("my_package.sets.Mine") and not is_dotted("NuminaMath-1.5") and not is_dotted("math")
    with pytest.raises(ValueError, match="NuminaMath-1.5"):
        dataset_class("NuminaMath-1.5")


def test_keys_of_data_default_are_applied_only_to_data_sets_that_accept_those_keys():
    default = {"dataset_name": "ResponseDataset", "input_key": "problem", "prompt_file": "p.txt"}
    assert defaults_for({"data_path": "x"}, default) == default
    kept = {"dataset_name": "ResponseDataset", "prompt_file": "p.txt"}
    assert defaults_for({"dataset_name": "OpenMathInstruct-2"}, default) == kept
