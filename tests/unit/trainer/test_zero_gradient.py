"""Rows without a gradient (groups of equal rewards) go without a backward: the same log-probabilities, metrics and gradients."""

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.ranks import GradientSums
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan, wanted_tokens
from nemo_rl_cpp.models.policy.train_step import MicroBatchRunner
from test_gradient_invariance import groups_batch, trainer_of
from test_token_loss import ROW_LOSSES, TOKEN_LOSSES, train, training_data

NO_KL = {"reference_policy_kl_penalty": 0.0}
NO_OTHER_TERM = {
    name: settings | NO_KL
    for name, settings in (TOKEN_LOSSES | ROW_LOSSES).items() if "positive_example_nll_weight" not in settings and name not in ("dro", "kl-cov", "nll")
}  # fmt: skip


class EveryRow(ClippedPGLossFn):
    """The same loss, with a backward for every row."""

    def zero_gradient_rows(self, data):
        return None


class Wrong(ClippedPGLossFn):
    """Declares rows that have a gradient to have none."""

    def zero_gradient_rows(self, data):
        return torch.arange(data.size) < 4


def data_with_zeros(rows):
    data = training_data()
    data["advantages"][rows] = 0.0
    return data


@pytest.mark.parametrize(
    "dtype,bound", [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 5, 6], [0, 1, 2, 3, 4, 5, 6]], ids=str)
def test_skipping_samples_with_zero_loss_gradient_does_not_change_the_gradients(rows, dtype, bound):
    data, settings = data_with_zeros(rows), NO_KL
    some, grads = train(ClippedPGLossFn(settings), data, dtype)
    every, expected = train(EveryRow(settings), data, dtype)
    assert some.zero_gradient_tokens > 0 == every.zero_gradient_tokens and len(some.metrics) == 2 > len(every.metrics)
    assert torch.equal(some.outputs, every.outputs)
    assert expected.norm() > 0 and (grads - expected).norm() <= bound * expected.norm()
    for name in ("loss", "probs_ratio", "gen_kl_error", "approx_entropy", "num_valid_samples"):
        assert sum(m[name] for m in some.metrics) == pytest.approx(sum(m[name] for m in every.metrics), rel=1e-5)


@pytest.mark.parametrize("name", NO_OTHER_TERM)
def test_backward_pass_skips_samples_with_zero_advantages_if_the_loss_has_only_a_policy_term(name):
    data = data_with_zeros([4, 5, 6, 7])
    some, grads = train(ClippedPGLossFn(NO_OTHER_TERM[name]), data)
    _, expected = train(EveryRow(NO_OTHER_TERM[name]), data)
    assert some.zero_gradient_tokens > 0 and (grads - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    "settings", [{}, NO_KL | {"positive_example_nll_weight": 0.1}, NO_KL | {"name": "dro"}], ids=["KL", "NLL", "DRO"]
)
def test_backward_pass_skips_no_samples_if_the_loss_has_a_kl_or_another_additional_term(settings):
    data = data_with_zeros([0, 1, 2, 3])
    assert ClippedPGLossFn(settings).zero_gradient_rows(RaggedBatch.of(data)) is None
    result, _ = train(ClippedPGLossFn(settings), data)
    assert result.zero_gradient_tokens == 0 and len(result.metrics) == 1


def test_advantages_at_masked_tokens_do_not_prevent_skipping_a_sample_with_zero_gradient():
    data = data_with_zeros([])
    data["advantages"][2] = data["token_mask"][2] - 1  # -1 outside of the response
    loss_fn = ClippedPGLossFn(NO_KL)
    assert loss_fn.zero_gradient_rows(RaggedBatch.of(data)).nonzero().tolist() == [[2]]
    data["advantages"][2, int(data["token_mask"][2].nonzero()[-1])] = float("nan")
    assert not loss_fn.zero_gradient_rows(RaggedBatch.of(data)).any()


def test_step_with_only_zero_gradient_samples_returns_logprobs_and_zero_gradients():
    data = data_with_zeros(slice(None))
    result, grads = train(ClippedPGLossFn(NO_KL), data)
    assert result.zero_gradient_tokens == result.packed_tokens > 0 and not grads.any() and result.outputs.any()


