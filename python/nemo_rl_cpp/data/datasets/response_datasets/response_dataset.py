"""Question-and-answer pairs from a file or the hub."""

from __future__ import annotations

from typing import Any

from nemo_rl_cpp.data.datasets.raw_dataset import RawDataset
from nemo_rl_cpp.data.datasets.utils import load_dataset_from_path


def text_of(value: Any) -> Any:
    """Numbers as text, since they stand in a message; everything else unchanged."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def task_name_of(data_path: str) -> str:
    """The last two parts of the path joined by "-", without what follows a dot: data/math/train.jsonl is math-train."""
    name = "-".join(str(data_path).split("/")[-2:]).split(".")[0]
    return name.removeprefix("-")


class ResponseDataset(RawDataset):
    """Rows with a question under `input_key` and an answer under `output_key`, or with ready "messages".

    `data_path` is what `load_dataset_from_path` reads, `subset` and `split` as on the hub. `split_validation_size`
    rows (a count, or a share) become the validation set, chosen by `seed`.
    Rows come out as {"messages": [user, assistant], "task_name"}.
    """

    def __init__(
        self,
        data_path: str,
        input_key: str = "input",
        output_key: str = "output",
        subset: str | None = None,
        split: str | None = None,
        split_validation_size: float = 0,
        seed: int = 42,
        **kwargs: Any,
    ):
        self.input_key = input_key
        self.output_key = output_key
        self.task_name = task_name_of(data_path)
        self.dataset = load_dataset_from_path(data_path, subset, split or "train")
        columns = self.dataset.column_names
        if "messages" in columns:
            if "task_name" not in columns:
                self.dataset = self.dataset.add_column("task_name", [self.task_name] * len(self.dataset))
        else:
            for key, name in (("input_key", input_key), ("output_key", output_key)):
                if name not in columns:
                    raise ValueError(f"data: {key} is {name!r}, but {data_path} has the columns {columns}")
            self.dataset = self.dataset.map(self.format_data, remove_columns=columns)
        self.val_dataset = None
        self.split_train_validation(split_validation_size, seed)

    def format_data(self, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "user", "content": text_of(data[self.input_key])},
                {"role": "assistant", "content": text_of(data[self.output_key])},
            ],
            "task_name": self.task_name,
        }
