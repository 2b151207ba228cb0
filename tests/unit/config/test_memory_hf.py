import pytest
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.models.memory import forecast, forecast_text
from nemo_rl_cpp.models.model_sizes import model_sizes

D, INNER, L, V, HEADS, SIZE = 64, 96, 3, 1000, 4, 16
MODEL = (
    "++policy.hf_config_overrides={model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 3, num_attention_heads: 4, "
    "num_key_value_heads: 2, vocab_size: 1000, tie_word_embeddings: true}"
)  # fmt: skip
LAYER = D * (2 * HEADS * SIZE + 2 * 2 * SIZE) + 3 * D * INNER + 2 * D
WEIGHTS = L * LAYER + V * D + D
TOKENS = 512
HF = (
    MODEL, "policy.backend=hf", "policy.sequence_packing.enabled=true",
    f"policy.sequence_packing.train_mb_tokens={TOKENS}", f"policy.sequence_packing.logprob_mb_tokens={TOKENS}",
)  # fmt: skip
TWO = ("cluster.executor=processes", "cluster.gpus_per_node=2")


def phases(*overrides, load=load_grpo_config, config="grpo_tiny.yaml"):
    return {phase.name: dict(phase.parts) for phase in forecast(load(config, [*HF, *overrides]))}


@pytest.mark.parametrize(("precision", "width"), [("float32", 4), ("bfloat16", 2)])
def test_memory_estimate_of_the_transformers_backend_includes_logits_and_autograd_tape(precision, width):
    found = phases(f"policy.precision={precision}")
    training = found["policy training"]
    chunk = TOKENS * V * 16
    assert training["logits of a micro-batch"] == 2 * TOKENS * V * width + chunk
    assert found["log-probabilities"]["logits of a micro-batch"] == TOKENS * V * width + chunk
    large = phases(f"policy.precision={precision}", "policy.hf_config_overrides.vocab_size=256000")["policy training"]
    assert large["logits of a micro-batch"] == 2 * TOKENS * 256_000 * width + 2**28
    few = phases(f"policy.precision={precision}", "policy.logprob_chunk_size=10")["policy training"]
    assert few["logits of a micro-batch"] == 2 * TOKENS * V * width + 10 * V * 16
    tape = 6 * D + 3 * HEADS * SIZE + 2 * 2 * SIZE + 4 * INNER
    assert training["activations"] == TOKENS * L * (tape * width + (8 * D if width == 2 else 0))
    assert training["policy weights"] == WEIGHTS * width and training["policy gradients"] == WEIGHTS * 4
    assert ("policy master weights" in training) == (width == 2) and "packed weights" not in training


def test_parameter_count_of_the_transformers_backend_includes_all_experts():
    sizes = model_sizes("elsewhere", {**vars_of(), "num_local_experts": 8, "num_experts_per_tok": 2})
    assert sizes.layer_parameters == LAYER + 7 * 3 * D * INNER + 8 * D and sizes.experts_per_token == 2
    narrow = model_sizes("elsewhere", {**vars_of(), "n_routed_experts": 4, "moe_intermediate_size": 32})
    assert narrow.layer_parameters == LAYER - 3 * D * INNER + 4 * 3 * D * 32 + 4 * D
    assert model_sizes("elsewhere", vars_of()).layer_parameters == LAYER


def vars_of():
    return {
        "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": L, "num_attention_heads": HEADS, "num_key_value_heads": 2, "vocab_size": V,
        "tie_word_embeddings": True,
    }  # fmt: skip


def test_memory_estimate_of_the_transformers_backend_shards_weights_gradients_and_moments():
    """Of the sum over two processes once: what is shared; twice: what each gathers, and its micro-batch."""
    one, two = phases("policy.precision=bfloat16"), phases("policy.precision=bfloat16", *TWO)
    training = two["policy training"]
    assert training["policy weights"] == WEIGHTS * 4 and "policy master weights" not in training
    assert training["policy optimizer"] == WEIGHTS * 8 and training["policy gradients"] == WEIGHTS * 4
    assert training["gathered"] == 2 * (LAYER + V * D) * 2 and two["generation"]["gathered"] == 2 * WEIGHTS * 2
    for part in ("activations", "logits of a micro-batch"):
        assert training[part] == 2 * one["policy training"][part]
    assert "gathered" not in one["generation"]


def test_memory_estimate_of_the_transformers_backend_shards_the_critic_over_processes():
    ppo = phases("policy.precision=bfloat16", *TWO, load=load_ppo_config, config="ppo_tiny.yaml")["value training"]
    assert ppo["value weights"] == ppo["value gradients"] == ppo["value optimizer"] / 2


def test_memory_estimate_of_the_transformers_backend_has_no_reused_generation_activations():
    assert "kept beside it" not in forecast_text(load_grpo_config("grpo_tiny.yaml", list(HF)))
    assert "kept beside it" in forecast_text(load_grpo_config("grpo_tiny.yaml", [MODEL]))
