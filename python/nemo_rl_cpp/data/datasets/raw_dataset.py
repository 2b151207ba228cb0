"""A data set before tokenisation: its rows, its split, its processor and its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.data import DatasetConfig
from nemo_rl_cpp.data.config_access import get_field
from nemo_rl_cpp.data.datasets.list_dataset import ListDataset
from nemo_rl_cpp.data.interfaces import TaskDataPreProcessFnCallable, TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl_cpp.data.processors import FILLS_A_PLACE, PROCESSOR_REGISTRY
from nemo_rl_cpp.data.prompt_place import split_prompt

if TYPE_CHECKING:
    from datasets import Dataset


class RawDataset:
    """Base of all data sets. A subclass sets `task_name` and `dataset`, then calls `split_train_validation`.

    `val_dataset` is None unless rows of this data set serve for validation.
    """

    data_config: DatasetConfig | Mapping[str, object]
    dataset: ListDataset | Dataset
    val_dataset: ListDataset | Dataset | None
    processor: TaskDataProcessFnCallable
    task_spec: TaskDataSpec
    preprocessor: TaskDataPreProcessFnCallable | None = None
    task_name: str
    default_processor = "default"
    """Name of the processor where the configuration names none."""
    unread_columns: Sequence[str] = ()
    """Columns that are no part of the prompt though their names say so; said before the run."""
    eval_split: str | None = None
    """The split that an evaluation uses where the configuration names none."""

    def split_train_validation(self, test_size: float | int, seed: int) -> None:
        """Moves `test_size` rows (a count, or a share of them) to `val_dataset`; nothing for 0."""
        if not hasattr(self, "val_dataset"):
            self.val_dataset = None
        if test_size and test_size > 0:
            split = self.dataset.train_test_split(test_size=test_size, seed=seed)
            self.dataset = split["train"]
            self.val_dataset = split["test"]

    def set_processor(self) -> None:
        name = get_field(self.data_config, "processor", None) or self.default_processor
        if name not in PROCESSOR_REGISTRY:
            raise ValueError(
                f"data: the processor {name!r} is unknown; known are {sorted(PROCESSOR_REGISTRY)}; add one "
                "with nemo_rl_cpp.data.processors.register_processor"
            )
        self.processor = PROCESSOR_REGISTRY[name]
        self._check_prompt()

    def _check_prompt(self) -> None:
        """A question that has no place in the prompt file would be lost in every row."""
        spec = getattr(self, "task_spec", None)
        if spec is None or not spec.prompt or self.processor not in FILLS_A_PLACE:
            return
        try:
            split_prompt(spec.prompt)
        except ValueError as error:
            raise ValueError(f"prompt_file: {spec.prompt_file or 'the prompt'}: {error}") from None

    def set_task_spec(self, data_config: DatasetConfig | Mapping[str, object]) -> None:
        self.data_config = data_config
        self.task_spec = TaskDataSpec(
            task_name=self.task_name,
            prompt_file=get_field(data_config, "prompt_file", None),
            system_prompt_file=get_field(data_config, "system_prompt_file", None),
        )
