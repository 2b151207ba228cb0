from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import SMALL, saved, workers

pytestmark = pytest.mark.usefixtures("forked_workers")
TP = ("policy.dtensor_cfg.tensor_parallel_size=2",)
BLOCKS = ("policy.gradient_blocks=4", *SMALL)
PPO = (
    "policy.gradient_blocks=4",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "ppo.policy_training_start_step=1",
)
CRITIC = ("value.megatron_cfg.tensor_model_parallel_size=2",)


def tensors(checkpoint: Path, model: str = "policy") -> dict[str, torch.Tensor]:
    return load_file(checkpoint / model / "weights" / "model.safetensors")


def moments(checkpoint: Path, model: str = "policy") -> dict[str, torch.Tensor]:
    return load_file(checkpoint / model / "optimizer" / "optimizer.safetensors")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()}
    first, second = (torch.cat([t[name].flatten().double() for name in sorted(a)]) for t in (a, b))
    return float((first - second).norm() / second.norm())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def is_exact(history: list[dict]) -> bool:
    trained = [row for row in history if "token_mult_prob_error" in row]  # PPO's first steps train the critic alone
    return bool(trained) and all(row["token_mult_prob_error"] == 1 and row["max_logprob_gap"] == 0 for row in trained)


def test_tensor_parallel_training_gives_the_weights_of_one_rank_up_to_rounding(tmp_path):
    """Two groups of two ranks train bit-identical weights to those of one group."""
    one, alone = saved(tmp_path / "1", 3, *BLOCKS)
    two, sliced = saved(tmp_path / "2", 3, *BLOCKS, *workers(2), *TP)
    four, groups = saved(tmp_path / "4", 3, *BLOCKS, *workers(4), *TP)
    quarters, in_four = saved(tmp_path / "in 4", 3, *BLOCKS, *workers(4), "policy.dtensor_cfg.tensor_parallel_size=4")
    assert all(map(is_exact, (one, two, four, quarters)))
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    assert distance(tensors(sliced), tensors(alone)) < 1e-4 and not equal(tensors(sliced), tensors(alone))
    assert distance(tensors(in_four), tensors(alone)) < 1e-4
    assert equal(tensors(sliced), tensors(groups)) and equal(moments(sliced), moments(groups))


@pytest.mark.parametrize(
    "overrides",
    [("policy.precision=bfloat16", "policy.generation.top_p=0.9", "loss_fn.reference_policy_kl_penalty=0.01",
      "grpo.skip_reference_policy_logprobs_calculation=false"),
     ("policy.hf_config_overrides.tie_word_embeddings=true", "policy.generation.kv_cache_gb=0.0005", "grpo.val_period=1", "grpo.max_val_samples=8"),
     ("++policy.hf_config_overrides.model_type=qwen3", "policy.generation.top_k=5", "policy.dtensor_cfg.activation_checkpointing=true")],
    ids=["bfloat16_top_p_kl", "tied_small_cache", "qwen3_top_k"],
)  # fmt: skip
def test_generation_and_training_logprobs_are_bit_identical_on_two_tensor_parallel_ranks(tmp_path, overrides):
    history, _ = saved(tmp_path, 2, *SMALL, *workers(2), *TP, *overrides)
    assert is_exact(history)


def test_ppo_checkpoint_resumes_with_a_different_tensor_parallel_size_of_policy_or_critic(tmp_path):
    """Two steps with policy and critic in two slices, one with whole models, and one with the policy in two slices
    equal four steps with whole models."""
    config = "ppo_tiny.yaml"
    _, straight = saved(tmp_path / "straight", 4, *PPO, config=config)
    for steps, more in ((2, (*workers(2), *CRITIC)), (3, ()), (4, workers(2))):
        history, mixed = saved(tmp_path / "mixed", steps, *PPO, *more, config=config)
        assert is_exact(history)
    for model in ("policy", "value"):
        assert distance(tensors(mixed, model), tensors(straight, model)) < 1e-4
        assert distance(moments(mixed, model), moments(straight, model)) < 1e-2
