import signal
from pathlib import Path

import nemo_rl_cpp
import pytest
from nemo_rl_cpp.models import hub_upload

ROWS = [{"prompt": f"{a}{b}="} for a in range(10) for b in range(2)]


class Heard(nemo_rl_cpp.Callback):
    def __init__(self, stop_at=""):
        self.said, self.stop_at = [], stop_at

    def hear(self, method, event):
        words = [method, str(event.step), event.status or "", "saved" if event.checkpoint else ""]
        self.said.append(" ".join(filter(None, words)))
        if self.said[-1] == self.stop_at:
            event.stop("enough")

    def on_step(self, event):
        assert "reward" in event.metrics and event.run.history[-1]["step"] == event.step and event.max_steps == 3
        self.hear("step", event)

    def on_validation(self, event):
        assert "accuracy" in event.metrics
        self.hear("validation", event)

    def on_checkpoint(self, event):
        assert (event.checkpoint / "policy" / "weights" / "config.json").is_file()
        self.hear("checkpoint", event)

    def on_end(self, event):
        self.hear("end", event)


def train(folder, callbacks, **more):
    return nemo_rl_cpp.train_grpo(
        "tiny-random", ROWS, lambda completions: [float(len(text)) for text in completions], 3, validation=ROWS[:2],
        num_prompts_per_step=2, num_generations=2, max_new_tokens=3, max_length=16, log_dir=folder, checkpoint_dir=folder / "c",
        callbacks=callbacks, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("stop_at", "said"), [
    ("", "validation 0, step 1, step 2, checkpoint 2 saved, step 3, validation 3, checkpoint 3 saved, end 3 finished"),
    ("validation 0", "validation 0, end 0 finished"),
    ("step 1", "validation 0, step 1, validation 1, checkpoint 1 saved, end 1 finished"),
    ("checkpoint 2 saved", "validation 0, step 1, step 2, checkpoint 2 saved, end 2 finished"),
])  # fmt: skip
def test_callbacks_are_called_at_each_event_of_a_run_and_can_stop_the_run(tmp_path, stop_at, said, capsys):
    heard = Heard(stop_at)
    train(tmp_path, heard, checkpointing__save_period=2)
    assert ", ".join(heard.said) == said
    assert not stop_at or "enough" in capsys.readouterr().out


def test_ctrl_c_during_a_callback_ends_the_run_after_the_same_step(tmp_path):
    class Pressed(Heard):
        def on_step(self, event):
            super().on_step(event)
            signal.raise_signal(signal.SIGINT)

    heard = Pressed()
    train(tmp_path, heard)
    assert heard.said == ["validation 0", "step 1", "checkpoint 1 saved", "end 1 interrupted"]


def test_run_stopped_by_a_callback_continues_with_resume_true(tmp_path, monkeypatch):
    train(tmp_path, Heard("step 1"))
    heard = Heard()
    result = train(tmp_path, heard, resume=True)
    assert [row["step"] for row in result.history] == [2, 3] and heard.said[0] == "step 2"
    sent = {}
    monkeypatch.setattr("nemo_rl_cpp.api.training.push_to_hub", lambda *folder, **options: sent.update(options))
    result.push_to_hub("org/x")
    assert sent["message"] == "GRPO tiny-random, 3 steps, by nemo_rl_cpp"  # of the run, not of this call
    card = (result.save(tmp_path / "model") / "README.md").read_text()
    assert "steps on rows given from Python" in card


def test_failing_callback_ends_the_run_with_an_error_that_names_the_callback(tmp_path, capsys):
    class Broken(nemo_rl_cpp.Callback):
        def on_step(self, event):
            raise KeyError("mine")

        def on_end(self, event):
            raise RuntimeError(f"after {event.status}")

    with pytest.raises(KeyError, match=r"^callback Broken.on_step failed with KeyError 'mine', in .*Broken.on_step"):
        train(tmp_path, [Broken()])
    assert "warning: callback Broken.on_end failed with RuntimeError: after failed" in capsys.readouterr().err


