"""Training on generation's own activations: the same gradients, bit for bit, as from a forward pass of its own."""

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, cut_rows
from nemo_rl_cpp.models.weights import initialize_weights
from paired_prompts import to_train
from row_batch import padded_rows
from tiny_layers import LAYERS

LLAMA = dict(model_type="llama", vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip
FAMILIES = {
    "llama": {}, "qwen2": {"tie_word_embeddings": False}, "qwen3": {},
    "mistral": {"sliding_window": 1},  # no layer keeps the blocks of all tokens
    **{name: LAYERS[name] for name in ("granite", "qwen2_moe", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "gemma4_text with experts")},
    "lfm2": {"hidden_size": 48, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    **{name: LAYERS[name] | {"sliding_window": 7} for name in ("gemma2", "gemma3_text", "gemma4_text")},
    **{name: LAYERS[name] | {"tie_word_embeddings": False} for name in ("nemotron_h", "nemotron_h with latent experts")},
}  # fmt: skip
PLENTY = 1 << 28


def make_model(family="qwen3", dtype=torch.bfloat16, max_bytes=PLENTY):
    config = LLAMA | {"model_type": family.partition(" ")[0]} | FAMILIES[family]
    model = C.DecoderModel(native_config(config), dtype, True)
    initialize_weights(model, 3, std=0.2)
    model.masters_changed()
    model.keep_activations(max_bytes)
    return model


def generation_on(model, **config):
    settings = dict(max_new_tokens=20, stop_token_ids=[5, 6], kv_cache_gb=0.01) | config
    return NativeGeneration(native_runner(model, settings), settings, None, seed=7)


def prompts(groups=4, generations=4, first=3):
    """Prompts of 3, 12, 21, ... tokens, a group of rows each."""
    rows = [[(7 * g + i) % 61 for i in range(first + 9 * g)] for g in range(groups) for _ in range(generations)]
    width = max(map(len, rows))
    return BatchedDataDict(
        input_ids=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        input_lengths=torch.tensor([len(row) for row in rows]),
        draw_ids=torch.arange(groups).repeat_interleave(generations),
        sample_index=torch.arange(generations).repeat(groups),
    )


def batch_of(data, output, generations=4):
    made = to_train(data, output, generations)
    mask = made["token_mask"].bool()
    return padded_rows(made["input_ids"].contiguous(), made["input_lengths"], mask, made["group_id"]), mask


def generated(model, **engine):
    """(what `prompts` returns, its responses, the batch to train on, its mask)"""
    data = prompts()
    output = generation_on(model, **engine).generate(data)
    return data, output, *batch_of(data, output)


def gradients(model, batch, mask, max_samples=0, max_tokens=0, share=True, checkpoint=False):
    """(gradients, log-probabilities, tokens whose forward was generation's)"""
    trainer = C.Trainer(model)
    out = torch.zeros(mask.shape)
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(9))
    for rows in cut_rows(batch, list(range(len(mask))), MicroBatching(max_samples, max_tokens, share_prefix=share)):
        trainer.forward(batch, rows, 1.0, share, True, checkpoint, out)
        trainer.backward(weight * mask)
    return trainer.grads.clone(), out, trainer.reused_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "split", [{}, dict(max_samples=3), dict(max_tokens=90), dict(share=False), dict(checkpoint=True)], ids=str
)
def test_activations_reused_from_generation_give_the_gradients_of_a_new_forward_pass(family, dtype, split):
    keeping, plain = make_model(family, dtype), make_model(family, dtype, max_bytes=0)
    data, output, batch, mask = generated(keeping)
    assert torch.equal(output["logprobs"], generation_on(plain).generate(data)["logprobs"])
    kept, logprobs, reused = gradients(keeping, batch, mask, **split)
    computed, expected, none = gradients(plain, batch, mask, **split)
    assert reused > 0 and none == 0
    assert torch.equal(logprobs, expected)
    assert torch.equal(logprobs[mask], output["logprobs"][mask])
    assert torch.equal(kept, computed)


@pytest.mark.parametrize(
    "engine",
    [
        dict(max_batch_size=3),
        dict(prefill_chunk_tokens=5),
        dict(kv_cache_gb=4e-5),
        dict(max_batch_size=1, temperature=0.1),
    ],
    ids=str,
)
def test_activations_can_be_reused_from_generation_in_any_schedule(engine):
    """Few slots, prompts in chunks, a cache so small that sequences are given up and computed again, and drafts."""
    keeping, plain = make_model(), make_model(max_bytes=0)
    data = prompts()
    generation = generation_on(keeping, **engine)
    output = generation.generate(data)
    if "kv_cache_gb" in engine:
        assert generation.get_logger_metrics()["preemptions"] > 0
    if "temperature" in engine:
        metrics = generation.get_logger_metrics()
        assert 0 < metrics["accepted_draft_tokens"] < metrics["draft_tokens"]
    batch, mask = batch_of(data, output)
    kept, _, reused = gradients(keeping, batch, mask)
    assert reused > 0
    assert torch.equal(kept, gradients(plain, batch, mask)[0])


