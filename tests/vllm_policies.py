"""Small policies for tests with vLLM as the generator."""

import tiny
import torch
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.generation.vllm.vllm_generation import vllm_of
from nemo_rl_cpp.models.policy.lm_policy import Policy
from paired_prompts import texts

MODEL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.2}
RECURRENT = MODEL | {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
"""with gated delta nets, which vLLM on CPUs computes only in bfloat16, for heads of this size"""

MIXTURE = RECURRENT | {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
"""with experts. Each token is computed by all of them, because in bfloat16 the choice of some depends on rounding"""
FUSED = MIXTURE | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}


def policy_of(tied=True, vllm=None, model=MODEL, precision="float32", **generation):
    """Return a policy that generates with vLLM.

    `vllm` is {"python": ...} or {"server_url": ...}, with further keys of vllm_cfg."""
    tiny.one_thread()
    vllm = {"timeout_s": 60.0, "enforce_eager": True} | (vllm or {})
    config = PolicyConfig(
        model_name="tiny-random", precision=precision, max_total_sequence_length=24, reuse_generation_logprobs="never",
        hf_config_overrides={**model, "tie_word_embeddings": tied, "max_position_embeddings": 32},
        generation={"backend": "vllm", "vllm_cfg": vllm, "max_new_tokens": 8, "stop_token_ids": [2], "max_batch_size": 16, **generation},
    )  # fmt: skip
    config.fill_defaults()
    return Policy(None, config, tiny_tokenizer(), seed=1)


def engine_of(policy):
    return vllm_of(policy, policy.config, policy.tokenizer, seed=5)


def change(policy, seed):
    """Change the weights, as training does."""
    policy.model.masters.add_(
        torch.randn(policy.model.masters.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    )
    policy.model.masters_changed()


def scored(policy, data, out):
    """Return the policy's log-probabilities of the responses `out`, 0 at the tokens of the prompts."""
    begins, lengths = data["input_lengths"], data["input_lengths"] + out["generation_lengths"]
    places = torch.arange(out["output_ids"].shape[1])
    mask = (places >= begins[:, None]) & (places < lengths[:, None])
    rows = {"input_ids": out["output_ids"], "input_lengths": lengths, "token_mask": mask.float()}
    return policy.get_logprobs(rows | {"sample_mask": torch.ones(len(lengths))})["logprobs"] * mask


def greedy_texts(engine, policy, data, gap=1e-5):
    """Return vLLM's greedy responses, after comparing them with those of the native engine on the policy's weights; in
    bfloat16, where another token may be the likeliest, their log-probabilities with those of the policy."""
    out = engine.generate(data, greedy=True)
    if policy.config.precision == "bfloat16":
        torch.testing.assert_close(out["logprobs"], scored(policy, data, out), atol=gap, rtol=0)
        return texts(out, data)
    native = policy.create_generation(policy.config.generation, seed=5)
    wanted = NativeGeneration.generate(native, data, greedy=True)
    assert texts(out, data) == texts(wanted, data) and torch.equal(out["truncated"], wanted["truncated"])
    torch.testing.assert_close(out["logprobs"], wanted["logprobs"], atol=gap, rtol=0)
    return texts(out, data)
