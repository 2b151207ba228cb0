"""Rows of NeMo Gym, as `ng_prepare_data` or `gym dataset` writes them."""

import json
from collections.abc import Mapping

from nemo_rl_cpp.data.conversation import is_list, question_and_answer
from nemo_rl_cpp.data.datasets.files import ListDataset, load_dataset_from_path
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.interfaces import Row


class NemoGymDataset(RawDataset):
    """A JSON Lines file of NeMo Gym, each row `repeat` times. A row has `responses_create_params`, whose `input` is the
    prompt, and `agent_ref` or `task_source`. The environment `nemo_gym` gets the row unchanged.

    `split_validation_size` rows (a count, or a fraction), chosen by `seed`, become the validation set.
    """

    task_name = "nemo_gym"
    default_processor = "nemo_gym_data_processor"

    def __init__(
        self, data_path: str, repeat: int = 1, split_validation_size: float = 0, seed: int = 42, **kwargs: object
    ) -> None:
        rows = [
            self._row(row, f"data: {data_path}, row {i + 1}") for i, row in enumerate(load_dataset_from_path(data_path))
        ]
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
        return {
            "messages": question_and_answer(text.strip() or "-", None),
            "task_name": self.task_name,
            "extra_env_info": {"nemo_gym_row": json.dumps(row)},
        }


def _text(content: object) -> str:
    """Return a message's content as one text: its parts of type text, joined."""
    if is_list(content):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
