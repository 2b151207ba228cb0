from nemo_rl_cpp.algorithms.validation import choose_samples, print_samples


def test_printed_samples_range_from_the_best_to_the_worst_reward():
    assert choose_samples([1, 2, 3], 5) == [0, 1, 2]
    assert choose_samples([0.0, 5.0, 3.0, 4.0, 1.0], 2) == [1, 0]
    assert choose_samples([0.0, 5.0, 3.0, 4.0, 1.0], 3) == [1, 2, 0]
    assert choose_samples([0.0, 5.0, 3.0], 1) == [2]


def test_markup_characters_in_printed_samples_are_shown_unchanged(capsys):
    logs = [[{"role": "user", "content": "2 + 2 = [/bold] [red]"}, {"role": "assistant", "content": "[link=x] 4"}], []]
    print_samples(logs, [1.0, -0.5], 2, step=7)
    text = capsys.readouterr().out
    assert "user: 2 + 2 = [/bold] [red]" in text and "assistant: [link=x] 4" in text
    assert "step 7, row 0, reward 1" in text and "step 7, row 1, reward -0.5" in text
