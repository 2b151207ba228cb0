import pytest
import torch
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.config.loss import LOSSES
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan, wanted_tokens
from nemo_rl_cpp.models.policy.train_step import (
    MicroBatchRunner,
    NonFiniteError,
    Scoring,
    fused_token_loss,
    global_counts,
)
from test_gradient_invariance import groups_batch, trainer_of

TOKEN_LOSSES = {
    "grpo": {},
    "no KL": dict(reference_policy_kl_penalty=0.0),
    "dapo": dict(ratio_clip_max=0.28, ratio_clip_c=3.0, reference_policy_kl_penalty=0.0),
    "tis": dict(use_importance_sampling_correction=True, truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=1.2),
    "icepop": dict(use_importance_sampling_correction=True, truncated_importance_sampling_type="icepop", truncated_importance_sampling_ratio=1.5,
                   truncated_importance_sampling_ratio_min=0.5),
    "cispo": dict(use_cispo=True),
    "reinforce": dict(disable_ppo_ratio=True),
    "on-policy": dict(force_on_policy_ratio=True),
    "sapo": dict(name="sapo"),
    "dppo-tv": dict(name="dppo_tv", ratio_clip_c=3.0),
    "dppo-kl": dict(name="dppo_kl"),
    "dro": dict(name="dro"),
    "kl-cov": dict(name="kl_cov"),
    "nll": dict(name="nll"),
    "dr-grpo": dict(name="dr_grpo", loss_scale_factor=8.0),
    "NLL": dict(positive_example_nll_weight=0.3, reference_policy_kl_type="k2"),
}  # fmt: skip
ROW_LOSSES = {
    "sequence-level": dict(token_level_loss=False),
    "gspo": dict(token_level_loss=False, sequence_level_importance_ratios=True),
    "gmpo": dict(name="gmpo"),
    "luspo": dict(name="luspo"),
    "vespo": dict(name="vespo"),
    "seq-tis": dict(use_importance_sampling_correction=True, truncated_importance_sampling_type="seq-tis", truncated_importance_sampling_ratio=2.0),
    "geo-icepop": dict(use_importance_sampling_correction=True, truncated_importance_sampling_type="geo-icepop",
                       truncated_importance_sampling_ratio=1.5, truncated_importance_sampling_ratio_min=0.5),
    "seq-mask-tis": dict(use_importance_sampling_correction=True, truncated_importance_sampling_type="seq-mask-tis",
                         truncated_importance_sampling_ratio=1.5, truncated_importance_sampling_ratio_min=0.5),
}  # fmt: skip


