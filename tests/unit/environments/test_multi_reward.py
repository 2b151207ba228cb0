import pickle

import pytest
import torch
from nemo_rl_cpp.algorithms.algorithm import grpo_advantages
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.environments.math_environment import MathMultiRewardEnvironment
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.rollouts.rollouts import merged_returns

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
    asked = {"role": "user", "content": "2 + 2?"}
    return [[asked, {"role": "assistant", "content": response}] for response in responses]


def test_multi_reward_math_environment_scores_correctness_integer_and_format():
    environment = MathMultiRewardEnvironment({"num_workers": 8})
    result = environment.step(logs(RESPONSES), [{"ground_truth": "4"}] * len(RESPONSES), return_extracted_answer=True)
    parts = torch.stack([result.rewards[name] for name in ("reward/correctness", "reward/integer", "reward/format")], 1)
    assert [tuple(row) for row in parts.tolist()] == list(RESPONSES.values())
    observed = [observation["content"] for observation in result.observations]
    assert observed[0] == "Environment: correct" and observed[2] == "Environment: incorrect"
    assert result.terminateds.tolist() == [1] * len(RESPONSES) and result.answers[0] == "4"


def longer(completions, **columns):
    return [float(len(text)) for text in completions]


def even(completions, **columns):
    return [None if not text else float(len(text) % 2 == 0) for text in completions]


def test_reward_function_environment_returns_one_reward_component_per_function_with_as_parts():
    environment = RewardFunctionEnvironment({"functions": [longer, even], "weights": [0.5, 2.0], "as_parts": True})
    result = environment.step(logs(["ab", "abc", ""]), [{}, {}, {}])
    parts = {name: values.tolist() for name, values in result.rewards.items()}
    assert parts == {"longer": [2.0, 3.0, 0.0], "even": [1.0, 0.0, 0.0]}
    assert result.rewards.weights == {"longer": 0.5, "even": 2.0}
    summed = RewardFunctionEnvironment([longer, even], [0.5, 2.0]).step(logs(["ab", "abc", ""]), [{}, {}, {}])
    assert summed.rewards.tolist() == [3.0, 1.5, 0.0]
    twice = RewardFunctionEnvironment([even, even], as_parts=True).step(logs(["ab"]), [{}])
    assert len(twice.rewards) == 2 and all(values.tolist() == [1.0] for values in twice.rewards.values())


def test_reward_components_keep_their_weights_if_batches_are_merged_or_pickled():
    environment = RewardFunctionEnvironment([longer, even], [0.5, -2.0], as_parts=True)
    answers = [environment.step(logs([text]), [{}]) for text in ("ab", "abc")]
    merged = merged_returns([([1], answers[0]), ([0], answers[1])], 2).rewards
    again = pickle.loads(pickle.dumps(merged))
    assert again["longer"].tolist() == [3, 2] and again.weights == {"longer": 0.5, "even": -2.0}


def gdpo(*overrides):
    """Return the GDPO estimator of a configuration whose reward functions `longer` and `even` have the weights 0.5 and
    -2."""
    names = ", ".join(f"{__name__}.{function.__name__}" for function in (longer, even))
    section = f"++env={{reward_functions: {{functions: [{names}], weights: [0.5, -2.0], as_parts: true}}}}"
    given = ["data.train.data_path=x.jsonl", section, "grpo.adv_estimator.name=gdpo", *overrides]
    return grpo_advantages(load_grpo_config("grpo_jsonl.yaml", given)).estimator


def advantages(estimator, *names):
    """Return the advantages of a group of two samples with the rewards (1, 0) in the first and (0, 3) in the second
    component."""
    values = (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0]))
    parts = {f"reward/{name}": value for name, value in zip(names, values)}
    return estimator.compute_advantage(torch.zeros(2, 1), None, torch.ones(2, 1), parts)[:, 0].tolist()


def test_gdpo_uses_the_configured_weights_of_reward_functions():
    estimator = gdpo("grpo.adv_estimator.normalize_rewards=false")
    assert estimator.part_weights == {"longer": 0.5, "even": -2.0} and estimator.config.reward_weights is None
    explicit = gdpo(
        "grpo.adv_estimator.normalize_rewards=false",
        "env.reward_functions.weights=null",
        "grpo.adv_estimator.reward_weights=[-2.0,0.5]",
    )
    assert advantages(estimator, "longer", "even") == advantages(explicit, "longer", "even")
    assert advantages(estimator, "longer", "even")[0] > 0  # 0.5 * 0.5 + -2 * -1.5 before they are whitened
    assert advantages(estimator, "even", "of another")[0] < 0  # -2 * 0.5 + 1 * -1.5


def test_gdpo_ignores_weights_of_reward_functions_that_the_run_does_not_use():
    """The section `env.reward_functions` may be of another run, and the environment in use does not read it."""
    estimator = gdpo("data.train.env_name=math", "++env.math={num_workers: 1}")
    assert estimator.part_weights == {} and estimator.config.reward_weights is None
    assert len(advantages(estimator, "a", "b")) == 2


def test_reward_weights_in_both_environment_and_estimator_are_an_error_with_gdpo():
    with pytest.raises(ValueError, match="env.reward_functions.weights and .*adv_estimator.reward_weights are the"):
        gdpo("grpo.adv_estimator.reward_weights=[1,3]")
    assert gdpo(
        "grpo.adv_estimator.reward_weights=[1,3]", "env.reward_functions.weights=null"
    ).config.reward_weights == [1.0, 3.0]


@pytest.mark.parametrize("truth", [["4"], {"value": "4"}, True, None])
def test_ground_truth_that_is_not_a_string_matches_no_response(truth):
    log = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": str(truth)}]
    returned = MathMultiRewardEnvironment({}).step([log], [{"ground_truth": truth}])
    assert returned.rewards["reward/correctness"].tolist() == [0.0]
