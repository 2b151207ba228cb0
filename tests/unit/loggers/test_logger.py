import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.config.checkpointing import CheckpointingConfig
from nemo_rl_cpp.config.logger import LoggerConfig
from nemo_rl_cpp.loggers import tensorboard as tb_events
from nemo_rl_cpp.loggers.folders import get_experiment_dir, get_next_experiment_dir
from nemo_rl_cpp.loggers.logger import Logger


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steady_rows(path):
    """Return the rows of a metrics.jsonl without times."""
    kept = [{name: v for name, v in row.items() if not name.startswith("timing/")} for row in rows(path)]
    return [row for row in kept if set(row) != {"step"}]


def events(folder):
    """Return (tag, step, value) of every scalar in the event files of a folder, in file order."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for _, event in tb_events.records(path.read_bytes()):
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
    return found


def log_steps(logger, first, last):
    for step in range(first, last + 1):
        logger.log_metrics({"loss": 1.0 / step, "reward": step}, step, prefix="train")
        logger.log_metrics({"total_step_time": random.random()}, step, prefix="timing/train", step_finished=True)
        samples = {"content": ["a", "b"], "rewards": [0.0, float(step)]}
        logger.log_batched_dict_as_jsonl(samples, f"train_data_step{step}.jsonl")


def test_rows_of_metrics_jsonl_are_strict_json_with_sorted_keys(tmp_path):
    with Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False)) as logger:
        values = {"z": np.float32(0.5), "a": float("nan"), "m": {"n": [1, math.inf]}, "i": np.int64(3), "flag": True}
        logger.log_metrics(values, 4, prefix="train")
        logger.log_metrics({"plain": 1}, 5)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.splitlines()[0] == (
        '{"step": 4, "train/a": "nan", "train/flag": true, "train/i": 3, "train/m/n": [1, "inf"], "train/z": 0.5}'
    )
    assert rows(tmp_path / "metrics.jsonl")[1] == {"step": 5, "plain": 1}


def test_torch_scalars_are_logged_as_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        values = {"loss": torch.tensor([0.25]), "norm": torch.tensor(2.0, requires_grad=True)}
        logger.log_metrics(values, 1, prefix="train")
        columns = {"r": torch.tensor([1.0, float("nan")]), "ids": torch.tensor([[1], [2]])}
        logger.log_batched_dict_as_jsonl(columns, "x.jsonl")
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": [0.25], "train/norm": 2.0}]
    assert rows(tmp_path / "x.jsonl") == [{"r": 1.0, "ids": [1], "idx": 0}, {"r": "nan", "ids": [2], "idx": 1}]
    assert events(tmp_path / "tensorboard") == [("train/loss", 1, 0.25), ("train/norm", 1, 2.0)]


def test_tensorboard_logger_skips_non_numeric_values_with_one_warning(tmp_path, capsys):
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        for step in (1, 2):
            logger.log_metrics({"text": "hello", "list": [1, 2], "x": step}, step)
        logger.log_histogram([1.0, 2.0, float("nan")], 2, "train/h")
        logger.log_histogram([], 2, "train/empty")
        logger.log_hyperparams({"lr": 1e-6})
    printed = capsys.readouterr().out
    assert printed.count("text is not logged") == 0 and printed.count("list is not logged") == 1
    assert events(tmp_path / "tensorboard") == [("x", 1, 1.0), ("x", 2, 2.0)]


def test_secrets_are_hidden_in_logged_hyperparameters(tmp_path):
    given = {"wandb": {"api_key": "s3cret", "project": "p"}, "stop_token_ids": [2], "pad_token": "<pad>"}
    with Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False)) as logger:
        logger.log_hyperparams(given)
    stored = json.loads((tmp_path / "hyperparams.json").read_text())
    assert stored == given | {"wandb": {"api_key": "***", "project": "p"}}


def test_logging_a_batch_without_samples_writes_an_empty_file(tmp_path):
    logger = Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False))
    logger.log_batched_dict_as_jsonl({}, "empty.jsonl")
    assert (tmp_path / "empty.jsonl").read_text() == ""


def test_logs_of_a_resumed_run_equal_those_of_an_uninterrupted_run(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with Logger(LoggerConfig(log_dir=str(whole))) as logger:
        log_steps(logger, 1, 6)
    first = Logger(LoggerConfig(log_dir=str(broken)))
    log_steps(first, 1, 5)
    first.log_metrics({"half": 1}, 6, prefix="train")
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "train/lo')  # killed in mid-write
    with Logger(LoggerConfig(log_dir=str(broken))) as logger:
        logger.truncate_after(3)
        assert {row["step"] for row in rows(broken / "metrics.jsonl")} == {1, 2, 3}
        assert not (broken / "train_data_step4.jsonl").exists()
        log_steps(logger, 4, 6)
    assert steady_rows(broken / "metrics.jsonl") == steady_rows(whole / "metrics.jsonl") != []

    def names(root):
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.suffix == ".jsonl")

    assert names(broken) == names(whole)
    for name in names(whole):
        if name != "metrics.jsonl":
            assert (broken / name).read_bytes() == (whole / name).read_bytes()

    def stable(folder):
        return [event for event in events(folder / "tensorboard") if not event[0].startswith("timing")]

    assert stable(broken) == stable(whole)


def test_logs_can_be_truncated_to_step_zero_and_in_an_empty_folder(tmp_path):
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        logger.truncate_after(3)
        log_steps(logger, 1, 2)
        logger.truncate_after(0)
        assert rows(tmp_path / "metrics.jsonl") == [] and list(tmp_path.glob("train_data*")) == []
    assert events(tmp_path / "tensorboard") == []


def test_incomplete_last_line_of_the_metrics_file_does_not_corrupt_the_next_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    with Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False)) as logger:
        logger.log_metrics({"a": 2}, 2)
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]


def test_metrics_logged_before_the_process_is_killed_are_on_disk(tmp_path):
    program = (
        "import os, sys\nfrom nemo_rl_cpp.config.logger import LoggerConfig\nfrom nemo_rl_cpp.loggers.logger import Logger\n"
        "logger = Logger(LoggerConfig(log_dir=sys.argv[1]))\n"
        "logger.log_metrics({'x': 1.5}, 1, prefix='train')\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -9
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/x": 1.5}]
    assert events(tmp_path / "tensorboard") == [("train/x", 1, 1.5)]


def test_importing_the_logger_imports_neither_trackers_nor_torch():
    program = (
        "import sys, nemo_rl_cpp.loggers.logger, nemo_rl_cpp.checkpoints.manager, nemo_rl_cpp.report\n"
        "heavy = {'torch', 'wandb', 'mlflow', 'swanlab', 'trackio', 'tensorboardX', 'rich', 'matplotlib', 'ray'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_log_folders_of_experiments_are_numbered_consecutively(tmp_path):
    base = str(tmp_path / "logs")
    assert get_next_experiment_dir(base).endswith("exp_001")
    (tmp_path / "logs" / "exp_007").mkdir()
    (tmp_path / "logs" / "exp_x").mkdir()
    assert get_next_experiment_dir(base).endswith("exp_008")
    assert get_experiment_dir(base).endswith("exp_009")


def _run_of(folder, base, log_dir=None, step=2):
    """Log and save a run below `base` and in `folder`. Return (its log folder, its checkpoint)."""
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(folder)))
    log_dir = log_dir or get_next_experiment_dir(str(base))
    with Logger(LoggerConfig(log_dir=log_dir)) as logger:
        logger.claim(folder)
        log_steps(logger, 1, step + 2)
        manager.facts["run"] = logger.ledger.run
    with manager.saving(step, {"log_dir": log_dir}) as tmp:
        pass
    return Path(log_dir), tmp.with_name(f"step_{step}")


def test_resumed_run_logs_into_the_log_folder_of_the_interrupted_run(tmp_path):
    logs, checkpoint = _run_of(tmp_path / "ck", tmp_path / "logs")
    (tmp_path / "alias").symlink_to(tmp_path / "ck")
    for path in (checkpoint, tmp_path / "alias" / checkpoint.name):
        assert get_experiment_dir(str(tmp_path / "logs"), str(logs), path) == str(logs)


def test_resumed_run_whose_folders_were_moved_logs_into_the_moved_log_folder(tmp_path):
    logs, checkpoint = _run_of(tmp_path / "ck", tmp_path / "logs")
    (tmp_path / "ck").rename(tmp_path / "ck_moved")
    moved, checkpoint = (tmp_path / "logs").rename(tmp_path / "logs_moved"), tmp_path / "ck_moved" / checkpoint.name
    assert get_experiment_dir(str(moved), str(logs), checkpoint) == str(moved / "exp_001")


def test_run_resumed_from_a_copied_checkpoint_does_not_modify_logs_of_the_original_run(tmp_path, capsys):
    """The log folder that training_info.json names is not used, neither with another log_dir nor with the same one."""
    logs, checkpoint = _run_of(tmp_path / "ck", tmp_path / "logs")
    copy, link = tmp_path / "branch" / checkpoint.name, tmp_path / "linked" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    link.parent.mkdir()
    link.symlink_to(checkpoint)
    assert get_experiment_dir(str(tmp_path / "logs"), str(logs), link) != str(logs)
    for base in (tmp_path / "logs2", tmp_path / "logs"):
        new = get_experiment_dir(str(base), str(logs), copy)
        assert Path(new).parent == base and new != str(logs)
    assert f"holds the logs of {tmp_path / 'ck'}" in capsys.readouterr().out


def test_resumed_run_with_a_changed_log_dir_prints_that_the_earlier_logs_are_missing(tmp_path, capsys):
    logs, checkpoint = _run_of(tmp_path / "ck", tmp_path / "logs")
    new = get_experiment_dir(str(tmp_path / "logs2"), str(logs), checkpoint)
    said = f"The logs go on in {new}: the checkpoint names {logs}, and {tmp_path / 'logs2' / 'exp_001'} is not there."
    assert capsys.readouterr().out.strip() == said


def test_resumed_run_does_not_log_into_the_log_folder_of_a_different_run(tmp_path):
    """The owner's checkpoint folder is gone, but the ledger has another run number."""
    logs, checkpoint = _run_of(tmp_path / "ck", tmp_path / "logs")
    _run_of(tmp_path / "gone", tmp_path / "logs2")
    shutil.rmtree(tmp_path / "gone")
    assert get_experiment_dir(str(tmp_path / "logs2"), str(logs), checkpoint).endswith("exp_002")


