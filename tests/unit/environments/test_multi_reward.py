"""Environments that give their reward in parts."""

import pickle

import torch
from nemo_rl_cpp.compat.experience.async_rollouts import _row
from nemo_rl_cpp.environments.multi_reward import MathMultiRewardEnvironment, extract_answer
from nemo_rl_cpp.environments.ray_environment import joined
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.experience.turns import _merge

RESPONSES = {
    "<think>2 and 2</think>\n<answer>4</answer>": (1, 1, 1),
    "<think>a\nb</think>\n<answer> 4 </answer>": (1, 1, 1),
    "<think>2 and 2</think>\n<answer>5</answer>": (0, 1, 1),
    "<think>2 and 2</think>\n<answer>four</answer>": (0, 0, 1),
    "<think>2 and 2</think> <answer>4</answer>": (1, 1, 0),  # no line feed
    "<answer>3</answer><answer>4</answer>": (1, 1, 0),
    "4": (1, 1, 0),
    "The answer is 4": (0, 0, 0),
    "<think>x</think>\n<answer>4</answer> and more": (1, 1, 0),
    "": (0, 0, 0),
}


def logs(responses):
    return [
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": response}] for response in responses
    ]


def test_three_parts():
    environment = MathMultiRewardEnvironment({"num_workers": 8})
    result = environment.step(logs(RESPONSES), [{"ground_truth": "4"}] * len(RESPONSES), return_extracted_answer=True)
    parts = torch.stack([result.rewards[name] for name in ("reward/correctness", "reward/integer", "reward/format")], 1)
    assert [tuple(row) for row in parts.tolist()] == list(RESPONSES.values())
    assert (
        result.observations[0]["content"] == "Environment: correct"
        and result.observations[2]["content"] == "Environment: incorrect"
    )
    assert result.terminateds.tolist() == [1] * len(RESPONSES) and result.answers[0] == "4"


def test_extract_answer():
    assert extract_answer("<answer>1</answer> then <answer> 2 </answer> x") == "2"


def longer(completions, **columns):
    return [float(len(text)) for text in completions]


def even(completions, **columns):
    return [None if not text else float(len(text) % 2 == 0) for text in completions]


def test_reward_functions_as_parts():
    environment = RewardFunctionEnvironment({"functions": [longer, even], "weights": [0.5, 2.0], "as_parts": True})
    result = environment.step(logs(["ab", "abc", ""]), [{}, {}, {}])
    assert {name: values.tolist() for name, values in result.rewards.items()} == {
        "longer": [2.0, 3.0, 0.0],
        "even": [1.0, 0.0, 0.0],
    }
    assert result.rewards.weights == {"longer": 0.5, "even": 2.0}
    summed = RewardFunctionEnvironment([longer, even], [0.5, 2.0]).step(logs(["ab", "abc", ""]), [{}, {}, {}])
    assert summed.rewards.tolist() == [3.0, 1.5, 0.0]
    twice = RewardFunctionEnvironment([even, even], as_parts=True).step(logs(["ab"]), [{}])
    assert len(twice.rewards) == 2 and all(values.tolist() == [1.0] for values in twice.rewards.values())


def test_parts_keep_the_weights_of_their_total():
    environment = RewardFunctionEnvironment([longer, even], [0.5, -2.0], as_parts=True)
    answers = [environment.step(logs([text]), [{}]) for text in ("ab", "abc")]
    merged = _merge([([1], answers[0]), ([0], answers[1])], 2).rewards
    for rewards, length in (
        (merged, [3, 2]),
        (joined(answers).rewards, [2, 3]),
        (_row(joined(answers), 1).rewards, [3]),
    ):
        again = pickle.loads(pickle.dumps(rewards))
        assert again["longer"].tolist() == length and again.weights == {"longer": 0.5, "even": -2.0}


def test_gdpo_weighs_the_parts_of_a_configuration_by_their_weights():
    from nemo_rl_cpp.algorithms.grpo import make_advantages
    from nemo_rl_cpp.config import load_grpo_config

    names = ", ".join(f"{__name__}.{function.__name__}" for function in (longer, even))
    section = f"env={{reward_functions: {{functions: [{names}], weights: [0.5, -2.0], as_parts: true}}}}"
    config = load_grpo_config(
        "grpo_jsonl.yaml", ["data.train.data_path=x.jsonl", f"++{section}", "grpo.adv_estimator.name=gdpo"]
    )
    assert make_advantages(config).estimator.reward_weights == [-2.0, 0.5]  # by the names in order: even, longer
    config.grpo.adv_estimator.reward_weights = [1.0, 3.0]
    assert make_advantages(config).estimator.reward_weights == [1.0, 3.0]
