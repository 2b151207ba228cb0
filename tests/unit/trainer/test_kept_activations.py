"""Training on generation's own activations: the same gradients, bit for bit, as from a forward pass of its own."""

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, cut_rows
from nemo_rl_cpp.models.weights import initialize_weights
from row_batch import padded_rows

LLAMA = dict(model_type="llama", vocab_size=61, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=True)  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": LLAMA | {"model_type": "qwen3"},
    "gemma3": LLAMA | {"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 2},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 1},  # no layer keeps the blocks of all tokens
    "gemma2": LLAMA | {"model_type": "gemma2", "sliding_window": 7, "final_logit_softcapping": 3.0},
    "qwen2_moe": LLAMA | {
        "model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5": LLAMA | {
        "model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "qwen3_5_moe": LLAMA | {
        "model_type": "qwen3_5_moe_text", "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "nemotron_h": LLAMA | {
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-*M-", "mlp_hidden_act": "relu2", "n_groups": 1, "mamba_num_heads": 2,
        "ssm_state_size": 16, "mamba_head_dim": 16, "tie_word_embeddings": False,
    },
    "deepseek_v3": LLAMA | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "nemotron_h with latent experts": LLAMA | {
        "model_type": "nemotron_h", "hybrid_override_pattern": "ME*M-", "mlp_hidden_act": "relu2", "n_groups": 1, "mamba_num_heads": 2,
        "ssm_state_size": 16, "mamba_head_dim": 16, "tie_word_embeddings": False, "n_routed_experts": 5, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16,
    },
    "granite": LLAMA | {"model_type": "granite", "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
}  # fmt: skip
PLENTY = 1 << 28


def make_model(family="qwen3", dtype=torch.bfloat16, max_bytes=PLENTY):
    model = C.DecoderModel(native_config(FAMILIES[family]), dtype, True)
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
    ids, lengths = output["output_ids"], output["unpadded_sequence_lengths"]
    place = torch.arange(ids.shape[1])[None]
    mask = (place >= data["input_lengths"][:, None]) & (place < lengths[:, None])
    return padded_rows(ids.contiguous(), lengths, mask, torch.arange(len(ids)) // generations), mask


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
def test_activations_kept_from_generation_give_the_same_gradients_as_a_new_forward_pass(family, dtype, split):
    keeping, plain = make_model(family, dtype), make_model(family, dtype, max_bytes=0)
    data = prompts()
    output = generation_on(keeping).generate(data)
    assert torch.equal(output["logprobs"], generation_on(plain).generate(data)["logprobs"])
    batch, mask = batch_of(data, output)
    kept, logprobs, reused = gradients(keeping, batch, mask, **split)
    computed, expected, none = gradients(plain, batch, mask, **split)
    assert reused > 0 and none == 0
    assert torch.equal(logprobs, expected)
    assert torch.equal(logprobs[mask], output["logprobs"][mask])
    assert torch.equal(kept, computed)


@pytest.mark.parametrize(
    "engine", [dict(max_batch_size=3), dict(prefill_chunk_tokens=5), dict(kv_cache_gb=4e-5)], ids=str
)
def test_activations_kept_from_generation_are_usable_after_chunked_prefill_and_preemption(engine):
    """Few slots, prompts in chunks, and a cache so small that sequences are given up and computed again."""
    keeping, plain = make_model(), make_model(max_bytes=0)
    data = prompts()
    generation = generation_on(keeping, **engine)
    output = generation.generate(data)
    if "kv_cache_gb" in engine:
        assert generation.get_logger_metrics()["preemptions"] > 0
    batch, mask = batch_of(data, output)
    kept, _, reused = gradients(keeping, batch, mask)
    assert reused > 0
    assert torch.equal(kept, gradients(plain, batch, mask)[0])


def test_activations_beyond_the_memory_budget_for_kept_ones_are_recomputed():
    """A small budget keeps the first sequences whole; a micro-batch that misses a row makes its own forward."""
    whole = make_model()
    data = prompts()
    output = generation_on(whole).generate(data)
    batch, mask = batch_of(data, output)
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


def test_second_turn_reuses_the_activations_kept_from_the_first():
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


def test_activations_kept_from_generation_are_not_used_for_different_tokens():
    model = make_model()
    data = prompts()
    output = generation_on(model).generate(data)
    output["output_ids"][0, 0] += 1
    batch, mask = batch_of(data, output)
    assert gradients(model, batch, mask, max_samples=1, share=False)[2] > 0
    assert gradients(model, batch, mask)[2] == 0  # one micro-batch with the row among its rows


def test_activations_kept_from_generation_are_dropped_after_an_optimizer_step():
    model = make_model()
    data = prompts()
    output = generation_on(model).generate(data)
    batch, mask = batch_of(data, output)
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


def test_generation_for_validation_keeps_no_activations():
    model = make_model()
    generation_on(model).generate(prompts() | {"stream": "val"})
    assert model.kept_tokens == 0


def test_memory_of_activations_kept_from_generation_is_freed():
    model = make_model()
    generation_on(model).generate(prompts())
    model.keep_activations(0)
    assert model.kept_tokens == model.kept_bytes == model.max_kept_bytes == 0
