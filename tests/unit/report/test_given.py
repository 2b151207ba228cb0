from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.report.given import given_keys, schema_defaults


def test_overrides_on_a_shipped_file_are_what_was_set():
    config = load_grpo_config(
        "grpo_tiny.yaml", ["grpo.max_num_steps=7", "policy.optimizer.kwargs.lr=0.001", "grpo.seed=1"]
    )
    given = given_keys(config, schema_defaults(config))
    assert given.base == "grpo_tiny.yaml"
    # the learning rate is the file's own
    assert sorted(given.keys) == [("grpo.max_num_steps", 7, 400, "command line"), ("grpo.seed", 1, 42, "command line")]


def test_a_file_of_ones_own_names_its_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("defaults: grpo_tiny.yaml\ngrpo:\n  max_num_steps: 9\n  val_period: 100\n")
    config = load_grpo_config("my.yaml", [])
    given = given_keys(config, schema_defaults(config))
    assert given.base == "grpo_tiny.yaml" and given.keys == [("grpo.max_num_steps", 9, 400, "my.yaml:3")]


def test_python_values_are_named_by_their_argument():
    config = load_grpo_config(
        "grpo_tiny.yaml", [], {"grpo.max_num_steps": 3}, {"grpo.max_num_steps": "argument max_num_steps"}
    )
    assert given_keys(config, {}).keys == [("grpo.max_num_steps", 3, 400, "argument max_num_steps")]


def test_nothing_is_known_of_a_configuration_that_was_not_loaded():
    assert given_keys({"grpo": {}}, {}) is None