def training_data(seed=1):
    _, ids, mask = groups_batch()
    random = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([int(row.nonzero().max()) + 1 for row in mask])
    noise = lambda scale: torch.randn(ids.shape, generator=random) * scale  # noqa: E731
    sample_mask = torch.ones(len(ids))
    sample_mask[3] = 0
    penalty = (torch.rand(ids.shape, generator=random) < 0.2).float()
    return {"input_ids": ids, "kl_cov_penalty": penalty, "input_lengths": lengths, "token_mask": mask.float(), "sample_mask": sample_mask, "advantages": noise(1.0),
            "prev_logprobs": noise(0.3) - 4, "generation_logprobs": noise(0.3) - 4, "reference_policy_logprobs": noise(0.3) - 4,
            "rewards": torch.randint(0, 2, (len(ids),), generator=random).float(), "group_id": torch.arange(len(ids)) // 4}  # fmt: skip


class AskedAfterwards(ClippedPGLossFn):
    """The same loss, asked for the gradient of whole rows."""

    def token_loss(self, *args):
        return None


def train(loss_fn, data, dtype=torch.float32, batching=MicroBatching(max_samples=100), on_policy=False, **shared):
    trainer = trainer_of(dtype)
    way = MicroBatchRunner(trainer, loss_fn, batching, Scoring(0.9), **shared)
    result = way.forward_backward(RaggedBatch.of(data), 0, len(data["input_ids"]), on_policy=on_policy)
    return result, trainer.grads.clone()


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_loss_fused_into_the_lm_head_gives_the_gradients_of_the_unfused_loss(name, dtype, bound):
    data = training_data()
    at_once, grads = train(ClippedPGLossFn(TOKEN_LOSSES[name]), data, dtype)
    afterwards, expected = train(AskedAfterwards(TOKEN_LOSSES[name]), data, dtype)
    assert torch.equal(at_once.outputs, afterwards.outputs)
    assert at_once.metrics == afterwards.metrics and at_once.loss == afterwards.loss
    assert expected.norm() > 0 and (grads - expected).norm() <= bound * expected.norm()


def test_loss_fused_into_the_lm_head_uses_current_logprobs_if_old_logprobs_are_missing():
    data = {k: v for k, v in training_data().items() if k != "prev_logprobs"}
    _, grads = train(ClippedPGLossFn({}), data, on_policy=True)
    _, expected = train(AskedAfterwards({}), data, on_policy=True)
    assert (grads - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    "batching",
    [MicroBatching(max_samples=1), MicroBatching(max_samples=3, share_prefix=False), MicroBatching(max_tokens=120)],
    ids=str,
)
@pytest.mark.parametrize(
    "settings, dtype, bound",
    [({}, torch.float32, 1e-5), ({"entropy_coef": 0.5}, torch.float64, 1e-12)],
    ids=["fused", "entropy bonus"],
)
def test_gradients_of_every_loss_do_not_depend_on_the_micro_batch_size(batching, settings, dtype, bound):
    data, loss_fn = training_data(), ClippedPGLossFn(settings)
    whole, expected = train(loss_fn, data, dtype)
    parts, grads = train(loss_fn, data, dtype, batching)
    assert torch.equal(whole.outputs, parts.outputs)
    assert (grads - expected).norm() <= bound * expected.norm()
    if settings:
        assert sum(m["entropy"] for m in parts.metrics) == pytest.approx(whole.metrics[0]["entropy"], rel=1e-12)


ROWS = {f"clipped_pg {name}": ROW_LOSSES[name] for name in ("sequence-level", "seq-tis", "geo-icepop", "seq-mask-tis")}


@pytest.mark.parametrize("settings", [*({"name": name} for name in LOSSES), *ROWS.values()], ids=[*LOSSES, *ROWS])
def test_gradient_of_every_loss_equals_the_sum_of_the_gradients_of_two_ranks(settings):
    """Each rank trains its half of the samples, which have different numbers of tokens, and divides by the counts of the whole batch."""
    scale = {"loss_scale_factor": 8.0} if settings.get("name") == "dr_grpo" else {}
    loss_fn = ClippedPGLossFn({"positive_example_nll_weight": 0.1} | scale | settings)
    data, double = training_data(), torch.float64
    whole, expected = train(loss_fn, data, double)
    (first, ours), (second, theirs) = (train(loss_fn, data, double, ranks=Ranks(rank, 2), blocks=2) for rank in (0, 1))
    assert min(ours.norm(), theirs.norm()) > 0.1 * expected.norm()
    assert first.metrics[0]["num_valid_samples"] != second.metrics[0]["num_valid_samples"]  # one sample is masked
    assert first.loss + second.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (ours + theirs - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("name", ROW_LOSSES)
def test_sequence_level_loss_is_not_fused_into_the_lm_head(name):
    data = training_data()
    loss_fn, batch = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0} | ROW_LOSSES[name]), RaggedBatch.of(data)
    assert fused_token_loss(trainer_of(), loss_fn, batch, global_counts(batch), Scoring()) is None
    assert train(loss_fn, data)[0].outputs.any()


def test_loss_is_not_fused_into_the_lm_head_with_top_p_float64_or_custom_loss_functions():
    data = RaggedBatch.of(training_data())
    counts = global_counts(data)

    class Doubled(ClippedPGLossFn):
        def native(self, *args, **kwargs):
            result = super().native(*args, **kwargs)
            result.grad_logprobs.mul_(2)
            return result

    assert fused_token_loss(trainer_of(), ClippedPGLossFn({}), data, counts, Scoring()) is not None
    assert fused_token_loss(trainer_of(), ClippedPGLossFn({}), data, counts, Scoring(top_p=0.9)) is None
    assert fused_token_loss(trainer_of(torch.float64), ClippedPGLossFn({}), data, counts, Scoring()) is None
    assert fused_token_loss(trainer_of(), Doubled({}), data, counts, Scoring()) is None
    assert fused_token_loss(trainer_of(), lambda **_: None, data, counts, Scoring()) is None


def test_backward_pass_without_a_matching_forward_pass_raises():
    trainer, data = trainer_of(), RaggedBatch.of(training_data())
    batch, _ = plan(data, wanted_tokens(data), range(data.size), MicroBatching(max_samples=100))
    loss = fused_token_loss(trainer, ClippedPGLossFn({}), data, global_counts(data), Scoring())
    out = torch.zeros(data.num_tokens)
    trainer.forward_with_loss(batch, [0, 1], 1.0, False, False, out, loss)
    with pytest.raises(RuntimeError, match="has no loss of its own"):
        trainer.backward(out)
    trainer.finish_backward()
    with pytest.raises(RuntimeError, match="needs a forward with a loss"):
        trainer.finish_backward()


def test_error_for_a_non_finite_loss_fused_into_the_lm_head_names_sample_and_token():
    data = training_data()
    token = int(data["token_mask"][5].nonzero()[1])
    data["prev_logprobs"][5, token], data["advantages"][5, token] = -torch.inf, -1.0
    with pytest.raises(NonFiniteError, match=f"sample 5, token {token} "):
        train(ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}), data)
