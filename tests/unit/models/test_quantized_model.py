import math
from dataclasses import replace

import pytest
import torch
from block_matrices import SINGLE, blocks_in, blocks_of, kind_in
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.memory import forecast
from nemo_rl_cpp.models.model_folder import read_model_folder, tiny_random
from nemo_rl_cpp.models.weights import initialize_weights, load_weights, named_views, save_weights

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=40)  # fmt: skip
QWEN = {**SIZES, "model_type": "qwen2"}
GEMMA = {**SIZES, "model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS = {**SIZES, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RECURRENT = {
    **SIZES, "model_type": "qwen3_5_text", "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {
    **SIZES, "model_type": "nemotron_h", "hybrid_override_pattern": "M*-", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16,
    "mamba_head_dim": 16,
}  # fmt: skip
MAMBA_EXPERTS = {
    **MAMBA, "hybrid_override_pattern": "ME*E-", "n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 32,
}  # fmt: skip
BOTH = {**RECURRENT, **EXPERTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 64}
MODELS = {"llama": SIZES, "tied": {**SIZES, "tie_word_embeddings": True}, "qwen2": QWEN, "gemma2": GEMMA, "experts": EXPERTS, "recurrent": RECURRENT, "recurrent and experts": BOTH, "mamba": MAMBA, "mamba and latent experts": MAMBA_EXPERTS}  # fmt: skip


def model_of(sizes, kind, dtype, seed=0):
    folder = replace(tiny_random(sizes), quantization=kind)
    model = C.DecoderModel(folder.native(), dtype, False)
    initialize_weights(model, seed, std=0.1)
    return model


def dequantised(sizes, kind, dtype):
    """Return (the quantised model, a model without quantisation that holds the dequantised weights)."""
    quantised, plain = model_of(sizes, kind, dtype), model_of(sizes, None, dtype)
    views = named_views(plain.specs, plain.compute)
    for spec in quantised.blocks:
        if len(spec.shape) == 1:  # the bias of a router, which is not quantised
            continue
        expected = blocks_of(views[spec.name].clone(), kind_in(quantised, spec))
        assert torch.equal(blocks_in(quantised, spec), expected), spec.name
        C.unpack_blocks(quantised.blocks_of(spec), views[spec.name], spec.begin)
    plain.masters_changed()
    return quantised, plain


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", MODELS.values(), ids=MODELS)
def test_logits_of_quantised_and_dequantised_models_are_bit_identical(sizes, dtype, kind):
    """Without bfloat16 instructions the logits differ, since only the model without quantisation rounds the weights to
    bfloat16."""
    quantised, plain = dequantised(sizes, kind, dtype)
    for count in (1, 3, 20):
        ids = torch.arange(count) * 7 % 40
        ours, theirs = C.Trainer(quantised).logits(ids), C.Trainer(plain).logits(ids)
        if SINGLE and dtype == torch.bfloat16:
            assert (ours - theirs).abs().median() < 0.15 * theirs.abs().median()  # a router may choose another expert
        else:
            assert torch.equal(ours, theirs) and ours.isfinite().all()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_quantised_weights_use_the_bits_per_weight_of_their_format(kind):
    quantised, plain = model_of(SIZES, kind, torch.bfloat16), model_of(SIZES, None, torch.bfloat16)
    names = [spec.name for spec in quantised.blocks]
    bits = {spec.name: blocks_in(quantised, spec).nbytes * 8 / math.prod(spec.shape) for spec in quantised.blocks}
    in_layers = [name for name in names if name.startswith("model.layers.")]
    assert len(in_layers) == 7 * 3
    for name in in_layers:
        assert bits[name] == (8.5 if ".v_proj." in name else {"q8_0": 8.5, "q4_0": 4.5, "nf4": 5.0}[kind]), name
    rest = {name: bits[name] for name in names if name not in in_layers}  # bitsandbytes does not quantise them
    assert rest == ({} if kind == "nf4" else {"model.embed_tokens.weight": 8.5, "lm_head.weight": 8.5})
    weights = sum(math.prod(spec.shape) for spec in quantised.blocks)
    assert quantised.compute.numel() + weights <= plain.compute.numel()
    assert quantised.digest() != plain.digest()


