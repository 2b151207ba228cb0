import pytest
import tiny
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.weights import initialize_weights
from row_batch import padded_rows

pytestmark = pytest.mark.gpu

COMMON = dict(vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
              rms_norm_eps=1e-6, rope_theta=10000.0)  # fmt: skip
CONFIGS = {
    "llama": dict(COMMON, model_type="llama", tie_word_embeddings=False),
    "qwen2": dict(COMMON, model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(COMMON, model_type="qwen3", tie_word_embeddings=True),
    "deepseek_v3": dict(COMMON, model_type="deepseek_v3", tie_word_embeddings=False, num_key_value_heads=4, head_dim=8, q_lora_rank=24,
                        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=2),
}  # fmt: skip
SIGMOID = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)
EXPERTS = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=64, shared_expert_intermediate_size=64, mlp_only_layers=[1]),
    "qwen3_moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    "olmoe": dict(num_experts=6, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
    "glm4_moe": SIGMOID | dict(n_group=3, topk_group=2),
    "deepseek_v3": CONFIGS["deepseek_v3"] | SIGMOID | dict(n_group=1, topk_group=1),
}  # fmt: skip
CONFIGS |= {
    f"{name} with experts": COMMON | dict(model_type=name, tie_word_embeddings=False) | config
    for name, config in EXPERTS.items()
}
CONFIGS |= {
    "qwen3_5_text": dict(COMMON, model_type="qwen3_5_text", tie_word_embeddings=True, full_attention_interval=2, linear_num_key_heads=2,
                         linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32),
    "nemotron_h": dict(COMMON, model_type="nemotron_h", tie_word_embeddings=False, hybrid_override_pattern="M*-", num_hidden_layers=3,
                       mlp_hidden_act="relu2", n_groups=2, mamba_num_heads=4, ssm_state_size=16, mamba_head_dim=32, layer_norm_epsilon=1e-5),
}  # fmt: skip
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name in CONFIGS
    for dtype in BOUNDS
    if dtype == torch.float32 or "experts" not in name  # rounding to bfloat16 changes which experts a token chooses
]


def model_on(device, config, dtype, value_head=False):
    model = C.DecoderModel(native_config(config, value_head=value_head), dtype, True, device)
    initialize_weights(model, 3, std=0.2)
    return model


def batch_of_groups():
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (6, 50), generator=random)
    ids[1:3, :20] = ids[0, :20]
    lengths = torch.tensor([50, 31, 44, 50, 22, 37])
    mask = (torch.arange(50) < lengths[:, None]) & (torch.arange(50) >= 20)
    return padded_rows(ids, lengths, mask, torch.tensor([0, 0, 0, 1, 2, 3])), ids, mask


def gradients(device, config, dtype, share=True, checkpoint=False, value_head=False, **filters):
    trainer = C.Trainer(model_on(device, config, dtype, value_head))
    batch, ids, mask = batch_of_groups()
    out = torch.zeros(ids.shape)
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(9)) * mask
    trainer.forward(batch, list(range(6)), 1.0 if value_head else 0.8, share, True, checkpoint, out, **filters)
    trainer.backward(torch.where(torch.isinf(out), 0.0, weight))
    return out, trainer.grads.cpu()


def close(a, b, bound):
    assert (a.double() - b.double()).norm() <= bound * b.double().norm() + 1e-6, float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("value_head", [False, True])
