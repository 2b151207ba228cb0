from dataclasses import replace

import pytest
import torch
from models import build, compute_in_float64, configurations
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.lora import LoraConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.models.hf_config import read_config
from nemo_rl_cpp.models.lora import Lora
from nemo_rl_cpp.models.model_folder import read_model_folder
from nemo_rl_cpp.models.nemotron_h import our_name
from nemo_rl_cpp.models.qwen3_next import is_fused, joined_adapters
from nemo_rl_cpp.models.weight_files import name_writer
from nemo_rl_cpp.models.weights import buffers, load_weights, named_views, save_weights
from reference.lora import adapted_call
from test_hf_model import hf_logprobs, ragged_batch


def named(*names):
    return {"match_all_linear": False, "target_modules": list(names)}


TARGETS = {
    "all": {},
    "some": named("q_proj", "v_proj", "in_proj_z", "in_proj_a", "*.layers.1.*.up_proj", "down_proj"),
    "experts": named("*proj*", "*.experts"),
    "for PEFT": named("in_proj", "q_proj", "up_proj", "*.layers.1.*.down_proj", "*.experts"),
    "gate and up": named("gate_up_proj", "*.layers.1.*.down_proj", "*.layers.0.mamba.*_proj", "k_proj"),
    "LFM2": named("conv.in_proj", "out_proj", "w1", "*.layers.1.*.w2", "q_proj", "*.experts"),
    "late": named("*.layers.2.*k*_proj", "*.layers.2.*.in_proj_b", "*.layers.1.mlp.gate*_proj"),
}


def lora_of(folder, **keys) -> Lora:
    config = PolicyConfig(
        model_name=str(folder), dtensor_cfg={"lora_cfg": LoraConfig(enabled=True, **{"dim": 3, "alpha": 7, **keys})}
    )
    return Lora.of(config, read_model_folder(folder), "policy")


def adapted(folder, lora, dtype, spread=0.1, seed=4, quantization=None):
    """Return the native model with adapters, whose B is random with the standard deviation `spread`."""
    model = C.DecoderModel(replace(read_model_folder(folder), quantization=quantization).native(), dtype, False)
    load_weights(model, folder)
    lora.begin(model, seed, None, is_whole=True)
    generator = torch.Generator().manual_seed(11)
    for name, view in named_views(model.trained_layout.specs, model.masters).items():
        if name.endswith("lora_B.weight"):
            view.copy_(torch.randn(view.shape, generator=generator) * spread)
    model.masters_changed()
    return model


def factors(model, flat) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return {module: (A, B)} of the flat buffer `flat`, in PEFT's shapes."""
    views = named_views(model.trained_layout.specs, flat)
    modules = [name.removesuffix(".lora_A.weight") for name in views if name.endswith(".lora_A.weight")]
    return {m: (views[f"{m}.lora_A.weight"].clone(), views[f"{m}.lora_B.weight"].t().clone()) for m in modules}


DENSE = ["all", "some", "late"]
DEFAULT_ROPE = [
    "mixtral",
    "qwen3_moe_dense_layer",
    "qwen2_moe",
    "glm4_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "granite_experts",
]
MAMBA = ["nemotron_h", "nemotron_h_experts", "nemotron_h_latent_experts"]
GRANITE_4 = [
    ("granite_4", "all"),
    ("granite_4_other_layers", "gate and up"),
    ("granite_4_experts", "all"),
    ("granite_4_experts", "experts"),
]
GEMMA_4 = [
    ("gemma4", "all"),
    ("gemma4_without_inputs", "all"),
    ("gemma4_experts", "all"),
    ("gemma4_experts", "experts"),
]
LFM2 = [("lfm2", "all"), ("lfm2_other_layers", "LFM2"), ("lfm2_moe", "all"), ("lfm2_moe", "LFM2")]
MIXTURES = [*DEFAULT_ROPE, "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize(
    "name, targets",
    [
        (name, targets)
        for name in ("llama_tied", "llama_biases", "qwen2", "qwen3", "olmo2_gelu", "phi3", "granite", "glm4", "qwen3_5")
        for targets in (DENSE if name in ("llama_biases", "qwen3_5") else DENSE[:1])
    ]
    + [(name, targets) for name in (*DEFAULT_ROPE, *MAMBA) for targets in ("all", "experts")]
    + GRANITE_4
    + GEMMA_4
    + LFM2,
)
def test_lora_gradients_match_autograd(name, targets, merge, tmp_path, monkeypatch):
    hf = build(name, tmp_path, torch.float64)
    compute_in_float64(hf, monkeypatch)
    if name in MIXTURES or name.startswith("lfm2"):  # routers, and norms with other epsilons
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    lora = lora_of(tmp_path, merge=merge, **TARGETS[targets])
    model = adapted(tmp_path, lora, torch.float64)
    assert_gradients_match(model, hf, lora, 1e-10)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("name", sorted(set(MIXTURES) - set(DEFAULT_ROPE)))