@pytest.mark.parametrize(
    "sizes, mixer, expected, count",
    [(RECURRENT, "linear_attn", ["in_proj_qkv", "in_proj_z", "out_proj"], 2 * 6 + 7), (MAMBA, "mamba", ["in_proj", "out_proj"], 2 + 4 + 2)],
)  # fmt: skip
def test_only_the_large_matrices_of_recurrent_layers_are_quantised(sizes, mixer, expected, count):
    names = [spec.name for spec in model_of(sizes, "q4_0", torch.bfloat16).blocks]
    assert [name.split(".")[-2] for name in names if f".0.{mixer}." in name] == expected
    assert len(names) == count + 2  # embedding and LM head


@pytest.mark.parametrize("sizes", [{}, {**RECURRENT, "hidden_size": 256}, {**BOTH, "hidden_size": 256, "moe_intermediate_size": 256}, {**MAMBA, "hidden_size": 256, "intermediate_size": 1024}, {**MAMBA_EXPERTS, "hidden_size": 256, "intermediate_size": 1024}])  # fmt: skip
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_memory_estimate_of_a_quantised_base_equals_the_size_of_the_stored_weights(kind, sizes):
    config = load_grpo_config(
        "grpo_tiny.yaml", [f"policy.quantization={kind}", "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.precision=bfloat16",
                           *(f"++policy.hf_config_overrides.{key}={value}" for key, value in sizes.items())]
    )  # fmt: skip
    model = model_of(config.policy.hf_config_overrides, kind, torch.bfloat16)
    stored = model.compute.nbytes + sum(
        (model.blocks_of(spec) if len(spec.shape) == 1 else blocks_in(model, spec)).nbytes for spec in model.blocks
    )
    parts = dict(forecast(config)[0].parts)
    assert parts["policy weights"] == pytest.approx(stored, rel=0.02) and "policy frozen weights" not in parts


def test_weights_are_quantised_from_the_dtype_in_the_file_and_not_from_the_compute_dtype(tmp_path):
    plain = model_of(SIZES, None, torch.float32)
    save_weights(plain, tmp_path, tiny_random(SIZES).config)
    folder = replace(read_model_folder(tmp_path), quantization="q4_0")
    folder.check_weights()
    loaded = C.DecoderModel(folder.native(), torch.bfloat16, False)
    load_weights(loaded, tmp_path)
    views = named_views(plain.specs, plain.compute)
    for spec in loaded.blocks:
        assert torch.equal(blocks_in(loaded, spec), blocks_of(views[spec.name].clone(), kind_in(loaded, spec)))


def test_weight_digest_changes_if_a_quantised_weight_block_changes():
    one, other = (model_of(SIZES, "q8_0", torch.float32) for _ in range(2))
    assert one.digest() == other.digest()
    other.blocks_of(other.blocks[-1])[0, 7] += 1
    assert one.digest() != other.digest()


@pytest.mark.parametrize(
    "sizes, reason",
    [({"intermediate_size": 80}, "policy.quantization is q4_0, .* has intermediate_size 80, .*=null"),
     (RECURRENT | {"linear_num_key_heads": 1, "linear_num_value_heads": 1}, "has linear_num_value_heads . linear_value_head_dim 16, which is no multiple"),
     (MAMBA | {"mamba_num_heads": 1, "n_groups": 1}, "has mamba_num_heads . mamba_head_dim 16, which is no multiple")],
)  # fmt: skip
def test_quantising_unsupported_matrix_shapes_is_an_error(sizes, reason):
    with pytest.raises(ModelFolderError, match=reason):
        replace(tiny_random(SIZES | sizes), quantization="q4_0").check_quantization("policy.quantization")


def test_training_or_float64_computation_of_a_quantised_base_is_an_error():
    native = replace(tiny_random(SIZES), quantization="q4_0").native()
    with pytest.raises(ValueError, match="frozen"):
        C.DecoderModel(native, torch.bfloat16, True)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        C.DecoderModel(native, torch.float64, False)
