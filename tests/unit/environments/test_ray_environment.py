import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import user_kinds
from fakes import EchoEnvironment
from nemo_rl_cpp.config import ConfigError
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed import get
from nemo_rl_cpp.distributed.ray_workers import ray_in_use, ray_module, start_ray
from nemo_rl_cpp.environments import remote
from nemo_rl_cpp.environments.arithmetic_environment import ReverseDigitsEnvironment
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.math_environment import MathEnvironment
from nemo_rl_cpp.environments.remote import (
    ActorSettings,
    EnvironmentLostError,
    LocalActor,
    RayEnvironment,
    answer_of,
    ray_environment,
)
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.rollouts.rollout_metrics import environment_metrics
from nemo_rl_cpp.rollouts.rollouts import calculate_rewards
from processes import wait_until_gone

SETTINGS = ActorSettings(deadline=120.0, restarts=2)
LOGS = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": f"\\boxed{{{i}}}"}] for i in range(7)]
TRUTHS = [{"ground_truth": str(i if i % 3 else 99)} for i in range(7)]


def same(first: EnvironmentReturn, second: EnvironmentReturn) -> bool:
    tensors = torch.equal(first.rewards, second.rewards) and torch.equal(first.terminateds, second.terminateds)
    return tensors and first._replace(rewards=0, terminateds=0) == second._replace(rewards=0, terminateds=0)


class WhereItRuns(ReverseDigitsEnvironment):
    """An environment that returns its working directory, process id, thread and environment variables."""

    can_be_asked_again = False

    def where(self):
        return os.getcwd(), os.getpid()

    def is_in_main_thread(self):
        return threading.current_thread() is threading.main_thread()

    def variables(self, *names):
        return [os.environ.get(name) for name in names]


def signals_itself(prompts, completions, **columns):
    """A reward function that sets a signal handler, as verifiers with a time limit do."""
    heard = []
    signal.signal(signal.SIGALRM, lambda *_: heard.append(1.0))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not heard:
        pass
    return heard * len(completions)


def judged_by_math_verify(prompts, completions, **columns):
    from math_verify import parse, verify

    return [float(verify(parse(text), parse(text))) for text in completions]  # each with a time limit by signal.alarm


def test_remote_environment_runs_in_the_current_process_if_ray_is_not_started():
    assert ray_in_use() is None and isinstance(EchoEnvironment.remote({}), LocalActor)
    assert isinstance(EchoEnvironment.options(num_cpus=1).remote({}), LocalActor)


def test_remote_environment_runs_in_the_current_process_if_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert ray_in_use() is None and isinstance(EchoEnvironment.remote({}), LocalActor)


def test_config_error_keeps_its_message_when_pickled():
    with pytest.raises(ConfigError) as caught:
        MathEnvironment({"num_workers": 0})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.fixture(scope="module")
def ray():
    module = ray_module()
    assert start_ray(2)
    yield module
    module.shutdown()


def pid_of(ray, env):
    """Return the process id of the environment's actor; wait if the actor is being restarted."""
    return ray.get(env._actor.__ray_call__.remote(lambda _: os.getpid()), timeout=120)


@pytest.mark.slow
def test_environments_in_ray_actors_support_the_remote_calls_of_nemo_rl(ray):
    """The test includes a lost actor, whose metrics start over, and errors of the constructor."""
    here = MathEnvironment({"num_workers": 1})
    wanted, metrics = here.step(LOGS, TRUTHS, return_extracted_answer=True), here.pop_metrics()
    here.shutdown()
    with pytest.raises(ConfigError, match="verifier_type must be one of"):
        MathEnvironment.remote({"verifier_type": "poetry"})
    env = MathEnvironment.options(num_cpus=0, runtime_env={"env_vars": {"SEEN": "1"}}).remote({"num_workers": 2})
    assert isinstance(env, RayEnvironment) and env.scores_rows_alone is True and not hasattr(env, "nonsense")
    assert same(ray.get(env.step.remote(LOGS, TRUTHS, return_extracted_answer=True)), wanted)
    first = pid_of(ray, env)
    assert ray.get(env.pop_metrics.remote()) == metrics
    with pytest.raises(KeyError) as caught:
        get(env.step.remote(LOGS, [{}] * 7))
    assert "math_environment.py" in caught.value.__notes__[0]
    ray.get(env.step.remote(LOGS, TRUTHS))
    os.kill(first, signal.SIGKILL)
    batch = {"message_log": LOGS, "extra_env_info": TRUTHS, "task_name": ["math"] * 7}
    assert calculate_rewards(batch, {"math": env}).rewards.tolist() == wanted.rewards.tolist()
    assert environment_metrics({"math": env}) == metrics
    assert same(ray.get(env.step.remote(LOGS, TRUTHS, return_extracted_answer=True)), wanted)
    second = pid_of(ray, env)
    assert second != first
    env.close()
    assert not wait_until_gone([second])


