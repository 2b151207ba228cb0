"""Environments as Ray actors: the same answers, several actors each, and what happens when one is lost."""

import os
import pickle
import signal
import time

import pytest
import torch
from fakes import EchoEnvironment
from nemo_rl_cpp.config import ConfigError
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed import get
from nemo_rl_cpp.distributed.ray_session import ray_in_use, ray_module, start_ray
from nemo_rl_cpp.environments import ray_environment as rooms
from nemo_rl_cpp.environments import remote
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.math_environment import MathEnvironment
from nemo_rl_cpp.environments.ray_environment import ActorSettings, RayEnvironment, joined, ray_environment
from nemo_rl_cpp.environments.remote import EnvironmentLostError, LocalActor, answer_of
from nemo_rl_cpp.environments.reverse_digits_environment import ReverseDigitsEnvironment
from nemo_rl_cpp.experience.rollout_metrics import environment_metrics
from nemo_rl_cpp.experience.turns import calculate_rewards
from processes import alive, wait_until_gone

SETTINGS = ActorSettings(silence=3.0, deadline=120.0, restarts=2)
LOGS = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": f"\\boxed{{{i}}}"}] for i in range(7)]
TRUTHS = [{"ground_truth": str(i if i % 3 else 99)} for i in range(7)]


def same(first: EnvironmentReturn, second: EnvironmentReturn) -> bool:
    tensors = torch.equal(first.rewards, second.rewards) and torch.equal(first.terminateds, second.terminateds)
    return tensors and first._replace(rewards=0, terminateds=0) == second._replace(rewards=0, terminateds=0)


class WhereItRuns(ReverseDigitsEnvironment):
    """Says in which folder and process it is."""

    can_be_asked_again = False

    def where(self):
        return os.getcwd(), os.getpid()


def test_without_ray_the_same_call_stays_in_this_process():
    assert ray_in_use() is None and isinstance(EchoEnvironment.remote({}), LocalActor)
    assert isinstance(EchoEnvironment.options(num_cpus=1).remote({}), LocalActor)
    with pytest.raises(ValueError, match=r"options\(num_gpus=1\).*start Ray"):
        EchoEnvironment.options(num_gpus=1)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'nemo_rl_cpp\[ray\]'"):
        ray_module()
    assert ray_in_use() is None and isinstance(EchoEnvironment.remote({}), LocalActor)


def test_parts_become_one_answer():
    env = ReverseDigitsEnvironment({})
    infos = [{"ground_truth": "12"}] * 5
    logs = [[{"role": "assistant", "content": text}] for text in ("12", "1", "", "21", "12 ")]
    parts = [env.step(logs[i : i + 2], infos[i : i + 2]) for i in range(0, 5, 2)]
    assert same(joined([*parts, env.step([], [])]), env.step(logs, infos))
    named = [part._replace(rewards={"a": part.rewards, "b": -part.rewards}) for part in parts]
    assert torch.equal(joined(named).rewards["b"], -env.step(logs, infos).rewards)


def test_an_error_of_a_configuration_survives_its_way():
    with pytest.raises(ConfigError) as caught:
        MathEnvironment({"num_workers": 0})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.fixture(scope="module")
def ray():
    module = ray_module()
    assert start_ray(2)
    yield module
    module.shutdown()


def wait_for_new_pids(env, old):
    end = time.monotonic() + 120
    while (set(env.pids) & set(old) or len(env.pids) < len(old)) and time.monotonic() < end:
        time.sleep(0.05)
    return env.pids


