"""A data set of digits to count down from. Selected by `data.train.dataset_name: count_down`."""

from nemo_rl_cpp.data.datasets import ListDataset, RawDataset
from nemo_rl_cpp.data.datasets.response_datasets import register_dataset


class CountDown(RawDataset):
    """The prompts "9=", "8=" and so on, down to `last`. The correct response is the next smaller digit."""

    task_name = "count_down"
    default_processor = "raw_completion_data_processor"

    def __init__(self, last=1, split_validation_size=0, seed=42, **section):
        self.dataset = ListDataset(
            {
                "messages": [{"role": "user", "content": f"{n}="}, {"role": "assistant", "content": str(n - 1)}],
                "task_name": self.task_name,
            }
            for n in range(9, last - 1, -1)
        )
        self.split_train_validation(split_validation_size, seed)


register_dataset("count_down", CountDown, keys=("last",))