def test_float32_lora_gradients_of_a_moe_model_with_yarn_match_autograd(name, merge, tmp_path):
    """They are compared in float32, in which transformers computes the cosines of YaRN."""
    hf = build(name, tmp_path).double()
    lora = lora_of(tmp_path, merge=merge, **TARGETS["experts"])
    assert_gradients_match(adapted(tmp_path, lora, torch.float32), hf, lora, 1e-5)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "nemotron_h"])
def test_lora_gradients_with_one_a_matrix_per_fused_projection_match_autograd(name, merge, tmp_path, monkeypatch):
    hf = build(name, tmp_path, torch.float64)
    compute_in_float64(hf, monkeypatch)
    lora = megatrons(tmp_path, merge=merge)
    assert_gradients_match(adapted(tmp_path, lora, torch.float64), hf, lora, 1e-10)


def megatrons(folder, **keys) -> Lora:
    peft = {"enabled": True, "dim": 3, "alpha": 7, **keys}
    megatron = {"enabled": True, "peft": peft}
    config = PolicyConfig(model_name=str(folder), dtensor_cfg={"enabled": False}, megatron_cfg=megatron)
    return Lora.of(config, read_model_folder(folder), "policy")


def of_single_matrices(lora, leaves):
    """Return {transformers' module: (A, B)}. A joined adapter gives each of its modules the common A and the module's
    rows of B."""
    name_of = name_writer(lora.folder.config)
    found = {name_of(module): pair for module, pair in leaves.items()}
    for module, parts in lora.joined.items():
        a, b = found.pop(module)
        found |= {part: (a, rows) for (part, _), rows in zip(parts, b.split([rows for _, rows in parts]))}
    if not is_fused(lora.folder.config):
        return found
    named = {f"{module}.lora_{which}.weight": t for module, pair in found.items() for which, t in zip("AB", pair)}
    joined = joined_adapters(named, lora.folder.config, lora.settings.dim)
    modules = [name.removesuffix(".lora_A.weight") for name in joined if name.endswith(".lora_A.weight")]
    return {module: (joined[f"{module}.lora_A.weight"], joined[f"{module}.lora_B.weight"]) for module in modules}


def assert_gradients_match(model, hf, lora, bound):
    """Compare log-probabilities and the gradients of A and B with those of autograd on the float64 model `hf`."""
    trainer = C.Trainer(model)
    batch, ids, lengths, mask = ragged_batch()
    weight = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    pairs = factors(model, model.masters.double())
    leaves = {m: (a.requires_grad_(), b.requires_grad_()) for m, (a, b) in pairs.items()}
    theirs = of_single_matrices(lora, leaves)
    expected_logprobs = hf_logprobs(adapted_call(hf, theirs, 7 / 3), ids, mask)
    (expected_logprobs * weight[:, 1:]).sum().backward()

    out = torch.zeros(ids.shape, dtype=trainer.out_dtype)
    trainer.forward(batch, list(range(len(lengths))), 1.0, False, True, False, out)
    trainer.backward((weight * mask).to(out.dtype))
    assert (out[:, 1:] - expected_logprobs.detach()).abs().max() < bound
    ours = factors(model, trainer.grads)
    of_experts = sum(module.endswith(".experts") for module in lora.modules)
    assert ours.keys() == leaves.keys() and len(ours) == len(lora.modules) + of_experts
    for module, pair in ours.items():
        for which, gradient, leaf in zip("AB", pair, leaves[module]):
            assert (gradient - leaf.grad).norm() <= bound * leaf.grad.norm() + 1e-14, (module, which)