@pytest.mark.slow
def test_code_written_for_nemo_rl(ray):
    """`Class.remote(cfg)`, `env.step.remote`, `ray.get`; rows over two actors, each lost once; its constructor's own errors."""
    here = MathEnvironment({"num_workers": 1})
    wanted, metrics = here.step(LOGS, TRUTHS, return_extracted_answer=True), here.pop_metrics()
    here.shutdown()
    with pytest.raises(ConfigError, match="verifier_type must be one of"):
        MathEnvironment.remote({"verifier_type": "poetry"})
    env = MathEnvironment.options(num_cpus=0, runtime_env={"env_vars": {"SEEN": "1"}}).remote({"num_workers": 2})
    assert isinstance(env, RayEnvironment) and env.scores_rows_alone is True and not hasattr(env, "nonsense")
    assert same(ray.get(env.step.remote(LOGS, TRUTHS, return_extracted_answer=True)), wanted)
    first = wait_for_new_pids(env, [0, 0])
    assert len(set(first)) == 2 and ray.get(env.pop_metrics.remote()) == metrics
    with pytest.raises(KeyError) as caught:
        get(env.step.remote(LOGS, [{}] * 7))
    assert "math_environment.py" in caught.value.__notes__[0]
    ray.get(env.pop_metrics.remote())
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    assert same(ray.get(env.step.remote(LOGS, TRUTHS, return_extracted_answer=True)), wanted)
    assert ray.get(env.pop_metrics.remote()) == metrics
    pids = wait_for_new_pids(env, first)
    env.close()
    assert not wait_until_gone(pids)


@pytest.mark.slow
def test_a_stopped_actor_is_replaced_and_its_counts_are_not_lost(ray):
    """The restarted process is given the earlier calls of the step again, so the metrics are those of an unbroken one."""
    env = ray_environment(ReverseDigitsEnvironment, ({},), {}, SETTINGS)
    logs = [[{"role": "assistant", "content": text}] for text in ("12", "1", "21", "12")]
    infos = [{"ground_truth": "12"}] * 4
    batch = {"message_log": logs, "extra_env_info": infos, "task_name": ["digits"] * 4}
    assert calculate_rewards(batch, {"digits": env}).rewards.tolist() == [1.0, 0.5, 0.0, 1.0]
    pid = wait_for_new_pids(env, [0])[0]
    os.kill(pid, signal.SIGSTOP)
    assert answer_of(env, env.step.remote(logs[:1], infos[:1]), "digits").rewards.tolist() == [1.0]
    assert not alive(pid) and environment_metrics({"digits": env}) == {"exactly_right": 3 / 5}
    env.close()


@pytest.mark.slow
def test_one_that_may_not_be_asked_again_ends_the_run_by_its_name(ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not where Ray was started
    env = ray_environment(WhereItRuns, ({},), {}, SETTINGS)
    folder, pid = ray.get(env.where.remote())
    assert folder == str(tmp_path) and env.where() == (folder, pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        EnvironmentLostError, match=r"the environment game \(RayEnvironment\(WhereItRuns.*is lost.*can_be_asked_again"
    ):
        answer_of(env, env.step.remote([], []), "game")
    monkeypatch.setattr(remote, "DEADLINE_S", 0.2)
    never = ray.remote(lambda: time.sleep(30)).options(num_cpus=0).remote()
    with pytest.raises(EnvironmentLostError, match="gave no answer for 0.2 s"):
        answer_of(None, never, "theirs")
    ray.cancel(never, force=True)
    env.close()


class StopsOnce(ReverseDigitsEnvironment):
    """Its process is stopped while it is made for the first time."""

    def __init__(self, settings):
        super().__init__({})
        if not os.path.exists(settings["made"]):
            open(settings["made"], "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_an_actor_that_is_stopped_while_it_starts_is_replaced(ray, tmp_path):
    env = ray_environment(StopsOnce, ({"made": str(tmp_path / "made")},), {}, SETTINGS)
    assert (tmp_path / "made").exists() and env.pop_metrics() is not None
    env.close()


@pytest.mark.slow
def test_an_actor_that_does_not_start_ends_the_run_by_its_name(ray, monkeypatch):
    monkeypatch.setattr(rooms, "START_SECONDS", 0.0)  # as if its process were stopped
    with pytest.raises(
        TimeoutError, match="no answer from an actor of ReverseDigitsEnvironment within 0 s of its start"
    ):
        ray_environment(ReverseDigitsEnvironment, ({},), {}, SETTINGS)


def test_settings_come_from_the_cluster():
    cluster = ClusterConfig(
        executor="ray", gpus_per_node=2, cpus_per_worker=3, worker_timeout_s=5.0, environment_restarts=1
    )
    assert ActorSettings.of(cluster) == ActorSettings(5.0, 1800.0, 1, 6)
