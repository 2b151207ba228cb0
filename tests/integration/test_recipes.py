"""The components in tests/recipes, each registered in one file, work in a GRPO run."""

import importlib
import sys

import pytest
import tiny
from documents.snippets import ROOT
from nemo_rl_cpp.config import ConfigError, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.data import DATASET_REGISTRY
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.config.logger import LOGGER_BACKENDS, LoggerConfig, register_logger
from nemo_rl_cpp.config.loop import ADVANTAGE_ESTIMATORS, AdvEstimatorConfig
from registered import forget

sys.path.insert(0, str(ROOT / "docs" / "site"))
from configuration_pages import document  # noqa: E402

ADDED = {
    "best_of_group": (ADVANTAGE_ESTIMATORS.data, AdvEstimatorConfig, ("num_best",)),
    "even_digits": (ENV_REGISTRY,),
    "count_down": (DATASET_REGISTRY.data,),
    "csv": (LOGGER_BACKENDS.data, LoggerConfig, ("csv", "csv_enabled")),
}
FILES = ("best_of_group", "even_digits", "count_down", "csv_logger")


@pytest.fixture
def recipes():
    """Import the four recipe modules anew, and unregister their components afterwards."""
    modules = {name: importlib.import_module(f"recipes.{name}") for name in FILES}
    yield modules
    for name, (entries, *more) in ADDED.items():
        forget(entries, name, *more)
    for name in FILES:
        del sys.modules[f"recipes.{name}"]


CHOSEN = (
    "grpo.adv_estimator.name=best_of_group", "++grpo.adv_estimator.num_best=2",
    "data.train={dataset_name:count_down,last:2}", "~data.train.num_digits", "data.validation=null", "data.default.env_name=even_digits",
    "++env.even_digits.weight=0.5", "++logger.csv_enabled=true", "++logger.csv.file=numbers.csv",
)  # fmt: skip


def test_run_uses_estimator_environment_data_set_and_logger_registered_by_the_user(recipes, tmp_path):
    run = tiny.make(tmp_path, *tiny.SMALL, *CHOSEN, "grpo.max_num_steps=2")
    with run:
        run.train()
    first, second = run.history
    assert first["advantage/counted"] == second["advantage/counted"] == 0.5  # two of each four
    assert first["calls_of_even_digits"] > 0 and 0 < first["reward"] <= 0.5
    prompts = {row["messages"][0]["content"] for row in recipes["count_down"].CountDown(last=2).dataset}
    assert prompts == {f"{n}=" for n in range(2, 10)} and run.config.data.train.dataset_name == "count_down"
    lines = [line.split(",") for line in (run.log_dir / "csv" / "numbers.csv").read_text().splitlines()]
    logged = {(int(step), name): float(value) for step, name, value in lines}
    assert logged[1, "train/reward"] == first["reward"] and logged[2, "train/loss"] == second["loss"]
    assert (run.log_dir / "csv" / "numbers.algorithm").read_text() == "best_of_group"


@pytest.mark.parametrize(("override", "said"), [
    ("++grpo.adv_estimator.num_bests=2", "num_bests is unknown; did you mean num_best?"),
    ("++grpo.adv_estimator.num_best=0", "num_best must be at least 1, not 0"),
    ("++env.even_digits.wait=1", "env.even_digits.wait is unknown; did you mean weight?"),
    ("++data.train.lost=1", "data.train.lost is unknown; did you mean last?"),
    ("++logger.csv.fil=x", "logger.csv.fil is unknown; did you mean file?"),
    ("++logger.csv_enabled=2", "logger.csv_enabled must be true or false, not 2"),
    ("grpo.adv_estimator.name=best_of_groups", "did you mean best_of_group?"),
])  # fmt: skip
def test_configuration_keys_of_user_registered_components_are_checked_like_built_in_keys(recipes, override, said):
    load_grpo_config("grpo_tiny.yaml", [*CHOSEN, "grpo.max_num_steps=1"])
    with pytest.raises(ConfigError) as refused:
        load_grpo_config("grpo_tiny.yaml", [*CHOSEN, override])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_user_registered_components_are_documented_and_cannot_be_registered_twice(recipes):
    page = document()
    for text in (
        "or best_of_group or a dotted name |", "| `adv_estimator.num_best` |", "### `env.even_digits`",
        "| `count_down` | `last` |", "`csv_enabled`", "| `csv.file` |",
    ):  # fmt: skip
        assert text in page
    words = "adv_estimator.name must be one of gae, raw_reward, opd, a dotted name, not 'best_of_group'"
    with pytest.raises(ConfigError, match=words):
        load_ppo_config("ppo_tiny.yaml", ["ppo.adv_estimator.name=best_of_group"])  # it is GRPO's
    with pytest.raises(ValueError, match="the logger back end csv is there already|logger has a key csv already"):
        register_logger("csv", None)
    with pytest.raises(ValueError, match="logger has a key report already"):
        register_logger("report", None)


def test_configuration_keys_of_unregistered_components_are_reported_as_unknown():
    tables = (ADVANTAGE_ESTIMATORS, ENV_REGISTRY, DATASET_REGISTRY, LOGGER_BACKENDS)
    assert not any(name in table for table in tables for name in ADDED)
    assert "csv" not in LoggerConfig.model_fields and "best_of_group" not in document()
    with pytest.raises(ConfigError, match=r"logger\.csv_enabled is unknown"):
        load_grpo_config("grpo_tiny.yaml", ["++logger.csv_enabled=true"])
