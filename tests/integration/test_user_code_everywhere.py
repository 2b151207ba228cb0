"""The user's code gives the same rewards as reward function, environment or agent, in every mode of a run."""

import json
import os
import threading

import nemo_rl_cpp
import pytest
import tiny
import torch
import user_kinds
from nemo_rl_cpp import run_grpo_math
from nemo_rl_cpp.algorithms.callbacks import Callbacks
from nemo_rl_cpp.environments.loading import ENV_REGISTRY, register_env
from test_dedicated_engines import apart
from tiny import workers

pytestmark = pytest.mark.usefixtures("forked_workers")
STEPS = 3
PLACES = {
    "reward": (
        f"++env.reward_functions.functions=[{','.join(f'user_kinds.{name}' for name in user_kinds.KINDS)}]",
        f"++env.reward_functions.names=[{','.join(user_kinds.KINDS)}]", "data.default.env_name=reward_functions",
    ),
    "environment": ("++env.kinds={}", "data.default.env_name=kinds"),
    "agent": (
        "++env.agent.function=user_kinds.agent", "data.default.env_name=agent", "++data.default.processor=agent_data_processor",
        "policy.generation.expose_http_server=true",
    ),
}  # fmt: skip
WAYS = {
    "processes": workers(2),
    "async_grpo": (*[text.format("grpo") for text in apart(1, 1)], "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"),
}  # fmt: skip
COMMON = (
    *tiny.SMALL, f"grpo.max_num_steps={STEPS}", "policy.optimizer.kwargs.lr=0", "policy.optimizer.kwargs.weight_decay=0",
    "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.enabled=false", "logger.report=false",
    "logger.tensorboard_enabled=false",
)  # fmt: skip


def rewards_of(rows):
    """Return {kind of reward function: its mean reward in each step}."""
    return {name: [row[f"rewards/{name}"] for row in rows] for name in user_kinds.KINDS}


def by_command_line(place, folder):
    """Return {kind: mean rewards} of a run of the script, with a relative log folder although a reward function calls
    os.chdir."""
    assert run_grpo_math.main(["--config", "grpo_tiny.yaml", "logger.log_dir=logs", *COMMON, *PLACES[place]]) == 0
    lines = (folder / "logs" / "exp_001" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    names = {f"train/rewards/{name}": name for name in user_kinds.KINDS}
    found = {name: {} for name in user_kinds.KINDS}
    for row in rows:
        for key in names.keys() & row.keys():
            found[names[key]][row["step"]] = row[key]
    return {name: list(values.values()) for name, values in found.items()}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_env("kinds", "user_kinds.Environment")
    yield
    del ENV_REGISTRY["kinds"]


@pytest.fixture(autouse=True)
def torch_as_before():
    threads = torch.get_num_threads()
    yield
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the rewards of a run in this process with a plain reward function."""
    with tiny.make(
        tmp_path_factory.mktemp("expected"), *COMMON,
        "++env.reward_functions.functions=[user_kinds.plain]", "data.default.env_name=reward_functions",
    ) as run:  # fmt: skip
        run.train()
        rewards = [row["reward"] for row in run.history]
    assert len(set(rewards)) > 1  # something is there to be lost
    return rewards


@pytest.mark.parametrize("place", PLACES)
def test_sync_async_and_threaded_rewards_are_equal_on_the_command_line(place, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards = by_command_line(place, tmp_path)
    assert os.getcwd() == str(tmp_path)
    if place == "agent":  # whose answers are drawn by the request
        expected = rewards["plain"]
        assert any(expected)
    assert rewards == {name: pytest.approx(expected, rel=1e-6) for name in user_kinds.KINDS}


@pytest.mark.parametrize("place", ["reward", "environment"])
@pytest.mark.parametrize("way", WAYS)
def test_sync_async_and_threaded_rewards_are_equal_in_every_training_mode(way, place, expected, tmp_path):
    with tiny.make(tmp_path, *COMMON, *PLACES[place], *WAYS[way]) as run:
        run.train()
        assert rewards_of(run.history) == {name: pytest.approx(expected, rel=1e-6) for name in user_kinds.KINDS}


def test_sync_async_and_threaded_rewards_are_equal_in_the_python_api(tmp_path, monkeypatch):
    """The second run reuses the functions of the first, as in a notebook."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}{b}="} for a in range(10) for b in range(10)]
    for _ in range(2):
        result = nemo_rl_cpp.train_grpo(
            "tiny-random", rows, dict(user_kinds.KINDS), 2, num_prompts_per_step=16, num_generations=4, max_new_tokens=3,
            max_length=16, log_dir="logs",
        )  # fmt: skip
        rewards = rewards_of(result.history)
        assert all(values == rewards["plain"] for values in rewards.values()) and rewards["plain"][0] > 0
        assert result.log_dir.parent == tmp_path / "logs"
    found = nemo_rl_cpp.evaluate(result, rows, dict(user_kinds.KINDS), temperature=1.0).metrics
    assert {found[f"rewards/{name}"] for name in user_kinds.KINDS} == {found["rewards/plain"]} != {0.0}


def test_stopping_an_async_run_does_not_wait_for_an_unfinished_async_reward_call(tmp_path):
    class Stop(nemo_rl_cpp.Callback):
        def on_step(self, event):
            event.stop()

    way = WAYS["async_grpo"]
    with tiny.make(
        tmp_path, *COMMON, *PLACES["environment"], *way, "grpo.max_num_steps=50", callbacks=Callbacks([Stop()])
    ) as run:
        run.train()
        assert run.state.step == 1


def test_custom_losses_estimators_and_callbacks_are_called_in_the_main_thread(tmp_path):
    threads = {}

    def note(what):
        threads[what] = threading.current_thread()

    def loss(next_token_logprobs, data):
        note("loss")
        torch.set_default_dtype(torch.float64)
        return -(next_token_logprobs * data["advantages"][:, 1:] * data["token_mask"][:, 1:]).mean()

    def estimator(rewards, mask):
        note("estimator")
        os.chdir("/")
        return rewards - rewards.mean()

    class Callback(nemo_rl_cpp.Callback):
        def on_step(self, event):
            note("callback")
            torch.set_grad_enabled(False)

        def on_validation(self, event):
            note("validation")
            self.again = event.run.validate()  # a run within the run's callback

    before = os.getcwd()
    rows = [{"prompt": f"{a}{b}="} for a in range(10) for b in range(10)]
    nemo_rl_cpp.train_grpo(
        "tiny-random", rows, user_kinds.coroutine, 2, validation=rows[:8], loss_fn=loss, adv_estimator=estimator,
        callbacks=Callback(), num_prompts_per_step=8, num_generations=4, max_new_tokens=3, max_length=16, log_dir=tmp_path,
    )  # fmt: skip
    assert threads == dict.fromkeys(("loss", "estimator", "callback", "validation"), threading.main_thread())
    assert os.getcwd() == before
