import json
import math

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.lora import LayerKinds, LoraConfig, adapted_modules, matches
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.models.lora import Lora, remove_adapter
from nemo_rl_cpp.models.model_folder import tiny_random
from nemo_rl_cpp.models.model_sizes import ModelSizes, adapter_sizes, model_sizes
from nemo_rl_cpp.models.nemotron_h import our_name
from nemo_rl_cpp.models.weights import initialize_weights, named_views
from row_batch import padded_rows
from tiny_layers import LAYERS

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=40)  # fmt: skip
RECURRENT = dict(model_type="qwen3_5_text", layer_types=["full_attention", "linear_attention", "linear_attention"], linear_num_key_heads=2,
                 linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32)  # fmt: skip
LATENT = dict(model_type="deepseek_v3", num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=40, qk_rope_head_dim=16, qk_nope_head_dim=24,
              v_head_dim=32, first_k_dense_replace=3)  # fmt: skip
SHARED = dict(model_type="qwen2_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
              shared_expert_intermediate_size=40, mlp_only_layers=[1])  # fmt: skip
MAMBA = LAYERS["nemotron_h"] | dict(model_type="nemotron_h", hybrid_override_pattern="M*-")
MAMBA_EXPERTS = MAMBA | dict(hybrid_override_pattern="ME*E-", n_routed_experts=4, moe_intermediate_size=24,
                             moe_shared_expert_intermediate_size=40, moe_latent_size=48)  # fmt: skip
SPARSE = dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern, module, is_meant",
    [("q_proj", Q, True), ("self_attn.q_proj", Q, True), (Q, Q, True), ("*_proj", Q, True), ("*.layers.1.*.q_proj", Q, True),
     ("*.self_attn.*", Q, True), ("proj", Q, False), ("*.layers.0.*", Q, False), ("k_proj", Q, False), ("*.q.proj", Q, False),
     ("q_proj*", Q, False), ("*.layers.1.*.q_proj", "model.layers.11.self_attn.q_proj", False), ("", Q, False),
     ("backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj", True), ("backbone.layers.0.*", Q, False)],
)  # fmt: skip
def test_lora_target_module_patterns_match_the_expected_matrices(pattern, module, is_meant):
    assert matches(pattern, module) is is_meant


