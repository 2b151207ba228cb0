"""Data sets on the Hub: mathematics and multiple-choice questions."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from nemo_rl_cpp.config.data import DATASET_ALIASES
from nemo_rl_cpp.data.conversation import question_and_answer, text_of
from nemo_rl_cpp.data.datasets.files import load_hub_dataset, merge_datasets
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.interfaces import Row


class HubSource(NamedTuple):
    """A data set on the Hub. `question` and `answer` each are the name of a column, or a function from the row to the
    value; for multiple-choice questions `answer` returns (the options in display order, the index of the correct
    one)."""

    repository: str
    question: str | Callable[[Row], str] = "problem"
    answer: str | Callable[[Row], object] = "answer"
    subsets: tuple[str | None, ...] = (None,)  # the subsets that are loaded; None: the default one
    split: str = "train"
    repeat: int = 1  # how many times each row occurs
    num_options: int = 4  # the maximum number of options of a multiple-choice question


def last_boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`, including inner braces, or of `\boxed 2$` without braces, or the
    whole text if there is neither."""
    _, box, rest = text.rpartition("\\boxed")
    if box and rest.startswith(" "):
        return rest.partition("$")[0].strip()
    rest, depth = rest.removeprefix("{"), 1
    for end, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:end]
    return text


def _gpqa_options(row: Row) -> tuple[list[str], int]:
    """Return (answer options, index of the correct one). Their order depends only on the question."""
    order = list(range(4))
    random.Random(row["Question"]).shuffle(order)
    texts = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    return [texts[i] for i in order], order.index(0)


_MATH_SUBSETS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra", "precalculus",
)  # fmt: skip
_DAPO = {"question": lambda row: row["prompt"][0]["content"], "answer": lambda row: row["reward_model"]["ground_truth"]}
SOURCES = {
    "OpenMathInstruct-2": HubSource("nvidia/OpenMathInstruct-2", split="train_1M"),
    "DAPOMath17K": HubSource("BytedTsinghua-SIA/DAPO-Math-17k", **_DAPO),
    "DAPOMathAIME2024": HubSource("BytedTsinghua-SIA/AIME-2024", **_DAPO),
    "DeepScaler": HubSource("agentica-org/DeepScaleR-Preview-Dataset"),
    "AIME2024": HubSource("HuggingFaceH4/aime_2024", repeat=16),
    "AIME2025": HubSource(
        "opencompass/AIME2025", "question", subsets=("AIME2025-I", "AIME2025-II"), split="test", repeat=16
    ),
    "AIME2026": HubSource("MathArena/aime_2026", repeat=16),
    "GSM8K": HubSource(  # grade-school word problems: the answer follows ####
        "openai/gsm8k", "question", lambda row: row["answer"].split("####")[-1].strip().replace(",", ""), ("main",)
    ),
    "math500": HubSource("HuggingFaceH4/MATH-500", split="test"),
    "math": HubSource(  # the 5,000 test problems of MATH
        "EleutherAI/hendrycks_math", answer=lambda row: last_boxed(row["solution"]), subsets=_MATH_SUBSETS, split="test"
    ),
    "mmlu": HubSource(
        "cais/mmlu", "question", lambda row: (list(row["choices"]), int(row["answer"])), ("all",), "test"
    ),
    "mmlu_pro": HubSource(
        "TIGER-Lab/MMLU-Pro", "question", lambda row: (list(row["options"]), int(row["answer_index"])),
        split="test", num_options=10,
    ),
    "gpqa": HubSource("Idavidrein/gpqa", "Question", _gpqa_options, ("gpqa_main",)),
    "gpqa_diamond": HubSource("Idavidrein/gpqa", "Question", _gpqa_options, ("gpqa_diamond",)),
}  # fmt: skip
"""Name of a data set in a configuration -> its description."""


class HubDataset(RawDataset):
    """A data set on the Hub, an entry of `SOURCES`. `split` and `repeat` override the values of this entry; `repeat` is
    the number of times that each row occurs (above 1 for small test sets, whose scores are noisy).
    `split_validation_size` and `seed` have the same meaning as in ResponseDataset."""

    def __init__(
        self, dataset_name: str, split: str | None = None, split_validation_size: float = 0, seed: int = 42,
        repeat: int | None = None, **kwargs: object,
    ):  # fmt: skip
        self.task_name = DATASET_ALIASES.get(dataset_name, dataset_name)
        source = self.source = SOURCES[self.task_name]
        repeat = source.repeat if repeat is None else repeat
        if repeat < 1:
            raise ValueError(f"data: repeat must be at least 1, got {repeat}")
        parts = [load_hub_dataset(source.repository, subset, split or source.split) for subset in source.subsets]
        parts = [part.map(self.format_data, remove_columns=part.column_names) for part in parts]
        self.dataset = merge_datasets(parts * repeat)
        self.split_train_validation(split_validation_size, seed)

    def question_and_answer(self, row: Row) -> tuple[str, object]:
        getters = self.source.question, self.source.answer
        question, answer = (get(row) if callable(get) else row[get] for get in getters)
        return question, text_of(answer)

    def format_data(self, row: Row) -> Row:
        return {"messages": question_and_answer(*self.question_and_answer(row)), "task_name": self.task_name}


class OpenMathDataset(HubDataset):
    """Problems with synthetic solutions. `output_key` is "expected_answer" or "generated_solution"."""

    def __init__(self, output_key: str = "expected_answer", **kwargs: Any):
        self.output_key = output_key
        super().__init__(**kwargs)

    def question_and_answer(self, row: Row) -> tuple[str, object]:
        return row["problem"], text_of(row[self.output_key])


class GSM8KDataset(HubDataset):
    eval_split = "test"


class HubMultichoiceDataset(HubDataset):
    """A multiple-choice data set. Its rows {"question", "options": {letter: text or None}, "answer": letter,
    "messages", "task_name"} fit `multichoice_qa_processor` and the processors that read "messages"."""

    default_processor = "multichoice_qa_processor"

    def format_data(self, row: Row) -> Row:
        question, (texts, right) = self.question_and_answer(row)
        letters = "ABCDEFGHIJ"[: self.source.num_options]
        options = dict(zip(letters, [*texts, *[None] * (len(letters) - len(texts))]))
        listed = "\n".join(f"{letter}) {text}" for letter, text in options.items() if text is not None)
        messages = question_and_answer(f"{question}\n{listed}", letters[right])
        row = {"question": question, "options": options, "answer": letters[right]}
        return {**row, "messages": messages, "task_name": self.task_name}
