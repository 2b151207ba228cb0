import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, cut_rows
from nemo_rl_cpp.models.weights import initialize_weights, named_views
from row_batch import padded_rows
from threads import on_threads

CONFIG = dict(model_type="qwen3", vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip


def groups_batch(num_groups=5, generations=4, seed=0):
    """Groups of rows that share a prompt, ragged responses."""
    random = torch.Generator().manual_seed(seed)
    rows, masks, groups = [], [], []
    for g in range(num_groups):
        prompt = torch.randint(0, 61, (int(torch.randint(1, 40, (1,), generator=random)),), generator=random)
        for _ in range(generations):
            response = torch.randint(0, 61, (int(torch.randint(1, 30, (1,), generator=random)),), generator=random)
            rows.append(torch.cat([prompt, response]))
            masks.append(torch.arange(len(rows[-1])) >= len(prompt))
            groups.append(g)
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(r) for r in rows])
    ids, mask = pad(rows, batch_first=True), pad(masks, batch_first=True)
    mask[:, 0] = False
    return padded_rows(ids, lengths, mask, torch.tensor(groups)), ids, mask


def model_of(dtype, trainable=True, std=0.2, **changes):
    model = C.DecoderModel(native_config({**CONFIG, **changes}), dtype, trainable)
    initialize_weights(model, 3, std=std)
    return model


def trainer_of(dtype=torch.float32):
    return C.Trainer(model_of(dtype))


def gradients(dtype, max_samples=0, max_tokens=0, share=False):
    model = model_of(dtype)
    trainer, (batch, ids, mask) = C.Trainer(model), groups_batch()
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(9)).to(trainer.out_dtype)
    out = torch.zeros(ids.shape, dtype=trainer.out_dtype)
    plans = cut_rows(batch, list(range(len(ids))), MicroBatching(max_samples, max_tokens, share_prefix=share))
    assert sorted(b for rows in plans for b in rows) == list(range(len(ids)))
    for rows in plans:
        trainer.forward(batch, rows, 1.0, share, True, False, out)
        trainer.backward(weight * mask)
    return {n: g.clone() for n, g in named_views(model.specs, trainer.grads).items()}, out


@pytest.mark.slow
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "split", [dict(max_samples=1), dict(max_samples=2), dict(max_samples=4), dict(max_tokens=100), dict(share=True), dict(max_tokens=150, share=True),
              dict(max_samples=2, share=True)],
)  # fmt: skip
def test_gradients_do_not_depend_on_micro_batch_size_or_shared_prompts(dtype, bound, split):
    whole, logprobs = gradients(dtype)
    parts, same_logprobs = gradients(dtype, **split)
    assert torch.equal(logprobs, same_logprobs)
    for name, grad in whole.items():
        assert (parts[name] - grad).norm() <= bound * grad.norm(), name


def test_gradients_are_bit_identical_with_one_and_two_threads():
    for dtype in (torch.float32, torch.bfloat16):
        one, two = on_threads(lambda: gradients(dtype, share=True)[0], (1, 2))
        assert all(torch.equal(one[n], two[n]) for n in one)


def test_prompt_shared_by_a_group_is_computed_only_once():
    batch, ids, mask = groups_batch(num_groups=1, generations=8)
    alone, shared = (C.packed_tokens(batch, list(range(8)), share) for share in (False, True))
    prompt = int((~mask[0]).nonzero().flatten()[mask[0].nonzero()[0] - 1]) + 1
    assert alone - shared == 7 * prompt


def row_batch(wanted, lengths):
    """Rows of the tokens 1, 2, 3, ... of which `wanted` are."""
    S = max(lengths)
    mask = torch.zeros(len(lengths), S, dtype=torch.bool)
    for row, places in enumerate(wanted):
        mask[row, places] = True
    ids = torch.arange(1, S + 1).repeat(len(lengths), 1)
    return padded_rows(ids, torch.tensor(lengths), mask, torch.zeros(len(lengths), dtype=torch.int64))


@pytest.mark.parametrize(
    "wanted,lengths,alone,shared",
    [([[3, 4]], [5], 4, 4), ([[3]], [9], 3, 3), ([[1]], [2], 1, 1), ([[2, 6]], [9], 6, 6), ([[3, 4], [3], [3, 4, 5]], [5, 5, 6], 12, 6),
     ([[3], [3]], [4, 4], 6, 3), ([[], [2]], [6, 3], 2, 2)],
    ids=["last token", "what follows it", "second token", "gap", "group", "group of one token each", "nothing wanted"],
)  # fmt: skip
def test_tokens_that_no_trained_token_attends_to_are_skipped_in_the_forward_pass(wanted, lengths, alone, shared):
    rows = list(range(len(lengths)))
    assert C.packed_tokens(row_batch(wanted, lengths), rows, False) == alone
    assert C.packed_tokens(row_batch(wanted, lengths), rows, True) == shared


def test_forward_pass_of_a_sample_without_tokens_to_score_is_an_error():
    with pytest.raises(ValueError, match="none of these 1 rows has a wanted token"):
        C.packed_tokens(row_batch([[], [2]], [6, 3]), [0], True)


@pytest.mark.parametrize("share", [False, True])
def test_logprobs_of_one_token_responses_are_those_of_the_last_prompt_position(share):
    """Their rows have no token of their own: the prompt's last row has all their log-probabilities."""
    model = model_of(torch.float64)
    trainer = C.Trainer(model)
    ids = torch.tensor([[3, 4, 5, 7], [3, 4, 5, 8], [3, 4, 5, 9]])
    mask = torch.tensor([[False, False, False, True]]).expand(3, 4).contiguous()
    batch = padded_rows(ids, torch.tensor([4, 4, 4]), mask, torch.zeros(3, dtype=torch.int64))
    out = torch.zeros(3, 4, dtype=torch.float64)
    trainer.forward(batch, [0, 1, 2], 1.0, share, True, False, out)
    expected = torch.log_softmax(trainer.logits(torch.tensor([3, 4, 5]))[-1], 0)[ids[:, 3]]
    torch.testing.assert_close(out[:, 3], expected, rtol=1e-12, atol=1e-12)
    trainer.forward(batch, [0, 1, 2], 1.0, share, True, False, out)  # `logits` was a forward too
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    trainer.backward(weight[:, None] * mask)
    grads, step, masters, losses = trainer.grads.clone(), 1e-6, model.masters, []
    direction = torch.randn(len(grads), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for sign in (1, -1):
        masters.add_(direction, alpha=sign * step)
        model.masters_changed()
        trainer.forward(batch, [0, 1, 2], 1.0, share, False, False, out)
        losses.append(float((out[:, 3] * weight).sum()))
        masters.sub_(direction, alpha=sign * step)
    assert float(grads @ direction) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6)
