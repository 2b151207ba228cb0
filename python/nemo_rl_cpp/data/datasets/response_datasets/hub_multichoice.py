"""Multiple-choice data sets of the hub, by the names that configurations use. `verifier_type: english_multichoice` scores them."""

import random
from collections.abc import Mapping
from typing import TypedDict

from nemo_rl_cpp.data.datasets.response_datasets.hub_math import HubMathDataset
from nemo_rl_cpp.data.interfaces import Row

_LETTERS = "ABCDEFGHIJ"


class HubMultichoiceDataset(HubMathDataset):
    """Base: rows become {"question", "options": {letter: text or None}, "answer": letter, "messages", "task_name"}, so that
    `multichoice_qa_processor` and the processors of messages both take them."""

    default_processor = "multichoice_qa_processor"
    default_split = "test"
    input_key = "question"
    num_options = 4

    def choices(self, row: Row) -> tuple[list[str], int]:
        """(the options in the order that they are shown in, the number of the right one)."""
        raise NotImplementedError

    def format_data(self, row: Row) -> Row:
        texts, right = self.choices(row)
        letters = _LETTERS[: self.num_options]
        options = dict(zip(letters, [*texts, *[None] * (self.num_options - len(texts))]))
        listed = "\n".join(f"{letter}) {text}" for letter, text in options.items() if text is not None)
        question = self.question(row)
        messages = [
            {"role": "user", "content": f"{question}\n{listed}"},
            {"role": "assistant", "content": letters[right]},
        ]
        return {
            "question": question,
            "options": options,
            "answer": letters[right],
            "messages": messages,
            "task_name": self.task_name,
        }


class _MMLURow(TypedDict):
    choices: list[str]
    answer: int


class MMLUDataset(HubMultichoiceDataset):
    task_name = "mmlu"
    repository = "cais/mmlu"
    subsets = ("all",)

    def choices(self, row: _MMLURow) -> tuple[list[str], int]:
        return list(row["choices"]), int(row["answer"])


class _MMLUProRow(TypedDict):
    options: list[str]
    answer_index: int


class MMLUProDataset(HubMultichoiceDataset):
    task_name = "mmlu_pro"
    repository = "TIGER-Lab/MMLU-Pro"
    num_options = 10

    def choices(self, row: _MMLUProRow) -> tuple[list[str], int]:
        return list(row["options"]), int(row["answer_index"])


class GPQADataset(HubMultichoiceDataset):
    """GPQA's main questions. The order of a question's options is drawn from the question itself: the same in every run."""

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
