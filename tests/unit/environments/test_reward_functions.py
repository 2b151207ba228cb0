import asyncio
import math
from functools import partial

import numpy as np
import pytest
import torch
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.user_code import serve

LOGS = [[{"role": "user", "content": f"{n}="}, {"role": "assistant", "content": str(n)}] for n in range(3)]
INFO = [{"answer": str(n)} for n in range(3)]


def rewards(functions, weights=None):
    return RewardFunctionEnvironment(functions, weights).step(LOGS, INFO).rewards.tolist()


class Fixed:
    def __init__(self, value):
        self.value = value

    def __call__(self, completions):
        return [self.value] * len(completions)


def scaled(completions, factor):
    return [factor * float(text) for text in completions]


async def later(completions, answer):
    await asyncio.sleep(0)
    return [float(c == a) for c, a in zip(completions, answer)]


def test_each_reward_function_is_logged_as_a_separate_metric():
    def metrics(*functions):
        environment = RewardFunctionEnvironment(functions)
        environment.step(LOGS, INFO)
        return environment.pop_metrics()

    one = lambda completions: [1.0] * 3  # noqa: E731
    two = lambda completions: [2.0] * 3  # noqa: E731
    assert metrics(one, two) == {"rewards/<lambda>_1": 1.0, "rewards/<lambda>_2": 2.0}
    fixed = {"rewards/Fixed_1": 4.0, "rewards/Fixed_2": 5.0, "rewards/later": 1.0}
    assert metrics(Fixed(4.0), Fixed(5.0), later) == fixed

    def scaled_1(completions):
        return [7.0] * 3

    assert metrics(scaled_1, partial(scaled, factor=1), partial(scaled, factor=2)) == {
        "rewards/scaled_1": 7.0, "rewards/scaled_2": 1.0, "rewards/scaled_3": 2.0}  # fmt: skip


def test_a_reward_function_gets_a_column_named_function():
    def called(completions, function):
        return [float(name == "add") for name in function]

    environment = RewardFunctionEnvironment(called)
    assert environment.step(LOGS[:2], [{"function": "add"}, {"function": "sub"}]).rewards.tolist() == [1.0, 0.0]


def test_async_reward_functions_are_awaited():
    assert rewards(later) == [1.0, 1.0, 1.0]

    class Judge:
        async def __call__(self, completions):
            return [0.5] * len(completions)

    assert rewards([later, Judge(), partial(later)]) == [2.5] * 3

    async def notebook():  # whose thread has a loop that runs
        return rewards(later)

    assert asyncio.run(notebook()) == [1.0, 1.0, 1.0]

    async def fails(completions):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        rewards(fails)


def test_async_reward_functions_of_a_run_wait_at_the_same_time():
    here = []

    async def judge(completions):
        here.append(completions)
        async with asyncio.timeout(9):
            while len(here) < 2:
                await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    assert serve(lambda: rewards([judge, judge])) == [2.0] * 3


@pytest.mark.parametrize(
    "values",
    [[1, 2, 3], (1.0, 2.0, 3.0), iter([1, 2, 3]), np.array([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0]), [np.float32(1), torch.tensor(2), 3], range(1, 4),
     {1: "a", 2: "b", 3: "c"}.keys()],
)  # fmt: skip
def test_reward_functions_may_return_any_kind_of_sequence(values):
    assert rewards(lambda completions: values) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("returned", "message"), [
    (0.5, "must return one number a completion, a list of 3, but returned 0.5"),
    (3, "but returned 3"),
    (None, "must return one number a completion, a list of 3, but returned None"),
    (True, "but returned True"),
    ("111", "but returned '111'"),
    ({"a": 1}, "but returned a dict"),
    ({1, 2, 3}, "but returned a set"),
    (torch.tensor(0.5), "but returned a Tensor"),
    (torch.zeros(3, 1), r"but returned a Tensor of shape \(3, 1\)"),
    ([1, 2], "returned 2 rewards for 3 completions"),
    ([1, 2, math.nan], "the reward of mine for completion 2 is nan; it must be a finite number or None"),
    ([1, 2, 1e300], "the reward of mine for completion 2 is 1e.300; it must be a number of at most 3.403e.38 or None"),
    ([1, math.inf, 2], "completion 1 is inf"),
    ([1, "2", 3], "completion 1 is '2'"),
    ([1, [2], 3], "completion 1 is a list"),
    ([1, 10**400, 3], "completion 1 is 1000"),
    ([1, 2j, 3], "completion 1 is a complex"),
])  # fmt: skip
def test_invalid_rewards_are_rejected_with_a_one_line_error(returned, message):
    def mine(completions):
        return returned

    words = f"reward function mine {message}" if message.startswith(("must", "returned")) else message
    with pytest.raises(ValueError, match=words) as caught:
        rewards(mine)
    assert "\n" not in str(caught.value)


def test_completions_without_a_reward_from_any_function_give_one_warning(capsys):
    environment = RewardFunctionEnvironment(lambda completions: [None, 1.0, None])
    assert environment.step(LOGS, INFO).rewards.tolist() == [0.0, 1.0, 0.0]
    environment.step(LOGS, INFO)
    said = "2 of 3 completions got None from every reward function; such ones count as 0"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(("functions", "weights", "message"), [
    (3, None, "reward_funcs is 3; it must be a function, the dotted name of one, or a list"),
    (b"a.b", None, "reward_funcs is b'a.b'"),
    ({scaled}, None, "reward_funcs is {<function"),
    ([], None, "no reward function was given"),
    ([scaled, 3], None, "reward function 3 is of type int, which cannot be called: give a function"),
    (scaled, "1", "must be a list of numbers"),
    (scaled, ["1"], "a weight of a reward function = '1': expected a number"),
    (scaled, [True], "a weight of a reward function = True"),
    (scaled, [math.nan], "a weight of a reward function = nan"),
    (scaled, [1, 2], "1 reward functions and 2 weights"),
    ({"functions": scaled, 1: 2}, None, "takes functions, weights, names and as_parts"),
])  # fmt: skip
def test_invalid_reward_functions_and_weights_are_errors(functions, weights, message):
    with pytest.raises(ValueError, match=message) as caught:
        RewardFunctionEnvironment(functions, weights)
    assert "\n" not in str(caught.value)


def test_single_number_is_accepted_as_weights_of_a_single_reward_function():
    assert rewards(Fixed(2.0), 0.5) == [1.0] * 3
    assert rewards([Fixed(2.0), Fixed(1.0)], (0.5, np.float64(2))) == [3.0] * 3
