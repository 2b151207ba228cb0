import json
import re
import shutil

import pytest
import tiny
from nemo_rl_cpp.checkpoints.manager import ResumeError
from nemo_rl_cpp.checks import preflight
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.files.durable import seal_folder
from nemo_rl_cpp.files.folder_lock import FolderInUseError

RUN = (
    *tiny.SMALL, "checkpointing.enabled=true", "checkpointing.save_period=2", "checkpointing.metric_name=null",
    "logger.tensorboard_enabled=false",
)  # fmt: skip
ROWS = [{"input": f"{i}", "output": f"{i}"} for i in range(100, 140)]


def close(run):
    run.log.logger.finish()
    run.checkpoints.shutdown()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory):
    """Return a folder with the model folder `model`, the data file `rows.jsonl`, and a run of two steps on both."""
    root = tmp_path_factory.mktemp("resume")
    first = tiny.train(root / "seedling", *RUN, "grpo.max_num_steps=1")
    shutil.copytree(root / "seedling" / "checkpoints" / "step_1" / "policy" / "weights", root / "model")
    write_rows(root / "rows.jsonl", ROWS)
    tiny.train(root / "run", *RUN, "grpo.max_num_steps=2", *own(root))
    assert first.state.step == 1
    return root


def own(root, model="model", rows="rows.jsonl"):
    return (
        f"policy.model_name={root / model}", "data.train.dataset_name=ResponseDataset",
        "~data.train.num_digits", f"+data.train.data_path={root / rows}", "data.validation=null",
        "+data.train.input_key=input", "+data.train.output_key=output",
    )  # fmt: skip


@pytest.fixture
def root(run_of_two_steps, tmp_path):
    """Return a folder with a copy of that run. Its model and data files stay in the original folder."""
    shutil.copytree(run_of_two_steps / "run", tmp_path / "run")
    return tmp_path


def resume(root, base, *overrides, model="model", rows="rows.jsonl", **options):
    run = tiny.make(root / "run", *RUN, *own(base, model, rows), *overrides, **options)
    close(run)
    return run


