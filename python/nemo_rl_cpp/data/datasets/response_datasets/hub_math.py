"""Data sets on the Hub: mathematics and multiple-choice questions."""

import random
from collections.abc import Mapping
from typing import Any

from nemo_rl_cpp.data.conversation import question_and_answer, text_of
from nemo_rl_cpp.data.datasets.files import load_hub_dataset, merge_datasets
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.interfaces import Row


class HubMathDataset(RawDataset):
    """The base class of data sets on the Hub. A subclass sets the repository, its columns and the default split. Rows
    become {"messages": [user, assistant], "task_name"}.

    `split` overrides the default split, and `repeat` repeats the rows, because small test sets are noisy.
    `split_validation_size` and `seed` have the same meaning as in ResponseDataset."""

    repository: str
    subsets: tuple[str | None, ...] = (None,)
    default_split = "train"
    default_repeat = 1
    input_key = "problem"
    output_key = "answer"

    def __init__(
        self,
        split: str | None = None,
        split_validation_size: float = 0,
        seed: int = 42,
        repeat: int | None = None,
        **kwargs: object,
    ):
        repeat = self.default_repeat if repeat is None else repeat
        if repeat < 1:
            raise ValueError(f"data: repeat must be at least 1, got {repeat}")
        parts = [load_hub_dataset(self.repository, subset, split or self.default_split) for subset in self.subsets]
        parts = [part.map(self.format_data, remove_columns=part.column_names) for part in parts]
        self.dataset = merge_datasets(parts * repeat)
        self.val_dataset = None
        self.split_train_validation(split_validation_size, seed)

    def question(self, row: Mapping[str, str]) -> str:
        return row[self.input_key]

    def answer(self, row: Mapping[str, str]) -> str:
        return text_of(row[self.output_key])

    def format_data(self, row: Mapping[str, str]) -> Row:
        return {"messages": question_and_answer(self.question(row), self.answer(row)), "task_name": self.task_name}


class OpenMathInstruct2Dataset(HubMathDataset):
    """Problems with synthetic solutions. `output_key` is "expected_answer" (default) or "generated_solution"."""

    task_name = "OpenMathInstruct-2"
    repository = "nvidia/OpenMathInstruct-2"
    default_split = "train_1M"

    def __init__(self, output_key: str = "expected_answer", **kwargs: Any):
        self.output_key = output_key
        super().__init__(**kwargs)


class _DAPOFormat(HubMathDataset):
    def question(self, row: Row) -> str:
        return row["prompt"][0]["content"]

    def answer(self, row: Row) -> str:
        return row["reward_model"]["ground_truth"]


class DAPOMath17KDataset(_DAPOFormat):
    task_name = "DAPOMath17K"
    repository = "BytedTsinghua-SIA/DAPO-Math-17k"


class DAPOMathAIME2024Dataset(_DAPOFormat):
    task_name = "DAPOMathAIME2024"
    repository = "BytedTsinghua-SIA/AIME-2024"


class DeepScalerDataset(HubMathDataset):
    task_name = "DeepScaler"
    repository = "agentica-org/DeepScaleR-Preview-Dataset"


class AIME2024Dataset(HubMathDataset):
    task_name = "AIME2024"
    repository = "HuggingFaceH4/aime_2024"
    default_repeat = 16


class AIME2025Dataset(HubMathDataset):
    task_name = "AIME2025"
    repository = "opencompass/AIME2025"
    subsets = ("AIME2025-I", "AIME2025-II")
    default_split = "test"
    default_repeat = 16
    input_key = "question"


class AIME2026Dataset(HubMathDataset):
    task_name = "AIME2026"
    repository = "MathArena/aime_2026"
    default_repeat = 16


class GSM8KDataset(HubMathDataset):
    """Grade-school word problems. The answer is the text after `####` in the solution."""

    task_name = "GSM8K"
    repository = "openai/gsm8k"
    subsets = ("main",)
    eval_split = "test"
    input_key = "question"

    def answer(self, row: Mapping[str, str]) -> str:
        return row["answer"].split("####")[-1].strip().replace(",", "")


class Math500Dataset(HubMathDataset):
    task_name = "math500"
    repository = "HuggingFaceH4/MATH-500"
    default_split = "test"


class MathDataset(HubMathDataset):
    r"""The 5,000 test problems of MATH. The answer is the content of the last `\boxed{...}` in the solution."""

    task_name = "math"
    repository = "EleutherAI/hendrycks_math"
    subsets = (
        "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra", "precalculus",
    )  # fmt: skip
    default_split = "test"

    def answer(self, row: Mapping[str, str]) -> str:
        return last_boxed(row["solution"])


def last_boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`, including inner braces, or the whole text if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return text


_LETTERS = "ABCDEFGHIJ"


class HubMultichoiceDataset(HubMathDataset):
    """The base class of multiple-choice data sets on the Hub. Rows become {"question", "options": {letter: text or
    None}, "answer": letter, "messages", "task_name"}, which both `multichoice_qa_processor` and the processors of
    messages accept."""

    default_processor = "multichoice_qa_processor"
    default_split = "test"
    input_key = "question"
    num_options = 4

    def choices(self, row: Row) -> tuple[list[str], int]:
        """Return the options in display order, and the index of the correct one."""
        raise NotImplementedError

    def format_data(self, row: Row) -> Row:
        texts, right = self.choices(row)
        letters = _LETTERS[: self.num_options]
        options = dict(zip(letters, [*texts, *[None] * (self.num_options - len(texts))]))
        listed = "\n".join(f"{letter}) {text}" for letter, text in options.items() if text is not None)
        question = self.question(row)
        return {
            "question": question,
            "options": options,
            "answer": letters[right],
            "messages": question_and_answer(f"{question}\n{listed}", letters[right]),
            "task_name": self.task_name,
        }


class MMLUDataset(HubMultichoiceDataset):
    task_name = "mmlu"
    repository = "cais/mmlu"
    subsets = ("all",)

    def choices(self, row: Row) -> tuple[list[str], int]:
        return list(row["choices"]), int(row["answer"])


class MMLUProDataset(HubMultichoiceDataset):
    task_name = "mmlu_pro"
    repository = "TIGER-Lab/MMLU-Pro"
    num_options = 10

    def choices(self, row: Row) -> tuple[list[str], int]:
        return list(row["options"]), int(row["answer_index"])


class GPQADataset(HubMultichoiceDataset):
    """GPQA's main questions. The order of a question's options depends only on the question, so it is the same in every
    run."""

    task_name = "gpqa"
    repository = "Idavidrein/gpqa"
    subsets = ("gpqa_main",)
    default_split = "train"
    input_key = "Question"

    def choices(self, row: Mapping[str, str]) -> tuple[list[str], int]:
        order = list(range(4))
        random.Random(row["Question"]).shuffle(order)
        texts = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        return [texts[i] for i in order], order.index(0)


class GPQADiamondDataset(GPQADataset):
    task_name = "gpqa_diamond"
    subsets = ("gpqa_diamond",)
