"""Commands and overrides in NeMo RL's guides on GRPO, DAPO and ProRLv2 run as printed, with other model, data and
sizes. They set the documented keys and log the documented metrics."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
from nemo_rl_cpp import run_grpo_math
from nemo_rl_cpp.config import load_grpo_config

GRPO = "examples/configs/grpo.yaml"
DAPO = "examples/configs/recipes/llm/dapo-qwen2.5-7b.yaml"
PRORL = "examples/configs/prorlv2.yaml"

MODEL = (
    "policy.model_name=tiny-random", "++policy.hf_config_overrides.vocab_size=16", "++policy.hf_config_overrides.initializer_range=0.1",
    "++policy.hf_config_overrides.max_position_embeddings=32", "+policy.tokenizer.chat_template=null", "policy.precision=float32",
    "policy.optimizer.kwargs.lr=1e-3", "policy.scheduler=null",
)  # fmt: skip
DATA = (
    "data.train={dataset_name: reverse_digits, seed: 1}", "~data.train.split_validation_size", "data.validation=null",
    "data.default.env_name=reverse_digits", "data.default.prompt_file=null", "+env.reverse_digits={}", "env.math.num_workers=1",
)  # fmt: skip
SIZES = (
    "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=2", "policy.train_global_batch_size=32",
    "policy.max_total_sequence_length=16", "policy.generation.max_new_tokens=6", "data.max_input_seq_length=16",
    "checkpointing.enabled=false", "grpo.val_period=0", "logger.monitor_gpus=false",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A command that a guide prints: its `config` and `overrides`; `gives`, {configuration key: its value afterwards};
    `sizes`, overrides that make the run small; and `shows`, {metric: predicate of its values in the run's steps}."""

    config: str
    overrides: tuple[str, ...] = ()
    gives: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    shows: dict[str, Any] = field(default_factory=dict)


def exactly(value):
    return lambda values: all(v == value for v in values)


def some(predicate):
    return lambda values: any(predicate(v) for v in values)


