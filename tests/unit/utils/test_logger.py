import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from pydantic import BaseModel

from nemo_rl_cpp.utils import tb_events
from nemo_rl_cpp.utils.log_files import deterministic_rows, read_jsonl
from nemo_rl_cpp.utils.logger import Logger, flatten_dict, get_experiment_dir, get_next_experiment_dir
from nemo_rl_cpp.utils.plots import LinePlot


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder):
    """(tag, step, value) of every scalar, in file order, read with another project's message classes."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for _, payload in tb_events.records(path.read_bytes()):
            event = Event.FromString(payload)
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
    return found


def log_steps(logger, first, last):
    for step in range(first, last + 1):
        logger.log_metrics({"loss": 1.0 / step, "reward": step}, step, prefix="train")
        logger.log_metrics({"total_step_time": random.random()}, step, prefix="timing/train", step_finished=True)
        logger.log_batched_dict_as_jsonl({"content": ["a", "b"], "rewards": [0.0, float(step)]}, f"train_data_step{step}.jsonl")
        logger.log_plot(LinePlot("p", "x", "y", {"a": ([0, 1], [0, step])}), step, "train/p")


def test_metrics_jsonl_rows_are_sorted_plain_and_strict_json(tmp_path):
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}) as logger:
        logger.log_metrics(
            {"z": np.float32(0.5), "a": float("nan"), "m": {"n": [1, math.inf]}, "i": np.int64(3), "flag": True}, 4, prefix="train"
        )
        logger.log_metrics({"plain": 1}, 5)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.splitlines()[0] == (
        '{"step": 4, "train/a": "nan", "train/flag": true, "train/i": 3, "train/m/n": [1, "inf"], "train/z": 0.5}')
    assert rows(tmp_path / "metrics.jsonl")[1] == {"step": 5, "plain": 1}


def test_torch_values_are_numbers_in_the_files(tmp_path):
    torch = pytest.importorskip("torch")
    with Logger({"log_dir": str(tmp_path)}) as logger:
        logger.log_metrics({"loss": torch.tensor([0.25]), "norm": torch.tensor(2.0, requires_grad=True)}, 1, prefix="train")
        logger.log_batched_dict_as_jsonl({"r": torch.tensor([1.0, float("nan")]), "ids": torch.tensor([[1], [2]])}, "x.jsonl")
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": [0.25], "train/norm": 2.0}]
    assert rows(tmp_path / "x.jsonl") == [{"r": 1.0, "ids": [1], "idx": 0}, {"r": "nan", "ids": [2], "idx": 1}]
    assert events(tmp_path / "tensorboard") == [("train/loss", 1, 0.25), ("train/norm", 1, 2.0)]


def test_config_may_be_a_model_and_files_can_be_switched_off(tmp_path):
    class LoggerConfig(BaseModel):
        log_dir: str
        tensorboard_enabled: bool = True
        metrics_jsonl_enabled: bool = False

    with Logger(LoggerConfig(log_dir=str(tmp_path / "deep" / "logs"))) as logger:
        logger.log_metrics({"x": 1}, 1)
    assert not (tmp_path / "deep" / "logs" / "metrics.jsonl").exists()
    assert events(tmp_path / "deep" / "logs" / "tensorboard") == [("x", 1, 1.0)]
    with pytest.raises(ValueError, match="logger.log_dir is empty"):
        Logger({"log_dir": ""})


def test_tensorboard_skips_what_is_no_number_with_one_message(tmp_path, capsys):
    with Logger({"log_dir": str(tmp_path)}) as logger:
        for step in (1, 2):
            logger.log_metrics({"text": "hello", "list": [1, 2], "x": step}, step)
        logger.log_histogram([1.0, 2.0, float("nan")], 2, "train/h")
        logger.log_histogram([], 2, "train/empty")
        logger.log_hyperparams({"lr": 1e-6})
    printed = capsys.readouterr().out
    assert printed.count("text is not logged") == 0 and printed.count("list is not logged") == 1
    assert events(tmp_path / "tensorboard") == [("x", 1, 1.0), ("x", 2, 2.0)]


def test_hyperparams_hide_secrets(tmp_path):
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}) as logger:
        logger.log_hyperparams({"wandb": {"api_key": "s3cret", "project": "p"}, "stop_token_ids": [2], "pad_token": "<pad>"})
    stored = json.loads((tmp_path / "hyperparams.json").read_text())
    assert stored == {"wandb": {"api_key": "***", "project": "p"}, "stop_token_ids": [2], "pad_token": "<pad>"}


def test_batched_dict_needs_one_entry_a_sample(tmp_path):
    logger = Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False})
    with pytest.raises(ValueError, match="'a': 2, 'b': 1"):
        logger.log_batched_dict_as_jsonl({"a": [1, 2], "b": [1]}, "x.jsonl")
    logger.log_batched_dict_as_jsonl({}, "empty.jsonl")
    assert (tmp_path / "empty.jsonl").read_text() == ""
    logger.log_string_list_as_jsonl(['{"a": 1}'], "sub/s.jsonl")
    logger.log_string_list_as_jsonl(['{"a": 2}'], "sub/s.jsonl")
    assert rows(tmp_path / "sub" / "s.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_resumed_run_leaves_the_same_logs_as_an_unbroken_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with Logger({"log_dir": str(whole)}) as logger:
        log_steps(logger, 1, 6)
    first = Logger({"log_dir": str(broken)})
    log_steps(first, 1, 5)
    first.log_metrics({"half": 1}, 6, prefix="train")
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "train/lo')  # killed in mid-write
    with Logger({"log_dir": str(broken)}) as logger:
        logger.truncate_after(3)
        assert {row["step"] for row in rows(broken / "metrics.jsonl")} == {1, 2, 3}
        assert not (broken / "train_data_step4.jsonl").exists() and not (broken / "plots/train/p_step5.svg").exists()
        log_steps(logger, 4, 6)
    assert deterministic_rows(broken / "metrics.jsonl") == deterministic_rows(whole / "metrics.jsonl") != []

    def names(root):
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.suffix in (".jsonl", ".svg"))

    assert names(broken) == names(whole)
    for name in names(whole):
        if name != "metrics.jsonl":
            assert (broken / name).read_bytes() == (whole / name).read_bytes()

    def stable(folder):
        return [event for event in events(folder / "tensorboard") if not event[0].startswith("timing")]

    assert stable(broken) == stable(whole)


def test_truncation_to_the_start_and_of_an_empty_folder(tmp_path):
    with Logger({"log_dir": str(tmp_path)}) as logger:
        logger.truncate_after(3)
        log_steps(logger, 1, 2)
        logger.truncate_after(0)
        assert rows(tmp_path / "metrics.jsonl") == [] and list(tmp_path.glob("train_data*")) == []
    assert events(tmp_path / "tensorboard") == []


def test_a_torn_event_file_is_cut_at_its_last_whole_record(tmp_path):
    with Logger({"log_dir": str(tmp_path)}) as logger:
        for step in (1, 2, 3):
            logger.log_metrics({"x": step}, step)
        logger.log_metrics({"torn": 3}, 3)
    path = next((tmp_path / "tensorboard").glob("events*"))
    path.write_bytes(path.read_bytes()[:-5])
    with Logger({"log_dir": str(tmp_path)}) as logger:
        logger.truncate_after(3)
        logger.log_metrics({"after": 4.0}, 4)
    assert [event[:2] for event in events(tmp_path / "tensorboard")] == [("x", 1), ("x", 2), ("x", 3), ("after", 4)]


def test_a_torn_last_line_does_not_swallow_the_next_row(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}) as logger:
        logger.log_metrics({"a": 2}, 2)
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]


def test_a_process_killed_at_once_keeps_what_it_logged(tmp_path):
    program = (
        "import os, sys\nfrom nemo_rl_cpp.utils.logger import Logger\n"
        "logger = Logger({'log_dir': sys.argv[1]})\n"
        "logger.log_metrics({'x': 1.5}, 1, prefix='train')\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -9
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "train/x": 1.5}]
    assert events(tmp_path / "tensorboard") == [("train/x", 1, 1.5)]


def test_importing_the_logger_imports_no_tracker_and_no_torch():
    program = (
        "import sys, nemo_rl_cpp.utils.logger, nemo_rl_cpp.utils.checkpoint, nemo_rl_cpp.utils.report\n"
        "heavy = {'torch', 'wandb', 'mlflow', 'swanlab', 'trackio', 'tensorboardX', 'rich', 'matplotlib', 'ray'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_flatten_dict():
    assert flatten_dict({"a": 1, "b": {"c": 2}}) == {"a": 1, "b.c": 2}
    assert flatten_dict({"a": [1, 2], "b": {"c": [3, {"d": 4}]}}) == {"a.0": 1, "a.1": 2, "b.c.0": 3, "b.c.1.d": 4}
    assert flatten_dict({"a": [1], "b": {"c": 2}}, sep="/", expand_lists=False) == {"a": [1], "b/c": 2}


def test_experiment_folders(tmp_path):
    base = str(tmp_path / "logs")
    assert get_next_experiment_dir(base).endswith("exp_001")
    (tmp_path / "logs" / "exp_007").mkdir()
    (tmp_path / "logs" / "exp_x").mkdir()
    assert get_next_experiment_dir(base).endswith("exp_008")
    recorded = str(tmp_path / "logs" / "exp_007")
    pass
    assert get_experiment_dir(base, {"log_dir": "/moved/from/elsewhere/exp_001"}) == str(tmp_path / "logs" / "exp_001")
    assert get_experiment_dir(base, {}).endswith("exp_009")
    with pytest.warns(UserWarning, match="log folder /gone/exp_555 is gone"):
        assert get_experiment_dir(base, {"log_dir": "/gone/exp_555"}).endswith("exp_010")
