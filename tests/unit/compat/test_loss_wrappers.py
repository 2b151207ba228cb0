"""Losses on logits and on packed sequences, against the unpacked loss; NLL; filtered log-probabilities."""

import math

import pytest
import torch
from nemo_rl_cpp.compat.algorithms.logits_sampling_utils import TrainingSamplingParams
from nemo_rl_cpp.compat.algorithms.loss import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    MseValueLossFn,
    NLLLossFn,
    SequencePackingFusionLossWrapper,
    SequencePackingLossWrapper,
    prepare_loss_input,
    prepare_packed_loss_input,
)
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict

TIS = dict(
    use_importance_sampling_correction=True,
    truncated_importance_sampling_type="tis",
    truncated_importance_sampling_ratio=2.0,
)


def batch(rows=3, length=8, vocab=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.rand(*s, generator=g, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([length, length - 3, 2][:rows])
    data = BatchedDataDict(
        {
            "input_ids": torch.randint(0, vocab, (rows, length), generator=g),
            "advantages": rand(rows, length) - 0.5,
            "prev_logprobs": -rand(rows, length) - 2,
            "generation_logprobs": -rand(rows, length) - 2,
            "reference_policy_logprobs": -rand(rows, length) - 2,
            "token_mask": (torch.arange(length)[None] < lengths[:, None]).double(),
            "sample_mask": torch.ones(rows, dtype=torch.float64),
            "rewards": torch.tensor([1.0, 0.0, 1.0][:rows], dtype=torch.float64),
        }
    )
    data["token_mask"][:, 0] = 0
    logits = torch.randn(rows, length, vocab, generator=g, dtype=torch.float64)
    return data, logits, lengths, (data["sample_mask"].sum(), data["token_mask"][:, 1:].sum())


def test_nll_loss_by_hand():
    data, _, _, counts = batch()
    x = torch.full((3, 7), -2.0, dtype=torch.float64)
    loss, metrics = NLLLossFn()(x, data, *counts)
    assert float(loss) == pytest.approx(2.0) and metrics["num_unmasked_tokens"] == 12
    per_sample, _ = NLLLossFn()(x, data, *counts, dpo_loss=True, dpo_average_log_probs=True)
    assert per_sample.tolist() == [2.0, 2.0, 2.0]


def test_prepare_gives_logprobs_of_the_next_token():
    data, logits, _, _ = batch()
    loss_input, same = prepare_loss_input(logits, data, ClippedPGLossFn(ClippedPGLossConfig()))
    wanted = logits.float().log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    assert torch.allclose(loss_input["next_token_logprobs"], wanted, atol=1e-6) and same is data
    assert prepare_loss_input(logits, data, MseValueLossFn({}))[0]["logits"] is logits
    fused = ClippedPGLossFn(ClippedPGLossConfig(), use_fused_linear_logprobs=True)
    assert prepare_loss_input(wanted.double(), data, fused)[0]["next_token_logprobs"].shape == (3, 7)


def test_filtered_logprobs_keep_an_unfiltered_copy_for_the_kl(capsys):
    data, logits, _, counts = batch()
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    logits.requires_grad_()
    loss_input, data = prepare_loss_input(logits, data, fn, sampling_params=TrainingSamplingParams(top_k=2))
    x = loss_input["next_token_logprobs"]
    assert torch.isfinite(x).all() and (x[data["token_mask"][:, 1:] == 0] == 0).all()
    assert "-inf in curr_logprobs" in capsys.readouterr().out
    plain = prepare_loss_input(logits, dict(data), fn)[0]["next_token_logprobs"]
    assert torch.equal(data["curr_logprobs_unfiltered"], plain)
    loss, _ = fn(x, data, *counts)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    result = fn.native(x, data, *counts)
    (wanted,) = torch.autograd.grad((x * result.grad_logprobs).sum() + (plain * result.grad_unfiltered).sum(), logits)
    assert torch.allclose(grad, wanted) and result.grad_unfiltered.abs().sum() > 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"token_level_loss": False}, {"token_level_loss": False, "sequence_level_importance_ratios": True}, TIS],
)
@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_give_the_unpacked_loss(settings, padded):
    data, logits, lengths, counts = batch()
    fn = ClippedPGLossFn(ClippedPGLossConfig(positive_example_nll_weight=0.2, **settings))
    data["global_valid_positive_toks"] = torch.tensor(8.0)
    logits.requires_grad_()
    loss, metrics = fn(prepare_loss_input(logits, data, fn)[0]["next_token_logprobs"], data, *counts)
    (wanted,) = torch.autograd.grad(loss, logits)
    space = [4 * math.ceil(int(n) / 4) if padded else int(n) for n in lengths]
    cu, cu_padded = [torch.tensor([0, *torch.tensor(v).cumsum(0)]) for v in (lengths.tolist(), space)]
    pieces = [
        torch.nn.functional.pad(logits[i, :n], (0, 0, 0, w - n))
        for i, (n, w) in enumerate(zip(lengths, space, strict=True))
    ]
    packed = torch.cat(pieces)[None]
    for wrapper, prepare in (
        (SequencePackingLossWrapper, prepare_loss_input),
        (SequencePackingFusionLossWrapper, prepare_packed_loss_input),
    ):
        ours, found = wrapper(fn, prepare, cu, cu_padded)(packed, data, *counts)
        (grad,) = torch.autograd.grad(ours, logits, retain_graph=True)
        assert torch.allclose(ours, loss, rtol=1e-6) and torch.allclose(grad, wanted, rtol=1e-5, atol=1e-9), wrapper
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name


def test_parallel_groups_are_refused():
    class TwoRanks:
        def size(self):
            return 2

    data, logits, _, _ = batch()
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    with pytest.raises(NotImplementedError, match="vocab_parallel_group has 2 members"):
        prepare_loss_input(logits, data, fn, vocab_parallel_group=TwoRanks())
    with pytest.raises(NotImplementedError, match="context_parallel_group"):
        SequencePackingLossWrapper(fn, prepare_loss_input, torch.tensor([0, 8]), context_parallel_group=TwoRanks())
