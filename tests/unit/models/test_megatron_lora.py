"""Megatron's LoRA (`megatron_cfg.peft`), in which q, k and v have one adapter, and gate and up another."""

import math

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.lora import LayerKinds, adapted_modules
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.lora import Lora
from nemo_rl_cpp.models.model_folder import tiny_random
from nemo_rl_cpp.models.model_sizes import ModelSizes, adapter_sizes, model_sizes
from nemo_rl_cpp.models.weights import named_views
from safetensors.torch import load_file
from test_lora_of_a_model import LATENT, MAMBA, RECURRENT, SHARED, SIZES, adapted
from tiny_layers import LAYERS

GRANITE_4 = LAYERS["granitemoehybrid"] | {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba"],
}
FIRST = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


def policy(**keys) -> PolicyConfig:
    peft = {"enabled": True, "dim": 4, **keys}
    return PolicyConfig(
        model_name="tiny-random", dtensor_cfg={"enabled": False}, megatron_cfg={"enabled": True, "peft": peft}
    )


@pytest.mark.parametrize(
    "keys, more, expected",
    [({}, {}, [f"{layer}.{name}" for layer in range(3) for name in FIRST]),
     ({"target_modules": ["linear_qkv", "*.layers.1.*.linear_fc1"]}, {}, ["0.self_attn.qkv_proj", "1.self_attn.qkv_proj", "1.mlp.gate_up_proj", "2.self_attn.qkv_proj"]),
     ({"exclude_modules": ["linear_fc1", "linear_fc2"]}, {"model_type": "phi3"}, [f"{layer}.{name}" for layer in range(3) for name in FIRST[:2]]),
     ({"exclude_modules": ["*.layers.0.*", "*.layers.2.*"]}, SHARED, [f"1.{name}" for name in FIRST]),
     ({"exclude_modules": ["linear_qkv", "linear_proj", "*.layers.1.*"]}, SHARED,
      [f"{layer}.mlp.shared_expert.{name}" for layer in (0, 2) for name in ("gate_up_proj", "down_proj")]),
     ({}, MAMBA, ["0.mixer.in_proj", "1.mixer.qkv_proj", "1.mixer.o_proj", "2.mixer.up_proj", "2.mixer.down_proj"])],
    ids=["all", "some", "phi3", "dense layer of a mixture", "shared experts", "mamba"],
)  # fmt: skip
def test_megatron_lora_targets_select_one_adapter_per_fused_projection(keys, more, expected):
    folder, config = tiny_random(SIZES | more), policy(**keys)
    modules = adapted_modules(config.lora, LayerKinds.of(ModelSizes.of(folder.native()), joined=True))
    assert [module.removeprefix("model.layers.") for module in modules] == expected
    layout = C.ParameterLayout(folder.native(), 4, Lora.of(config, folder, "policy").targets)
    sizes = adapter_sizes(config.lora, model_sizes("tiny-random", SIZES | {"head_dim": 16} | more))
    assert sizes.trained == sum(math.prod(spec.shape) for spec in layout.specs)


@pytest.mark.parametrize("more", [{}, MAMBA], ids=["llama", "mamba"])
def test_megatron_lora_adapter_is_saved_as_one_adapter_per_projection_and_restored_exactly(tmp_path, more):
    folder = tiny_random(SIZES | more)
    lora = Lora.of(policy(), folder, "policy")

    model = adapted(lora, folder)
    for view in named_views(model.trained_layout.specs, model.masters).values():
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(view.numel())))
    lora.save(tmp_path, model.trained_layout, model.masters)
    again = adapted(lora, folder, weights=tmp_path)
    for name, view in named_views(again.trained_layout.specs, again.masters).items():
        assert torch.equal(view, named_views(model.trained_layout.specs, model.masters)[name]), name
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    attention = "base_model.model.model.layers.1." + ("mixer" if more else "self_attn")
    a, b = ([saved[f"{attention}.{name}_proj.lora_{which}.weight"] for name in "qkv"] for which in "AB")
    assert torch.equal(a[0], a[1]) and torch.equal(a[0], a[2])
    whole = named_views(model.trained_layout.specs, model.masters)["model.layers.1.self_attn.qkv_proj.lora_B.weight"]
    assert torch.equal(torch.cat(b), whole.t())
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    names = ["in_proj", *names, "up_proj"] if more else [*names, "gate_proj", "up_proj"]
    assert lora.peft_config()["target_modules"] == [*names, "down_proj"]


@pytest.mark.parametrize(
    "more, keys, slices, reason",
    [(LATENT, {}, 1, "latent attention"), (RECURRENT, {}, 1, "gated delta nets"), (GRANITE_4, {}, 1, "matrices that hold gate and up"),
     ({"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}, {}, 1, "gated short convolutions"),
     (SHARED, {"target_modules": ["linear_fc1"]}, 1, "experts, which target_modules may match"), ({}, {}, 2, "tensor-parallel ranks")],
)  # fmt: skip
def test_unsupported_megatron_lora_settings_are_an_error(more, keys, slices, reason):
    with pytest.raises(ModelFolderError, match=f"megatron_cfg.peft.enabled is true, .* for {reason} .*dtensor_cfg"):
        tiny_random(SIZES | more).check_mixers(policy(**keys), "policy", slices)
    tiny_random(SIZES).check_mixers(policy(), "policy", 1)
