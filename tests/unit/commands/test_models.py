from math import prod

import pytest
from nemo_rl_cpp.commands import models
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.memory import forecast, forecast_text, with_known_sizes
from nemo_rl_cpp.models.model_sizes import KNOWN_MODELS, known_model, model_sizes
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes

# billions of parameters as the models' cards give them; of Gemma 4 E2B and E4B, whose cards count the towers, too, those of the text
PARAMETERS = {
    "SmolLM2-135M": 0.1345, "SmolLM2-360M": 0.3618, "SmolLM2-1.7B": 1.711, "TinyLlama-1.1B": 1.1, "Llama-3.2-1B": 1.236, "Llama-3.2-3B": 3.213,
    "Llama-3.1-8B": 8.03, "Mistral-7B": 7.248, "OLMo-2-0425-1B": 1.485, "OLMo-2-1124-7B": 7.299, "OLMo-2-1124-13B": 13.716, "Qwen2.5-0.5B": 0.494,
    "Qwen2.5-1.5B": 1.544, "Qwen2.5-3B": 3.086, "Qwen2.5-7B": 7.616, "Qwen2.5-14B": 14.77, "Qwen2.5-32B": 32.76, "Qwen2.5-Math-1.5B": 1.544,
    "Qwen2.5-Math-7B": 7.616, "DeepSeek-R1-Distill-Qwen-1.5B": 1.777, "DeepSeek-R1-Distill-Qwen-7B": 7.616, "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.721,
    "Qwen3-4B": 4.022, "Qwen3-8B": 8.191, "Qwen3-14B": 14.768, "Qwen3-32B": 32.762, "Olmo-3-1025-7B": 7.298, "SmolLM3-3B": 3.075,
    "EXAONE-4.0-1.2B": 1.28, "EXAONE-4.0-32B": 32.0, "ERNIE-4.5-0.3B": 0.361, "GLM-4-9B-0414": 9.4, "Seed-OSS-36B": 36.15,
    "LFM2-350M": 0.3545, "LFM2-700M": 0.7425, "LFM2-1.2B": 1.1703, "LFM2-2.6B": 2.5693, "LFM2.5-350M": 0.3545, "LFM2.5-1.2B": 1.1703, "LFM2.5-2.6B": 2.69,
    "LFM2-8B-A1B": 8.34, "LFM2.5-8B-A1B": 8.467,
    "Ministral-3-3B": 3.429, "granite-3.3-2b-instruct": 2.534, "granite-4.0-350m": 0.352, "granite-4.0-h-350m": 0.340, "granite-4.0-h-1b": 1.462, "granite-4.0-micro": 3.403,
    "granite-4.0-h-micro": 3.191, "granite-4.0-h-tiny": 6.939, "granite-4.0-h-small": 32.21, "granite-3.1-1b-a400m-instruct": 1.335, "Phi-3.5-mini-instruct": 3.821, "Phi-4-mini-instruct": 3.836, "gemma-3-270m": 0.268, "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.884, "gemma-3-12b": 11.771, "gemma-3-27b": 27.016, "gemma-4-E2B": 4.629, "gemma-4-E4B": 7.463, "gemma-4-31B": 30.7, "gemma-4-12B": 11.9, "gemma-4-26B-A4B": 25.23, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    "Qwen3-30B-A3B": 30.53, "OLMoE-1B-7B-0924": 6.919, "Mixtral-8x7B": 46.70, "Qwen1.5-MoE-A2.7B": 14.32,
    "Qwen3.5-0.8B": 0.752, "Qwen3.5-9B": 8.954, "NVIDIA-Nemotron-Nano-9B-v2": 8.89, "NVIDIA-Nemotron-Nano-12B-v2": 12.31,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, "NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": 31.6, "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": 31.6,
    "NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120.6, "Qwen3-Next-80B-A3B": 79.67, "Qwen3.5-35B-A3B": 34.66, "Qwen3.5-122B-A10B": 122.1, "Qwen3.5-397B-A17B": 396.3,
}  # fmt: skip


@pytest.mark.parametrize("model", KNOWN_MODELS, ids=lambda model: model.name)
def test_computed_parameter_counts_of_known_models_match_published_counts(model):
    assert model.sizes.parameters / 1e9 == pytest.approx(PARAMETERS[model.name.rpartition("/")[2]], rel=0.003)
    assert model.model_type in SUPPORTED_ARCHITECTURES


