"""The sum of a run's passes, with seconds of each pass that are given."""

import pytest
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.models.time_forecast import Lengths, TimeForecast, time_text

SIZES = [
    "hidden_size=512",
    "intermediate_size=2048",
    "num_hidden_layers=4",
    "num_attention_heads=8",
    "num_key_value_heads=8",
]
MODEL = [f"++policy.hf_config_overrides.{size}" for size in SIZES]
RUN = MODEL + [
    "policy.generation.max_new_tokens=11", "policy.max_total_sequence_length=64", "policy.train_global_batch_size=12", "checkpointing.enabled=false",
    "policy.train_micro_batch_size=4", "policy.kept_activations_gb=0",
]  # fmt: skip
TIMES = {"prefill": 0.1, "score": 1.0, "forward": 2.0, "backward": 3.0, "update": 7.0, "packing": 0.5}


def seconds_of(config, monkeypatch, steps=1, val_rows=0):
    def measure(self, model, decode=(), **options):
        return TIMES | {"decode": [rows / 100 for rows, *_ in decode]}

    monkeypatch.setattr(TimeForecast, "_measure", measure)
    return TimeForecast.of(config, Lengths(5), val_rows).seconds(steps, begins=True)


def grpo(*overrides):
    sizes = ["grpo.num_prompts_per_step=3", "grpo.num_generations_per_prompt=4", "grpo.val_period=0"]
    return load_grpo_config("configs/grpo_tiny.yaml", [*RUN, *sizes, "grpo.val_at_end=false", *overrides])


# 3 prompts of 5 tokens, 10 decode steps of 12 responses after the prompts' first token, packing twice
GENERATION = 3 * 5 * 0.1 + 10 * 0.12 + 2 * 0.5
PACKED = 3 * (5 + 4 * 11)  # a micro-batch is a group, whose prompt is computed once
TRAINING = PACKED * (2.0 + 3.0) + 7.0


def test_step_is_generation_and_training(monkeypatch):
    assert seconds_of(grpo("loss_fn.reference_policy_kl_penalty=0"), monkeypatch) == pytest.approx(
        GENERATION + TRAINING
    )


def test_reference_model_and_old_policy_each_score_all_tokens(monkeypatch):
    reference = ["loss_fn.reference_policy_kl_penalty=0.1", "grpo.skip_reference_policy_logprobs_calculation=false"]
    config = grpo(*reference, "policy.reuse_generation_logprobs=never")
    assert seconds_of(config, monkeypatch) == pytest.approx(GENERATION + TRAINING + 2 * PACKED * 1.0)


def test_kept_activations_save_the_layers_forward_pass_of_the_first_update(monkeypatch):
    keys = [
        "policy.kept_activations_gb=1",
        "policy.kept_activations_check_period=4",
        "policy.train_global_batch_size=4",
    ]
    found = seconds_of(grpo("loss_fn.reference_policy_kl_penalty=0", *keys), monkeypatch)
    assert found == pytest.approx(GENERATION + TRAINING + 2 * 7.0 - PACKED / 3 * 3 / 4 * 0.1)


def test_sequences_without_slots_are_generated_later(monkeypatch):
    found = seconds_of(grpo("loss_fn.reference_policy_kl_penalty=0", "policy.generation.max_batch_size=5"), monkeypatch)
    assert found == pytest.approx(GENERATION + TRAINING - 10 * 0.12 + 2 * 10 * 0.05 + 10 * 0.02)


def test_validations_are_counted(monkeypatch):
    keys = ["grpo.val_period=2", "grpo.val_at_start=true", "grpo.max_val_samples=6", "grpo.val_batch_size=4"]
    base = grpo("loss_fn.reference_policy_kl_penalty=0")
    found = seconds_of(grpo("loss_fn.reference_policy_kl_penalty=0", *keys), monkeypatch, steps=5, val_rows=100)
    validation = 6 * 5 * 0.1 + 10 * (0.04 + 0.02)
    assert found == pytest.approx(seconds_of(base, monkeypatch, steps=5) + 3 * validation)


def test_ppo_trains_two_models_for_several_epochs(monkeypatch):
    keys = [
        "ppo.num_prompts_per_step=3",
        "ppo.num_generations_per_prompt=4",
        "ppo.val_period=0",
        "ppo.val_at_start=false",
        "ppo.ppo_epochs=2",
    ]
    config = load_ppo_config("configs/ppo_tiny.yaml", [*RUN, *keys, "ppo.val_at_end=false", "loss_fn.reference_policy_kl_penalty=0",
                                                       "value.train_micro_batch_size=4", "value.train_global_batch_size=12"])  # fmt: skip
    assert seconds_of(config, monkeypatch) == pytest.approx(GENERATION + 4 * TRAINING + PACKED * 1.0)


@pytest.mark.parametrize("override", ["policy.backend=hf", "policy.hf_config_overrides.hidden_size=64"])
def test_runs_elsewhere_and_small_models_have_no_forecast(override):
    assert TimeForecast.of(grpo(override, "loss_fn.reference_policy_kl_penalty=0"), Lengths(5)) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (99, "99 s"),
        (150, "2 min"),
        (5400, "90 min"),
        (7790, "2 h 10 min"),
        (40_000, "11 h"),
        (3e5, "3 days"),
    ],
)
def test_durations_have_two_figures(seconds, text):
    assert time_text(seconds) == text
