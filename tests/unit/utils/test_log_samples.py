import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from nemo_rl_cpp.utils.log_samples import choose_samples, print_message_log_samples
from nemo_rl_cpp.utils.logger import Logger
from nemo_rl_cpp.utils.plots import logprob_error_plot, timeline_plots
from rich.console import Console


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


def test_choose_samples():
    assert choose_samples([1, 2, 3], 5) == [0, 1, 2]
    assert choose_samples([0.0, 5.0, 3.0, 4.0, 1.0], 2) == [1, 0]
    assert choose_samples([0.0, 5.0, 3.0, 4.0, 1.0], 3) == [1, 2, 0]
    assert choose_samples([0.0, 5.0, 3.0], 1) == [2]


def test_samples_are_printed_with_hostile_text_intact():
    out = io.StringIO()
    logs = [[{"role": "user", "content": "2 + 2 = [/bold] [red]"}, {"role": "assistant", "content": "[link=x] 4"}], []]
    print_message_log_samples(logs, [1.0, -0.5], 2, step=7, console=Console(file=out, width=80))
    text = out.getvalue()
    assert "USER: 2 + 2 = [/bold] [red]" in text and "[link=x] 4" in text and "(no text)" in text
    assert "Rewards of step 7" in text and "mean 0.25" in text


def test_samples_need_a_reward_each():
    with pytest.raises(ValueError, match="2 message logs but 1 rewards"):
        print_message_log_samples([[], []], [1.0])
    out = io.StringIO()
    print_message_log_samples([], [], console=Console(file=out))
    print_message_log_samples([[]], [1.0], num_samples=0, console=Console(file=out))
    assert out.getvalue() == ""
