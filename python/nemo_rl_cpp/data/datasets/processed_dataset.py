"""Data sets: the raw rows of one task, and the tokenized rows of all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.access import as_written
from nemo_rl_cpp.config.data import DatasetConfig
from nemo_rl_cpp.data.conversation import row_at
from nemo_rl_cpp.data.datasets.files import ListDataset
from nemo_rl_cpp.data.interfaces import (
    DatumSpec,
    Indexed,
    LLMMessageLogType,
    Row,
    TaskDataPreProcessFnCallable,
    TaskDataProcessFnCallable,
    TaskDataSpec,
    TokenizerType,
)
from nemo_rl_cpp.data.processors import FILLS_A_PLACE, PROCESSOR_REGISTRY, split_prompt
from nemo_rl_cpp.dotted_names import import_object, is_dotted
from nemo_rl_cpp.user_code import call_any

if TYPE_CHECKING:
    from datasets import Dataset


class RawDataset:
    """The base class of data sets. A subclass sets `task_name` and `dataset`, then calls `split_train_validation`."""

    data_config: DatasetConfig | Mapping[str, object]
    dataset: ListDataset | Dataset
    val_dataset: ListDataset | Dataset | None = None
    processor: TaskDataProcessFnCallable
    task_spec: TaskDataSpec
    preprocessor: TaskDataPreProcessFnCallable | None = None
    task_name: str
    default_processor = "default"  # the name of the processor, if the configuration names none
    unread_columns: Sequence[str] = ()
    """Columns whose names suggest a part of the prompt but that are not read. They are reported before the run."""
    eval_split: str | None = None  # the split that an evaluation uses if the configuration names none

    def split_train_validation(self, test_size: float | int, seed: int) -> None:
        """Move `test_size` random rows (a count, or a fraction; 0: none), which `seed` determines, from `dataset` to
        `val_dataset`."""
        if test_size and test_size > 0:
            split = self.dataset.train_test_split(test_size=test_size, seed=seed)
            self.dataset, self.val_dataset = split["train"], split["test"]

    def set_processor(self) -> None:
        """Set the configured processor. Raise ValueError for an unknown name, or a prompt file without one `{}`."""
        name = self.data_config.get("processor") or self.default_processor
        if name in PROCESSOR_REGISTRY:
            self.processor = PROCESSOR_REGISTRY[name]
        elif is_dotted(name):
            self.processor = import_object(name, "processor")
        else:
            known = f"known are {sorted(PROCESSOR_REGISTRY)}; register_processor or a dotted name adds one"
            raise ValueError(f"data: the processor {name!r} is unknown; {known}")
        spec = getattr(self, "task_spec", None)
        if spec is not None and spec.prompt and self.processor in FILLS_A_PLACE:
            try:
                split_prompt(spec.prompt)
            except ValueError as error:
                raise ValueError(f"prompt_file: {spec.prompt_file or 'the prompt'}: {error}") from None

    def set_task_spec(self, data_config: DatasetConfig | Mapping[str, object]) -> None:
        self.data_config = as_written(data_config)
        self.task_spec = TaskDataSpec(
            task_name=self.task_name,
            prompt_file=self.data_config.get("prompt_file"),
            system_prompt_file=self.data_config.get("system_prompt_file"),
        )


@dataclass(eq=False, repr=False)
class AllTaskProcessedDataset:
    """A data set of processed rows: `dataset[i]` is the DatumSpec of row i. A processor is a function from a row to a
    DatumSpec; it needs a specification (`TaskDataSpec`). `task_data_processors` is one processor for all rows, with the
    specification `default_task_data_spec`, or a mapping (perhaps a defaultdict) from the row's "task_name" to
    (specification, processor); prompts that such a specification lacks are taken from the default one.
    `task_data_preprocessors` is a function that changes a row before it is processed, or a mapping from task names to
    such functions. The processor truncates and masks a prompt at `max_seq_length` tokens (None: no limit).

    Reading the first row of each task raises AssertionError if the row begins with two BOS tokens."""

    dataset: Indexed[Row]
    tokenizer: TokenizerType
    default_task_data_spec: TaskDataSpec | None
    task_data_processors: TaskDataProcessFnCallable | Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]]
    task_data_preprocessors: TaskDataPreProcessFnCallable | Mapping[str, TaskDataPreProcessFnCallable] | None = None
    max_seq_length: int | None = None

    def __post_init__(self) -> None:
        self._begun: set[object] = set()  # tasks whose first tokens were checked
        if isinstance(self.task_data_processors, Mapping):
            for task_data_spec, _ in self.task_data_processors.values():
                self._take_defaults(task_data_spec)
        elif self.default_task_data_spec is None:
            raise ValueError("one processor for all rows needs a default_task_data_spec")

    def _take_defaults(self, spec: TaskDataSpec | None) -> None:
        default = self.default_task_data_spec
        if spec is not None and default is not None:
            spec.prompt = default.prompt if spec.prompt is None else spec.prompt
            spec.system_prompt = default.system_prompt if spec.system_prompt is None else spec.system_prompt

    def __len__(self) -> int:
        return len(self.dataset)

    def _processor(self, entry: Row) -> tuple[TaskDataSpec, TaskDataProcessFnCallable]:
        table = self.task_data_processors
        if not isinstance(table, Mapping):
            return self.default_task_data_spec, table
        task_name = entry["task_name"]
        if task_name not in table:
            assert getattr(table, "default_factory", None) is not None, (
                f"task processor not provided for {task_name}. Provided processors: {list(table)}"
            )
            self._take_defaults(table[task_name][0])
        return table[task_name]

    def __getitem__(self, idx: int) -> DatumSpec:
        entry = row_at(self.dataset, idx)
        spec, process = self._processor(entry)
        preprocess = self.task_data_preprocessors
        if isinstance(preprocess, Mapping):
            preprocess = preprocess.get(entry.get("task_name"))
        if preprocess is not None:
            entry = call_any(preprocess, entry)
        datum = call_any(process, entry, spec, self.tokenizer, self.max_seq_length, idx)
        if entry.get("task_name") not in self._begun:
            _check_beginnings(datum.get("message_log") or [], self.tokenizer)
            self._begun.add(entry.get("task_name"))
        return datum


def _check_beginnings(message_log: LLMMessageLogType, tokenizer: TokenizerType) -> None:
    """Raise AssertionError if a message, or the prompt, begins with two BOS tokens (template's and tokenizer's)."""
    pieces = [message["token_ids"] for message in message_log if "token_ids" in message]
    beginnings = [[int(token) for token in piece[:2]] for piece in pieces]
    bos = tokenizer.bos_token_id
    assert bos is None or [bos, bos] not in [*beginnings, sum(beginnings, [])[:2]], (
        "Found double BOS token in the first two positions of the message."
    )