def test_generation_activations_that_exceed_the_memory_budget_are_recomputed_in_training():
    """A small budget keeps the first sequences whole; a micro-batch that misses a row makes its own forward."""
    whole = make_model()
    data, output, batch, mask = generated(whole)
    expected, _, all_tokens = gradients(whole, batch, mask, max_samples=1, share=False)
    token_bytes = whole.kept_bytes // (-(-whole.kept_tokens // 64) * 64)
    reused = []
    for tokens in (0, 1, 40, 120, whole.kept_tokens):
        model = make_model(max_bytes=tokens * token_bytes)
        assert torch.equal(generation_on(model).generate(data)["output_ids"], output["output_ids"])
        assert model.kept_tokens <= tokens
        grads, _, n = gradients(model, batch, mask, max_samples=1, share=False)
        assert torch.equal(grads, expected)
        reused.append(n)
    assert reused[0] == reused[1] == 0 < reused[3] < reused[4] == all_tokens
    assert reused == sorted(reused)


def test_second_turn_of_a_conversation_reuses_activations_of_the_first_turn():
    """A second turn: its prompt is the first turn's text with more behind it; tokens of the first response are trained too."""
    keeping, plain = make_model(), make_model(max_bytes=0)
    data, turns = prompts(groups=2), []
    for _ in range(2):
        output = generation_on(keeping, stop_token_ids=[]).generate(data)
        turns.append((data["input_lengths"], output["unpadded_sequence_lengths"]))
        ids = torch.cat([output["output_ids"], torch.zeros(len(output["output_ids"]), 2, dtype=torch.int64)], 1)
        for row, end in enumerate(output["unpadded_sequence_lengths"].tolist()):
            ids[row, end : end + 2] = torch.tensor([11, 12])
        data = BatchedDataDict(data | {"input_ids": ids, "input_lengths": output["unpadded_sequence_lengths"] + 2})
    ids, lengths = output["output_ids"].contiguous(), output["unpadded_sequence_lengths"]
    place = torch.arange(ids.shape[1])[None]
    mask = sum((place >= begin[:, None]) & (place < end[:, None]) for begin, end in turns).bool()
    batch = padded_rows(ids, lengths, mask, torch.arange(len(ids)) // 4)
    kept, _, reused = gradients(keeping, batch, mask)
    assert reused == C.packed_tokens(batch, list(range(len(ids))), True)
    assert torch.equal(kept, gradients(plain, batch, mask)[0])


def test_activations_of_generation_are_not_reused_for_different_tokens():
    model = make_model()
    data, output, *_ = generated(model)
    output["output_ids"][0, 0] += 1
    batch, mask = batch_of(data, output)
    assert gradients(model, batch, mask, max_samples=1, share=False)[2] > 0
    assert gradients(model, batch, mask)[2] == 0  # one micro-batch with the row among its rows


def test_activations_of_generation_are_discarded_after_an_optimizer_step():
    model = make_model()
    data, _, batch, mask = generated(model)
    trainer = C.Trainer(model)
    out = torch.zeros(mask.shape)
    for step in range(2):
        trainer.forward(batch, list(range(len(mask))), 1.0, True, True, False, out)
        trainer.backward(mask.float())
        assert (model.kept_tokens > 0) == (step == 0)
        trainer.step(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)
        assert model.kept_tokens == 0
    assert trainer.reused_tokens == C.packed_tokens(batch, list(range(len(mask))), True)
    bytes_before = model.kept_bytes
    generation_on(model).generate(data)
    assert model.kept_tokens > 0 and model.kept_bytes <= bytes_before + 64 * 4000  # the memory is used again
    model.masters_changed()
    assert model.kept_tokens == 0


def test_validation_keeps_no_activations_for_reuse_and_activation_memory_can_be_freed():
    model = make_model()
    generation_on(model).generate(prompts() | {"stream": "val"})
    assert model.kept_tokens == 0
    generation_on(model).generate(prompts())
    assert model.kept_tokens > 0
    model.keep_activations(0)
    assert model.kept_tokens == model.kept_bytes == model.max_kept_bytes == 0
