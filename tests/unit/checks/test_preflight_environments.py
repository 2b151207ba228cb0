import sys

import pytest
from nemo_rl_cpp import dotted_names
from nemo_rl_cpp.checks.data import check_environments
from nemo_rl_cpp.config import load_eval_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.dotted_names import LoadingError, import_object
from nemo_rl_cpp.environments.loading import environment_class

MODULE = """\
def right(completions, **_): return [1.0 for _ in completions]
class Holder:
    class Inner:
        @staticmethod
        def right(completions): return [1.0 for _ in completions]
class Odd:
    def __init__(self, cfg): pass
class Actor:
    @classmethod
    def remote(cls, cfg): return cls()
    def step(self, message_log_batch, metadata): pass
"""


@pytest.fixture(autouse=True)
def with_a_module(tmp_path, monkeypatch):
    (tmp_path / "preflight_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dotted_names, "searched", [])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("preflight_module", None)


def found(*overrides, load=load_grpo_config, config="grpo_tiny.yaml"):
    return [str(finding) for finding in check_environments(load(config, list(overrides)))]


def rewards(names):
    return ["data.default.env_name=reward_functions", f"+env={{reward_functions: {{functions: [{names}]}}}}"]


@pytest.mark.parametrize("config, load", [
    ("grpo_tiny.yaml", load_grpo_config), ("ppo_tiny.yaml", load_ppo_config), ("evals/eval.yaml", load_eval_config),
    ("grpo_multiple_datasets.yaml", load_grpo_config), ("grpo_guess_number.yaml", load_grpo_config), ("grpo_code_smollm2.yaml", load_grpo_config),
])  # fmt: skip
def test_preflight_check_of_shipped_configurations_gives_no_environment_error(config, load):
    assert found(config=config, load=load) == []


def test_preflight_check_accepts_valid_reward_functions_and_environments():
    assert found(*rewards("preflight_module.right, preflight_module.Holder.Inner.right, os.path.join")) == []
    assert found("data.default.env_name=preflight_module.Actor", "+env={preflight_module.Actor: {}}") == []


def test_gdpo_requires_several_reward_functions_whose_rewards_are_kept_as_parts():
    def of(section, *more):
        names = "functions: [preflight_module.right, preflight_module.Holder.Inner.right], "
        given = f"+env={{reward_functions: {{{names if 'functions' not in section else ''}{section}}}}}"
        return found("data.default.env_name=reward_functions", given, "grpo.adv_estimator.name=gdpo", *more)

    assert of("as_parts: true, weights: [1.0, 0.5]") == []
    (told,) = of("weights: [1.0, 0.5]")
    assert told.startswith("env.reward_functions.as_parts must be true with adv_estimator.name gdpo")
    (told,) = of("as_parts: true, functions: [preflight_module.right]")
    assert told.startswith(
        "env.reward_functions.functions names one function, but adv_estimator.name gdpo weighs the parts"
    )


def test_preflight_check_tests_the_environments_of_all_data_sets():
    given = ["data.train.env_name=preflight_module.Odd", "data.validation.env_name=nowhere.Env"]
    first, second = found(*given, "+env={preflight_module.Odd: {}, nowhere.Env: {}}")
    assert first.startswith("env.preflight_module.Odd cannot be used: ") and "EnvironmentInterface" in first
    assert second.startswith("env.nowhere.Env cannot be used: ") and "no module nowhere" in second


@pytest.mark.parametrize("name", ["", "right", ".right", "a..b", "a.b c", "1.2", None, 3, ["a.b"]])
def test_preflight_check_reports_a_reward_function_that_is_not_a_dotted_python_name(name):
    with pytest.raises(LoadingError, match="is no dotted name"):
        import_object(name, "reward function")


def test_error_for_a_misspelt_environment_name_suggests_a_registered_name():
    assert environment_class("arithmetic").__name__ == "ArithmeticEnvironment"
    with pytest.raises(LoadingError, match=r"no environment is called 'arithmetik'; did you mean arithmetic\?"):
        environment_class("arithmetik")
