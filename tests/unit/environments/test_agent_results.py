import asyncio
import math

import pytest
from nemo_rl_cpp.environments.agents import AgentEnvironment, AgentResult, AgentTask


class Playing(AgentEnvironment):
    """An agent that returns or raises an outcome per task, or never ends if the outcome is None."""

    def __init__(self, *outcomes, timeout_s=60.0):
        super().__init__(4, timeout_s)
        self.outcomes = outcomes

    async def roll_out(self, task):
        outcome = self.outcomes[int(task.key)]
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def play(self):
        return self.run_rollouts([AgentTask(str(n), [], {}, None) for n in range(len(self.outcomes))])


def test_timeout_error_raised_inside_agent_code_is_counted_as_an_error_and_not_as_a_timeout(capsys):
    playing = Playing(TimeoutError("the page did not load"))
    (result,) = playing.play()
    assert "the page did not load" in result.error
    metrics = playing.pop_metrics()
    assert metrics["agent_errors"] == 1 and metrics["agent_timeouts"] == 0
    assert "the page did not load" in capsys.readouterr().out


def test_agent_rollouts_that_exceed_the_timeout_are_counted_and_give_one_warning(capsys):
    playing = Playing(None, None, AgentResult(1.0), timeout_s=0.01)
    late, _, good = playing.play()
    assert late.error == "it was not over within 0.01 s (timeout_s)" and good.reward == 1.0
    metrics = playing.pop_metrics()
    assert metrics["agent_errors"] == 0 and metrics["agent_timeouts"] == 2
    assert capsys.readouterr().out.count("not over within 0.01 s") == 1


@pytest.mark.parametrize(("result", "said"), [
    (AgentResult(math.nan), "the agent's reward is nan; it must be a finite number"),
    (AgentResult(None), "the agent's reward is None"),
    (AgentResult("1"), "the agent's reward is '1'"),
    (AgentResult({"a": 1.0, "b": math.inf}), "the agent's reward b is inf"),
    (AgentResult(1.0, metrics={"m": math.nan}), "the agent's metric m is nan"),
])  # fmt: skip
def test_agent_reward_that_is_not_a_finite_number_is_an_error(result, said):
    playing = Playing(result)
    (failed,) = playing.play()
    assert said in failed.error and failed.reward == 0.0
    assert playing.pop_metrics()["agent_errors"] == 1


def test_integer_and_boolean_agent_rewards_are_converted_to_floats():
    (result,) = Playing(AgentResult({"a": True, "b": 2}, metrics={"m": 3})).play()
    assert result == AgentResult({"a": 1.0, "b": 2.0}, metrics={"m": 3.0})
