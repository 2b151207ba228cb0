import shutil
from collections import namedtuple

import pytest
from nemo_rl_cpp.argument_checks import folder_path
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.checks import folders, preflight
from nemo_rl_cpp.config import load_eval_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.files.folder_lock import FolderLock
from nemo_rl_cpp.models.memory import checkpoint_bytes

Usage = namedtuple("Usage", "total used free")
SIZES = (
    "policy.hf_config_overrides.hidden_size=64", "policy.hf_config_overrides.intermediate_size=128",
    "policy.hf_config_overrides.num_hidden_layers=2", "policy.hf_config_overrides.vocab_size=16",
)  # fmt: skip


def config_of(tmp_path, *overrides, **paths):
    checkpoints, logs = paths.get("checkpoints", tmp_path / "ck"), paths.get("logs", tmp_path / "logs")
    return load_grpo_config(
        "grpo_tiny.yaml", [f"checkpointing.checkpoint_dir={checkpoints}", f"logger.log_dir={logs}", *overrides]
    )


def errors(config):
    return [str(f) for f in preflight(config) if f.level == "error"]


def warnings_of(config):
    return [str(f) for f in folders.check(config) if f.level == "warning"]


def save(folder, step):
    with CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder))).saving(step, {"total_steps": step}):
        pass


