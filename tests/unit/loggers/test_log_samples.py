import io

import pytest
from nemo_rl_cpp.algorithms.validation import choose_samples, print_message_log_samples
from rich.console import Console


def test_chosen_samples_spread_from_best_to_worst_reward():
    assert choose_samples([1, 2, 3], 5) == [0, 1, 2]
    assert choose_samples([0.0, 5.0, 3.0, 4.0, 1.0], 2) == [1, 0]
    assert choose_samples([0.0, 5.0, 3.0, 4.0, 1.0], 3) == [1, 2, 0]
    assert choose_samples([0.0, 5.0, 3.0], 1) == [2]


def test_printed_samples_show_markup_in_their_text_literally():
    out = io.StringIO()
    logs = [[{"role": "user", "content": "2 + 2 = [/bold] [red]"}, {"role": "assistant", "content": "[link=x] 4"}], []]
    print_message_log_samples(logs, [1.0, -0.5], 2, step=7, console=Console(file=out, width=80))
    text = out.getvalue()
    assert "USER: 2 + 2 = [/bold] [red]" in text and "[link=x] 4" in text and "(no text)" in text
    assert "Rewards of step 7" in text and "mean 0.25" in text


def test_printing_samples_without_one_reward_each_is_an_error():
    with pytest.raises(ValueError, match="2 message logs but 1 rewards"):
        print_message_log_samples([[], []], [1.0])
    out = io.StringIO()
    print_message_log_samples([], [], console=Console(file=out))
    print_message_log_samples([[]], [1.0], num_samples=0, console=Console(file=out))
    assert out.getvalue() == ""