FOUR_UPDATES = ("policy.train_global_batch_size=8", "grpo.max_num_steps=3")
LINES = {
    # ---- grpo.md
    "grpo: the default configuration": Line(GRPO, gives={"policy.model_name": "Qwen/Qwen2.5-1.5B", "policy.sequence_packing.enabled": True, "loss_fn.ratio_clip_max": 0.2}),
    "grpo: dual clipping": Line(GRPO, ("loss_fn.ratio_clip_c=3",), {"loss_fn.ratio_clip_c": 3}, FOUR_UPDATES),
    "grpo: KL penalty": Line(
        GRPO, ("loss_fn.reference_policy_kl_penalty=0.1",), {"loss_fn.reference_policy_kl_penalty": 0.1},
        FOUR_UPDATES, {"kl_penalty": some(lambda v: v > 0)},
    ),
    "grpo: on-policy KL approximation": Line(
        GRPO, ("loss_fn.use_on_policy_kl_approximation=True",), {"loss_fn.use_on_policy_kl_approximation": True},
        FOUR_UPDATES, {"kl_penalty": some(lambda v: v > 0)},
    ),
    "grpo: importance sampling correction": Line(
        GRPO, ("loss_fn.use_importance_sampling_correction=True",), {"loss_fn.use_importance_sampling_correction": True},
        shows={"sampling_importance_ratio": exactly(1.0)},
    ),
    "grpo: dynamic batching": Line(
        GRPO, ("policy.sequence_packing.enabled=false", "policy.dynamic_batching.enabled=true"), {"policy.dynamic_batching.enabled": True}
    ),
    # ---- dapo.md
    "dapo: the recipe": Line(
        DAPO,
        gives={"grpo.batch_multiplier": 3, "loss_fn.ratio_clip_max": 0.28, "loss_fn.token_level_loss": True, "loss_fn.ratio_clip_c": 10,
               "grpo.use_dynamic_sampling": True, "loss_fn.reference_policy_kl_penalty": 0.0},
        shows={"filtered_reward": lambda v: all(-1 <= x <= 1 for x in v), "dynamic_sampling_kept_groups": exactly(8)},
    ),
    "dapo: the configuration block": Line(
        DAPO,
        ("grpo.use_dynamic_sampling=true", "grpo.num_prompts_per_step=512", "grpo.num_generations_per_prompt=16", "grpo.dapo_batch_multiplier=3",
         "grpo.max_num_gen_batches=10", "grpo.reward_scaling.enabled=true", "grpo.reward_scaling.correct=1.0",
         "grpo.reward_scaling.incorrect=-1.0", "grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=4096",
         "grpo.reward_shaping.overlong_buffer_penalty=1.0", "grpo.reward_shaping.max_response_length=20480"),
        {"grpo.batch_multiplier": 3, "grpo.dynamic_sampling_max_gen_batches": 10, "grpo.reward_scaling.target_max": 1.0,
         "grpo.reward_scaling.target_min": -1.0, "grpo.reward_shaping.overlong_buffer_length": 4096,
         "grpo.reward_shaping.max_response_length": 20480, "policy.train_global_batch_size": 512},
        ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.reward_shaping.overlong_buffer_length=4",
         "grpo.reward_shaping.max_response_length=6"),
        {"reward": lambda v: min(v) < -1.0},  # wrong (-1) and too long (up to -1 more)
    ),
    # ---- prorlv2.md
    "prorlv2: the configuration": Line(
        PRORL,
        gives={"grpo.batch_multiplier": 1.5, "grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.reward_shaping.stop_properly_penalty_coef": 0,
               "loss_fn.ratio_clip_max": 0.27, "loss_fn.truncated_importance_sampling_type": "icepop", "grpo.adv_estimator.minus_baseline": True,
               "loss_fn.use_kl_in_reward": False, "grpo.adv_estimator.use_leave_one_out_baseline": False},
        shows={"is_oob_ratio": exactly(0.0), "reward": lambda v: max(v) < 0.1},
    ),
    "prorlv2: batch multiplier and limit": Line(
        PRORL, ("grpo.batch_multiplier=2", "grpo.dynamic_sampling_max_gen_batches=5"), {"grpo.dynamic_sampling_max_gen_batches": 5},
        shows={"dynamic_sampling_num_gen_batches": lambda v: all(1 <= x <= 5 for x in v)},
    ),
    "prorlv2: no penalty": Line(
        PRORL, ("grpo.reward_shaping.stop_properly_penalty_coef=1.0",), {"grpo.reward_shaping.stop_properly_penalty_coef": 1.0},
    ),
    "prorlv2: tis": Line(
        PRORL, ("loss_fn.truncated_importance_sampling_type=tis",), {"loss_fn.truncated_importance_sampling_type": "tis"},
        shows={"is_oob_ratio": exactly(0.0)},
    ),
    "prorlv2.1: seq-mask-tis": Line(
        PRORL,
        ("grpo.use_dynamic_sampling=false", "grpo.batch_multiplier=1", "loss_fn.force_on_policy_ratio=true",
         "loss_fn.truncated_importance_sampling_type=seq-mask-tis", "loss_fn.truncated_importance_sampling_ratio=1.002",
         "loss_fn.truncated_importance_sampling_ratio_min=0.999"),
        {"loss_fn.truncated_importance_sampling_ratio": 1.002}, shows={"is_oob_ratio": exactly(0.0), "probs_ratio_max": exactly(1.0)},
    ),
    "prorlv2: practical overrides": Line(
        PRORL,
        ("policy.model_name=Qwen/Qwen2.5-1.5B", "logger.wandb_enabled=true", "logger.wandb.project=prorlv2-dev",
         "checkpointing.checkpoint_dir=results/prorlv2", "logger.log_dir=logs/prorlv2"),
        {"logger.wandb.project": "prorlv2-dev", "checkpointing.checkpoint_dir": "results/prorlv2", "logger.log_dir": "logs/prorlv2"},
        ("logger.wandb_enabled=false",),
    ),
    "prorlv2: overlong shaping instead": Line(
        PRORL,
        ("grpo.reward_shaping.stop_properly_penalty_coef=null", "grpo.reward_shaping.overlong_buffer_length=4096",
         "grpo.reward_shaping.overlong_buffer_penalty=1.0", "grpo.reward_shaping.max_response_length=20480"),
        {"grpo.reward_shaping.stop_properly_penalty_coef": None, "grpo.reward_shaping.max_response_length": 20480},
        ("grpo.reward_shaping.overlong_buffer_length=4", "grpo.reward_shaping.max_response_length=6"), {"reward": lambda v: min(v) < 0},
    ),
    "prorlv2: room for longer answers": Line(
        PRORL, ("policy.max_total_sequence_length=1024", "policy.generation.max_model_len=1024"),
        {"policy.generation.vllm_cfg.max_model_len": 1024}, ("policy.max_total_sequence_length=24", "policy.generation.max_model_len=24"),
    ),
}  # fmt: skip