def test_sample_wrongly_declared_to_have_zero_gradient_is_still_trained():
    data = training_data()
    wrong, grads = train(Wrong(NO_KL), data)
    _, expected = train(EveryRow(NO_KL), data)
    assert wrong.zero_gradient_tokens == 0 and (grads - expected).norm() <= 1e-5 * expected.norm()


def test_backward_pass_is_skipped_if_the_gradient_of_a_custom_loss_is_zero():
    def loss_fn(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        return (next_token_logprobs * data["advantages"][:, 1:] * data["token_mask"][:, 1:]).sum(), {}

    result, grads = train(loss_fn, data_with_zeros([0]), batching=MicroBatching(max_samples=1))
    assert 0 < result.zero_gradient_tokens < result.packed_tokens and grads.any()


@pytest.mark.parametrize("batching", [MicroBatching(max_samples=3), MicroBatching(max_tokens=100)], ids=str)
def test_samples_with_zero_gradient_are_placed_last_in_separate_micro_batches(batching):
    data = RaggedBatch.of(training_data())
    apart = torch.zeros(data.size, dtype=torch.bool)
    apart[[1, 4, 5]] = True
    batch, micro_batches = plan(data, wanted_tokens(data), range(1, 7), batching, apart)
    flat = [b for rows in micro_batches for b in rows]
    assert sorted(flat) == [1, 2, 4, 5, 6] and set(flat[:2]) == {2, 6}  # row 3 counts nowhere: sample_mask
    for rows in micro_batches:
        assert len(set(apart[rows].tolist())) == 1 and len(rows) <= 3
        tokens = C.packed_tokens(batch, rows, True)
        assert len(rows) == 1 or not batching.max_tokens or tokens <= batching.max_tokens


@pytest.mark.parametrize("samples", [[2, 1], [0, 0], [-1], [0, 10_000]], ids=str)
def test_sample_indices_in_descending_order_are_an_error(samples):
    batch, *_ = groups_batch()
    with pytest.raises(ValueError, match="ascending rows of the batch"):
        C.prompt_units(batch, samples, 100, True)


class Recorded:
    """A trainer that notes what it is asked for."""

    def __init__(self, trainer):
        self._trainer, self.asked = trainer, []

    def __getattr__(self, name):
        found = getattr(self._trainer, name)
        if not callable(found):
            return found

        def noted(*args, **kwargs):
            self.asked.append(name)
            return found(*args, **kwargs)

        return noted


@pytest.mark.parametrize("rows, begins", [([0, 5], 1), (slice(None), 0)], ids=["some", "all"])
def test_gradient_reduction_over_ranks_starts_during_the_last_backward_pass(rows, begins):
    """Micro-batches without a gradient come behind it."""
    trainer = Recorded(trainer_of())
    loss_fn, data = ClippedPGLossFn(NO_KL), RaggedBatch.of(data_with_zeros(rows))
    way = MicroBatchRunner(trainer, loss_fn, MicroBatching(max_samples=2), sums=GradientSums(beside=True))
    assert way.forward_backward(data, 0, data.size).zero_gradient_tokens > 0
    asked = [name for name in trainer.asked if name in ("begin_sum", "forward", "forward_with_loss", "finish_backward")]
    assert asked.count("begin_sum") == begins and asked[-1] == "forward"  # of rows apart
    if begins:
        at = asked.index("begin_sum")
        assert asked[at + 1 : at + 3] == ["forward_with_loss", "finish_backward"]
        assert set(asked[at + 3 :]) == {"forward"} and asked[:at].count("finish_backward") > 0


def test_overlapped_gradient_reduction_raises_if_a_declared_zero_gradient_is_not_zero():
    data = RaggedBatch.of(training_data())
    loss_fn, sums = Wrong(NO_KL), GradientSums(beside=True)
    way = MicroBatchRunner(trainer_of(), loss_fn, MicroBatching(max_samples=2), sums=sums)
    with pytest.raises(ValueError, match="of the loss names sample 0, whose micro-batch has a gradient"):
        way.forward_backward(data, 0, data.size)