def test_model_outputs_and_gradients_on_cuda_match_the_cpu(name, dtype, value_head):
    cpu, gpu = (gradients(device, CONFIGS[name], dtype, value_head=value_head) for device in ("cpu", "cuda"))
    close(gpu[0], cpu[0], BOUNDS[dtype] / 10)
    close(gpu[1], cpu[1], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_on_cuda_are_bit_identical_in_every_run_and_with_activation_checkpointing(name, dtype):
    runs = [gradients("cuda", CONFIGS[name], dtype, checkpoint=c) for c in (False, False, True)]
    assert all(torch.equal(r[0], runs[0][0]) and torch.equal(r[1], runs[0][1]) for r in runs)


@pytest.mark.parametrize("filters", [dict(top_k=5), dict(top_p=0.7)], ids=str)
def test_logprobs_with_top_k_and_top_p_and_gradients_on_cuda_match_the_cpu(filters):
    cpu, gpu = (gradients(device, CONFIGS["qwen2"], torch.float32, **filters) for device in ("cpu", "cuda"))
    both = torch.isfinite(cpu[0]) & torch.isfinite(gpu[0])
    assert (torch.isfinite(cpu[0]) == torch.isfinite(gpu[0])).float().mean() > 0.99
    close(gpu[0][both], cpu[0][both], 1e-3)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_on_cuda_do_not_depend_on_micro_batch_size_or_shared_prompts(name, dtype):
    trainer = C.Trainer(model_on("cuda", CONFIGS[name], dtype))
    batch, ids, _ = batch_of_groups()
    whole, results = [0, 1, 2, 3, 4, 5], []
    for plan, share in (
        ([whole], True),
        ([whole], False),
        ([[b] for b in whole], False),
        ([[5, 0], [1, 2, 3, 4]], True),
    ):
        out = torch.zeros(ids.shape)
        for rows in plan:
            trainer.forward(batch, rows, 1.0, share, False, False, out)
        results.append(out)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_products_with_quantised_matrices_on_cuda_have_the_bits_of_their_dense_weights(kind, dtype):
    """Packed on the device, where 37 rows end within a tile; forward, gated and backward products, and embeddings."""
    N, K, M = 37, 96, 9
    random = torch.Generator().manual_seed(2)
    w, x, dy = (torch.randn(*shape, generator=random).to("cuda", dtype) for shape in ((2 * N, K), (M, K), (M, 2 * N)))
    matrix, packed = C.zero_blocks(80, K, kind).cuda()[: 2 * N], C.zero_blocks(2 * N, K, kind)  # 80: whole tiles
    for at in (0, N):
        C.pack_blocks(w[at : at + N], matrix, at)
        C.pack_blocks(w[at : at + N].cpu(), packed, at)
    assert torch.equal(C.read_block_rows(matrix, K, 0, 2 * N), C.read_block_rows(packed, K, 0, 2 * N))
    whole = torch.empty(2 * N, K, dtype=dtype, device="cuda")
    C.unpack_blocks(matrix, whole)
    on_cpu = torch.empty(2 * N, K, dtype=dtype)
    C.unpack_blocks(matrix, on_cpu)
    assert torch.equal(whole.cpu(), on_cpu)

    def results(weights):
        y, dx = torch.empty(M, 2 * N, dtype=dtype, device="cuda"), torch.empty(M, K, dtype=dtype, device="cuda")
        C.linear_forward(x, weights, None, y)
        C.linear_backward_input(dy, weights, dx)
        return y, dx

    for got, expected in zip(results(matrix), results(whole)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_weight_digest_on_cuda_equals_that_on_the_cpu(dtype):
    models = [model_on(device, CONFIGS["llama"], dtype) for device in ("cpu", "cuda")]
    assert models[0].digest() == models[1].digest()
    assert models[1].device.startswith("cuda")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [(), ("policy.generation.top_p=0.9",), ("policy.generation.top_k=5",)], ids=str)
def test_grpo_run_on_cuda_is_reproducible_with_equal_generation_and_training_logprobs(tmp_path, precision, sampling):
    options = ["cluster.device=cuda", "grpo.max_num_steps=2", f"policy.precision={precision}", *sampling]
    run = tiny.train(tmp_path, *tiny.SMALL, *options)
    assert run.policy.device == "cuda" and run.policy.model.device.startswith("cuda")
    for row in run.history:
        assert row["max_logprob_gap"] == 0.0 and row["logprob_mismatched_tokens"] == 0
        assert row["token_mult_prob_error"] == 1.0 and row["grad_norm"] > 0
    again = tiny.train(tmp_path / "again", *tiny.SMALL, *options)
    assert again.policy.weight_digest() == run.policy.weight_digest()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_cuda_graphs_for_decode_steps_do_not_change_the_sampled_tokens(tmp_path, precision):
    """32 responses that end one after another, in two phases of generation with an update between them."""
    args = [
        *tiny.SMALL, "cluster.device=cuda", "grpo.max_num_steps=2", f"policy.precision={precision}",
        "policy.generation.max_new_tokens=40",
    ]  # fmt: skip
    graphs, eager = (
        tiny.train(tmp_path / str(eager), *args, f"policy.generation.vllm_cfg.enforce_eager={str(eager).lower()}")
        for eager in (False, True)
    )
    assert all(row["max_logprob_gap"] == 0.0 for row in graphs.history)
    assert [row["reward"] for row in graphs.history] == [row["reward"] for row in eager.history]
    assert graphs.policy.weight_digest() == eager.policy.weight_digest()


def test_checkpoint_saved_on_cuda_loads_on_the_cpu(tmp_path):
    run = tiny.train(tmp_path, *tiny.SMALL, "cluster.device=cuda", "grpo.max_num_steps=1")
    run.policy.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    model = C.DecoderModel(native_config(run.policy.folder.config), torch.float32, True)
    from nemo_rl_cpp.models.weights import load_weights

    load_weights(model, tmp_path / "weights")
    assert model.digest() == run.policy.model.digest()


def test_float64_model_on_cuda_is_an_error():
    with pytest.raises(ValueError, match="policy.precision"):
        model_on("cuda", CONFIGS["llama"], torch.float64)
