"""A data set of questions and answers, from a file or from the Hub."""

import math
from collections.abc import Mapping

from nemo_rl_cpp.data import conversation
from nemo_rl_cpp.data.datasets.files import ListDataset, load_dataset_from_path
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.interfaces import Row

_INPUT, _OUTPUT = "input", "output"
_PROMPT_COLUMNS = ("system", "system_prompt", "instruction", "context", "passage", "choices", "options")
"""Names of columns that often contain a part of the prompt."""
_OF_PROCESSORS = {"tools", "stop_strings", "extra_env_info"}
"""Columns that processors read, whatever the columns of question and answer are called."""


def task_name_of(data_path: str) -> str:
    """Return the last two names of a path up to the first dot: `data/math/train.jsonl` -> `math-train`."""
    names = [part for part in str(data_path).split("/") if part not in ("", ".", "..", "~")][-2:]
    return "-".join(names).split(".")[0] or "-".join(name.lstrip(".") for name in names).split(".")[0]


class ResponseDataset(RawDataset):
    """Rows with a question under `input_key` and an answer under `output_key`, or with complete conversations.
    `split_validation_size` rows (a count, or a fraction), chosen by `seed`, become the validation set.

    A question is a string or a conversation (see `conversation_of`); keys may be dotted (`reward_model.ground_truth`).
    If `input_key` is not set, a column "messages" or "conversations" may end with the answer. Rows become {"messages":
    [..., user, assistant], "task_name"}. Raises ValueError with file, row (from 1) and key for any other row."""

    def __init__(
        self, data_path: str, input_key: str = _INPUT, output_key: str = _OUTPUT, subset: str | None = None,
        split: str | None = None, split_validation_size: float = 0, seed: int = 42, **kwargs: object,
    ):  # fmt: skip
        self.data_path, self.task_name = data_path, task_name_of(data_path)
        self.dataset = load_dataset_from_path(data_path, subset, split or "train")
        self._padded = conversation.comes_from_arrow(self.dataset)
        columns = self.dataset.column_names
        whole = ("messages", "conversations") if input_key == _INPUT else ()
        ready = next((name for name in whole if name in columns), None)
        self.input_key, self.output_key = ready or input_key, output_key
        self._answers_inside = ready is not None and output_key == _OUTPUT
        if ready is None:
            self._check_columns(columns)
        kept = set(columns) - {"conversations"} if ready else _OF_PROCESSORS
        read = {self.input_key.partition(".")[0], self.output_key.partition(".")[0]}
        self.unread_columns = [name for name in columns if name in _PROMPT_COLUMNS and name not in read]
        removed = [name for name in columns if name not in kept]
        types = {name: type(self.dataset.features[name]).__name__ for name in read & {*columns}} if self._padded else {}
        if any(kind != "Value" and name != "messages" for name, kind in types.items()):
            # `datasets` gives a new column the type of its first 1,000 rows, but later conversations may have more keys
            self.dataset = ListDataset(map(conversation.without_padding, self.dataset))
        self.dataset = self.dataset.map(self._formatted, remove_columns=removed, with_indices=True)
        self.split_train_validation(split_validation_size, seed)

    def _check_columns(self, columns: list[str]) -> None:
        for key, name in (("input_key", self.input_key), ("output_key", self.output_key)):
            if name not in columns and name.partition(".")[0] not in columns:
                hint = _hint(columns) if key == "input_key" else ""
                raise ValueError(f"data: {key} is {name!r}, but {self.data_path} has the columns {columns}{hint}")
        if (self.input_key, self.output_key) == (_INPUT, _OUTPUT) and "instruction" in columns:
            remedy = "join them into one column, and name it in input_key"
            raise ValueError(f"data: {self.data_path} has the columns instruction and input: {remedy}")

    def _formatted(self, row: Row, number: int) -> Row:
        try:
            formatted = self.format_data(conversation.without_padding(row) if self._padded else row)
        except ValueError as error:
            raise ValueError(f"data: {self.data_path}, row {number + 1}: {error}") from None
        if self.input_key == "messages" and row.get("task_name"):
            formatted["task_name"] = row["task_name"]
        return formatted

    def format_data(self, data: Row) -> Row:
        """Return a row as {"messages", "task_name"}, with the answer as the last message. Raise ValueError if the
        question or the answer is missing."""
        messages = conversation.conversation_of(conversation.look_up(data, self.input_key), self.input_key)
        answered = messages[-1]["role"] == "assistant"
        if answered and self._answers_inside:
            answer = messages[-1]
        elif self._answers_inside and self.output_key not in data:
            remedy = "add an assistant message, or name the answer's column in output_key"
            raise ValueError(f"{self.input_key!r} ends with {messages[-1]['role']} and holds no answer: {remedy}")
        else:
            value = conversation.look_up(data, self.output_key)
            answer = {**_last_message(value), "role": "assistant", "content": _answer(value, self.output_key)}
        messages = [*(messages[:-1] if answered else messages), answer]
        conversation.split_conversation(messages, self.input_key)
        return {"messages": messages, "task_name": self.task_name}


def _last_message(value: object) -> Mapping[str, object]:
    """Return the last message of an answer that is a conversation (TRL's completions), if it is the assistant's, with
    its reasoning and tool calls; {} for any other answer."""
    last = value[-1] if conversation.is_list(value) and value else None
    return last if isinstance(last, Mapping) and last.get("role") == "assistant" else {}


def _answer(value: object, key: str) -> object:
    """Return an answer (for a conversation, the content of its last message) as text, or None. Raise ValueError for NaN
    and inf."""
    if last := _last_message(value):
        value = last.get("content")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key!r} is {value}: expected a finite number, a text, or null if there is no answer")
    value = conversation.text_of(value)
    if isinstance(value, str):
        conversation.check_characters(value, repr(key))
    return value


def _hint(columns: list[str]) -> str:
    questions = ("prompt", "question", "problem", "instruction", "query")
    answers = ("answer", "ground_truth", "reward_model", "completion", "solution", "response")
    question, answer = (next((name for name in names if name in columns), None) for names in (questions, answers))
    answer = "reward_model.ground_truth" if answer == "reward_model" else answer or "the answer's column"
    return f"; perhaps input_key: {question} and output_key: {answer}" if question else ""
