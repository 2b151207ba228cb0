from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("forked_workers")
STEPS = 10
SMALL = (
    "policy.backend=hf", "++policy.hf_config_overrides.num_hidden_layers=2", "++policy.hf_config_overrides.hidden_size=32",
    "++policy.hf_config_overrides.intermediate_size=64", "policy.precision=float32", "++policy.hf_config_overrides.model_type=olmo",
    "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=2", "policy.train_global_batch_size=8", "value.train_global_batch_size=8",
    "ppo.policy_training_start_step=1", "ppo.ppo_epochs=1",
)  # fmt: skip


def weights(checkpoint: Path, model: str) -> torch.Tensor:
    tensors = load_file(checkpoint / model / "weights" / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def test_transformers_backend_trains_equal_weights_on_one_and_two_ranks_within_1e_6(tmp_path):
    """The second run changes from two ranks to one process after six of ten steps."""
    expected, alone = tiny.saved(tmp_path / "one", STEPS, *SMALL, config="ppo_tiny.yaml")
    first, _ = tiny.saved(tmp_path / "two", 6, *SMALL, *tiny.workers(2), config="ppo_tiny.yaml")
    second, shared = tiny.saved(tmp_path / "two", STEPS, *SMALL, config="ppo_tiny.yaml")
    history = first + second
    for model in ("policy", "value"):
        one, two = weights(alone, model), weights(shared, model)
        assert 0 < float((two - one).norm() / one.norm()) <= 1e-6
    assert [row["reward"] for row in history] == [row["reward"] for row in expected]
    for name in ("loss", "grad_norm", "token_mult_prob_error"):
        for mine, theirs in zip(history, expected):
            if name in theirs:  # steps that train only the critic have none
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
