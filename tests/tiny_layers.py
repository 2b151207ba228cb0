"""The keys of config.json that tiny models of several architectures have in addition to common sizes."""

LAYERS = {
    "llama": {},
    "olmo3": {"sliding_window": 20},
    "smollm3": {"no_rope_layer_interval": 2},
    "exaone4": {"sliding_window": 20, "sliding_window_pattern": 2},
    "glm4": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96, "num_local_experts": 0, "mamba_n_heads": 4, "mamba_d_state": 16,
        "residual_multiplier": 0.3, "attention_multiplier": 0.2,
    },
    "granitemoehybrid with experts": {
        "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "intermediate_size": 48, "shared_intermediate_size": 64,
        "num_local_experts": 6, "num_experts_per_tok": 3, "mamba_n_heads": 4, "mamba_d_state": 16,
    },
    "phi3": {"sliding_window": 70, "partial_rotary_factor": 0.5},
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 20, "sliding_window_pattern": 2},
    "gemma4_text": {
        "sliding_window": 20, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "global_head_dim": 32, "hidden_size_per_layer_input": 32,
    },
    "gemma4_text with experts": {
        "model_type": "gemma4_text", "sliding_window": 20, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 20},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64},
    "qwen2_moe": {
        "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "qwen3_5_text": {
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "qwen3_5_moe_text": {
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    },
    "qwen3_next": {
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*-", "mlp_hidden_act": "relu2", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16,
        "mamba_head_dim": 32, "layer_norm_epsilon": 1e-5,
    },
    "nemotron_h with experts": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E", "mlp_hidden_act": "relu2", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16,
        "mamba_head_dim": 32, "layer_norm_epsilon": 1e-5, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5,
    },
    "nemotron_h with latent experts": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "EM*E", "mlp_hidden_act": "relu2", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16,
        "mamba_head_dim": 32, "layer_norm_epsilon": 1e-5, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 24,
    },
}  # fmt: skip