def test_on_end_of_every_callback_is_called_even_if_an_earlier_callback_fails(tmp_path, capsys):
    class Broken(nemo_rl_cpp.Callback):
        def on_end(self, event):
            raise RuntimeError("mine")

    heard = Heard()
    with pytest.raises(RuntimeError, match="^callback Broken.on_end failed with RuntimeError: mine"):
        train(tmp_path, [Broken(), Broken(), heard])
    assert heard.said[-1] == "end 3 finished" and capsys.readouterr().err.count("warning: callback Broken.on_end") == 1


def test_ctrl_c_during_the_upload_to_the_hub_cancels_only_the_upload(tmp_path, monkeypatch, capsys):
    def interrupted(*folder, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("nemo_rl_cpp.checks.folders.can_push", lambda: True)
    monkeypatch.setattr("nemo_rl_cpp.algorithms.checkpointing.push_to_hub", interrupted)
    heard = Heard()
    assert len(train(tmp_path, heard, checkpointing__push_to_hub="org/x").history) == 3
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert heard.said[-1] == "end 3 finished" and "hub not uploaded: the upload to org/x was interrupted" in said


def test_resume_true_requires_a_checkpoint_and_resume_false_forbids_one(tmp_path):
    with pytest.raises(ValueError, match="checkpointing.resume=must, but .* holds no checkpoint"):
        train(tmp_path, None, resume=True)
    train(tmp_path, None, resume=False)
    with pytest.raises(ValueError, match="checkpointing.resume=never, but .* holds checkpoints"):
        train(tmp_path, None, resume=False)


class Hub:
    sent = []

    def create_repo(self, repo_id, **options):
        if "refused" in repo_id:
            raise RuntimeError("no")

    def upload_folder(self, repo_id, folder_path, **options):
        self.sent.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.mark.parametrize("name", ["org/taken", "org/refused"])
def test_push_to_hub_uploads_the_finished_run_or_reports_why_the_upload_failed(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(hub_upload, "can_push", lambda: True)
    monkeypatch.setattr("nemo_rl_cpp.checks.folders.can_push", lambda: True)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: Hub())
    Hub.sent.clear()
    result = train(tmp_path, None, checkpointing__push_to_hub=name, checkpointing__save_optimizer=False)
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    if name == "org/refused":
        assert Hub.sent == [] and "hub not uploaded: the upload to org/refused failed" in said
        return
    assert "hub https://huggingface.co/org/taken" in said
    ((repository, files),) = Hub.sent
    assert repository == name and {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert not (tmp_path / "c" / "step_3" / "policy" / "optimizer").exists()
    assert "3 steps on rows given" in (tmp_path / "c" / "step_3" / "policy" / "weights" / "README.md").read_text()
    assert result.push_to_hub("org/again", client=Hub()) == "https://huggingface.co/org/again" and len(Hub.sent) == 2


def test_push_to_hub_without_a_token_or_checkpoints_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.checks.folders.can_push", lambda: False)
    said = "checkpointing.push_to_hub is org/x, but this machine has no token of the hub: log in"
    with pytest.raises(ValueError, match=said):
        train(tmp_path, None, checkpointing__push_to_hub="org/x")
    with pytest.raises(ValueError, match="checkpointing.push_to_hub is 'a b': give the name of a repository"):
        train(tmp_path, None, checkpointing__push_to_hub="a b")
    with pytest.raises(ValueError, match="uploads the last checkpoint, but checkpointing.enabled is false"):
        options = {"checkpointing__push_to_hub": "org/x", "log_dir": tmp_path}
        nemo_rl_cpp.train_grpo("tiny-random", ROWS, lambda completions: 0, **options)


def test_resume_without_saved_optimizer_state_gives_a_warning(tmp_path):
    train(tmp_path, Heard("step 1"), checkpointing__save_optimizer=False)
    with pytest.warns(UserWarning, match="the policy optimizer starts fresh, with new moments"):
        train(tmp_path, None, resume=True, checkpointing__save_optimizer=False)
