"""Tiny random models of transformers for parity tests, one for each supported option."""

import copy
import functools
import sys

import torch
from nemo_rl_cpp.models import lfm2
from nemo_rl_cpp.models.nemotron_h import our_name

BASE = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip


def without(mapping: dict, *names: str) -> dict:
    return {key: value for key, value in mapping.items() if key not in names}


@functools.cache
def configurations() -> dict:
    import transformers as hf

    llama3 = dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
        rope_theta=10000.0,
    )  # fmt: skip
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
    linear = dict(rope_type="linear", factor=2.0, rope_theta=5000.0)
    nested = lambda scaling: {
        "full_attention": scaling,
        "sliding_attention": dict(rope_type="default", rope_theta=700.0),
    }  # noqa: E731
    longrope = dict(
        rope_type="longrope", short_factor=[1.0 + i / 10 for i in range(6)], long_factor=[2.0 + i for i in range(6)],
        rope_theta=10000.0, partial_rotary_factor=0.75,
    )  # fmt: skip
    phi3 = {**BASE, "hidden_size": 64}
    experts = dict(num_experts=6, num_experts_per_tok=3)
    qwen_moe = {**BASE, **experts, "moe_intermediate_size": 24}
    recurrent = dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    nemotron_h = without(BASE, "num_hidden_layers", "rms_norm_eps") | dict(
        head_dim=16, layer_norm_epsilon=1e-5, ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, chunk_size=16,
        time_step_min=1e-9,  # transformers' least time step in prefill, but not in decode
    )  # fmt: skip
    sigmoid = dict(
        moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=3, n_group=1, topk_group=1, routed_scaling_factor=1.5, first_k_dense_replace=1,
    )  # fmt: skip
    latent = {**BASE, **sigmoid, "num_key_value_heads": 4} | dict(
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rope_parameters=yarn | dict(mscale=0.7, mscale_all_dim=1.3),
    )  # fmt: skip
    nano = dict(moe_intermediate_size=24, moe_shared_expert_intermediate_size=40)
    granite_4 = dict(
        shared_intermediate_size=80, num_local_experts=0, mamba_n_heads=8, mamba_d_state=16, tie_word_embeddings=True, mamba_chunk_size=16,
        initializer_range=0.1,
    )  # fmt: skip
    gemma4 = {**BASE, "num_hidden_layers": 6, "num_key_value_heads": 1} | dict(
        head_dim=16,
        global_head_dim=32,
        sliding_window=9,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )
    lfm2_base = without(phi3, "rms_norm_eps") | dict(layer_types=["conv", "full_attention", "conv"], norm_eps=1e-4)
    granite = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.15, logits_scaling=8.0)
    return {
        "llama": hf.LlamaConfig(**BASE, head_dim=16),
        "llama_tied": hf.LlamaConfig(**BASE, head_dim=16, tie_word_embeddings=True),
        "llama_biases": hf.LlamaConfig(**BASE, head_dim=16, attention_bias=True, mlp_bias=True),
        "llama_mha_wide_heads": hf.LlamaConfig(**{**BASE, "num_key_value_heads": 4}, head_dim=24),
        "llama_rope_llama3": hf.LlamaConfig(**BASE, head_dim=16, rope_parameters=llama3),
        "llama_rope_yarn": hf.LlamaConfig(**BASE, head_dim=16, rope_parameters=yarn),
        "llama_rope_linear": hf.LlamaConfig(**BASE, head_dim=16, rope_parameters=linear),
        "qwen2": hf.Qwen2Config(**{**BASE, "hidden_size": 64}),
        "qwen2_tied": hf.Qwen2Config(**{**BASE, "hidden_size": 64}, tie_word_embeddings=True),
        "qwen3": hf.Qwen3Config(**BASE, head_dim=16),
        "llama_gelu": hf.LlamaConfig(**BASE, head_dim=16, hidden_act="gelu_pytorch_tanh"),
        "mistral": hf.MistralConfig(**BASE, head_dim=16, sliding_window=None),
        "mistral_window": hf.MistralConfig(**BASE, head_dim=16, sliding_window=9),
        "qwen3_windows": hf.Qwen3Config(
            **BASE, head_dim=16, use_sliding_window=True, sliding_window=33, max_window_layers=1
        ),
        "olmo3": hf.Olmo3Config(
            **{**BASE, "hidden_size": 64}, sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=nested(yarn),
        ),
        "smollm3": hf.SmolLM3Config(**{**BASE, "hidden_size": 64}, no_rope_layer_interval=2, tie_word_embeddings=True),
        "exaone4": hf.Exaone4Config(
            **{**BASE, "num_hidden_layers": 4, "hidden_size": 64}, sliding_window=9, sliding_window_pattern="LLLG", rope_parameters=llama3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ),
        "exaone4_without_windows": hf.Exaone4Config(
            **{**BASE, "hidden_size": 64}, sliding_window=None, tie_word_embeddings=True, rope_parameters=llama3, layer_types=["full_attention"] * 3,
        ),
        "seed_oss": hf.SeedOssConfig(**BASE, head_dim=16),
        "seed_oss_other_biases": hf.SeedOssConfig(**BASE, head_dim=16, attention_bias=False, mlp_bias=True),
        "ernie4_5": hf.Ernie4_5Config(**BASE, head_dim=16),
        "glm4": hf.Glm4Config(**BASE, head_dim=16),
        "glm4_other_rope": hf.Glm4Config(
            **BASE, head_dim=24, attention_bias=False, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=1.0),
        ),
        "granite": hf.GraniteConfig(**{**BASE, "hidden_size": 64}, **granite),
        "granite_tied_biases": hf.GraniteConfig(
            **{**BASE, "hidden_size": 64}, **granite, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "phi3": hf.Phi3Config(**phi3, sliding_window=20),
        "phi3_longrope": hf.Phi3Config(**phi3, rope_parameters=longrope, original_max_position_embeddings=400),
        "gemma2": hf.Gemma2Config(
            **{**BASE, "num_hidden_layers": 3}, head_dim=16, sliding_window=10, query_pre_attn_scalar=24, attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
        "gemma3": hf.Gemma3TextConfig(
            **{**BASE, "num_hidden_layers": 4}, head_dim=16, sliding_window=10, query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], rope_parameters=nested(linear),
        ),
        "gemma4": hf.Gemma4TextConfig(**gemma4, num_kv_shared_layers=3, use_double_wide_mlp=True, final_logit_softcapping=4.0),
        "gemma4_without_inputs": hf.Gemma4TextConfig(
            **gemma4 | dict(hidden_size_per_layer_input=0, num_key_value_heads=4), attention_k_eq_v=True, num_global_key_value_heads=2,
        ),
        "gemma4_experts": hf.Gemma4TextConfig(
            **gemma4 | dict(hidden_size_per_layer_input=0, num_key_value_heads=4, num_hidden_layers=4, layer_types=gemma4["layer_types"][:4]),
            attention_k_eq_v=True, num_global_key_value_heads=2, enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=24,
        ),
        "olmo2": hf.Olmo2Config(**{**BASE, "hidden_size": 64}),
        "olmo2_gelu": hf.Olmo2Config(**{**BASE, "hidden_size": 64}, hidden_act="gelu_pytorch_tanh"),
        "qwen3_tied": hf.Qwen3Config(**BASE, head_dim=32, tie_word_embeddings=True),
        "qwen3_moe": hf.Qwen3MoeConfig(**qwen_moe, head_dim=16, norm_topk_prob=True),
        "qwen3_moe_dense_layer": hf.Qwen3MoeConfig(**qwen_moe, head_dim=16, mlp_only_layers=[1], tie_word_embeddings=True),
        "qwen3_moe_window": hf.Qwen3MoeConfig(**qwen_moe, head_dim=16, use_sliding_window=True, sliding_window=9),
        "olmoe": hf.OlmoeConfig(**{**BASE, "hidden_size": 64, "intermediate_size": 24}, **experts),
        "gpt_oss": hf.GptOssConfig(
            **{**BASE, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2}, head_dim=16, num_local_experts=6, num_experts_per_tok=3,
            sliding_window=9, rope_parameters=yarn | dict(truncate=False),
        ),
        "mixtral": hf.MixtralConfig(**{**BASE, "intermediate_size": 24}, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        "mixtral_window": hf.MixtralConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
        "qwen2_moe": hf.Qwen2MoeConfig(**{**qwen_moe, "hidden_size": 64}, shared_expert_intermediate_size=40),
        "qwen2_moe_sparse_step": hf.Qwen2MoeConfig(
            **{**qwen_moe, "hidden_size": 64}, shared_expert_intermediate_size=40, decoder_sparse_step=2, norm_topk_prob=True,
            use_sliding_window=True, sliding_window=11, max_window_layers=2,
        ),
        "glm4_moe": hf.Glm4MoeConfig(**BASE, **sigmoid, head_dim=16, attention_bias=True, use_qk_norm=True),
        "glm4_moe_groups": hf.Glm4MoeConfig(
            **BASE, **sigmoid | dict(n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=0, n_shared_experts=2), head_dim=16,
            norm_topk_prob=False, rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=1.0),
        ),
        "deepseek_v3": hf.DeepseekV3Config(**latent | dict(n_routed_experts=8, n_group=4, topk_group=2)),
        "deepseek_v3_queries_without_latent": hf.DeepseekV3Config(**latent | dict(q_lora_rank=None, rope_parameters=None)),
        "deepseek_v3_halves": hf.DeepseekV3Config(**latent | dict(rope_interleave=False, qk_nope_head_dim=8, v_head_dim=8)),
        "glm4_moe_lite": hf.Glm4MoeLiteConfig(**without(latent, "first_k_dense_replace") | dict(v_head_dim=24, rope_parameters=None)),
        "glm4_moe_lite_layers": hf.Glm4MoeLiteConfig(
            **without(latent, "first_k_dense_replace") | dict(mlp_layer_types=["dense", "sparse", "dense"], tie_word_embeddings=True)
        ),
        "qwen3_5": hf.Qwen3_5TextConfig(**{**BASE, "num_hidden_layers": 4}, **recurrent, head_dim=16),
        "qwen3_5_tied_other_layers": hf.Qwen3_5TextConfig(
            **BASE, **{**recurrent, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}, head_dim=24, tie_word_embeddings=True,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=0.5, mrope_section=[2, 2, 2], mrope_interleaved=True),
        ),
        "qwen3_5_moe": hf.Qwen3_5MoeTextConfig(
            **{**without(qwen_moe, "intermediate_size"), "num_hidden_layers": 4}, **recurrent, head_dim=16, shared_expert_intermediate_size=40,
        ),
        "qwen3_5_moe_tied_other_layers": hf.Qwen3_5MoeTextConfig(
            **without(qwen_moe, "intermediate_size") | dict(num_experts_per_tok=1), **recurrent, head_dim=16, shared_expert_intermediate_size=24,
            tie_word_embeddings=True, layer_types=["full_attention", "linear_attention", "full_attention"],
        ),
        "qwen3_next": hf.Qwen3NextConfig(**{**qwen_moe, "num_hidden_layers": 4}, **recurrent, head_dim=16, shared_expert_intermediate_size=40),
        "qwen3_next_tied_other_layers": hf.Qwen3NextConfig(
            **qwen_moe | dict(num_hidden_layers=4, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[1]), **recurrent | dict(linear_num_value_heads=2),
            head_dim=24, shared_expert_intermediate_size=24, tie_word_embeddings=True,
            layer_types=["full_attention", "linear_attention", "linear_attention", "linear_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=0.5),
        ),
        "nemotron_h": hf.NemotronHConfig(**nemotron_h, layers_block_type=layers("M-M*-")),
        "nemotron_h_other_layers": hf.NemotronHConfig(
            **nemotron_h | dict(mamba_head_dim=48, n_groups=1, conv_kernel=2, ssm_state_size=32, time_step_min=0.4),
            time_step_limit=(0.4, float("inf")), layers_block_type=layers("-*MM"),
        ),
        "ministral3": hf.Ministral3Config(
            **BASE, head_dim=16,
            rope_parameters=yarn | dict(original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        ),
        "granite_experts": hf.GraniteMoeConfig(
            **phi3 | dict(intermediate_size=40), **granite, num_local_experts=6, num_experts_per_tok=3, tie_word_embeddings=True,
        ),
        "granite_4": hf.GraniteMoeHybridConfig(
            **phi3, **granite, **granite_4, layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "granite_4_of_attention": hf.GraniteMoeHybridConfig(
            **phi3, **granite, **granite_4, layer_types=["full_attention"] * 3, position_embedding_type="rope", attention_bias=True,
        ),
        "granite_4_other_layers": hf.GraniteMoeHybridConfig(
            **phi3, **granite, **granite_4 | dict(tie_word_embeddings=False, mamba_n_groups=2, mamba_d_conv=2, mamba_n_heads=2, shared_intermediate_size=96),
            layer_types=["linear_attention", "linear_attention", "full_attention"], position_embedding_type="rope",
        ),
        "granite_4_experts": hf.GraniteMoeHybridConfig(
            **phi3 | dict(intermediate_size=40), **granite, **granite_4 | dict(num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=48),
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "lfm2": hf.Lfm2Config(**lfm2_base, block_multiple_of=16),
        "lfm2_other_layers": hf.Lfm2Config(
            **lfm2_base | dict(layer_types=["full_attention", "conv", "conv"]), block_auto_adjust_ff_dim=False, conv_L_cache=4, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=700.0),
        ),
        "lfm2_moe": hf.Lfm2MoeConfig(**lfm2_base, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, num_dense_layers=1),
        "lfm2_moe_other_layers": hf.Lfm2MoeConfig(
            **lfm2_base | dict(layer_types=["conv", "conv", "full_attention"]), num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
            num_dense_layers=0, norm_topk_prob=False, routed_scaling_factor=2.5,
        ),
        "nemotron_h_experts": hf.NemotronHConfig(
            **nemotron_h, **nano, layers_block_type=layers("MEM*E-"), n_routed_experts=6, num_experts_per_tok=3, routed_scaling_factor=2.5,
        ),
        "nemotron_h_latent_experts": hf.NemotronHConfig(
            **nemotron_h, **nano, layers_block_type=layers("EM*E"), n_routed_experts=6, num_experts_per_tok=3, routed_scaling_factor=5.0, moe_latent_size=32,
        ),
        "nemotron_h_groups_of_experts": hf.NemotronHConfig(
            **nemotron_h, **nano, layers_block_type=layers("E*ME"), n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=False,
        ),
    }  # fmt: skip


def layers(pattern: str) -> list[str]:
    """Return the kinds of layers of Nemotron-H by their letters."""
    return [{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}[letter] for letter in pattern]


def build(name: str, folder, dtype=torch.float32, seed: int = 0, **changes):
    """Build the transformers model, with random weights for which every option matters, and save it in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = copy.deepcopy(configurations()[name])
    config.update(changes)
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                from_zero = (
                    name.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
                    and "linear_attn" not in parameter_name
                )
                parameter.copy_((not from_zero) + 0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 3 and ("conv1d" in parameter_name or parameter_name.endswith("conv.conv.weight")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


def by_checkpoint_names(tensors: dict, model_type: str) -> dict:
    """Rename tensors from the parameter names of transformers' module to those of its checkpoints: one tensor per
    expert. Qwen3-Next's fused projections are split as in Qwen3.5."""
    found = {}
    for name, tensor in tensors.items():
        if model_type == "gpt_oss" and ".experts." in name:
            found |= of_gpt_oss(name, tensor)
            continue
        if ".in_proj_qkvz." in name or ".in_proj_ba." in name:
            found |= of_key_heads(name, tensor)
            continue
        if model_type.startswith("granitemoe"):
            block = "mlp.shared_experts" if any("block_sparse_moe" in each for each in tensors) else "mlp"
            name = name.replace("block_sparse_moe", "mlp").replace("shared_mlp.output_linear", f"{block}.down_proj")
            if "shared_mlp.input_linear" in name:
                names = (name.replace("shared_mlp.input_linear", f"{block}.{part}_proj") for part in ("gate", "up"))
                found |= dict(zip(names, tensor.chunk(2)))
                continue
        if model_type == "nemotron_h":
            name = our_name(name.replace("model.", "backbone.", 1))
        if model_type in lfm2.MODEL_TYPES:
            name = lfm2.our_name(name)
        if model_type == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        matrices = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        block, _, matrix = name.rpartition(".experts.")
        if not block:
            found[name] = tensor
            continue
        for expert, of_expert in enumerate(tensor):
            parts = of_expert.chunk(2) if matrix == "gate_up_proj" else [of_expert]
            names = {"gate_up_proj": matrices[:2], "up_proj": matrices[1:2], "down_proj": matrices[2:]}[matrix]
            found |= {f"{block}.experts.{expert}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    return found


def of_gpt_oss(name: str, tensor: torch.Tensor) -> dict:
    """Split a tensor of all experts, [E, in, out] with the columns gate, up, gate, up, ..., into the tensors of each
    expert."""
    block, matrix = name.removesuffix("_bias").rsplit(".", 1)
    kind, found = "bias" if name.endswith("_bias") else "weight", {}
    for expert, columns in enumerate(tensor):
        parts = (
            {"gate": columns[..., 0::2], "up": columns[..., 1::2]} if matrix == "gate_up_proj" else {"down": columns}
        )
        found |= {f"{block}.{expert}.{part}_proj.{kind}": values.t() for part, values in parts.items()}
    return found


def of_key_heads(name: str, tensor: torch.Tensor) -> dict:
    """Split a fused projection of Qwen3-Next, with 2 key heads of size 16, as transformers' module does."""
    heads = tensor.unflatten(0, (2, -1))
    if ".in_proj_ba." in name:
        parts = dict(zip(("in_proj_b", "in_proj_a"), heads.chunk(2, 1)))
    else:
        values = heads.shape[1] // 2 - 16
        *qkv, z = (part.flatten(0, 1) for part in heads.split([16, 16, values, values], 1))
        parts = {"in_proj_qkv": torch.cat(qkv), "in_proj_z": z}
    block = name.rpartition(".in_proj_")[0]
    return {f"{block}.{part}.weight": rows.reshape(-1, tensor.shape[1]) for part, rows in parts.items()}


class Float64Torch:
    """The module torch, but with float64 in place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


def recur_in_float64(monkeypatch) -> None:
    """Make transformers compute the recurrences, norms and routers of Qwen3.5, Qwen3-Next, Nemotron-H and Granite 4 in
    float64.

    It computes them in float32 whatever the model's dtype, and a recurrence accumulates the rounding errors."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid
    from transformers.models.nemotron_h import modeling_nemotron_h
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
    from transformers.models.qwen3_next import modeling_qwen3_next

    for module in (
        modeling_qwen3_5,
        modeling_qwen3_5_moe,
        modeling_qwen3_next,
        modeling_nemotron_h,
        modeling_granitemoehybrid,
    ):
        monkeypatch.setattr(module, "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def compute_in_float64(model, monkeypatch) -> None:
    """Make transformers compute the norms, softmax, recurrences and RoPE cosines of a float64 `model` as our core does.
    transformers computes them in float32 whatever the model's dtype, and their last bits differ between processors.
    RoPE must be of the default type, or Gemma 4's; its frequencies, angles and cosines are each rounded to float32
    once."""
    if model.config.model_type == "nemotron_h":  # it has no RoPE
        return recur_in_float64(monkeypatch)
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        recur_in_float64(monkeypatch)
    for module in {type(part).__module__ for part in model.modules()}:
        if module.startswith("transformers.models."):
            monkeypatch.setattr(sys.modules[module], "torch", Float64Torch())
    config, rotary = model.config, getattr(model.model, "pos_emb", None) or model.model.rotary_emb
    if rotary is None:
        return
    if config.model_type == "gemma4_text":
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        of_kind, sizes = (
            config.rope_parameters,
            {kind: config.per_layer_config[kind].head_dim for kind in config.layer_types},
        )
    else:
        assert rotary.rope_type == "default" and rotary.attention_scaling == 1.0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        of_kind = {None: config.rope_parameters}
        sizes = {None: int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))}
    frequencies = {}
    for kind, size in sizes.items():
        exponents = -torch.arange(0, size, 2, dtype=torch.float64) / size
        frequencies[kind] = (of_kind[kind]["rope_theta"] ** exponents).to(torch.float32)
        if of_kind[kind]["rope_type"] == "proportional":
            frequencies[kind][int(of_kind[kind]["partial_rotary_factor"] * size // 2) :] = 0

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, kind: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Qwen3.5 has positions of three axes, which are equal in a text
        positions = position_ids[0] if position_ids.dim() == 3 else position_ids
        angles = torch.cat([positions[..., None].to(torch.float32) * frequencies[kind]] * 2, dim=-1).double()
        return tuple(f(angles).to(torch.float32).to(x.dtype) for f in (torch.cos, torch.sin))

    rotary.forward = forward