@pytest.mark.parametrize("recorded", ["/etc", "../..", "exp_001/../../x", "", "exp_x", 7, None])
def test_resume_creates_a_new_log_folder_if_the_recorded_one_is_not_an_experiment_folder(tmp_path, recorded):
    _, checkpoint = _run_of(tmp_path / "ck", tmp_path / "logs")
    found = get_experiment_dir(str(tmp_path / "logs"), recorded, checkpoint)
    assert found == str(tmp_path / "logs" / "exp_002")


def test_truncating_logs_on_resume_deletes_no_user_files(tmp_path):
    own = ["notes_step12.jsonl", "sub/train_data_step4.jsonl"]
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        log_steps(logger, 1, 4)
        for name in own:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine\n")
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        logger.truncate_after(2)
    assert all((tmp_path / name).read_text() == "mine\n" for name in own)
    assert sorted(p.name for p in tmp_path.glob("train_data*")) == ["train_data_step1.jsonl", "train_data_step2.jsonl"]


def test_truncating_logs_on_resume_keeps_tensorboard_files_of_other_runs(tmp_path):
    """`logger.tensorboard.log_dir` may be one folder for many runs."""
    shared = tmp_path / "tb"
    config = {"tensorboard": {"log_dir": str(shared)}}
    with Logger(LoggerConfig(log_dir=str(tmp_path / "a"), **config)) as first:
        log_steps(first, 1, 4)
    before = {path: path.read_bytes() for path in shared.iterdir()}
    with Logger(LoggerConfig(log_dir=str(tmp_path / "b"), **config)) as second:
        log_steps(second, 1, 4)
        second.truncate_after(1)
        log_steps(second, 2, 3)
    assert {path: path.read_bytes() for path in before} == before and len(list(shared.iterdir())) == 2
    with Logger(LoggerConfig(log_dir=str(tmp_path / "a"), **config)) as first:
        first.truncate_after(1)
    assert len(list(shared.iterdir())) == 2 and len(events(shared)) < 2 * 3 * 4


