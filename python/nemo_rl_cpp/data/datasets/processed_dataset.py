"""A data set that tokenises its rows, each by the processor of its task."""

from collections.abc import Mapping

from nemo_rl_cpp.data.datasets.utils import assert_no_double_bos
from nemo_rl_cpp.data.interfaces import DatumSpec, Indexed, LLMMessageLogType, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.interfaces import TaskDataPreProcessFnCallable as Preprocessor
from nemo_rl_cpp.data.interfaces import TaskDataProcessFnCallable as Processor
from nemo_rl_cpp.data.plain_rows import row_at
from nemo_rl_cpp.user_code import call_any


class AllTaskProcessedDataset:
    """`dataset[i]` is the DatumSpec of row i.

    `task_data_processors` is one processor for all rows (with `default_task_data_spec`), or a mapping from the row's
    "task_name" to (specification, processor); a defaultdict serves the tasks it does not list. Specifications take
    their missing prompts from `default_task_data_spec`. `task_data_preprocessors` (one, or by task) change the row
    first. The first row is checked for a double BOS token.
    """

    def __init__(
        self,
        dataset: Indexed[Row],
        tokenizer: TokenizerType,
        default_task_data_spec: TaskDataSpec | None,
        task_data_processors: Processor | Mapping[str, tuple[TaskDataSpec, Processor]],
        task_data_preprocessors: Preprocessor | Mapping[str, Preprocessor] | None = None,
        max_seq_length: int | None = None,
    ):
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.task_data_preprocessors = task_data_preprocessors
        self.max_seq_length = max_seq_length
        self._begun: set[object] = set()  # tasks whose beginnings are known to be right
        if isinstance(task_data_processors, Mapping):
            for task_data_spec, _ in task_data_processors.values():
                self._take_defaults(task_data_spec)
        elif default_task_data_spec is None:
            raise ValueError("one processor for all rows needs a default_task_data_spec")

    def _take_defaults(self, spec: TaskDataSpec | None) -> None:
        if spec is not None and self.default_task_data_spec is not None and spec is not self.default_task_data_spec:
            spec.copy_defaults(self.default_task_data_spec)

    def __len__(self) -> int:
        return len(self.dataset)

    def _processor(self, entry: Row) -> tuple[TaskDataSpec, Processor]:
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
    """AssertionError where a message, or the prompt as a whole, begins with two BOS tokens."""
    pieces = [message["token_ids"] for message in message_log if "token_ids" in message]
    whole = [int(token) for piece in pieces for token in piece[:2]]
    for piece in [*pieces, whole]:
        assert_no_double_bos(piece, tokenizer)
