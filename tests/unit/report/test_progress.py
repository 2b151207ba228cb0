import io
from types import SimpleNamespace

from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.report.progress import Progress
from nemo_rl_cpp.stages import stages_shown
from rich.console import Console


def test_training_progress_is_printed_as_plain_lines_if_output_is_not_a_terminal(capsys, clock):
    progress = Progress(total_steps=3)
    assert progress.mode == "plain"
    clock.now += 10
    progress.step(1, {"reward": 0.5, "loss": -0.012345, "tokens_per_sec": 81234.0, "note": "x"})
    clock.now += 4
    progress.step(2, {"reward": 0.75})
    progress.print("a word")
    clock.now += 4
    progress.step(3, {})
    progress.finish({"reward": "0.5 -> 0.75"}, "GRPO: finished")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/3 | reward 0.5  loss -0.01235  tok/s 81.2k | 10.0 s | 20.0 s left"
    assert lines[1] == "step 2/3 | reward 0.75  loss -0.01235  tok/s 81.2k | 4.0 s | 4.0 s left"
    assert lines[2] == "a word" and lines[3].startswith("step 3/3") and "left" not in lines[3]
    table = "\n".join(lines[4:])
    assert "0.5 -> 0.75" in table and "GRPO: finished" in table


def test_progress_line_shows_the_accuracy_only_if_it_differs_from_the_reward(capsys):
    progress = Progress(total_steps=2)
    progress.step(1, {"reward": 0.078125, "accuracy": 0.0781250074505806})
    progress.step(2, {"reward": 0.078125, "accuracy": 0.25})
    first, second = capsys.readouterr().out.splitlines()
    assert "reward 0.07812 |" in first and "reward 0.07812  acc 0.25 |" in second


def test_progress_line_in_a_terminal_shows_phase_and_remaining_time(clock):
    out = io.StringIO()
    progress = Progress(10, mode="live", console=Console(file=out, force_terminal=True, width=120))
    timer = Timer()
    timer.subscribe(progress)
    with timer.step(0), timer("prepare_for_generation/total"):
        clock.now += 2
        assert progress.line() == "step 0/10 | prepare_for_generation 2.0 s"
        with timer("inner"):
            assert "inner" not in progress.line()
    clock.now += 8
    progress.step(1, {"reward": 0.5})
    clock.now += 6
    progress.step(2, {})
    clock.now += 1
    progress.phase("policy_training")
    assert progress.line() == "step 2/10 | policy_training 0.0 s | reward 0.5 | 47.0 s left"
    progress.close()
    progress.close()


def test_remaining_time_of_a_resumed_run_is_estimated_from_its_steps_after_the_resume(clock):
    progress = Progress(100, start_step=50)
    clock.now += 3
    progress.step(51, {})
    assert progress.line().endswith("2 min 27 s left")
    clock.now += 1
    progress.step(52, {})
    assert progress.line().endswith("48.0 s left")


def test_progress_line_is_updated_in_place_in_a_notebook(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle()

    import IPython.display

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    progress = Progress(2)
    assert progress.mode == "notebook"
    progress.phase("generation")
    progress.step(1, {"reward": 1.0})
    assert len(shown) == 3 and shown[1].startswith("step 0/2 | generation") and shown[2].startswith("step 1/2")


def test_first_phases_of_a_run_without_rollouts_do_not_mention_generation(capsys):
    for has_rollouts in (True, False):
        with stages_shown():
            progress = Progress(3, mode="plain", has_rollouts=has_rollouts)
            progress.phase("generation"), progress.phase("policy_training")
        assert ("generating" in (shown := capsys.readouterr().out)) == has_rollouts and "first batch" in shown
