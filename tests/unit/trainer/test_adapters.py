"""Adapters of the native core: the effective weights, sums of small updates, and what stays as it is. Their gradients are compared with
torch's tape in tests/parity/test_lora_parity.py."""

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.lora import LayerKinds
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.nemotron_h import our_name
from nemo_rl_cpp.models.weights import initialize_weights, named_views
from reference.lora import effective
from test_gradient_invariance import CONFIG, groups_batch, model_of

DIM, ALPHA = 3, 12
SOME = [f"model.layers.{m}.weight" for m in ("0.mlp.up_proj", "0.self_attn.k_proj", "1.self_attn.q_proj", "1.self_attn.v_proj", "1.mlp.down_proj")]  # fmt: skip
ALL = [f"{module}.weight" for module in LayerKinds(2).modules()]
RECURRENT = {
    "model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
ALL_OF_RECURRENT = [f"{module}.weight" for module in LayerKinds(2, recurrent=(0,)).modules()]
SOME_OF_RECURRENT = [f"model.layers.{m}.weight" for m in ("0.linear_attn.in_proj_z", "0.linear_attn.in_proj_a", "1.self_attn.q_proj", "1.mlp.down_proj")]  # fmt: skip
MAMBA = {
    "model_type": "nemotron_h", "tie_word_embeddings": False, "hybrid_override_pattern": "M*-", "n_groups": 2, "mamba_num_heads": 4,
    "ssm_state_size": 16, "mamba_head_dim": 16, "mlp_hidden_act": "relu2",
}  # fmt: skip
ALL_OF_MAMBA = [our_name(f"{module}.weight") for module in LayerKinds(3, recurrent=(0,), mlps=(2,)).modules()]
MIXTURE = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
ALL_OF_MIXTURE = [f"{module}.weight" for module in LayerKinds(2, experts=range(2), shared="shared_expert").modules()]
KINDS = pytest.mark.parametrize(
    "targets, changes",
    [(ALL, {}), (ALL_OF_RECURRENT, RECURRENT), (ALL_OF_MAMBA, MAMBA)],
    ids=["attention", "recurrent", "mamba"],
)


def base(dtype, **changes):
    return model_of(dtype, trainable=False, **changes)


def draw(model, spread, seed=1):
    """A and B at random; B is 0 where spread is."""
    generator = torch.Generator().manual_seed(seed)
    for name, view in named_views(model.trained_layout.specs, model.masters).items():
        scale = spread if name.endswith("lora_B.weight") else 0.3
        view.copy_(torch.randn(view.shape, generator=generator) * scale)
    model.masters_changed()


def adapted(dtype, targets=ALL, spread=0.2, **changes):
    model = base(dtype, **changes)
    model.adapt(DIM, ALPHA, targets)
    draw(model, spread)
    return model


def weights(model):
    return {name: view.clone() for name, view in named_views(model.specs, model.compute).items()}


def backward(model, seed=9, **options):
    """(log-probabilities, gradients) of a loss that is linear in the log-probabilities."""
    trainer = C.Trainer(model)
    batch, ids, mask = groups_batch()
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(seed)).to(trainer.out_dtype)
    out = torch.zeros(ids.shape, dtype=trainer.out_dtype)
    trainer.forward(batch, list(range(len(ids))), 1.0, True, True, options.pop("checkpoint", False), out, **options)
    trainer.backward(weight * mask)
    return out, trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("targets", [ALL, SOME], ids=["all", "some"])
def test_merged_lora_weights_are_the_base_weights_plus_the_scaled_product_of_b_and_a(dtype, targets):
    frozen, model = weights(base(dtype)), adapted(dtype, targets)
    factors = named_views(model.trained_layout.specs, model.masters)
    for name, now in weights(model).items():
        if name not in targets:
            assert torch.equal(now, frozen[name]), name
            continue
        a, b = (factors[f"{name.removesuffix('.weight')}.lora_{which}.weight"] for which in "AB")
        expected = effective(frozen[name], a, b.t(), ALPHA / DIM)
        bound = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}[dtype]
        assert not torch.equal(now, frozen[name])
        torch.testing.assert_close(now, expected, rtol=bound, atol=bound / 10)
        # a sum in float32 rounds as one in float64 but for few
        assert dtype != torch.bfloat16 or (now != expected).double().mean() < 0.01


@KINDS
def test_lora_gradients_are_bit_identical_with_activation_checkpointing(targets, changes):
    models = (adapted(torch.float32, targets, **changes) for _ in range(2))
    first, second = (backward(model, checkpoint=i > 0)[1].grads for i, model in enumerate(models))
    assert torch.equal(first, second)


def test_lora_updates_below_bfloat16_rounding_accumulate_in_float32():
    model = base(torch.bfloat16)
    model.adapt(DIM, ALPHA, ["model.layers.0.mlp.up_proj.weight"])
    draw(model, spread=0.0)
    name = "model.layers.0.mlp.up_proj"
    b = named_views(model.trained_layout.specs, model.masters)[f"{name}.lora_B.weight"]
    before = weights(model)[f"{name}.weight"]
    unchanged = []
    for _ in range(400):
        b += 2e-6
        model.masters_changed()
        unchanged.append(float((weights(model)[f"{name}.weight"] == before).float().mean()))
    assert unchanged[0] > 0.98 and unchanged[-1] < 0.7


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
def test_value_head_of_a_critic_is_trained_together_with_its_lora_adapters(merge):
    model = C.DecoderModel(native_config(CONFIG, value_head=True), torch.bfloat16, False)
    initialize_weights(model, 3, std=0.2)
    model.adapt(DIM, ALPHA, SOME, merge=merge)
    names = [spec.name for spec in model.trained_layout.specs]
    assert names[-1] == "score.weight" and len(names) == 2 * len(SOME) + 1
    draw(model, spread=0.1)
    head = named_views(model.trained_layout.specs, model.masters)["score.weight"]
    assert torch.equal(named_views(model.specs, model.compute)["score.weight"], head.bfloat16())
    _, trainer = backward(model)
    grads = named_views(model.trained_layout.specs, trainer.grads)
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_invalid_lora_targets_of_the_native_model_are_errors():
    for targets, said in (([], "a matrix"), (["model.layers.9.mlp.up_proj.weight"], "layers.9"), ([ALL[0], ALL[0]], "twice"), (["lm_head.weight"], "lm_head")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            base(torch.float32).adapt(DIM, ALPHA, targets)
    model = adapted(torch.float32)
    with pytest.raises(ValueError, match="once"):
        model.adapt(DIM, ALPHA, ALL)
    with pytest.raises(ValueError, match="frozen"):
        C.DecoderModel(native_config(CONFIG), torch.float32, True).adapt(DIM, ALPHA, ALL)
