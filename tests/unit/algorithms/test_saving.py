import errno
import json
import os

import pytest
import tiny
import torch
from loop_fakes import Warns, train
from nemo_rl_cpp.algorithms.checkpointing import NotSavedError
from nemo_rl_cpp.algorithms.hooks import summary
from nemo_rl_cpp.models.policy.train_step import NonFiniteError
from safetensors.torch import load_file
from test_grpo_loop import make


class FullDisk:
    """A replacement of a policy's `save_checkpoint` that raises `error` while `full` is True."""

    def __init__(self, run, error):
        self.run, self.error, self.full, self.tried = run, error, True, []
        self.save, run.policy.save_checkpoint = run.policy.save_checkpoint, self

    def __call__(self, weights, *args, **kwargs):
        self.tried.append(self.run.state.step)
        if self.full:
            raise self.error
        return self.save(weights, *args, **kwargs)


ERRORS = [
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded"), OSError(errno.EIO, "Input/output error"),
    RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # the safetensors library's way to say it
]  # fmt: skip


def saved(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").glob("*step_*"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:30])
def test_run_continues_and_retries_a_checkpoint_save_that_failed_on_a_full_disk(tmp_path, error):
    run = make(tmp_path, "grpo.max_num_steps=6", "checkpointing.save_period=2")
    disk, step = FullDisk(run, error), run.policy.train

    def train_and_free(*args, **kwargs):
        disk.full = run.policy.version < 4  # space again in step 5
        return step(*args, **kwargs)

    run.policy.train = train_and_free
    with pytest.warns(UserWarning) as warned:
        train(run)
    said = [str(w.message) for w in warned if "could not be saved" in str(w.message)]
    assert len(said) == 1 and "step 2 could not be saved" in said[0]
    assert str(tmp_path / "checkpoints") in said[0] and " are free there" in said[0]
    assert disk.tried == [2, 3, 4, 5, 6] and run.state.step == 6
    assert saved(tmp_path) == ["step_6"]  # step 5 was off the period: it goes when a newer one is there


def test_full_disk_at_the_last_checkpoint_is_an_error_that_advises_to_free_space(tmp_path):
    run = make(tmp_path, "grpo.max_num_steps=3", "checkpointing.save_period=2")
    FullDisk(run, ERRORS[0])
    words = "step 3 could not be saved.*free space and start"
    with pytest.warns(UserWarning, match="step 2 could not be saved"), pytest.raises(NotSavedError, match=words):
        train(run)
    assert isinstance(NotSavedError(""), ValueError) and saved(tmp_path) == []


def test_run_summary_does_not_name_a_report_that_a_full_disk_prevented(tmp_path, monkeypatch):
    run = make(tmp_path, "grpo.max_num_steps=1", "checkpointing.enabled=false", "logger.report=true")

    def full(*args, **kwargs):
        raise ERRORS[0]

    monkeypatch.setattr(run.report, "_write", full)
    train(run)
    assert "logs" in summary(run, 0, 1.0) and "report" not in summary(run, 0, 1.0)


def test_checkpoint_save_error_ends_the_run_unless_the_disk_is_full(tmp_path):
    run = make(tmp_path, "grpo.max_num_steps=3")
    FullDisk(run, OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(PermissionError):
        train(run)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"lr": 1e38, "weight_decay": 1e9}, "parameters are not finite, first model.embed_tokens"),
        ({"lr": 1e30, "weight_decay": 1e9}, "parameters are not finite, first model.embed_tokens"),
        ({"lr": 1e30, "weight_decay": 0}, "the gradient norm is .*first bad parameters"),
        *(({key: value}, "policy: .*(not finite|is nan)") for key, value in (("weight_decay", 1e38), ("eps", 0), ("lr", 1e37))),
    ],
    ids=str,
)  # fmt: skip
def test_non_finite_weights_end_the_run_and_are_never_saved(tmp_path, settings, words):
    run = tiny.make(
        tmp_path, *tiny.SMALL, *(f"policy.optimizer.kwargs.{key}={value}" for key, value in settings.items()), "grpo.max_num_steps=3",
        "checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.metric_name=null",
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=words):
        run.train()
    for folder in (tmp_path / "checkpoints").glob("step_*"):
        weights = load_file(folder / "policy" / "weights" / "model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize(("bad", "enabled"), [(float("nan"), "true"), (-float("inf"), "false")])
def test_error_for_non_finite_weights_names_the_first_such_parameter(tmp_path, bad, enabled):
    run = tiny.make(
        tmp_path, *tiny.SMALL, "grpo.max_num_steps=1", f"checkpointing.enabled={enabled}", "checkpointing.metric_name=null",
        "policy.optimizer.kwargs.lr=0.5",
    )  # fmt: skip
    trained = run.policy.train

    def train_and_break(*args, **kwargs):
        result = trained(*args, **kwargs)
        run.policy.state_dict()["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
        return result

    run.policy.train = train_and_break
    words = r"policy: after step 1 1 parameters are not finite, first model.layers.1.mlp.up_proj.weight.*rate.* 0.5"
    with pytest.raises(NonFiniteError, match=words):
        run.train()
    assert saved(tmp_path) == []


def make_steps(tmp_path, steps, metric, *overrides):
    """Return a run of `steps` steps that saves after the last one, with `metric` to rank checkpoints."""
    names = (f"grpo.max_num_steps={steps}", f"checkpointing.save_period={steps}", f"checkpointing.metric_name={metric}")
    return make(tmp_path, *names, *overrides)


@pytest.mark.parametrize("name", ["train:rewrd", "val:accurcy", "val:loss"])
def test_unknown_checkpoint_metric_name_ends_the_run_after_the_first_step(tmp_path, name):
    """Only training has the metric `loss`."""
    run = make_steps(tmp_path, 9, name, "grpo.val_period=5")
    kind, missing = name.split(":")
    with pytest.raises(ValueError, match=f"metric_name: the {kind} metrics have no '{missing}'; there are .*accuracy"):
        train(run)
    assert run.state.step == 1


def test_unknown_metric_that_is_to_end_the_run_is_an_error_after_the_first_step(tmp_path):
    """A user may write it as in checkpointing.metric_name."""
    stop = ("grpo.stop_at_validation_metric=val:accuracy", "grpo.stop_at_validation_threshold=0.9")
    run = make(tmp_path, "grpo.max_num_steps=9", "grpo.val_period=5", *stop, "checkpointing.enabled=false")
    with pytest.raises(ValueError, match="stop_at_validation_metric: .* no 'val:accuracy'; there are accuracy"):
        train(run)
    assert run.state.step == 1


SURPLUS = (
    *tiny.SAVED_AT_THE_END, "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8", "policy.train_global_batch_size=32",
    "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=4", "+grpo.dynamic_sampling_keep_surplus=true",
)  # fmt: skip


@pytest.mark.parametrize("name", ["train:truncation_rate", "val:truncation_rate"])
def test_run_that_resumes_with_a_step_without_rollouts_accepts_their_metrics_as_checkpoint_metric(tmp_path, name):
    for steps in (1, 2):
        with tiny.make(tmp_path, *SURPLUS, f"grpo.max_num_steps={steps}", f"checkpointing.metric_name={name}") as run:
            run.train()
    assert run.history[0]["dynamic_sampling_num_gen_batches"] == 0 and "truncation_rate" not in run.history[0]
    assert run.state.step == 2


def test_unknown_validation_metric_raises_at_validation_if_validation_environments_differ(tmp_path):
    """The names of their metrics do not follow from those of training."""
    run = make_steps(tmp_path, 9, "val:accurcy", "grpo.val_period=2")
    run.environments.train["second"] = next(iter(run.environments.train.values()))
    run.validation.validator.task_to_env = {"t": run.environments.train["t"]}
    with pytest.raises(ValueError, match="the val metrics have no 'accurcy'"):
        train(run)
    assert run.state.step == 2


def test_initial_validation_reports_an_unknown_checkpoint_metric_name(tmp_path):
    run = make(tmp_path, "checkpointing.metric_name=val:accurcy", "grpo.val_at_start=true")
    with pytest.raises(ValueError, match="the val metrics have no 'accurcy'; there are accuracy"):
        train(run)
    assert run.state.step == 0 and run.policy.trained == []


@pytest.mark.parametrize(
    "name",
    ["train:loss", "train:reward", "val:accuracy", "val:avg_length", "val:pass_k", "val:mean_gen_tokens_per_sample"],
)
def test_checkpoint_records_the_value_of_the_configured_metric(tmp_path, name):
    several = ("grpo.val_num_generations_per_prompt=2",) if name == "val:pass_k" else ()
    run = make_steps(tmp_path, 2, name, "grpo.val_period=2", *several)
    train(run)
    info = json.loads((tmp_path / "checkpoints" / "step_2" / "training_info.json").read_text())
    assert isinstance(info[name], float)


def test_checkpoint_is_saved_with_a_warning_if_the_configured_metric_disappears_during_the_run(tmp_path):
    run = make_steps(tmp_path, 3, "train:token_mult_prob_error")
    step = run.policy.train

    def train_without_loss(*args, **kwargs):
        result = step(*args, **kwargs)
        if run.policy.version == 3:
            del result["all_mb_metrics"]["token_mult_prob_error"]
        return result

    run.policy.train = train_without_loss
    words = "saved without checkpointing.metric_name=train:token_mult_prob_error.*have no 'token_mult_prob_error'"
    with pytest.warns(UserWarning, match=words):
        train(run)
    assert os.path.isdir(tmp_path / "checkpoints" / "step_3")


def test_checkpoints_saved_without_the_configured_metric_give_one_warning_per_run(tmp_path):
    run = make_steps(tmp_path, 4, "val:accuracy", "grpo.val_period=4", "checkpointing.save_period=1")
    words = "saved without checkpointing.metric_name=val:accuracy.*multiple of val_period"
    with pytest.warns(UserWarning, match=words) as warned:
        train(run)
    assert sum("saved without" in str(w.message) for w in warned) == 1


def test_warning_about_the_metric_of_a_run_without_validation_data_advises_to_set_data(tmp_path):
    run = tiny.make(tmp_path, *tiny.SMALL, "data.validation=null", "checkpointing.enabled=true", "grpo.max_num_steps=1")
    run.terminal.progress = Warns()
    with pytest.warns(UserWarning, match="saved without checkpointing.metric_name=val:accuracy.*set data.validation"):
        run.train()


def test_interrupted_run_gets_no_warning_about_a_missing_validation_metric(tmp_path, recwarn):
    run = make_steps(tmp_path, 4, "val:accuracy", "grpo.val_period=4")
    run.stop.reason = "interrupted"
    train(run)
    assert saved(tmp_path) == ["step_1"] and [w for w in recwarn if "saved without" in str(w.message)] == []
