"""Plots of a logger: which sample is drawn, files, and cutting them back."""

import json
import os
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from nemo_rl_cpp.compat.utils.logger import Logger
from nemo_rl_cpp.compat.utils.plots import LinePlot, logprob_error_plot, timeline_plots


def error_data():
    data = {
        "token_mask": np.array([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]),
        "sample_mask": np.array([1, 1, 0]),
        "generation_logprobs": np.array([[0, 0, -1, -2, -1.0], [0, 0, -1, -1, 0], [0, 0, -9, -9, -9.0]]),
        "prev_logprobs": np.array([[0, 0, -1, -2, -1.0], [0, 0, -1, -1.5, 0], [0, 0, 0, 0, 0.0]]),
        "prompt_lengths": np.array([2, 2, 2]),
        "full_lengths": np.array([5, 4, 5]),
    }
    return data


def test_the_plot_shows_the_worst_sample_that_counts():
    plot = logprob_error_plot(error_data())
    # sample 1: tokens with |difference| 0 and 0.5; sample 2 is masked
    assert plot.title.startswith(f"token_mult_prob_error = {(1 + np.exp(0.5)) / 2:.6g} (sample 1)")
    assert plot.lines["abs error"] == ([1, 2], [0.0, 0.5])
    assert plot.lines["logprob (training policy recompute)"][1] == [-1.0, -1.5]


def test_nothing_is_plotted_without_a_counted_token(tmp_path):
    data = error_data() | {"sample_mask": np.zeros(3)}
    assert logprob_error_plot(data) is None
    empty = error_data() | {"prompt_lengths": np.array([5, 5, 5])}
    assert logprob_error_plot(empty) is None
    logger = Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False})
    logger.log_plot_token_mult_prob_error(data, 1, "train/e")
    assert not (tmp_path / "plots").exists()
    logger.log_plot_token_mult_prob_error(error_data(), 1, "train/e")
    root = ElementTree.parse(tmp_path / "plots" / "train" / "e_step1.svg").getroot()
    assert root.tag.endswith("svg") and "sample 1" in "".join(root.itertext())


def test_timelines(tmp_path):
    plots = timeline_plots({1: [2.0, 4.0], 0: [0.0, 2.0, 9.0], 2: []}, "queue", 0.5)
    assert plots["per_worker"].lines == {
        "worker_0": ([0.0, 0.5, 1.0], [0.0, 2.0, 9.0]),
        "worker_1": ([0.0, 0.5], [2.0, 4.0]),
    }
    assert plots["average"].lines == {"average": ([0.0, 0.5], [1.0, 3.0])}
    assert timeline_plots({0: []}, "queue", 1.0) == {}
    with pytest.raises(ValueError, match="timeline_interval=0"):
        timeline_plots({0: [1]}, "queue", 0)
    logger = Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False})
    logger.log_plot_per_worker_timeline_metrics({0: [1, 2]}, 3, "generation_metrics", "queue", 1.0)
    assert (tmp_path / "plots/generation_metrics/per_worker_queue_step3.svg").exists()


def draw(logger, first, last):
    for step in range(first, last + 1):
        logger.log_plot(LinePlot("p", "x", "y", {"a": ([0, 1], [0, step])}), step, "train/p")
        logger.log_string_list_as_jsonl([f'{{"a": {step}}}'], "sub/s.jsonl")


def test_plots_are_cut_back_with_the_rest_and_flushed_to_the_disk(tmp_path, monkeypatch):
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}) as logger:
        draw(logger, 1, 4)
        (tmp_path / "plots" / "mine_step12.svg").write_text("mine\n")
    plots = tmp_path / "plots" / "train"
    before = (plots / "p_step2.svg").read_bytes()
    assert [json.loads(line) for line in (tmp_path / "sub" / "s.jsonl").read_text().splitlines()] == [
        {"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}
    ]  # fmt: skip
    synced = set()
    with Logger({"log_dir": str(tmp_path), "tensorboard_enabled": False}) as logger:
        logger.truncate_after(2)
        assert sorted(path.name for path in plots.iterdir()) == ["p_step1.svg", "p_step2.svg"]
        assert (tmp_path / "plots" / "mine_step12.svg").read_text() == "mine\n"
        draw(logger, 3, 4)
        monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")))
        logger.flush()
    assert {str((plots / name).resolve()) for name in ("p_step3.svg", "p_step4.svg", ".")} <= synced
    assert (plots / "p_step2.svg").read_bytes() == before and len(list(plots.iterdir())) == 4
