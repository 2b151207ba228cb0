"""Serious findings in the terminal: when they are said, how often, and what the last table says."""

from nemo_rl_cpp.report.findings import Alerts

DEAD = {
    "grad_norm": 0.0,
    "reward": 0.5,
    "groups/pct_equal": 100.0,
    "accuracy": 0.5,
    "advantages/min": 0.0,
    "advantages/max": 0.0,
}
ALIVE = {"grad_norm": 1.0, "reward": 0.5, "groups/pct_equal": 10.0, "token_mult_prob_error": 1.0}


def test_a_dead_run_is_told_once_and_in_the_table():
    alerts = Alerts()
    said = [alerts.step(step, DEAD) for step in range(1, 11)]
    assert said[:2] == [[], []] and said[3:] == [[]] * 7
    (line,) = said[2]  # three findings of one cause are one line
    assert line.startswith("serious: ") and "had the same reward, 0.5" in line
    assert alerts.learned_nothing and len(alerts.table()) == 1 and "had the same reward" in alerts.table()["serious"]


def test_a_good_run_is_silent():
    alerts = Alerts()
    assert [alerts.step(step, ALIVE) for step in range(1, 200)] == [[]] * 199
    assert alerts.table() == {} and not alerts.learned_nothing
    assert not Alerts().learned_nothing and Alerts().table() == {}


def test_what_becomes_serious_later_is_said_then():
    alerts = Alerts()
    for step in range(1, 11):
        assert alerts.step(step, ALIVE) == []
    said = [line for step in range(11, 14) for line in alerts.step(step, ALIVE | {"token_mult_prob_error": 1.2})]
    assert len(said) == 1 and "token_mult_prob_error reached 1.2" in said[0]


def test_a_long_run_is_looked_at_ever_more_seldom(monkeypatch):
    looks = []
    monkeypatch.setattr("nemo_rl_cpp.report.findings.find", lambda history: looks.append(1) or [])
    alerts = Alerts()
    for step in range(1, 2001):
        alerts.step(step, {})
    assert 50 < len(looks) < 160  # geometric: 20 looks for every doubling, or so


def test_two_causes_are_two_rows():
    alerts = Alerts({"data": {"max_input_seq_length": 9}})
    for step in range(1, 4):
        alerts.step(step, DEAD | {"cut_prompts_rate": 1.0, "token_mult_prob_error": 2.0})
    rows = alerts.table()
    assert (
        list(rows) == ["serious", "serious 2"]
        and sum("data.max_input_seq_length = 9" in text for text in rows.values()) == 1
    )