@pytest.mark.slow
def test_reward_functions_run_in_the_main_thread_of_their_ray_actor(ray):
    """Python allows signal handlers only in the main thread."""
    own = {function.__name__: f"{__name__}.{function.__name__}" for function in (signals_itself, judged_by_math_verify)}
    functions = own | {name: f"user_kinds.{name}" for name in user_kinds.KINDS}
    settings = {"functions": [*functions.values()], "names": [*functions]}
    env = ray_environment(RewardFunctionEnvironment, (settings,), {}, SETTINGS)
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": f"${i}$"}] for i in (7, 77, 1)]
    for _ in range(2):  # async functions meet the event loop of their first call again
        env.step(logs, [{}] * 3)
        means = {f"rewards/{name}": 1.0 if name in own else pytest.approx(1 / 3) for name in functions}
        assert env.pop_metrics() == means
    env.close()


@pytest.mark.slow
def test_environment_in_a_ray_actor_has_working_directory_and_variables_of_the_run(ray, tmp_path, monkeypatch):
    """Ray already runs in another folder. The environment's class does not set `can_be_asked_again`."""
    monkeypatch.chdir(tmp_path)
    given = {
        "JUDGE_KEY": "a secret key = 7\u00e4", "EMPTY": "", "OMP_NUM_THREADS": "7", "HOSTNAME": "not here", "SLURM_PROCID": "3",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    options = {"runtime_env": {"env_vars": {"EMPTY": "of the actor"}}}
    env = ray_environment(WhereItRuns, ({},), {}, SETTINGS, options)
    judge, empty, threads, host, process = env.variables(*given)
    assert (judge, empty, threads) == (given["JUDGE_KEY"], "of the actor", "1")
    assert host != "not here" and process is None
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = [file.read_text(errors="replace") for file in logs.rglob("*") if file.is_file()]
    assert any("OMP_NUM_THREADS" in text for text in texts)  # Ray logs what is in a runtime_env
    assert not any("a secret key" in text for text in texts)

    folder, pid = ray.get(env.where.remote())
    assert folder == str(tmp_path) and env.where() == (folder, pid) and env.is_in_main_thread()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentLostError, match=r"game \(RayEnv.*WhereItRuns.*is lost.*can_be_asked_again"):
        answer_of(env, env.step.remote([], []), "game")
    env.close()
    monkeypatch.setattr(remote, "DEADLINE_S", 0.2)
    never = ray.remote(lambda: time.sleep(30)).options(num_cpus=0).remote()
    with pytest.raises(EnvironmentLostError, match="gave no answer for 0.2 s"):
        answer_of(None, never, "theirs")
    ray.cancel(never, force=True)


@pytest.mark.slow
def test_error_for_a_ray_actor_that_does_not_start_names_the_environment(ray, monkeypatch):
    monkeypatch.setattr(remote, "START_SECONDS", 0.0)  # as if its process were stopped
    with pytest.raises(TimeoutError, match="no answer from an actor of ReverseDigitsEnvironment within 0 s"):
        ray_environment(ReverseDigitsEnvironment, ({},), {}, SETTINGS)


def test_cluster_section_determines_the_ray_resources_of_environment_actors():
    cluster = ClusterConfig(
        executor="ray", gpus_per_node=2, cpus_per_worker=3, worker_timeout_s=5.0, environment_restarts=1
    )
    assert ActorSettings.of(cluster) == ActorSettings(1800.0, 1, 6)