TINY = {"vocab_size": 96, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
GLM = TINY | {
    "model_type": "glm4_moe", "num_hidden_layers": 5, "first_k_dense_replace": 2, "intermediate_size": 512, "moe_intermediate_size": 64,
    "n_routed_experts": 32,
}  # fmt: skip
QWEN3_5 = TINY | {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 6, "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
}  # fmt: skip
QWEN3_NEXT = QWEN3_5 | {"model_type": "qwen3_next", "mlp_only_layers": [2], "intermediate_size": 512}
LFM2 = TINY | {
    "model_type": "lfm2_moe", "num_hidden_layers": 3, "full_attn_idxs": [1], "num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 512,
}  # fmt: skip
NEMOTRON_3 = TINY | {
    "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E-", "intermediate_size": 512, "n_groups": 2, "mamba_num_heads": 8, "ssm_state_size": 32,
    "mamba_head_dim": 32, "n_routed_experts": 32, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [GLM, QWEN3_5, QWEN3_NEXT, LFM2, NEMOTRON_3, NEMOTRON_3 | {"moe_latent_size": 128}],
    ids=["glm", "qwen3.5", "qwen3-next", "lfm2", "nano", "super"],
)
def test_computed_parameter_count_of_moe_models_equals_the_total_size_of_the_tensors(config):
    tensors = parameter_shapes(native_config(config)).values()
    assert model_sizes("none", config).parameters == sum(map(prod, tensors))


@pytest.mark.parametrize(("name", "known"), [
    ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B"), ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M"),
    ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"), ("somebody/Qwen3-8B", None), ("", None),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B"), ("Qwen/Qwen3-Next-80B-A3B-Thinking", "Qwen/Qwen3-Next-80B-A3B"), ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
])  # fmt: skip
def test_models_command_finds_the_base_model_of_a_fine_tuned_variant_by_name(name, known):
    found = known_model(name)
    assert (found.name if found else None) == known


def test_models_command_prints_parameter_count_and_memory_estimate(capsys):
    assert models.main(["qwen2.5-0.5b"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Qwen/Qwen2.5-0.5B "))
    assert line.split()[1:5] == ["qwen2", "0.494", "B", "11.9"]  # as docs/supported-models.md says
    assert models.main(["no-such-model"]) == 1
    with pytest.raises(SystemExit):
        models.main(["--tokens", "-3"])


def test_dry_run_estimates_memory_of_known_models_without_a_download():
    config = load_grpo_config("grpo_math_1B.yaml")
    assert "Peak memory by phase" in forecast_text(config) and not config.policy.hf_config_overrides
    other = load_grpo_config("grpo_math_1B.yaml", ["policy.model_name=somebody/else"])
    assert with_known_sizes(other) is other and "not known" in forecast_text(other)


def test_memory_estimate_counts_only_the_sliding_window_of_windowed_layers():
    """Gemma 3 1B has 4 full layers and 22 with a window of 512, one key head of 256, which is 1,024 bytes per token and
    layer. 16 sequences of 8,192 tokens, all from one prompt, hold the window and a block each, and the prompt too."""
    overrides = [
        "policy.model_name=google/gemma-3-1b-it", "policy.precision=bfloat16", "policy.max_total_sequence_length=8192",
        "grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=16", "policy.train_global_batch_size=16",
        "policy.generation.max_new_tokens=8192", "data.validation=null",
    ]  # fmt: skip
    config = load_grpo_config("grpo_math_1B.yaml", overrides)
    (generation,) = (phase for phase in forecast(with_known_sizes(config)) if phase.name == "generation")
    windowed = 17 * (512 + 32) + config.policy.generation.prefill_chunk_tokens
    assert dict(generation.parts)["KV cache"] == 1024 * (4 * 16 * 8192 + 22 * windowed)
    mistral = with_known_sizes(load_grpo_config("grpo_math_1B.yaml", ["policy.model_name=mistralai/Mistral-7B"])).policy
    assert model_sizes(mistral.model_name, mistral.hf_config_overrides).window == 0  # that of version 0.3


def test_memory_estimate_includes_the_states_of_recurrent_layers():
    config = load_grpo_config("grpo_math_1B.yaml", ["policy.model_name=Qwen/Qwen3.5-0.8B", "policy.precision=bfloat16"])
    (generation,) = (phase for phase in forecast(with_known_sizes(config)) if phase.name == "generation")
    rollouts = config.loop.prompts_per_round * config.loop.num_generations_per_prompt
    sequences = min(config.policy.generation.max_batch_size or rollouts, rollouts)
    prompts = min(config.loop.prompts_per_round, sequences)
    state = 16 * 128 * 128 * 4 + 3 * 3 * 16 * 128 * 2  # float32 states of 16 heads; three inputs of q, k and v
    parts = dict(generation.parts)
    assert parts["recurrent states"] == 18 * state * (sequences + prompts)
    length = config.policy.generation.effective_max_model_len(config.policy.max_total_sequence_length)
    assert parts["KV cache"] <= sequences * length * 6 * 2 * 2 * 256 * 2  # of the six layers with attention
