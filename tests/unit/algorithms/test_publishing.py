"""What a model card lists as rewards."""

import pytest
from nemo_rl_cpp.algorithms.checkpointing import reward_names
from nemo_rl_cpp.config import load_grpo_config


class Remote:
    """An environment of another process: of its functions this one knows nothing."""


@pytest.mark.parametrize(
    ("names", "rewards"),
    [(["reward_functions"], ["mine.good"]), (["math"], ["one"]), (["reward_functions", "math"], ["one", "two"])],
)
def test_model_card_lists_only_reward_functions_of_environments_in_use(names, rewards):
    sets = [f"{{dataset_name: ResponseDataset, data_path: a.jsonl, env_name: {name}}}" for name in names]
    config = load_grpo_config(
        "grpo_jsonl.yaml",
        ["env.reward_functions.functions=[mine.good]", "+env.math={num_workers: 1}", f"data.train=[{', '.join(sets)}]"],
    )
    tasks = dict(zip(("one", "two"), [Remote() for _ in names]))
    assert reward_names(config, tasks) == rewards
