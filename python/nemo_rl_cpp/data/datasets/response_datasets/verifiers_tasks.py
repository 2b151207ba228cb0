"""Tasks of the package `verifiers` as rows of a data set. A row identifies one task of a task set; the environment
`verifiers` runs it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.conversation import question_and_answer
from nemo_rl_cpp.data.datasets.files import ListDataset
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.interfaces import Row

if TYPE_CHECKING:
    from verifiers.v1.task import Task

INSTALL = "pip install 'nemo-rl-cpp[agents]'"


def check_verifiers(what: str) -> None:
    """Raise ValueError if the package verifiers is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError(f"{what} needs the package verifiers: run `{INSTALL}`")


@cache
def tasks_of(taskset: str, limit: int | None = None) -> list[Task]:
    """Return the first `limit` tasks of a task set. `taskset` is the JSON of its configuration, a mapping with `id`.
    Raise ValueError if verifiers has no such task set, or if it is endless and there is no limit.
    """
    check_verifiers("a task set")
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
    """The first `num_samples` tasks of a task set of `verifiers`. `taskset` is its id, or a mapping with `id` and
    settings.

    `split_validation_size`, a count or a fraction, holds out the last tasks for validation.
    """

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
        rows = [
            self._row(task.data.prompt_text, number, text, settings["id"], num_samples)
            for number, task in enumerate(tasks_of(text, num_samples))
        ]
        held = split_validation_size
        held = held if isinstance(held, int) else max(1, round(held * len(rows))) if held else 0
        if not 0 <= held < len(rows):
            raise ValueError(
                f"data: split_validation_size holds {held} of {len(rows)} tasks out, which leaves none to train on"
            )
        self.dataset = ListDataset(rows[: len(rows) - held])
        self.val_dataset = ListDataset(rows[len(rows) - held :]) if held else None

    def _row(self, text: str, number: int, taskset: str, name: object, limit: int | None) -> Row:
        shown = text.strip() or f"task {number}"  # a task may have no prompt
        return {
            "messages": question_and_answer(shown, None),
            "task_name": self.task_name,
            "extra_env_info": {"taskset": taskset, "taskset_id": name, "task": number, "taskset_limit": limit},
        }
