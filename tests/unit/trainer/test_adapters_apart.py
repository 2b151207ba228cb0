"""Adapters that products add to a frozen matrix: y = W x + s B (A x), in one order of sums wherever a token is computed."""

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.generation.native import native_runner
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.weights import named_views
from test_adapters import (
    ALL,
    ALL_OF_MIXTURE,
    ALL_OF_RECURRENT,
    ALPHA,
    DIM,
    MIXTURE,
    RECURRENT,
    SOME,
    SOME_OF_RECURRENT,
    backward,
    base,
    draw,
)
from test_adapters import adapted as merged
from test_gradient_invariance import CONFIG, groups_batch
from threads import on_threads
from tiny_layers import LAYERS

TOKENS = torch.arange(1, 60)
TYPES = [torch.float32, torch.bfloat16]


def apart(dtype, targets=ALL, spread=0.2, seed=1, of=None, **changes):
    """A model with adapters apart: of a new base, or of one that it shares."""
    model = base(dtype, **changes) if of is None else of.base()
    model.adapt(DIM, ALPHA, targets, merge=False)
    draw(model, spread, seed)
    return model


def logits(model, tokens=TOKENS):
    return C.Trainer(model).logits(tokens)


@pytest.mark.parametrize(
    "targets, changes",
    [
        (targets, changes)
        for targets in (ALL, SOME)
        for changes in ({}, {"model_type": "gemma2"}, {"attention_bias": True})
    ]
    + [(ALL_OF_RECURRENT, RECURRENT), (SOME_OF_RECURRENT, RECURRENT), (ALL_OF_MIXTURE, MIXTURE)],
)
def test_unmerged_and_merged_lora_adapters_give_equal_results_in_float64(targets, changes):
    makers = apart, merged
    (out, trainer), (expected_out, expected) = (backward(make(torch.float64, targets, **changes)) for make in makers)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-11)
    assert (trainer.grads - expected.grads).norm() <= 1e-10 * expected.grads.norm()


@pytest.mark.parametrize(
    "targets, spread, changes",
    [(ALL, 0.2, {}), (SOME, 0.2, {}), (ALL_OF_MIXTURE, 0.07, MIXTURE)],
    ids=["all", "some", "mixture"],
)
def test_float32_gradients_of_an_unmerged_lora_adapter_match_float64_within_1e_5(targets, spread, changes):
    model, exact = (apart(dtype, targets, spread, **changes) for dtype in (torch.float32, torch.float64))
    both = (backward(each)[1].grads.double() for each in (model, exact))
    ours, theirs = (named_views(model.trained_layout.specs, grads) for grads in both)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_bfloat16_gradients_of_unmerged_lora_adapters_are_as_accurate_as_with_merged_adapters():
    """Both models have the same W in both types; the distance is that of bfloat16's activations."""
    errors = {}
    for merge in (True, False):
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            model = C.DecoderModel(native_config(CONFIG), dtype, False)
            model.compute.copy_(base(torch.bfloat16).compute)
            model.adapt(DIM, ALPHA, ALL, merge=merge)
            draw(model, 0.2)
            found.append(backward(model)[1].grads)
        errors[merge] = ((found[0] - found[1]).norm() / found[1].norm()).item()
    assert 0 < errors[False] < 1.2 * errors[True] < 0.1


def test_unmerged_lora_update_smaller_than_bfloat16_rounding_changes_the_logits():
    """All weights are at least 1/8, where half a step of bfloat16 is 2^-11; from B = 0 the first step changes no weight by more than
    s * 1e-5 * (sum of |A|'s column) < 2^-12. Merging loses it."""
    moved = {}
    for merge in (True, False):
        model = base(torch.bfloat16)
        views = named_views(model.specs, model.compute)
        for name in ALL:
            views[name].add_(torch.where(views[name] < 0, -0.125, 0.125))
        model.adapt(DIM, ALPHA, ALL, merge=merge)
        draw(model, spread=0.0)
        before, weights = logits(model), model.compute.clone()
        _, trainer = backward(model)
        trainer.step(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-12, weight_decay=0.0, max_grad_norm=0.0)
        factors = named_views(model.trained_layout.specs, model.masters)
        for name, b in factors.items():
            if name.endswith("lora_B.weight"):
                a = factors[name.replace("lora_B", "lora_A")]
                assert 0 < b.abs().max() < 1.1e-5 and ALPHA / DIM * (b.t() @ a).abs().max() < 2**-12
        assert torch.equal(model.compute, weights)
        moved[merge] = not torch.equal(logits(model), before)
    assert moved == {True: False, False: True}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "targets, changes",
    [(ALL, {}), (SOME, {}), (ALL_OF_RECURRENT, RECURRENT), (ALL_OF_MIXTURE, MIXTURE)],
    ids=["all", "some", "recurrent", "mixture"],
)
def test_logits_with_an_unmerged_lora_adapter_do_not_depend_on_later_tokens_or_threads(dtype, targets, changes):
    model = apart(dtype, targets, **changes, hidden_size=72, intermediate_size=136)
    tokens, lengths = torch.arange(1, 61).repeat(5), (1, 2, 3, 17, 64, 65, 300)
    whole = logits(model, tokens)
    for found in on_threads(lambda: [logits(model, tokens[:length]) for length in lengths], (1, 2)):
        assert all(torch.equal(part, whole[:length]) for part, length in zip(found, lengths))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "targets, changes",
    [(ALL, {}), (ALL_OF_RECURRENT, RECURRENT), (ALL_OF_MIXTURE, MIXTURE)],
    ids=["attention", "recurrent", "mixture"],
)
def test_logprobs_with_unmerged_lora_do_not_depend_on_batching_prompt_sharing_or_recomputation(dtype, targets, changes):
    outs, grads = [], []
    for share, checkpoint in ((False, False), (True, False), (True, True)):
        trainer = C.Trainer(apart(dtype, targets, **changes))
        batch, ids, mask = groups_batch()
        out = torch.zeros(ids.shape, dtype=trainer.out_dtype)
        trainer.forward(batch, list(range(len(ids))), 1.0, share, True, checkpoint, out)
        trainer.backward(mask.to(out.dtype))
        outs.append(out.clone())
        grads.append(trainer.grads.clone())
        for row in (0, 7):
            trainer.forward(batch, [row], 1.0, share, False, False, out.zero_())
            assert torch.equal(out[row], outs[-1][row])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2]) and torch.equal(grads[1], grads[2])