def value(config, key):
    for part in key.split("."):
        config = config[part]
    return config


def steps(folder):
    """Return the metrics of each training step, from metrics.jsonl."""
    (path,) = folder.rglob("metrics.jsonl")
    merged: dict[int, dict] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        merged.setdefault(row["step"], {}).update(row)
    return [row for _, row in sorted(merged.items()) if "train/loss" in row]


@pytest.mark.parametrize("name", LINES)
def test_commands_in_the_guides_set_the_documented_keys_and_log_documented_metrics(name, tmp_path, monkeypatch, capsys):
    line = LINES[name]
    config = load_grpo_config(line.config, line.overrides)
    for key, expected in line.gives.items():
        assert value(config.model_dump(), key) == expected, key
    monkeypatch.chdir(tmp_path)  # relative folders of the printed commands
    argv = ["--config", line.config, *line.overrides, *MODEL, *DATA, *SIZES, *line.sizes]
    tiny.one_thread()
    assert run_grpo_math.main(argv) == 0
    rows = steps(tmp_path)
    assert len(rows) >= 2
    assert all(row["train/token_mult_prob_error"] == 1.0 and row["train/max_logprob_gap"] == 0.0 for row in rows)
    for metric, holds in line.shows.items():
        assert holds([row[f"train/{metric}"] for row in rows]), (metric, [row[f"train/{metric}"] for row in rows])
    warns = config.grpo.reward_shaping.stop_properly_penalty_coef is not None
    said = capsys.readouterr().out
    assert said.count("stop_properly_penalty_coef is set, so") == warns  # once a run, not once a step


METRICS = {
    "grpo.md": ("token_mult_prob_error", "sampling_importance_ratio", "approx_entropy"),
    "dapo.md": ("filtered_reward", "dynamic_sampling_num_gen_batches", "dynamic_sampling_num_discarded_valid_samples"),
    "prorlv2.md": ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "truncation_rate", "is_oob_ratio"),
    "of every loss": ("loss", "grad_norm", "lr", "kl_penalty", "probs_ratio", "probs_ratio_clamped", "probs_ratio_min", "probs_ratio_max",
                      "probs_ratio_clamped_min", "probs_ratio_clamped_max", "num_valid_samples", "global_valid_seqs", "global_valid_toks",
                      "positive_nll_loss"),
    "of every step": ("reward", "mean_prompt_length", "total_num_tokens", "advantages/sum", "advantages/mean", "advantages/max",
                      "advantages/min", "baseline_reward/pct_0", "baseline_reward/pct_1", "baseline_reward/pct_mixed", "total_turns",
                      "avg_turns_per_sample", "max_turns_per_sample", "natural_termination_rate", "max_turns_reached_rate",
                      "mean_total_tokens_per_sample", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "mean_env_tokens_per_sample",
                      "num_masked_seqs_by_logprob_error", "max_seq_mult_prob_error"),
}  # fmt: skip


def test_every_metric_named_in_nemo_rls_guides_is_logged(tmp_path):
    run = tiny.train(
        tmp_path, *tiny.SMALL, "grpo.max_num_steps=2", "loss_fn.positive_example_nll_weight=0.1", "grpo.seq_logprob_error_threshold=2",
        config="prorlv2_tiny.yaml",
    )  # fmt: skip
    assert len(run.history) == 2
    for row in steps(tmp_path):
        assert [name for names in METRICS.values() for name in names if f"train/{name}" not in row] == []
        assert row["train/is_oob_ratio"] == 0.0
