import pytest
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.errors import ConfigError
from nemo_rl_cpp.config.master import GRPOMasterConfig, checked
from nemo_rl_cpp.models.budget import budget_text, within_budget
from nemo_rl_cpp.models.memory import forecast

NAME = "grpo_arithmetic_smollm2.yaml"


def chosen(gigabytes, *overrides, name=NAME):
    return within_budget(load_grpo_config(name, [f"policy.memory_budget_gb={gigabytes}", *overrides]))


def peak(config):
    return max(phase.total for phase in forecast(config)) / 1e9


def settings(config):
    policy = config.policy
    return (
        policy.generation.kv_cache_gb is not None, policy.activation_checkpointing, not policy.kept_activations_gb, -policy.train_micro_batch_size,
    )  # fmt: skip


def test_sufficient_memory_budget_changes_only_the_memory_limit_for_reused_activations():
    plain, config = load_grpo_config(NAME), chosen(100)
    assert config.policy.kept_activations_gb > 0
    kept = {"memory_budget_gb": None, "kept_activations_gb": None}
    assert config.policy.model_copy(update=kept).model_dump() == plain.policy.model_dump()
    assert within_budget(plain) is plain and budget_text(plain) is None


def test_decreasing_memory_budgets_change_settings_in_the_documented_order():
    rows = [chosen(gigabytes) for gigabytes in (6.2, 5.2, 4.7, 4.3, 3.9, 3.7, 3.5)]
    assert all(peak(row) <= row.policy.memory_budget_gb for row in rows)
    assert [settings(row) for row in rows] == sorted(map(settings, rows)) and len(set(map(settings, rows))) > 4
    for row in rows:
        tokens = row.policy.train_micro_batch_size * row.policy.max_total_sequence_length
        assert row.policy.sequence_packing.train_mb_tokens == tokens
        assert row.policy.sequence_packing.logprob_mb_tokens <= tokens
        assert within_budget(row).policy == row.policy
        assert checked(row, GRPOMasterConfig) is row and within_budget(row).policy == row.policy


def test_memory_budget_does_not_change_keys_set_in_the_same_file(tmp_path):
    assert chosen(4, "policy.train_micro_batch_size=16").policy.train_micro_batch_size == 16
    file = tmp_path / "own.yaml"
    file.write_text(
        f"defaults: {NAME}\npolicy:\n  memory_budget_gb: 4\n  kept_activations_gb: 0.01\n  train_micro_batch_size: 8\n"
    )
    policy = within_budget(load_grpo_config(file)).policy
    assert (policy.train_micro_batch_size, policy.kept_activations_gb) == (8, 0.01)
    given = load_grpo_config(NAME).model_dump()
    given["policy"] = {**load_grpo_config(NAME).policy.model_dump(exclude_unset=True), "memory_budget_gb": 8.0}
    assert within_budget(GRPOMasterConfig(**given)).policy.train_micro_batch_size == 16


def test_memory_budget_below_the_minimum_memory_is_an_error_that_states_the_minimum():
    said = r"policy.memory_budget_gb is 2, but this run needs 3\.\d+ GB with micro-batches of 1 sample"
    with pytest.raises(ConfigError, match=said) as error:
        chosen(2)
    least = float(str(error.value).rpartition("set it to ")[2].split()[0])
    assert peak(chosen(least)) <= least
    said = r"with micro-batches of 16 samples.*\(policy.train_micro_batch_size is set and stays\)"
    with pytest.raises(ConfigError, match=said):
        chosen(2, "policy.train_micro_batch_size=16")


@pytest.mark.parametrize(("load", "override", "reason"), [
    (load_grpo_config, "cluster.device=cuda", "runs on cuda"), (load_grpo_config, "policy.backend=hf", "trains with hf"),
    (load_grpo_config, "cluster.executor=processes", "has several processes"),
    (load_ppo_config, "policy.precision=float32", "has a critic"),
])  # fmt: skip
def test_memory_budget_is_an_error_for_runs_without_memory_planning(load, override, reason):
    name = "ppo_tiny.yaml" if load is load_ppo_config else NAME
    with pytest.raises(ConfigError, match=f"this run {reason}, whose memory is not planned: set it to null"):
        load(name, ["++policy.memory_budget_gb=4", override])


def test_memory_budget_is_an_error_with_an_unknown_model():
    with pytest.raises(ConfigError, match="needs the sizes of owner/nameless"):
        chosen(4, "policy.model_name=owner/nameless", name="grpo_math_1B.yaml")