@pytest.mark.parametrize("dtype", TYPES)
def test_unmerged_lora_adapter_with_zero_b_gives_the_logits_of_the_base_model(dtype):
    plain, model = logits(base(dtype)), apart(dtype)
    assert torch.equal(logits(model.base()), plain) and not torch.equal(logits(model), plain)
    assert torch.equal(logits(apart(dtype, spread=0.0)), plain)
    assert model.base().digest() == base(dtype).digest() != model.digest()


@pytest.mark.parametrize("dtype", TYPES)
def test_merged_copy_of_an_unmerged_lora_model_equals_a_model_with_a_merged_adapter(dtype):
    model, other = apart(dtype, SOME), merged(dtype, SOME)
    weights = model.compute.clone()
    assert torch.equal(model.merged(), other.compute) and torch.equal(other.merged(), other.compute)
    assert torch.equal(model.compute, weights)


def test_rslora_scales_the_adapter_by_alpha_over_the_square_root_of_the_rank():
    model, other = base(torch.float32), base(torch.float32)
    model.adapt(DIM, ALPHA, ALL, use_rslora=True)
    other.adapt(DIM, ALPHA * DIM**0.5, ALL)
    for each in (model, other):
        draw(each, 0.2)
    torch.testing.assert_close(model.compute, other.compute)
    assert (model.compute - merged(torch.float32).compute).abs().max() > 0.01


def sampled(runner, requests):
    """[(tokens, logprobs)] of requests that run in one batch; a request is (prompt, adapted)."""
    engine = C.ResidentEngine(
        runner, max_batch_size=9, prefill_chunk_tokens=24, max_model_len=64, max_cache_bytes=1 << 24, token_bytes=[]
    )
    found = {}
    for prompt, adapted in requests:
        rule = C.SamplingRule(temperature=1.0, top_p=1.0, top_k=0, greedy=False)
        first = engine.submit(prompt, rule=rule, max_new_tokens=12, stop_token_ids=[], stop_strings=[], samples=1, seed=5, stream=0,
                              draw_id=len(prompt), first_sample=0, adapted=adapted)  # fmt: skip
        found[first] = ([], [])
    while engine.has_work:
        for sequence, token, logprob, *_ in zip(*engine.step()):
            found[sequence][0].append(token)
            found[sequence][1].append(logprob)
    return list(found.values())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("packed", ["off", "on"])
@pytest.mark.parametrize(
    "targets, changes",
    [
        ((ALL, SOME), {}),
        ((ALL_OF_RECURRENT, SOME_OF_RECURRENT), RECURRENT),
        ((ALL_OF_MIXTURE, [name for name in ALL_OF_MIXTURE if "experts" in name]), MIXTURE),
        ((ALL, SOME), {"model_type": "gemma4_text", **LAYERS["gemma4_text"], "vocab_size_per_layer_input": 64}),
    ],
    ids=["attention", "recurrent", "mixture", "shared keys"],
)
def test_generation_with_several_lora_adapters_in_a_batch_is_identical_to_each_alone(dtype, packed, targets, changes):
    shared = base(dtype, **changes, vocab_size=64, hidden_size=64, intermediate_size=96)
    models = [apart(dtype, targets[i % 2], seed=i, of=shared) for i in range(8)]
    assert all(model.compute.data_ptr() == shared.compute.data_ptr() for model in models)
    requests = [(list(range(1, 4 + 5 * i)), model) for i, model in enumerate([None, *models])]
    together = sampled(C.NativeModelRunner(shared, packed_weights=packed), requests)
    for (prompt, adapted), found in zip(requests, together):
        own = C.NativeModelRunner(adapted or shared, packed_weights=packed)
        assert sampled(own, [(prompt, None)]) == [found]
        scored = logits(adapted or shared, torch.tensor([*prompt, *found[0]])).log_softmax(-1)
        assert scored[len(prompt) - 1 : -1].gather(1, torch.tensor(found[0])[:, None])[:, 0].tolist() == pytest.approx(found[1], abs=1e-5)  # fmt: skip
    assert len({tuple(tokens) for tokens, _ in together}) > 1


def test_training_one_lora_adapter_does_not_change_other_adapters():
    shared = base(torch.bfloat16)
    first, second = (apart(torch.bfloat16, seed=i, of=shared) for i in range(2))
    before = [logits(model) for model in (shared, first, second)]
    _, trainer = backward(first)
    trainer.step(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    same = [torch.equal(logits(model), then) for model, then in zip((shared, first, second), before)]
    assert same == [True, False, True]


def test_generation_with_merged_adapters_or_adapters_of_another_base_model_is_an_error():
    runner = native_runner(base(torch.float32), {})
    for other in (apart(torch.float32), merged(torch.float32), base(torch.float32)):
        with pytest.raises(ValueError, match="adapters must be apart"):
            sampled(runner, [([1, 2, 3], other)])
    with pytest.raises(ValueError, match="weights are trained has no base"):
        C.DecoderModel(native_config(CONFIG), torch.float32, True).base()
