import pickle

import pytest
import torch
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl_cpp.config import ConfigError
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict

TIS = dict(
    use_importance_sampling_correction=True, truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=2.0
)  # fmt: skip


def batch():
    g = torch.Generator().manual_seed(0)
    names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data = BatchedDataDict({name: -torch.rand(3, 8, generator=g, dtype=torch.float64) - 2 for name in names})
    data["advantages"] += 2.5
    data["token_mask"] = (torch.arange(8)[None] < torch.tensor([8, 5, 2])[:, None]).double()
    data["token_mask"][:, 0] = 0
    data["sample_mask"] = torch.ones(3, dtype=torch.float64)
    data["rewards"] = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    return data, (data["sample_mask"].sum(), data["token_mask"][:, 1:].sum())


def test_loss_constructor_raises_config_error_for_contradictory_settings():
    with pytest.raises(ConfigError, match="loss_fn.force_on_policy_ratio must be false with loss_fn.use_cispo"):
        ClippedPGLossFn(ClippedPGLossConfig(use_cispo=True, force_on_policy_ratio=True))


def test_gradient_of_a_scaled_native_loss_is_the_scaled_gradient():
    data, counts = batch()
    x = (-torch.rand(3, 7, dtype=torch.float64) - 2).requires_grad_()
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    loss, _ = fn(x, data, *counts)
    (3 * loss).backward()
    assert torch.equal(x.grad, 3 * fn.native(x, data, *counts).grad_logprobs)
    half = x.detach().to(torch.bfloat16).requires_grad_()
    fn(half, data, *counts)[0].backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.abs().sum() > 0
    with torch.no_grad():
        assert not fn(x, data, *counts)[0].requires_grad


def test_loss_with_force_on_policy_ratio_needs_no_old_logprobs():
    data, counts = batch()
    del data["prev_logprobs"]
    x = torch.full((3, 7), -2.0)
    _, metrics = ClippedPGLossFn(ClippedPGLossConfig(force_on_policy_ratio=True))(x, data, *counts)
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    with pytest.raises(KeyError, match="prev_logprobs"):
        ClippedPGLossFn(ClippedPGLossConfig())(x, data, *counts)


def test_positive_example_nll_is_normalised_by_the_global_token_count():
    """mu = 1 and rewards 1, 0, 1, so NLL is the sum of -x over rows 0 and 2. Without a global token count the batch's
    own is used."""
    data, counts = batch()
    data["advantages"].zero_()
    x = torch.full((3, 7), -2.0, dtype=torch.float64)
    fn = ClippedPGLossFn(ClippedPGLossConfig(positive_example_nll_weight=1.0, reference_policy_kl_penalty=0.0))
    own = 7 + 1  # valid shifted tokens of rows 0 and 2
    assert float(fn(x, data, *counts)[0]) == pytest.approx(2.0)
    assert float(fn(x, data, *counts, global_valid_positive_toks=4 * own)[0]) == pytest.approx(0.5)
    data["global_valid_positive_toks"] = torch.tensor(2.0 * own)
    assert fn(x, data, *counts)[1]["positive_nll_loss"] == pytest.approx(1.0)
    del data["rewards"]
    assert float(fn(x, data, *counts)[0]) == 0.0


def test_loss_object_can_be_pickled_after_use():
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(ratio_clip_max=0.28, **TIS))
    said = repr(loss_fn.op_config)
    again = pickle.loads(pickle.dumps(loss_fn))
    assert again.ratio_clip_max == 0.28 and repr(loss_fn.op_config) == said
    assert again.op_config.ratio_clip_max == loss_fn.op_config.ratio_clip_max
