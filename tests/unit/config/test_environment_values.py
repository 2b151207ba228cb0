import pytest
import tiny
from nemo_rl_cpp import errors
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.config.access import written
from nemo_rl_cpp.config.loader import find_config

PARENT = find_config("grpo_tiny.yaml").resolve()
SECRET = "s3cr3t-value-of-a-token"


def load(tmp_path, text, *overrides):
    file = tmp_path / "own.yaml"
    file.write_text(f"defaults: {PARENT}\n" + text)
    return load_grpo_config(
        file, [f"checkpointing.checkpoint_dir={tmp_path / 'ck'}", f"logger.log_dir={tmp_path / 'logs'}", *overrides]
    )


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("TOKEN", SECRET)


CASES = {
    "direct": ("logger: {wandb: {entity: '${oc.env:TOKEN}'}}\n", (), "logger.wandb.entity", "${oc.env:TOKEN}", SECRET),
    "with a default": ("logger: {wandb: {entity: '${oc.env:NOT_SET_ANYWHERE,TOKEN}'}}\n", (), "logger.wandb.entity", "TOKEN", "TOKEN"),
    "inside a text": ("logger: {wandb: {entity: 'Bearer ${oc.env:TOKEN}!'}}\n", (), "logger.wandb.entity", "Bearer ${oc.env:TOKEN}!", f"Bearer {SECRET}!"),
    "by an override": ("", ("logger.wandb.entity='${oc.env:TOKEN}'",), "logger.wandb.entity", "${oc.env:TOKEN}", SECRET),
    "by reference": (
        "logger: {wandb: {entity: '${oc.env:TOKEN}', name: '${logger.wandb.entity}'}}\n", (), "logger.wandb.name", "${oc.env:TOKEN}", SECRET),
    "by a sibling": ("logger: {wandb: {entity: '${oc.env:TOKEN}', name: '${.entity}'}}\n", (), "logger.wandb.name", "${oc.env:TOKEN}", SECRET),
    "by a chain": (
        "logger: {wandb: {entity: '${oc.env:TOKEN}', name: '${.entity}', project: '${.name}'}}\n", (), "logger.wandb.project", "${oc.env:TOKEN}", SECRET),
    "in a list": ("policy: {generation: {stop_strings: ['a', '${oc.env:TOKEN}']}}\n", (), "policy.generation.stop_strings", ["a", "${oc.env:TOKEN}"], ["a", SECRET]),
}  # fmt: skip


def value(tree, key):
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize("name", CASES)
def test_environment_variable_values_are_used_but_not_written_to_the_saved_configuration(tmp_path, name):
    text, overrides, key, shown, real = CASES[name]
    config = load(tmp_path, text, *overrides)
    assert value(config.model_dump(), key) == real
    assert value(written(config), key) == shown
    assert SECRET not in str(written(config))


def test_interpolated_environment_variable_values_are_not_written_to_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", str(tmp_path / "a-model-folder"))
    config = load(tmp_path, "policy: {model_name: '${oc.env:MODEL}', tokenizer: {name: '${oc.env:MODEL}'}}\n")
    assert config.policy.tokenizer.name == str(tmp_path / "a-model-folder")
    assert "a-model-folder" not in str(written(config)["policy"])


def test_configuration_without_environment_variables_is_saved_unchanged(tmp_path):
    config = load(tmp_path, "logger: {wandb: {entity: plain, name: '${logger.wandb.entity}'}}\n")
    assert config.environment_texts == {} and written(config) == config.model_dump()
    assert value(written(config), "logger.wandb.name") == "plain"


def test_run_resumes_although_its_files_contain_no_environment_variable_values(tmp_path, capsys, monkeypatch):
    own = tmp_path / "own.yaml"
    own.write_text(f"defaults: {PARENT}\n" + "logger: {wandb: {entity: '${oc.env:TOKEN}', name: 'x-${.entity}'}}\n")
    run = ("checkpointing.enabled=true", "checkpointing.metric_name=null", *tiny.SMALL)
    tiny.train(tmp_path, *run, "grpo.max_num_steps=1", config=str(own))
    files = [path for folder in ("checkpoints", "logs") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    saved = (tmp_path / "checkpoints" / "step_1" / "config.yaml").read_text()
    assert 'entity: "${oc.env:TOKEN}"' in saved
    monkeypatch.setenv("TOKEN", "another-token-than-before")
    resumed = tiny.train(tmp_path, *run, "grpo.max_num_steps=2", config=str(own))
    out = capsys.readouterr().out
    assert resumed.state.step == 2 and resumed.config.logger.wandb.entity == "another-token-than-before"
    assert "Changed since: grpo.max_num_steps 1 -> 2\n" in out
    keys = "logger.wandb.entity, logger.wandb.name"
    assert f"Not compared, since their values come from environment variables: {keys}" in out


def test_saved_traceback_contains_no_environment_variable_values(tmp_path, monkeypatch):
    """A message may name what it was given: the terminal shows it, the file that stays does not."""
    monkeypatch.setattr(errors, "_folder", tmp_path)
    config = load(tmp_path, "logger: {wandb: {entity: 'Bearer ${oc.env:TOKEN}'}}\n")
    try:
        raise ConnectionError(f"401 for {config.logger.wandb.entity!r}") from KeyError(SECRET)
    except ConnectionError as error:
        assert SECRET in errors.one_sentence(error)
        text = errors.save_traceback(error).read_text()
    assert "401 for 'Bearer ${oc.env:TOKEN}'" in text and SECRET not in text