SAID = {
    "policy.optimizer.kwargs.lr=2e-3": "policy.optimizer.kwargs.lr 0.001 -> 0.002",
    "grpo.num_prompts_per_step=4 policy.train_global_batch_size=16": "grpo.num_prompts_per_step 8 -> 4",
    "loss_fn.reference_policy_kl_penalty=0.01 grpo.skip_reference_policy_logprobs_calculation=false": "loss_fn.reference_policy_kl_penalty 0.0 -> 0.01",
    "policy.generation.stop_strings=[x]": "policy.generation.stop_strings null -> ['x']",
    "policy.tokenizer.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'": "policy.tokenizer.chat_template null -> ",
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", SAID)
def test_resume_prints_every_configuration_key_that_has_changed(root, run_of_two_steps, capsys, overrides):
    parts = [overrides] if "'" in overrides else overrides.split()
    run = resume(root, run_of_two_steps, *parts)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Resuming "))
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(rf"Resuming \S+/run/checkpoints/step_2, saved {time}\. Changed since: ", line)
    assert SAID[overrides] in line and run.state.step == 2


def test_configuration_in_a_checkpoint_cannot_include_files_outside_of_it(root, run_of_two_steps, tmp_path, capsys):
    secret = tmp_path / "secret.yaml"
    secret.write_text("grpo: {seed: 41}\n")
    step = root / "run" / "checkpoints" / "step_2"
    config = step / "config.yaml"
    config.write_text(f"defaults: {secret}\n" + config.read_text())
    (step / "manifest.json").unlink()
    seal_folder(step)
    resume(root, run_of_two_steps)
    assert "Its config.yaml cannot be read, so what changed since is not known." in capsys.readouterr().out


def test_run_resumes_after_its_model_and_data_files_were_moved(root, run_of_two_steps, capsys):
    shutil.copytree(run_of_two_steps / "model", run_of_two_steps / "moved" / "model", dirs_exist_ok=True)
    shutil.copy(run_of_two_steps / "rows.jsonl", run_of_two_steps / "moved.jsonl")
    resume(root, run_of_two_steps, model="moved/model", rows="moved.jsonl")
    out = capsys.readouterr().out
    assert "policy.model_name" in out and "data.train.data_path" in out


REFUSED = [
    ("other model", {"model": "model2"}, (), r"policy.model_name: \S+/model -> \S+/model2 is another model"),
    ("other tokenizer", {}, ("policy.tokenizer.name=BASE/model2",), r"policy.tokenizer.name: \S+/model -> \S+/model2 is another tokenizer"),
    ("other heads", {}, ("policy.hf_config_overrides.num_attention_heads=8", "policy.hf_config_overrides.num_key_value_heads=8", "+policy.hf_config_overrides.head_dim=8"),
     "policy.hf_config_overrides.num_attention_heads: num_attention_heads 4 -> 8 is another architecture"),
    ("rope_theta", {}, ("+policy.hf_config_overrides.rope_theta=500.0",), "policy.hf_config_overrides.rope_theta: rope_theta 10000.0 -> 500.0"),
    ("rms_norm_eps", {}, ("+policy.hf_config_overrides.rms_norm_eps=1e-2",), "policy.hf_config_overrides.rms_norm_eps: rms_norm_eps 1e-05 -> 0.01"),
    ("seed", {}, ("grpo.seed=7",), "grpo.seed: 42 -> 7: the order of the data"),
    ("shuffle", {}, ("data.shuffle=false",), "data.shuffle: true -> false"),
    ("precision", {}, ("policy.precision=bfloat16",), "policy.precision: 'float32' -> 'bfloat16'"),
    ("data set", {}, ("data.train.dataset_name=reverse_digits", "~data.train.data_path", "~data.train.input_key", "~data.train.output_key",
     "+data.train.num_digits=3"), "data.train.dataset_name: 'ResponseDataset' -> 'reverse_digits' is another data set"),
]  # fmt: skip


@pytest.mark.parametrize("name, paths, overrides, words", REFUSED, ids=[row[0] for row in REFUSED])
def test_resuming_with_a_changed_model_tokenizer_data_set_seed_or_precision_is_an_error(
    root, run_of_two_steps, name, paths, overrides, words, monkeypatch
):
    shutil.copytree(run_of_two_steps / "model", run_of_two_steps / "model2", dirs_exist_ok=True)
    monkeypatch.setattr("nemo_rl_cpp.algorithms.parts.make_policy", lambda *a, **k: pytest.fail("a model was loaded"))
    overrides = [text.replace("BASE", str(run_of_two_steps)) for text in overrides]
    with pytest.raises(ResumeError, match=words) as caught:
        resume(root, run_of_two_steps, *overrides, **paths)
    text = str(caught.value)
    assert "checkpointing.checkpoint_dir" in text and "\n" not in text
    assert not (root / "run" / "logs" / "exp_002").exists()
    assert (root / "run" / "checkpoints" / "step_2").is_dir()


def config_of(root, base, *overrides, **paths):
    home = root / "run"
    folders = [f"logger.log_dir={home / 'logs'}", f"checkpointing.checkpoint_dir={home / 'checkpoints'}"]
    fixed = [*folders, "grpo.val_period=0", "grpo.val_at_end=false"]
    return load_grpo_config("grpo_tiny.yaml", [*fixed, *RUN, *own(base, **paths), *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, paths, overrides, words", [row for row in REFUSED if row[0] in ("other model", "rope_theta", "seed")]
)
def test_check_reports_changed_keys_that_prevent_a_resume(root, run_of_two_steps, name, paths, overrides, words):
    errors = [str(f) for f in preflight(config_of(root, run_of_two_steps, *overrides, **paths)) if f.level == "error"]
    key, _, reason = words.partition(": ")
    wanted = f"{key} {reason.removeprefix(key.rpartition('.')[2] + ' ')}"  # the key once, and the reason
    assert any(re.match(wanted, text) and "run/checkpoints/step_2: set it back" in text for text in errors), errors
    assert [f for f in preflight(config_of(root, run_of_two_steps)) if f.level == "error" and "step_2" in str(f)] == []


@pytest.mark.parametrize(("override", "words"), [
    ("policy.hf_config_overrides.num_attention_heads=8", "num_attention_heads 4 -> 8 is another architecture"),
    ("++policy.hf_config_overrides.rope_theta=7.0", "rope_theta .* -> 7.0 is another architecture"),
])  # fmt: skip
def test_changed_architecture_of_a_randomly_initialised_model_prevents_a_resume(run_of_two_steps, override, words):
    home = run_of_two_steps / "seedling"
    fixed = [f"logger.log_dir={home / 'logs'}", f"checkpointing.checkpoint_dir={home / 'checkpoints'}", *RUN]
    for overrides, errors in (([], 0), ([override], 1)):
        config = load_grpo_config("grpo_tiny.yaml", [*fixed, *overrides])
        found = [str(f) for f in preflight(config) if f.level == "error"]
        assert len(found) == errors and all(re.search(words, text) for text in found), found


def test_changed_learning_rate_and_schedule_apply_from_the_first_step_after_a_resume(root, run_of_two_steps):
    def rate(*overrides):
        return resume(root, run_of_two_steps, *overrides).policy.learning_rate

    assert rate() == 1e-3
    assert rate("policy.optimizer.kwargs.lr=2e-3") == 2e-3
    # LinearLR from a tenth over 10 calls: after 2 calls 0.1 + 0.9 * 2 / 10
    warm_up = "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 10}}]"
    assert rate(warm_up) == pytest.approx(1e-3 * 0.28, rel=1e-12)
    assert rate(warm_up, "policy.optimizer.kwargs.lr=1e-2") == pytest.approx(1e-2 * 0.28, rel=1e-12)


def test_resuming_with_a_different_algorithm_is_an_error(root, run_of_two_steps):
    with pytest.raises(ResumeError, match="ppo: the checkpoint is of a GRPO run, this one is PPO"):
        tiny.make(root / "run", "checkpointing.enabled=true", config="ppo_tiny.yaml")


def test_resuming_a_finished_run_prints_which_key_to_raise_to_train_further(run_of_two_steps, capsys):
    resume(run_of_two_steps, run_of_two_steps, "grpo.max_num_steps=2")
    out = capsys.readouterr().out
    assert "step_2, saved 20" in out and "Nothing in the configuration has changed." in out
    assert "step_2 has 2 steps, and grpo.max_num_steps is 2: nothing is left to train. Raise grpo.max_num_steps" in out
    assert "checkpointing.checkpoint_dir" in out


def test_checkpoint_folder_in_use_by_another_run_is_an_error_before_the_model_is_loaded(tmp_path, monkeypatch):
    first = tiny.make(tmp_path, *RUN)
    monkeypatch.setattr("nemo_rl_cpp.algorithms.parts.make_policy", lambda *a, **k: pytest.fail("a model was loaded"))
    words = r"checkpoints is in use by this very process, since 20.*checkpointing.checkpoint_dir of its own"
    with pytest.raises(FolderInUseError, match=words):
        tiny.make(tmp_path, *RUN)
    close(first)


def test_saved_groups_of_dynamic_sampling_are_dropped_on_resume_if_the_group_size_changed(tmp_path, capsys):
    keep = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_keep_surplus=true", "grpo.batch_multiplier=2")
    first = tiny.train(tmp_path, *RUN, *keep, "grpo.max_num_steps=2", "grpo.dynamic_sampling_max_gen_batches=50")
    assert first.state.step == 2
    file = tmp_path / "checkpoints" / "step_2" / "trainer_state" / "sampler.json"
    if json.loads(file.read_text())["cache"] is None:
        pytest.fail("the run kept no groups: the test tries nothing")
    close(tiny.make(tmp_path, *RUN, *keep, "grpo.max_num_steps=3"))
    assert "Dropped" not in capsys.readouterr().out
    smaller = ("grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=16")
    other = tiny.make(tmp_path, *RUN, *keep, "grpo.max_num_steps=3", *smaller)
    close(other)
    assert "the settings of dynamic sampling changed" in capsys.readouterr().out
    assert other.collector.sampler.cached_groups == 0


PPO = (
    "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=32", "checkpointing.enabled=true",
    "checkpointing.save_period=1", "checkpointing.metric_name=null", "logger.tensorboard_enabled=false", "ppo.max_num_steps=1",
)  # fmt: skip


def test_changed_critic_keys_are_reported_or_prevent_a_resume_like_changed_policy_keys(tmp_path, capsys):
    tiny.train(tmp_path, *PPO, config="ppo_tiny.yaml")
    changed = ("value.megatron_cfg.optimizer.lr=0.25", "ppo.max_num_steps=2")
    run = tiny.make(tmp_path, *PPO, *changed, config="ppo_tiny.yaml")
    close(run)
    words = r"Resuming .*step_1.*ppo.max_num_steps 1 -> 2, value.megatron_cfg.optimizer.lr .* -> 0.25"
    assert re.search(words, capsys.readouterr().out)
    assert run.critic.model.learning_rate == 0.25
    words = "value.hf_config_overrides.rms_norm_eps: rms_norm_eps 1e-05 -> 0.5 is another architecture"
    with pytest.raises(ResumeError, match=words):
        tiny.make(tmp_path, *PPO, "+policy.hf_config_overrides.rms_norm_eps=0.5", config="ppo_tiny.yaml")
    shutil.rmtree(tmp_path / "checkpoints" / "step_1" / "value")  # as a run with the estimator raw_reward leaves it
    (tmp_path / "checkpoints" / "step_1" / "manifest.json").unlink()
    seal_folder(tmp_path / "checkpoints" / "step_1")
    with pytest.raises(ResumeError, match="value: the checkpoint holds no value model"):
        tiny.make(tmp_path, *PPO, config="ppo_tiny.yaml")