@pytest.mark.parametrize(
    "keys, count, more",
    [({}, 21, {}), ({"match_all_linear": False}, 21, {}), ({"match_all_linear": False, "target_modules": ["q_proj", "down_proj"]}, 6, {}),
     ({"match_all_linear": False, "exclude_modules": ["*.mlp.*", "lm_head"]}, 12, {}),
     ({"match_all_linear": False, "target_modules": ["*.layers.2.*"]}, 7, {}), ({}, 23, RECURRENT),
     ({"match_all_linear": False, "target_modules": ["q_proj", "in_proj_a", "*.layers.2.*"]}, 10, RECURRENT),
     ({"match_all_linear": False, "exclude_modules": ["*.mlp.*", "*.in_proj_*"]}, 6, RECURRENT),
     ({"match_all_linear": False, "exclude_modules": ["*.mlp.*"]}, 15, LATENT),
     ({"match_all_linear": False, "exclude_modules": ["*.mlp.*", "q_proj"]}, 9, LATENT | {"q_lora_rank": None}), ({}, 24, LATENT),
     ({}, 23, SHARED), ({"match_all_linear": False, "target_modules": ["up_proj"]}, 3, SHARED), ({"match_all_linear": False, "target_modules": ["*.experts", "q_proj"]}, 5, SHARED), ({}, 12, SPARSE),
     ({}, 24, LATENT | {"first_k_dense_replace": 1, "n_shared_experts": 2}),
     ({}, 7, MAMBA), ({"match_all_linear": False, "exclude_modules": ["*out_proj*", "k_proj"]}, 6, MAMBA),
     ({"match_all_linear": False, "target_modules": ["*.mixer.*_proj"]}, 8, MAMBA), ({}, 11, MAMBA_EXPERTS),
     ({"match_all_linear": False, "target_modules": ["*proj*", "*.experts"]}, 14, MAMBA_EXPERTS)],
)  # fmt: skip
def test_computed_number_of_lora_parameters_equals_that_of_the_native_model(keys, count, more):
    """The numbers are those of A and B together, and of the base weights of which `merge` keeps a frozen copy."""
    config, folder = LoraConfig(enabled=True, dim=4, **keys), tiny_random(SIZES | more)
    modules = adapted_modules(config, LayerKinds.of(ModelSizes.of(folder.native())))
    assert len(modules) == count
    native = folder.native()
    layout = C.ParameterLayout(native, 4, [our_name(f"{module}.weight") for module in modules])
    trained = sum(math.prod(spec.shape) for spec in layout.specs)
    assert [spec.name for spec in layout.specs if spec.name.endswith("lora_A.weight")] == [our_name(f"{name}.lora_A.weight") for m in modules for name in ([f"{m}.base_layer", m] if m.endswith(".experts") else [m])]  # fmt: skip
    together = (
        {"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"}, {"gate_proj", "up_proj"},
        {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
    )  # fmt: skip
    layers_parts = set()
    for module in modules:
        name = module.rpartition(".")[2]
        layers_parts.add(
            (module.split(".")[2], frozenset(next((names for names in together if name in names), {name})))
        )

    def part_of(name: str) -> str:
        return "experts" if ".experts." in name else name.split(".")[-2]

    whole = {spec.name: math.prod(spec.shape) for spec in C.ParameterLayout(native).specs}
    kept = sum(
        size for name, size in whole.items()
        if any(name.startswith(f"model.layers.{layer}.") and part_of(name) in part for layer, part in layers_parts)
        and name.endswith(".weight")
    )  # fmt: skip
    sizes = model_sizes("tiny-random", SIZES | more)
    assert adapter_sizes(config, sizes) == (trained, kept)


def lora_of(folder, **keys) -> Lora:
    config = PolicyConfig(model_name="tiny-random", dtensor_cfg={"lora_cfg": LoraConfig(enabled=True, dim=4, **keys)})
    return Lora.of(config, folder, "policy")


def test_lora_on_all_linear_layers_of_a_moe_model_freezes_routers_and_experts():
    folder = tiny_random(SIZES | SHARED)
    lora = lora_of(folder)
    model = adapted(lora, folder)
    trainer = C.Trainer(model)
    ids, out = torch.arange(3, 15)[None], torch.zeros(1, 12)
    trainer.forward(
        padded_rows(ids, torch.tensor([12]), torch.ones(1, 12, dtype=torch.bool), torch.tensor([-1])), [0], 1.0, False,
        True, False, out,
    )  # fmt: skip
    trainer.backward(torch.ones(1, 12))
    assert trainer.grads.isfinite().all()
    gradients = named_views(model.trained_layout.specs, trainer.grads)
    trained = {
        name.removesuffix(".lora_B.weight") for name, grad in gradients.items() if "lora_B" in name and grad.any()
    }
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names = ("gate_proj", "up_proj", "down_proj")
    shared, dense = ["mlp.shared_expert_gate", *(f"mlp.shared_expert.{n}" for n in names)], [f"mlp.{n}" for n in names]
    expected = ((0, attention + shared), (1, attention + dense), (2, attention + shared))
    assert trained == {f"model.layers.{layer}.{name}" for layer, names in expected for name in names}
    assert lora.peft_config()["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert lora.peft_config()["target_parameters"] == [f"{name}.weight" for name in (*shared, *dense)]


def adapted(lora, folder, seed=3, weights=None, model_seed=0):
    model = C.DecoderModel(folder.native(), torch.float32, False)
    initialize_weights(model, model_seed)
    lora.begin(model, seed, weights, is_whole=True)
    return model


@pytest.mark.parametrize(
    "name, base",
    [("./base", "{0}/base"), ("base", "{0}/base"), ("~/base", "{0}/base"), ("{0}/base/../base", "{0}/base"), ("Org/base", "Org/base"),
     ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("tiny-random", None)],
)  # fmt: skip
def test_saved_lora_adapter_config_names_the_base_model_for_peft(tmp_path, monkeypatch, name, base):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    config = PolicyConfig(model_name=name.format(tmp_path), dtensor_cfg={"lora_cfg": LoraConfig(enabled=True, dim=4)})
    lora = Lora.of(config, tiny_random(SIZES), "policy")
    monkeypatch.chdir(tmp_path / "base")
    assert lora.peft_config()["base_model_name_or_path"] == (base and base.format(tmp_path))


@pytest.mark.parametrize("init", ["xavier", "kaiming", "uniform"])
def test_lora_a_is_initialised_from_the_seed_and_lora_b_with_zeros(init):
    folder = tiny_random(SIZES | SHARED)
    lora = lora_of(folder, lora_A_init=init, match_all_linear=False, target_modules=["*_proj", "*.experts"])
    model, again, other = (adapted(lora, folder, seed) for seed in (3, 3, 4))
    assert torch.equal(model.masters, again.masters) and not torch.equal(model.masters, other.masters)
    for name, view in named_views(model.trained_layout.specs, model.masters).items():
        if name.endswith("lora_B.weight"):
            assert not view.any()
            continue
        dim, columns = lora.settings.dim, view.shape[1]
        if init == "xavier":
            assert float(view.std()) == pytest.approx(math.sqrt(2 / (dim + columns)), rel=0.2)
        else:
            assert 0.9 < float(view.abs().max()) * math.sqrt(columns) <= 1
    plain = C.DecoderModel(folder.native(), torch.float32, False)
    initialize_weights(plain, 0)
    assert plain.digest() == model.digest()


def test_saved_lora_adapter_is_restored_exactly_and_rejected_with_different_settings(tmp_path):
    folder = tiny_random(SIZES)
    lora = lora_of(folder)
    model = adapted(lora, folder)
    model.masters.copy_(torch.randn(model.masters.shape, generator=torch.Generator().manual_seed(1)))
    for spec in model.trained_layout.specs:  # the gaps between tensors are zero
        assert spec.offset + math.prod(spec.shape) <= model.masters.numel()
    model.masters_changed()
    lora.save(tmp_path, model.trained_layout, model.masters)
    again = adapted(lora, folder, seed=9, weights=tmp_path)
    saved, read = (named_views(m.trained_layout.specs, m.masters) for m in (model, again))
    assert all(torch.equal(read[name], view) for name, view in saved.items()) and again.digest() == model.digest()
    for other, said in (
        (lora_of(folder, alpha=8), "lora_cfg.alpha is 8, but the adapter in .* has 32"),
        (
            lora_of(folder, match_all_linear=False, target_modules=["q_proj"]),
            "target_modules means 3 matrices, .* has 21",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            adapted(other, folder, weights=tmp_path)
    with pytest.raises(ValueError, match="whose weights .* are not those"):
        adapted(lora, folder, weights=tmp_path, model_seed=5)
    with pytest.raises(ValueError, match="holds no adapter"):
        adapted(lora, folder, weights=tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("targets", [["*proj*"], ["in_proj_z", "in_proj_b"]])
def test_lora_adapters_of_fused_projection_parts_are_saved_as_one_adapter_and_restored_exactly(targets, tmp_path):
    folder = tiny_random(SIZES | LAYERS["qwen3_next"] | {"model_type": "qwen3_next"})
    lora = lora_of(folder, match_all_linear=False, target_modules=targets)
    model = adapted(lora, folder)
    for view in named_views(model.trained_layout.specs, model.masters).values():
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(1)))
    model.masters_changed()
    lora.save(tmp_path, model.trained_layout, model.masters)
    inputs = [name for name in lora.peft_config()["target_modules"] if name.startswith("in_proj")]
    assert inputs == ["in_proj_qkvz", "in_proj_ba"]
    assert lora.peft_config()["rank_pattern"] == {"in_proj_qkvz": 8, "in_proj_ba": 8}
    assert torch.equal(adapted(lora, folder, seed=9, weights=tmp_path).masters, model.masters)
    with pytest.raises(ValueError, match="target_modules means 4 matrices"):
        adapted(
            lora_of(folder, match_all_linear=False, target_modules=["in_proj_qkv", "in_proj_a"]),
            folder,
            weights=tmp_path,
        )


@pytest.mark.parametrize(
    "targets, names",
    [([], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]),
     (["in_proj_z", "q_proj"], ["q_proj", "in_proj_z"]),
     (["*.layers.1.linear_attn.out_proj", "q_proj"], ["model.layers.0.self_attn.q_proj", "model.layers.1.linear_attn.out_proj"])],
    ids=["all", "some", "of one layer"],
)  # fmt: skip
def test_peft_config_has_short_matrix_names_only_if_every_layer_is_adapted(targets, names):
    lora = lora_of(tiny_random(SIZES | RECURRENT), match_all_linear=not targets, target_modules=targets)
    assert lora.peft_config()["target_modules"] == names


def test_removing_a_lora_adapter_deletes_only_files_that_this_package_wrote(tmp_path):
    folder = tiny_random(SIZES)
    lora = lora_of(folder)
    model = adapted(lora, folder)
    lora.save(tmp_path, model.trained_layout, model.masters)
    remove_adapter(tmp_path)
    remove_adapter(tmp_path)
    assert list(tmp_path.iterdir()) == []
    other = tmp_path / "adapter" / "adapter_config.json"  # of somebody else
    other.parent.mkdir()
    other.write_text("{}")
    remove_adapter(tmp_path)
    assert other.is_file()
