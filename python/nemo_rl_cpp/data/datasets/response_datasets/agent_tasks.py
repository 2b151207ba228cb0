"""Data sets for agents: tasks of the package `verifiers`, and rows of NeMo Gym as `ng_prepare_data` or `gym dataset`
writes them. The environments `verifiers` and `nemo_gym` run them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.conversation import is_list, question_and_answer
from nemo_rl_cpp.data.datasets.files import ListDataset, load_dataset_from_path
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.datasets.response_datasets.generated import held_out_count
from nemo_rl_cpp.data.interfaces import Row

if TYPE_CHECKING:
    from verifiers.v1.task import Task


@cache
def tasks_of(taskset: str, limit: int | None = None) -> list[Task]:
    """Return the first `limit` tasks (None: all) of a task set of the package verifiers. `taskset` is the JSON text of
    a mapping with the `id` of the task set and its settings. Raise ValueError if verifiers has no such task set, or if
    it is endless and there is no limit."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    settings = json.loads(taskset)
    try:
        loaded = load_taskset(taskset_config_type(settings["id"]).model_validate(settings))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"data: taskset {settings['id']!r} is none of verifiers: {error}") from error
    if limit is None and not loaded.bounded:
        raise ValueError(f"data: the task set {settings['id']} has no end: set num_samples")
    return list(loaded if limit is None else loaded.take(limit))


class VerifiersDataset(RawDataset):
    """The first `num_samples` tasks of a task set of the package verifiers. `taskset` is its id, or a mapping with `id`
    and its settings.
    `split_validation_size`, a count or a fraction, holds out the last tasks for validation."""

    task_name = "verifiers"
    default_processor = "agent_data_processor"

    def __init__(
        self, taskset: str | Mapping[str, object] | None = None, num_samples: int | None = None, split_validation_size: float = 0,
        seed: int = 42, **kwargs: object,
    ) -> None:  # fmt: skip
        settings = {"id": taskset} if isinstance(taskset, str) else dict(taskset or {})
        if not isinstance(settings.get("id"), str) or not settings["id"]:
            raise ValueError(f"data: taskset is {taskset!r}: give the id of a task set, or a mapping with id")
        text = json.dumps(settings, sort_keys=True)
        common = {"taskset": text, "taskset_id": settings["id"], "taskset_limit": num_samples}
        rows = []
        for number, task in enumerate(tasks_of(text, num_samples)):
            messages = question_and_answer(task.data.prompt_text.strip() or f"task {number}", None)
            info = common | {"task": number}
            rows.append({"messages": messages, "task_name": self.task_name, "extra_env_info": info})
        held = held_out_count(split_validation_size, len(rows))
        if not 0 <= held < len(rows):
            raise ValueError(f"data: split_validation_size takes {held} of {len(rows)} tasks: none is left to train on")
        self.dataset = ListDataset(rows[: len(rows) - held])
        self.val_dataset = ListDataset(rows[len(rows) - held :]) if held else None


class NemoGymDataset(RawDataset):
    """A JSON Lines file of NeMo Gym, each row `repeat` times. A row has `responses_create_params`, whose `input` is the
    prompt, and `agent_ref` or `task_source`. The environment `nemo_gym` gets the row unchanged."""

    task_name = "nemo_gym"
    default_processor = "nemo_gym_data_processor"

    def __init__(
        self, data_path: str, repeat: int = 1, split_validation_size: float = 0, seed: int = 42, **kwargs: object
    ) -> None:
        given = enumerate(load_dataset_from_path(data_path), start=1)
        rows = [self._row(row, f"data: {data_path}, row {i}") for i, row in given]
        self.dataset = ListDataset(rows * repeat)
        self.split_train_validation(split_validation_size, seed)

    def _row(self, row: Row, where: str) -> Row:
        params = row.get("responses_create_params")
        if not isinstance(params, Mapping) or not params.get("input"):
            raise ValueError(f"{where}: responses_create_params.input is missing; the row has {sorted(row)}")
        if not row.get("agent_ref") and not row.get("task_source"):
            raise ValueError(f"{where}: it has neither agent_ref nor task_source, which name the agent for the row")
        asked = params["input"]
        messages = asked if is_list(asked) else [{"role": "user", "content": asked}]
        text = "\n".join(_text(message.get("content")) for message in messages if isinstance(message, Mapping))
        prompt, info = question_and_answer(text.strip() or "-", None), {"nemo_gym_row": json.dumps(row)}
        return {"messages": prompt, "task_name": self.task_name, "extra_env_info": info}


def _text(content: object) -> str:
    """Return a message's content as one string: the content itself, or its text parts joined."""
    if is_list(content):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
