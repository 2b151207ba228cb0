"""Seeds, and the parts of a reward."""

import torch
from nemo_rl_cpp.algorithms.advantage_estimator import get_gdpo_reward_component_keys
from nemo_rl_cpp.algorithms.parts import set_seed


def test_seeds_and_component_keys():
    set_seed(3)
    a = torch.rand(2)
    set_seed(3)
    assert torch.equal(a, torch.rand(2))
    assert get_gdpo_reward_component_keys({"reward/b": 1, "reward/a": 2, "total_reward": 3}) == ["reward/a", "reward/b"]