def test_preflight_check_of_writable_folders_gives_no_error_and_writes_no_files(tmp_path):
    assert list(folders.check(config_of(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ck").mkdir()
    assert list(folders.check(config_of(tmp_path))) == [] and list((tmp_path / "ck").iterdir()) == []


def test_single_checkpoint_given_as_checkpoint_dir_is_an_error_that_names_its_parent_folder(tmp_path):
    save(tmp_path / "ck", 2)
    (tmp_path / "ck" / "newest").symlink_to("step_2")
    for inner in ("step_2", "step_2/policy/weights", "newest"):
        (text,) = (str(f) for f in folders.check(config_of(tmp_path, checkpoints=tmp_path / "ck" / inner)))
        assert text.startswith("checkpointing.checkpoint_dir is") and text.endswith(f"that holds it, {tmp_path / 'ck'}")
    for free in ("step_2", "ck/step_2/../../other"):
        assert list(folders.check(config_of(tmp_path, checkpoints=tmp_path / free))) == []


UNUSABLE = {  # path below tmp_path (one from the root stays as it is) -> what the finding says
    "file": "not a folder",
    "file/below": "not a folder",
    "dangling": "a link to what is not there",
    "dangling/below": "a link to what is not there",
    "/proc/self/below": "which cannot be written",  # takes no files from anybody, root included
    "x" * 300: "File name too long",
}


@pytest.mark.parametrize("key, path", [("checkpointing.checkpoint_dir", "checkpoints"), ("logger.log_dir", "logs")])
@pytest.mark.parametrize("name", UNUSABLE)
def test_preflight_check_reports_a_folder_that_cannot_be_created_or_written(tmp_path, key, path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (found,) = errors(config_of(tmp_path, **{path: tmp_path / name}))
    assert found.startswith(f"{key} is {tmp_path / name}") and UNUSABLE[name] in found


def test_preflight_check_reports_a_save_path_of_an_evaluation_that_is_no_folder(tmp_path):
    (tmp_path / "samples.json").write_text("")
    for name, words in (("samples.json", ["not a folder"]), ("new", [])):
        key = f"eval.save_path={tmp_path / name}"
        found = list(folders.check(load_eval_config("evals/reverse_digits.yaml", [key])))
        assert [word for finding, word in zip(found, words, strict=True) if word in str(finding)] == words


def test_evaluation_saves_no_samples_into_the_folder_of_a_model_or_of_checkpoints(tmp_path):
    (tmp_path / "run" / "step_2").mkdir(parents=True)
    for name, content in (("model", '{"model_type": "llama"}'), ("earlier", '{"model_name": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    for name, count in (("run", 1), ("model", 1), ("earlier", 0)):
        keys = [f"eval.save_path={tmp_path / name}"]
        found = list(folders.check(load_eval_config("evals/reverse_digits.yaml", keys)))
        assert ["which holds a model or a run's checkpoints" in str(each) for each in found] == [True] * count


def test_preflight_check_reports_a_folder_of_tensorboard_that_is_a_file(tmp_path):
    (tmp_path / "events").write_text("")
    key = "logger.tensorboard.log_dir"
    (found,) = errors(config_of(tmp_path, f"{key}={tmp_path / 'events'}"))
    assert found.startswith(f"{key} is") and "not a folder" in found
    assert errors(config_of(tmp_path, f"{key}={tmp_path / 'events'}", "logger.tensorboard_enabled=false")) == []


def test_tilde_in_a_folder_that_is_written_is_the_home_folder_as_in_one_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = config_of(tmp_path, "logger.tensorboard.log_dir='~/tb'", checkpoints="'~/ck'", logs="'~/logs'")
    written = config.checkpointing.checkpoint_dir, config.logger.log_dir, config.logger.tensorboard.log_dir
    evaluation = load_eval_config("evals/reverse_digits.yaml", ["eval.save_path='~/out'"])
    assert [*written, evaluation.eval.save_path] == [str(tmp_path / name) for name in ("ck", "logs", "tb", "out")]
    assert folder_path("~/ck", "checkpoint_dir") == tmp_path / "ck"


def test_checkpoint_folder_is_not_checked_if_checkpointing_is_disabled(tmp_path):
    assert errors(config_of(tmp_path, "checkpointing.enabled=false", checkpoints="/proc/self/below")) == []


def test_preflight_check_reports_a_log_or_checkpoint_folder_in_use_by_another_run(tmp_path):
    (tmp_path / "ck").mkdir()
    lock = FolderLock(tmp_path / "ck", "key")
    (found,) = errors(config_of(tmp_path))
    assert "in use by this very process, since 20" in found and "a folder of its own" in found
    lock.close()
    assert errors(config_of(tmp_path)) == []


def test_estimated_checkpoint_sizes_match_hand_computed_values(tmp_path):
    """Of the tiny model: 16 x 64 twice (embedding, head), a last norm of 64, and two layers of 4 x 64 x 64 (attention, as many
    heads for keys and values), 3 x 64 x 128 (MLP) and two norms of 64."""
    parameters = 2 * 16 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert checkpoint_bytes(config_of(tmp_path, *SIZES)) == parameters * (4 + 8)
    assert checkpoint_bytes(config_of(tmp_path, *SIZES, "checkpointing.save_optimizer=false")) == parameters * 4
    assert checkpoint_bytes(config_of(tmp_path, *SIZES, "policy.precision=bfloat16")) == parameters * (2 + 4 + 8)
    ppo = load_ppo_config("ppo_tiny.yaml")
    assert checkpoint_bytes(ppo) > 1.5 * parameters * 12
    assert checkpoint_bytes(load_grpo_config("grpo_math_1B.yaml")) is None  # sizes not on this machine


@pytest.mark.parametrize("free, words", [
    (0.5, "is FOLDER with 506 kB free, but a checkpoint takes about 1.01 MB"),
    (3, "up to 5 of them are held at once"),
    (6, None),
])  # fmt: skip
def test_insufficient_disk_space_for_checkpoints_gives_a_warning(tmp_path, monkeypatch, free, words):
    size = checkpoint_bytes(config_of(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(free * size)))
    found = warnings_of(config_of(tmp_path))
    assert (
        ([words.replace("FOLDER", str(tmp_path / "ck")) in text for text in found] == [True]) if words else found == []
    )
    assert errors(config_of(tmp_path)) == []


@pytest.mark.parametrize("mode, steps, words", [
    ("never", 2, "resume=never, but"), ("must", 0, "resume=must, but"), ("never", 0, None), ("must", 2, None), ("auto", 2, None),
])  # fmt: skip
def test_preflight_check_reports_a_checkpoint_folder_that_contradicts_the_resume_setting(tmp_path, mode, steps, words):
    for step in range(1, steps + 1):
        save(tmp_path / "ck", step)
        (tmp_path / "ck" / f"step_{step}" / "policy" / "weights").mkdir(parents=True)
    found = errors(config_of(tmp_path, f"checkpointing.resume={mode}"))
    assert ([words in text for text in found] == [True]) if words else found == []