def test_flushing_the_logger_syncs_its_files_and_their_folder_to_disk(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")))
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        log_steps(logger, 1, 1)
        logger.flush()
    wanted = ("train_data_step1.jsonl", "metrics.jsonl", ".")
    assert {str((tmp_path / name).resolve()) for name in wanted} <= synced


def test_log_lines_rejected_by_a_full_disk_are_written_later_and_the_run_continues(tmp_path, monkeypatch):
    real, full = os.write, []

    def write(descriptor, data):
        if full and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            if len(full) == 1:  # half of a line still finds room
                full.append(True)
                return real(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False)) as logger:
        logger.log_metrics({"a": 1}, 1)
        full.append(True)
        with pytest.warns(UserWarning, match="No space left on device: lines of JsonlLogger cannot be written"):
            logger.log_metrics({"a": 2}, 2)
        logger.log_metrics({"a": 3}, 3)
        full.clear()
        logger.log_metrics({"a": 4}, 4)
    assert rows(tmp_path / "metrics.jsonl") == [{"step": step, "a": step} for step in (1, 2, 3, 4)]


def test_log_folder_in_use_by_another_run_is_an_error(tmp_path):
    first, second = (Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False)) for _ in range(2))
    first.claim()
    with pytest.raises(ValueError, match="in use by .*logger.log_dir of its own"):
        second.claim()
    first.finish()
    second.claim()