# rounding errors accumulate in a recurrent state
@pytest.mark.parametrize(
    "name, matrices, bound",
    [("qwen2", 7 * 3, 1e-5), ("qwen3_5", 3 * 6 + 7, 1e-4), ("nemotron_h", 2 * 2 + 4 + 2 * 2, 1e-4)],
)
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_float32_lora_gradients_on_a_quantised_base_match_autograd(kind, name, matrices, bound, tmp_path, monkeypatch):
    hf = build(name, tmp_path, hidden_size=64, intermediate_size=96)
    lora = lora_of(tmp_path, merge=False)
    model = adapted(tmp_path, lora, torch.float32, quantization=kind)
    parameters = {
        our_name(name.replace("model.", "backbone.", 1)): parameter for name, parameter in hf.named_parameters()
    }
    for spec in model.blocks:
        dequantised = torch.empty(spec.shape)
        C.unpack_blocks(model.blocks_of(spec), dequantised, spec.begin)
        parameters[spec.name].data.copy_(dequantised)
    hf = hf.double()
    compute_in_float64(hf, monkeypatch)
    assert len(model.blocks) == matrices + (0 if kind == "nf4" else 2)  # embedding and LM head
    assert_gradients_match(model, hf, lora, bound)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "apart"])
def test_lora_adapters_after_ten_adamw_steps_match_torch_adamw(merge, tmp_path):
    hf = build("qwen2", tmp_path)
    model = adapted(tmp_path, lora_of(tmp_path, merge=merge), torch.float32, spread=0.0)
    trainer = C.Trainer(model)
    leaves = {m: tuple(t.requires_grad_() for t in pair) for m, pair in factors(model, model.masters).items()}
    parameters = [t for pair in leaves.values() for t in pair]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)
    for step in range(10):
        batch, ids, lengths, mask = ragged_batch(seed=step)
        optimizer.zero_grad()
        expected = -hf_logprobs(adapted_call(hf, leaves, 7 / 3), ids, mask).sum() / mask.sum()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

        out = torch.zeros(ids.shape)
        trainer.zero_grad()
        trainer.forward(batch, list(range(len(lengths))), 1.0, False, True, False, out)
        trainer.backward(-mask.float() / mask.sum())
        result = trainer.step(lr=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
        torch.testing.assert_close(-(out * mask).sum() / mask.sum(), expected.detach(), rtol=1e-4, atol=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-3)
    for module, pair in factors(model, model.masters).items():
        for ours, leaf in zip(pair, leaves[module]):
            assert (ours - leaf).norm() <= 2e-3 * leaf.norm(), module


def saved(tmp_path, name, of=lora_of, **keys):
    """Return (transformers' base model, the native model with adapters, the folder of its checkpoint)."""
    hf = build(name, tmp_path / "base")
    lora = of(tmp_path / "base", **keys)
    model = adapted(tmp_path / "base", lora, torch.float32)
    whole = named_views(model.specs, model.merged()) | buffers(model)
    save_weights(model, tmp_path / "out", read_config(tmp_path / "base"), tensors=whole)
    lora.save(tmp_path / "out", model.trained_layout, model.masters)
    return hf, model, tmp_path / "out"


@pytest.mark.parametrize(
    "name, targets",
    [(name, targets) for name in ("qwen2", "qwen3_5") for targets in DENSE]
    + [(name, targets) for name in MIXTURES for targets in ("all", "experts")]
    + [(name, targets) for name in MAMBA for targets in ("all", "for PEFT")]
    + [("qwen3_next", "some"), *GRANITE_4, GEMMA_4[0], *LFM2],
)
def test_saved_lora_adapter_in_peft_gives_the_logits_of_the_merged_model(targets, name, tmp_path):
    peft = pytest.importorskip("peft")
    hf, model, folder = saved(tmp_path, name, **TARGETS[targets])
    ids = torch.arange(3, 40)[None]
    before = hf(input_ids=ids).logits.detach()
    loaded = peft.PeftModel.from_pretrained(hf, folder / "adapter").eval()
    merged = type(hf).from_pretrained(folder, attn_implementation="eager").eval()
    assert (loaded(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max() < 1e-4
    assert (C.Trainer(model).logits(ids[0]) - loaded(input_ids=ids).logits[0]).abs().max() < 1e-4
    assert (merged(input_ids=ids).logits - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name, rslora, of",
    [("qwen3", False, lora_of), ("qwen3", True, lora_of), ("qwen3_5", False, lora_of), ("qwen3_next", True, lora_of),
     ("nemotron_h", False, lora_of), ("qwen3", False, megatrons)],
    ids=["lora", "rslora", "recurrent", "fused", "mamba", "megatron"],
)  # fmt: skip
def test_unmerged_lora_adapter_gives_the_same_logits_as_peft(name, rslora, of, tmp_path):
    peft = pytest.importorskip("peft")
    hf, model, folder = saved(tmp_path, name, of, merge=False, use_rslora=rslora)
    ids = torch.arange(3, 40)
    before = hf(input_ids=ids[None]).logits[0].detach()
    loaded = peft.PeftModel.from_pretrained(hf, folder / "adapter").eval()
    expected = loaded(input_ids=ids[None]).logits[0]
    assert (C.Trainer(model).logits(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected - before).abs().max() > 1e-2
    assert loaded.peft_config["default"].use_rslora is rslora


TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
IMAGES = dict(vision_config=TOWER | dict(num_key_value_heads=2, head_dim=8), audio_config=None)
WITH_IMAGES = {
    "gemma3": ("Gemma3Config", dict(vision_config=TOWER | dict(image_size=28, patch_size=14), mm_tokens_per_image=4)),
    "gemma4": ("Gemma4Config", IMAGES),
    "gemma4_experts": ("Gemma4Config", IMAGES),
    "gemma4_without_inputs": ("Gemma4UnifiedConfig", dict(audio_config=None)),
    "mistral": (
        "Mistral3Config",
        dict(vision_config=TOWER | dict(model_type="pixtral", head_dim=8, image_size=28, patch_size=14)),
    ),
}


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_lora_adapter_of_a_model_with_images_loads_in_peft_onto_the_whole_model(name, tmp_path):
    peft = pytest.importorskip("peft")
    import transformers

    kind, more = WITH_IMAGES[name]
    text = configurations()[name].to_dict() | ({} if name == "gemma3" else {"initializer_range": 0.1})
    if kind == "Gemma4UnifiedConfig":
        del text["model_type"]
    config = getattr(transformers, kind)(text_config=text, **more)
    auto = transformers.AutoModelForImageTextToText if name == "mistral" else transformers.AutoModelForCausalLM
    hf = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    hf.save_pretrained(tmp_path / "base")
    lora = lora_of(tmp_path / "base")
    model = adapted(tmp_path / "base", lora, torch.float32)
    lora.save(tmp_path / "out", model.trained_layout, model.masters)
    loaded = peft.PeftModel.from_pretrained(hf, tmp_path / "out" / "adapter").eval()
    ids = torch.arange(3, 40)
    ours = C.Trainer(model).logits(ids)
    expected = loaded(input_ids=ids[None]).logits[0]
    assert (ours - expected).abs().max() < 1e-4 * max(1.0, expected.abs().max())
    again = adapted(tmp_path / "base", lora, torch.float32, spread=0.0)
    assert (C.Trainer(again).logits(ids) - ours).abs().max() > 1e-2
    lora.load(tmp_path / "out", again)
    assert torch.equal(C.Trainer(again).logits(ids), ours)
