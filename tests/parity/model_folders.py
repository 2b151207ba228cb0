"""Functions that write model folders for tests: valid ones, which transformers reads, and faulty ones."""

import json
import shutil
import struct
from pathlib import Path

import torch
from models import BASE, layers, without
from safetensors.torch import load_file, save_file

SMALL = BASE | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
TOKENS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(BASE["vocab_size"] - 3))]


def make_bases(root: Path) -> dict[str, Path]:
    """Write a folder for each architecture with transformers, and a tokenizer whose words are w0, w1, ..."""
    import transformers as hf

    experts = dict(num_experts=4, num_experts_per_tok=2)
    latent = dict(
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, moe_intermediate_size=24,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    )  # fmt: skip
    made = {
        "qwen3_moe": hf.Qwen3MoeConfig(**SMALL, **experts, head_dim=16, moe_intermediate_size=24, norm_topk_prob=True),
        "olmoe": hf.OlmoeConfig(**{**SMALL, "hidden_size": 64}, **experts), "mixtral": hf.MixtralConfig(**SMALL, num_local_experts=4),
        "qwen2_moe": hf.Qwen2MoeConfig(**SMALL, **experts, moe_intermediate_size=24, shared_expert_intermediate_size=40, mlp_only_layers=[0]),
        "llama": hf.LlamaConfig(**SMALL, head_dim=16), "qwen2": hf.Qwen2Config(**SMALL), "qwen3": hf.Qwen3Config(**SMALL, head_dim=16),
        "tied": hf.LlamaConfig(**SMALL, head_dim=16, tie_word_embeddings=True), "wide": hf.Qwen3Config(**SMALL),
        "mistral": hf.MistralConfig(**SMALL, head_dim=16, sliding_window=None), "olmo2": hf.Olmo2Config(**{**SMALL, "hidden_size": 64}),
        "window": hf.MistralConfig(**SMALL, head_dim=16, sliding_window=8), "olmo3": hf.Olmo3Config(**{**SMALL, "hidden_size": 64}, sliding_window=8),
        "smollm3": hf.SmolLM3Config(**{**SMALL, "hidden_size": 64}, no_rope_layer_interval=2), "phi3": hf.Phi3Config(**{**SMALL, "hidden_size": 64}),
        "exaone4": hf.Exaone4Config(**{**SMALL, "hidden_size": 64}, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "seed_oss": hf.SeedOssConfig(**SMALL, head_dim=16), "ernie4_5": hf.Ernie4_5Config(**SMALL, head_dim=16), "glm4": hf.Glm4Config(**SMALL, head_dim=16),
        "granite": hf.GraniteConfig(**{**SMALL, "hidden_size": 64}, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=4.0),
        "granite_4": hf.GraniteMoeHybridConfig(
            **{**SMALL, "hidden_size": 64}, shared_intermediate_size=48, num_local_experts=0, mamba_n_heads=4, mamba_d_state=16,
            layer_types=["linear_attention", "full_attention"], residual_multiplier=0.3, logits_scaling=4.0,
        ),
        "granite_4_moe": hf.GraniteMoeHybridConfig(
            **{**SMALL, "hidden_size": 64}, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, mamba_n_heads=4, mamba_d_state=16,
            layer_types=["linear_attention", "full_attention"],
        ),
        "lfm2": hf.Lfm2Config(
            **without(SMALL, "rms_norm_eps"), block_multiple_of=16, layer_types=["conv", "full_attention"], tie_word_embeddings=True
        ),
        "lfm2_moe": hf.Lfm2MoeConfig(
            **without(SMALL, "rms_norm_eps"), **experts, moe_intermediate_size=24, num_dense_layers=0, layer_types=["conv", "full_attention"],
        ),
        "ministral3": hf.Ministral3Config(**SMALL, head_dim=16, rope_parameters=YARN | {"original_max_position_embeddings": 64, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}),
        "granite_moe": hf.GraniteMoeConfig(**{**SMALL, "hidden_size": 64}, num_local_experts=4, residual_multiplier=0.3),
        "gemma2": hf.Gemma2Config(**SMALL, head_dim=16, sliding_window=8, final_logit_softcapping=3.0),
        "gemma3": hf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "gemma4": hf.Gemma4TextConfig(
            **SMALL | dict(num_hidden_layers=4), head_dim=16, global_head_dim=32, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=SMALL["vocab_size"], sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "qwen3_5": hf.Qwen3_5TextConfig(
            **SMALL, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
        "qwen3_5_moe": hf.Qwen3_5MoeTextConfig(
            **without(SMALL, "intermediate_size"), **experts, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
            linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], moe_intermediate_size=24, shared_expert_intermediate_size=40,
        ),
        "qwen3_next": hf.Qwen3NextConfig(
            **SMALL, **experts, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"], moe_intermediate_size=24, shared_expert_intermediate_size=40,
        ),
        "nemotron_h": hf.NemotronHConfig(
            **without(SMALL, "num_hidden_layers"), head_dim=16, ssm_state_size=16, mamba_num_heads=2, mamba_head_dim=16, n_groups=2,
            time_step_min=1e-9, layers_block_type=layers("M-*M"),
        ),
        "nemotron_h_moe": hf.NemotronHConfig(
            **without(SMALL, "num_hidden_layers"), head_dim=16, ssm_state_size=16, mamba_num_heads=2, mamba_head_dim=16, n_groups=2,
            time_step_min=1e-9, layers_block_type=layers("ME*M"), moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
            n_routed_experts=4, routed_scaling_factor=2.5,
        ),
        "glm4_moe": hf.Glm4MoeConfig(
            **SMALL, head_dim=16, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=2.5, use_qk_norm=True,
        ),
        "deepseek_v3": hf.DeepseekV3Config(**SMALL | latent, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, first_k_dense_replace=1),
        "moonlight": hf.DeepseekV3Config(**SMALL | latent | {"q_lora_rank": None}, first_k_dense_replace=1),
        "glm4_moe_lite": hf.Glm4MoeLiteConfig(**SMALL | latent),
        "gpt_oss": hf.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        "gelu": hf.Olmo2Config(**{**SMALL, "hidden_size": 64}, hidden_act="gelu_pytorch_tanh"),
    }  # fmt: skip
    folders = {}
    for name, config in made.items():
        torch.manual_seed(len(folders))
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
        folders[name] = root / name
        model.save_pretrained(folders[name])
        write_tokenizer(folders[name])
    return folders


def write_tokenizer(folder: Path, words=TOKENS) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"})
    )


class Folder:
    """A copy of a base folder, whose files a case changes."""

    def __init__(self, base: Path, path: Path):
        shutil.copytree(base, path)
        self.path, self.file = path, path / "model.safetensors"

    def config(self, drop=(), **keys) -> "Folder":
        known = json.loads((self.path / "config.json").read_text())
        (self.path / "config.json").write_text(json.dumps(without(known, *drop) | keys))
        return self

    def format_4(self, scaling=None, **keys) -> "Folder":
        return self.config(["rope_parameters"], rope_theta=keys.pop("rope_theta", 5000.0), rope_scaling=scaling, **keys)

    def format_5(self, scaling, **keys) -> "Folder":
        return self.config(["rope_theta", "rope_scaling"], rope_parameters={"rope_theta": 5000.0} | scaling, **keys)

    def tensors(self, change) -> "Folder":
        weights = load_file(self.file)
        save_file(
            {name: tensor.contiguous() for name, tensor in (change(weights) or weights).items()},
            self.file,
            metadata={"format": "pt"},
        )
        return self

    def shards(self, names=("a.safetensors", "b.safetensors"), scale=1.0) -> "Folder":
        """Write the weights (times `scale`) as two files with an index, and remove the single file."""
        weights = {name: tensor * scale for name, tensor in load_file(self.file).items()}
        weight_map = {name: names[i % 2] for i, name in enumerate(sorted(weights))}
        for file in names:
            (self.path / file).parent.mkdir(exist_ok=True)
            save_file(
                {name: weights[name] for name, place in weight_map.items() if place == file},
                self.path / file,
                metadata={"format": "pt"},
            )
        self.file.unlink()
        return self.write(
            "model.safetensors.index.json", json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        )

    def index(self, change) -> "Folder":
        index = json.loads((self.path / "model.safetensors.index.json").read_text())
        return self.write("model.safetensors.index.json", json.dumps(change(index)))

    def write(self, name: str, content: str | bytes) -> "Folder":
        (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def bytes(self, change) -> "Folder":
        self.file.write_bytes(change(self.file.read_bytes()))
        return self

    def header(self, change) -> "Folder":
        """Replace the header, and keep the bytes after it. `change` receives the header and returns the new one, or its
        text."""
        raw = self.file.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        text = change(json.loads(raw[8 : 8 + length]))
        text = text if isinstance(text, str) else json.dumps(text)
        self.file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + raw[8 + length :])
        return self

    def remove(self, *names: str) -> "Folder":
        for name in names:
            (self.path / name).unlink()
        return self


def of(base: str, change=lambda folder: folder):
    return base, change


def both_formats(scaling):
    return {"4": of("llama", lambda f: f.format_4(scaling)), "5": of("llama", lambda f: f.format_5(scaling))}


def _head(differs):
    return lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] * (1.5 if differs else 1.0)}


def _stale(folder, keep_shards):
    whole = folder.file.read_bytes()
    folder.shards(scale=3.0).write("model.safetensors", whole)
    return folder if keep_shards else folder.remove("a.safetensors", "b.safetensors")


def _hub_cache(folder):
    """Change to the layout of the hub's cache, where snapshots link to blobs. `folder.path` becomes the snapshot."""
    repo = folder.path.with_name("models--some--model-" + folder.path.name)
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.path.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    folder.path = snapshot
    return folder


def _base_model(weights):
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _stacked(weights):
    """Join the experts of each layer as released Qwen3.5 folders do: [E, 2I, D], first the gates, and [E, D, I]."""
    found = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in weights.keys() - found.keys()}):
        of = lambda matrix: [weights[f"{prefix}.experts.{e}.{matrix}_proj.weight"] for e in range(4)]  # noqa: B023, E731
        found[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(of("gate"), of("up"))])
        found[f"{prefix}.experts.down_proj"] = torch.stack(of("down"))
    return found


def within_images(folder, model_type="qwen3_5"):
    """Change to the format of released Qwen3.5 folders: the text model is a section, next to a vision tower and more
    heads."""
    known = json.loads((folder.path / "config.json").read_text())
    outer = {"model_type": model_type, "vision_config": {"depth": 1}}
    (folder.path / "config.json").write_text(json.dumps(outer | {"text_config": known, "tie_word_embeddings": False}))
    more = {"model.visual.pos_embed.weight": torch.ones(3, 4), "mtp.fc.weight": torch.ones(2, 2)}
    return folder.tensors(
        lambda w: {name.replace("model.", "model.language_model.", 1): t for name, t in w.items()} | more
    )


def _with_images(folder):
    """Change to a Gemma 3 folder with a vision tower, with the names of released folders."""
    text = json.loads((folder.path / "config.json").read_text())
    tower = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text, "vision_config": tower,
        "mm_tokens_per_image": 4, "eos_token_id": 2,
    }  # fmt: skip
    folder.write("config.json", json.dumps(whole))
    norm = {"vision_tower.vision_model.post_layernorm.weight": torch.ones(16)}
    return folder.tensors(lambda weights: {f"language_model.{name}": tensor for name, tensor in weights.items()} | norm)


def _released_gemma4(folder):
    """Change to the format of released Gemma 4 folders: a section of the text model, next to towers, keys for the sizes of
    layers with full attention, and keys and values that are not computed."""
    text = json.loads((folder.path / "config.json").read_text())
    del text["per_layer_config"]
    sizes = {"global_head_dim": 32, "num_global_key_value_heads": None}
    folder.write(
        "config.json", json.dumps({"model_type": "gemma4", "text_config": text | sizes, "tie_word_embeddings": True})
    )
    more = {f"model.layers.3.self_attn.{name}_proj.weight": torch.ones(64, 32) for name in "kv"} | {
        "model.layers.3.self_attn.k_norm.weight": torch.ones(32)
    }
    towers = {
        "model.embed_vision.embedding_projection.weight": torch.ones(2, 2),
        "model.audio_tower.norm.weight": torch.ones(2),
    }
    return folder.tensors(
        lambda w: {name.replace("model.", "model.language_model.", 1): t for name, t in (w | more).items()} | towers
    )


def _attention_everywhere(weights):
    """Give the first layer of a Granite 4 the attention of the second in place of Mamba-2."""
    own = {
        name.replace("layers.1.", "layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if "self_attn" in name
    }
    return {name: tensor for name, tensor in weights.items() if ".mamba." not in name} | own


WHOLE = {
    "gemma3 with images": of("gemma3", _with_images), "gemma4": of("gemma4"), "gemma4 as released folders have it": of("gemma4", _released_gemma4),
    "llama": of("llama"), "qwen2": of("qwen2"), "qwen3": of("qwen3"), "tied": of("tied"), "mistral": of("mistral"), "olmo2": of("olmo2"), "gelu": of("gelu"),
    **{name: of(name) for name in ("window", "olmo3", "smollm3", "exaone4", "seed_oss", "ernie4_5", "glm4", "granite", "granite_4", "granite_4_moe", "granite_moe", "lfm2", "lfm2_moe", "ministral3", "phi3", "gemma2", "gemma3", "qwen3_moe", "olmoe", "mixtral", "qwen2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gpt_oss", "nemotron_h", "nemotron_h_moe", "glm4_moe", "deepseek_v3", "moonlight", "glm4_moe_lite")},
    "glm4_moe with a layer that predicts more tokens": of("glm4_moe", lambda f: f.tensors(lambda w: w | {"model.layers.2.eh_proj.weight": torch.ones(32, 64)})),
    "deepseek_v3 as released folders have it": of("deepseek_v3", lambda f: f.config(["head_dim", "qk_head_dim"]).format_4({"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0} | without(YARN, "rope_type"), num_nextn_predict_layers=1, topk_method="noaux_tc")),
    "glm4_moe_lite as released folders have it": of("glm4_moe_lite", lambda f: f.config(["mlp_layer_types", "qk_head_dim"], first_k_dense_replace=1, num_nextn_predict_layers=1, partial_rotary_factor=1.0)),
    "qwen3_next as released folders have it": of("qwen3_next", lambda f: f.format_4(partial_rotary_factor=0.25).config(["layer_types"], full_attention_interval=2).tensors(lambda w: w | {"mtp.layers.0.mlp.gate.weight": torch.ones(4, 32)})),
    "nemotron_h as released folders have it": of("nemotron_h", lambda f: f.config(["layers_block_type"], hybrid_override_pattern="M-*M", num_hidden_layers=4)),
    "nemotron_h with experts as released folders have it": of("nemotron_h_moe", lambda f: f.config(["layers_block_type"], hybrid_override_pattern="ME*M", num_hidden_layers=4, mtp_hybrid_override_pattern="*E", rope_theta=10000, partial_rotary_factor=1.0).tensors(lambda w: w | {"mtp.layers.0.norm.weight": torch.ones(32)})),
    "nemotron_h, other names of layers": of("nemotron_h", lambda f: f.config(layers_block_type=["mamba", "mlp", "attention", "mamba"], time_step_limit=[0.0, float("inf")])),
    "exaone4 as released folders have it": of("exaone4", lambda f: f.format_4(LLAMA3).config(sliding_window_pattern="LLLG")),
    "glm4 as released folders have it": of("glm4", lambda f: f.format_4(partial_rotary_factor=0.5)),
    "granite_4 as released folders have it": of("granite_4", lambda f: f.config(["time_step_limit", "layers_block_type"], layer_types=["mamba", "attention"], num_experts_per_tok=0, position_embedding_type="nope", normalization_function="rmsnorm")),
    "granite_4, Mamba's sizes without a layer": of("granite_4", lambda f: f.config(layer_types=["attention", "attention"], mamba_n_heads=16, mamba_d_head=8).tensors(_attention_everywhere)),
    "lfm2 as released folders have it": of("lfm2", lambda f: f.config(["layer_types", "intermediate_size", "tie_word_embeddings"], full_attn_idxs=[1], block_ff_dim=48, block_dim=32, conv_dim=32).format_4()),
    "lfm2.5 as released folders have it": of("lfm2", lambda f: f.config(["tie_word_embeddings", "block_ffn_dim_multiplier", "block_multiple_of"], intermediate_size=32, block_auto_adjust_ff_dim=False, tie_embedding=True)),
    "lfm2_moe as released folders have it": of("lfm2_moe", lambda f: f.format_4()),
    "mistral, windows in some layers": of("window", lambda f: f.config(layer_types=["full_attention", "sliding_attention"])),
    "ministral": of("window", lambda f: f.config(model_type="ministral", layer_types=["full_attention", "sliding_attention"])),
    "text model within one of images": of("qwen3_5", lambda f: within_images(f)),
    "text model with experts within one of images": of("qwen3_5_moe", lambda f: within_images(f.tensors(_stacked), "qwen3_5_moe")),
    **{f"{base}, format 4": of(base, lambda f: f.format_4()) for base in ("llama", "qwen2", "qwen3", "tied", "mistral", "olmo2", "smollm3", "granite", "phi3", "qwen3_moe", "mixtral")},
    "gpt_oss, format 4": of("gpt_oss", lambda f: f.format_4(YARN | {"truncate": False})),
    "gpt_oss, no word on rope": of("gpt_oss", lambda f: f.config(["rope_parameters"], rope_theta=150000.0)),
    "experts as released folders have them": of("qwen3_moe", lambda f: f.config(["num_local_experts", "mlp_only_layers"], num_experts=4)),
    **{f"linear, format {n}": case for n, case in both_formats(LINEAR).items()},
    **{f"llama3, format {n}": case for n, case in both_formats(LLAMA3).items()},
    **{f"yarn, format {n}": case for n, case in both_formats(YARN).items()},
    **{f"yarn without original positions, format {n}": case for n, case in both_formats(without(YARN, "original_max_position_embeddings")).items()},
    **{f"llama3 without original positions, format {n}": case for n, case in both_formats(without(LLAMA3, "original_max_position_embeddings")).items()},
    **{f"yarn with attention_factor, format {n}": case for n, case in both_formats(YARN | {"attention_factor": 0.7}).items()},
    "yarn, original positions beside": of("llama", lambda f: f.format_4(without(YARN, "original_max_position_embeddings"), original_max_position_embeddings=16)),
    "llama3, original positions beside and within": of("llama", lambda f: f.format_5(LLAMA3, original_max_position_embeddings=16)),
    "yarn with mscale": of("llama", lambda f: f.format_5(YARN | {"mscale": 0.7, "mscale_all_dim": 1.3})),
    "yarn with betas, not truncated": of("llama", lambda f: f.format_5(YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False})),
    "yarn over very few positions": of("llama", lambda f: f.format_4(YARN | {"original_max_position_embeddings": 4})),
    "linear by its old name": of("llama", lambda f: f.format_4({"type": "linear", "factor": 2.0})),
    "rope_type before type": of("llama", lambda f: f.format_4({"type": "yarn", **LINEAR})),
    "both sections": of("llama", lambda f: f.config(rope_scaling=LINEAR, rope_parameters=YARN | {"rope_theta": 100.0}, rope_theta=700.0)),
    "both sections, theta in the one that does not count": of("llama", lambda f: f.config(rope_scaling=LINEAR, rope_parameters={"rope_theta": 100.0})),
    "theta within before beside": of("llama", lambda f: f.format_4(LINEAR | {"rope_theta": 300.0})),
    "no word on rope": of("llama", lambda f: f.config(["rope_parameters", "rope_theta"])),
    "scaling without type": of("llama", lambda f: f.format_4({"factor": 4.0})),
    "qwen3 without head_dim": of("wide", lambda f: f.config(["head_dim"])),
    "llama without head_dim, biases and eps": of("qwen2", lambda f: f.config(["head_dim", "rms_norm_eps"])),
    "kv heads null": of("llama", lambda f: f.config(num_key_value_heads=None).tensors(lambda w: {n: t.repeat(2, 1) if "k_proj" in n or "v_proj" in n else t for n, t in w.items()})),
    "window on, no layer has it": of("qwen2", lambda f: f.config(["layer_types"], use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "window on, all layers full": of("qwen3", lambda f: f.config(use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 2)),
    "window as long as the positions": of("qwen2", lambda f: f.config(["layer_types"], use_sliding_window=True, sliding_window=128, max_window_layers=0)),
    "swish": of("llama", lambda f: f.config(hidden_act="swish")),
    "pretraining_tp": of("llama", lambda f: f.config(pretraining_tp=2)),
    "quantization_config null": of("llama", lambda f: f.config(quantization_config=None)),
    "tied, equal head in the file": of("tied", lambda f: f.tensors(_head(differs=False))),
    "tied, another head in the file": of("tied", lambda f: f.tensors(_head(differs=True))),
    "tied, head alone in the file": of("tied", lambda f: f.tensors(lambda w: {n.replace("model.embed_tokens", "lm_head"): t for n, t in w.items()})),
    "tied, without the prefix model.": of("tied", lambda f: f.tensors(_base_model)),
    "bfloat16": of("llama", lambda f: f.config(dtype="float32").tensors(lambda w: {n: t.bfloat16() for n, t in w.items()})),
    "float16": of("llama", lambda f: f.config(dtype="float32").tensors(lambda w: {n: t.half() for n, t in w.items()})),
    "shards": of("qwen3", lambda f: f.shards()), "shards in folders": of("qwen2", lambda f: f.shards(("x/1.safetensors", "y/2.safetensors"))),
    "stale shards beside the whole file": of("llama", lambda f: _stale(f, True)), "stale index beside the whole file": of("llama", lambda f: _stale(f, False)),
    "inverse frequencies in the file": of("llama", lambda f: f.tensors(lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    "hub's cache": of("llama", _hub_cache), "hub's cache, shards": of("qwen2", lambda f: _hub_cache(f.shards())),
    "tensors at odd addresses": of("llama", lambda f: f.header(lambda h: json.dumps(h) + " " * (8 - len(json.dumps(h)) % 8 + 3))),
    "fewer tokens than embeddings": of("llama", lambda f: (write_tokenizer(f.path, TOKENS[:90]), f)[1]),
}  # fmt: skip


def _poke(name, **keys):
    return lambda header: header | {name: header[name] | keys}


NORM, LFS = "model.norm.weight", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
CONFIG, WEIGHTS, INDEX = r"config\.json", r"model\.safetensors", r"model\.safetensors\.index\.json"

# name -> (base, change, pattern of the one-sentence error)
FAULTY = {
    "config is a pointer": ("llama", lambda f: f.write("config.json", LFS), f"{CONFIG}.*git-lfs"),
    "config with a byte order mark": ("llama", lambda f: f.write("config.json", b"\xef\xbb\xbf{}"), f"{CONFIG}.*byte order mark"),
    "config is no JSON": ("llama", lambda f: f.write("config.json", "model: llama"), f"{CONFIG} cannot be read as JSON"),
    "config is empty": ("llama", lambda f: f.write("config.json", ""), f"{CONFIG} cannot be read as JSON"),
    "config in latin-1": ("llama", lambda f: f.write("config.json", '{"a": "\xe9"}'.encode("latin-1")), f"{CONFIG} cannot be read as JSON"),
    "config is a list": ("llama", lambda f: f.write("config.json", "[1]"), f"{CONFIG} holds list"),
    "config is deep": ("llama", lambda f: f.write("config.json", "[" * 100_000), f"{CONFIG} cannot be read"),
    "no config": ("llama", lambda f: f.remove("config.json"), f"no config.json.*{CONFIG} is missing"),
    "adapter alone": ("llama", lambda f: f.remove("config.json").write("adapter_config.json", "{}"), "adapter_config.json.*merge"),
    "adapter without weights": ("llama", lambda f: f.remove("model.safetensors").write("adapter_config.json", "{}"), "holds adapter_config.json, an adapter.*merge"),
    "weights of torch": ("llama", lambda f: f.remove("model.safetensors").write("pytorch_model.bin", "x"), "has no weights.*pytorch_model.bin"),
    "no weights": ("llama", lambda f: f.remove("model.safetensors"), f"has no weights: expected {WEIGHTS}"),
    "weights are a folder": ("llama", lambda f: (f.remove("model.safetensors").path / "model.safetensors").mkdir(), "has no weights"),
    "weights are a pointer": ("llama", lambda f: f.write("model.safetensors", LFS), f"{WEIGHTS} is a git-lfs pointer"),
    "shard is a pointer": ("llama", lambda f: f.shards().write("b.safetensors", LFS), r"b\.safetensors is a git-lfs pointer"),
    "weights are empty": ("llama", lambda f: f.write("model.safetensors", ""), f"{WEIGHTS} is not a whole"),
    "weights are cut": ("llama", lambda f: f.bytes(lambda b: b[:-1]), f"{WEIGHTS} is not a whole.*its tensors end at byte"),
    "weights are too long": ("llama", lambda f: f.bytes(lambda b: b + b"\0"), f"{WEIGHTS} is not a whole"),
    "header too long": ("llama", lambda f: f.bytes(lambda b: struct.pack("<Q", 1 << 40) + b[8:]), f"{WEIGHTS} is not a whole.*header"),
    "header is a list": ("llama", lambda f: f.header(lambda h: "[]"), f"{WEIGHTS} is not a whole"),
    "header without offsets": ("llama", lambda f: f.header(lambda h: h | {NORM: {"dtype": "F32", "shape": [32]}}), f"{WEIGHTS} is not a whole"),
    "tensors overlap": ("llama", lambda f: f.header(_poke(NORM, data_offsets=[0, 128])), f"{WEIGHTS} is not a whole.*begins at"),
    "tensor outside": ("llama", lambda f: f.header(_poke(NORM, data_offsets=[10**9, 10**9 + 128])), f"{WEIGHTS} is not a whole.*begins at"),
    "tensor before the file": ("llama", lambda f: f.header(_poke(NORM, data_offsets=[-128, 0])), f"{WEIGHTS} is not a whole.*{NORM}"),
    "tensor of another size": ("llama", lambda f: f.header(_poke(NORM, shape=[31])), f"{WEIGHTS} is not a whole.*{NORM} 128 bytes"),
    "name in two shards": ("llama", lambda f: (f.shards(), shutil.copy(f.path / "a.safetensors", f.path / "b.safetensors")), "unexpected: .*.a second model"),
    "index is empty": ("llama", lambda f: f.shards().index(lambda i: {}), f"{INDEX} has no weight_map"),
    "index names nothing": ("llama", lambda f: f.shards().index(lambda i: {"weight_map": {}}), f"{INDEX} has no weight_map"),
    "index of numbers": ("llama", lambda f: f.shards().index(lambda i: {"weight_map": {"a": 1}}), f"{INDEX} has no weight_map"),
    "index is a pointer": ("llama", lambda f: f.shards().write("model.safetensors.index.json", LFS), f"{INDEX}.*git-lfs"),
    "shard is missing": ("llama", lambda f: f.shards().remove("b.safetensors"), f"{INDEX} names files that are not there: b.safetensors"),
    "index leads out": ("llama", lambda f: f.shards().index(lambda i: {"weight_map": {NORM: "../other.safetensors"}}), f"{INDEX} names the file '../other"),
    "index leads out and back": ("llama", lambda f: f.shards().index(lambda i: {"weight_map": {NORM: "x/../a.safetensors"}}), f"{INDEX} names the file"),
    "index is absolute": ("llama", lambda f: f.shards().index(lambda i: {"weight_map": {NORM: str(f.path / "a.safetensors")}}), f"{INDEX} names the file"),
    "index with a long name": ("llama", lambda f: f.shards().index(lambda i: {"weight_map": {NORM: "x" * 5000}}), INDEX),
    "weights in int8": ("llama", lambda f: f.tensors(lambda w: w | {NORM: torch.ones(32, dtype=torch.int8)}), f"dtype that is not read: {NORM} is I8"),
    "weights in float8": ("llama", lambda f: f.tensors(lambda w: w | {NORM: torch.ones(32).to(torch.float8_e4m3fn)}), f"{NORM} is F8_E4M3"),
    "weights of another shape": ("llama", lambda f: f.tensors(lambda w: w | {NORM: torch.ones(31)}), rf"wrong shape: {NORM} is \[31\], expected \[32\]"),
    "tensor is missing": ("llama", lambda f: f.tensors(lambda w: without(w, NORM)), f"missing: {NORM}"),
    "untied, no head": ("llama", lambda f: f.tensors(lambda w: without(w, "lm_head.weight")), "missing: lm_head.weight.*tie_word_embeddings=true"),
    "tensor too many": ("llama", lambda f: f.tensors(lambda w: w | {"score.bias": torch.ones(1)}), "unexpected: score.bias"),
    "tied, head of another shape": ("tied", lambda f: f.tensors(lambda w: w | {"lm_head.weight": torch.ones(96, 32)}), r"lm_head.weight is \[96, 32\]"),
    "gemma": ("llama", lambda f: f.config(model_type="gemma"), f"{CONFIG}: model_type 'gemma'.*supported: llama"),
    "no model_type": ("llama", lambda f: f.config(["model_type"]), f"{CONFIG}: model_type None"),
    "quantized": ("llama", lambda f: f.config(quantization_config={"quant_method": "gptq"}), f"{CONFIG}: quantization_config"),
    "yarn without factor": ("llama", lambda f: f.format_5(without(YARN, "factor")), f"{CONFIG}: rope_parameters is yarn but has no factor"),
    "linear without factor": ("llama", lambda f: f.format_4({"type": "linear"}), f"{CONFIG}: rope_scaling is linear but has no factor"),
    "llama3 without low_freq_factor": ("llama", lambda f: f.format_4(without(LLAMA3, "low_freq_factor")), "has no low_freq_factor"),
    "factor is a text": ("llama", lambda f: f.format_4(LINEAR | {"factor": "2"}), f"{CONFIG}: rope_scaling.factor is '2'"),
    "dynamic": ("llama", lambda f: f.format_4({"rope_type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not supported"),
    "rope by layer": ("qwen3", lambda f: f.format_5({"full_attention": YARN}), f"{CONFIG}: rope_parameters has a section for each kind"),
    "rope is a text": ("llama", lambda f: f.format_4("yarn"), f"{CONFIG}: rope_scaling is 'yarn'"),
    "half of a head rotates": ("llama", lambda f: f.format_4(partial_rotary_factor=0.5), f"{CONFIG}: partial_rotary_factor 0.5"),
    "gelu": ("llama", lambda f: f.config(hidden_act="gelu"), f"{CONFIG}: hidden_act 'gelu'"),
    "size is a text": ("llama", lambda f: f.config(hidden_size="32"), f"{CONFIG}: hidden_size is '32'"),
    "heads do not divide": ("llama", lambda f: f.config(num_key_value_heads=3), f"{CONFIG}: num_attention_heads 4 is not a multiple"),
    "recurrent heads of 24": ("qwen3_5", lambda f: f.config(linear_value_head_dim=24), f"{CONFIG}: linear_key_head_dim 16 and linear_value_head_dim 24"),
    "recurrent heads do not divide": ("qwen3_5", lambda f: f.config(linear_num_key_heads=3), f"{CONFIG}: linear_num_value_heads 2 is not a multiple"),
    "layers of other kinds": ("qwen3_5", lambda f: f.config(layer_types=["mamba", "full_attention"]), rf"{CONFIG}: layer_types has \['mamba'\]"),
    "an expert too many in nemotron_h": ("nemotron_h_moe", lambda f: f.tensors(lambda w: w | {"backbone.layers.1.mixer.experts.4.up_proj.weight": torch.ones(24, 32)}), "unexpected: .*layers.1.mlp.experts.4.up_proj.weight"),
    "a tensor too many behind experts of nemotron_h": ("nemotron_h_moe", lambda f: f.tensors(lambda w: w | {"backbone.layers.2.mixer.other.weight": torch.ones(1)}), "unexpected: .*layers.2"),
    "latent experts of no columns": ("nemotron_h_moe", lambda f: f.config(moe_latent_size=0), f"{CONFIG}: moe_latent_size is 0, but a whole number above 0"),
    "nemotron_h without attention": ("nemotron_h", lambda f: f.config(layers_block_type=["mamba", "mlp"]), f"{CONFIG}: hybrid_override_pattern is M-, but layers with Mamba"),
    "unknown layers in nemotron_h": ("nemotron_h", lambda f: f.config(["layers_block_type"], hybrid_override_pattern="M-*X"), f"{CONFIG}: layers_block_type or hybrid_override_pattern is 'M-"),
    "an expert too few in granite_4": ("granite_4_moe", lambda f: f.tensors(lambda w: w | {"model.layers.0.block_sparse_moe.input_linear.weight": torch.ones(3, 96, 64)}), "missing: .*layers.0.mlp.experts.3.gate_proj.weight"),
    "granite_4 without attention": ("granite_4", lambda f: f.config(layer_types=["mamba", "mamba"]), rf"{CONFIG}: layer_types is \['mamba', 'mamba'\], but at least one layer with attention"),
    "unknown layers in granite_4": ("granite_4", lambda f: f.config(layer_types=["mamba", "mlp"]), rf"{CONFIG}: layer_types is \['mamba', 'mlp'\], but a list of num_hidden_layers 2 entries"),
    "unknown layers in lfm2": ("lfm2", lambda f: f.config(layer_types=["conv", "mamba"]), rf"{CONFIG}: layer_types is \['conv', 'mamba'\], but a list of num_hidden_layers 2 entries"),
    "lfm2 without convolutions": ("lfm2", lambda f: f.config(layer_types=["full_attention"] * 2), rf"{CONFIG}: layer_types is \['full_attention', 'full_attention'\], but a list"),
    "biases in lfm2": ("lfm2", lambda f: f.config(conv_bias=True), f"{CONFIG}: conv_bias is True, which is not supported: false was expected"),
    "a convolution over 9 tokens": ("lfm2", lambda f: f.config(conv_L_cache=9), f"{CONFIG}: conv_L_cache 9 is not supported: the kernels need at most 8"),
    "an MLP of a quarter": ("lfm2", lambda f: f.config(block_multiple_of=0.25), f"{CONFIG}: block_multiple_of is 0.25, but a whole number above 0"),
    "a router without bias": ("lfm2_moe", lambda f: f.config(use_expert_bias=False), f"{CONFIG}: use_expert_bias is False, which is not supported"),
    "dense layers below 0": ("lfm2_moe", lambda f: f.config(num_dense_layers=-1), f"{CONFIG}: num_dense_layers is -1, but a whole number from 0"),
    "a tensor too many in lfm2": ("lfm2_moe", lambda f: f.tensors(lambda w: w | {"model.layers.1.conv.conv.weight": torch.ones(32, 1, 3)}), "unexpected: model.layers.1.conv.conv.weight"),
    "Mamba heads that do not fit the hidden size": ("granite_4", lambda f: f.config(mamba_d_head=48), f"{CONFIG}: mamba_d_head is 48, but mamba_expand"),
    "half a gate in granite_4": ("granite_4", lambda f: f.tensors(lambda w: w | {"model.layers.0.shared_mlp.input_linear.weight": torch.ones(95, 64)}), "missing: .*layers.0.mlp.gate_proj.weight"),
    "Mamba heads of 24": ("nemotron_h", lambda f: f.config(mamba_head_dim=24), f"{CONFIG}: ssm_state_size 16 and mamba_head_dim 24 are not supported"),
    "time step limits in reverse": ("nemotron_h", lambda f: f.config(time_step_limit=[1.0, 0.5]), rf"{CONFIG}: time_step_limit is \[1.0, 0.5\]"),
    "gated MLP in nemotron_h": ("nemotron_h", lambda f: f.config(mlp_hidden_act="silu"), f"{CONFIG}: mlp_hidden_act 'silu' is not supported"),
    "a fused projection of another shape": ("qwen3_next", lambda f: f.tensors(lambda w: w | {"model.layers.0.linear_attn.in_proj_ba.weight": torch.ones(7, 32)}), "missing: model.layers.0.linear_attn.in_proj_a.weight, .*unexpected: model.layers.0.linear_attn.in_proj_ba.weight"),
    "an expert of another shape": ("qwen3_5_moe", lambda f: f.tensors(lambda w: _stacked(w) | {"model.layers.1.mlp.experts.down_proj": torch.ones(4, 32, 23)}), "of the wrong shape: .*layers.1.mlp.experts.0.down_proj.weight is .32, 23."),
    "experts in an unknown format": ("qwen3_5_moe", lambda f: f.tensors(lambda w: w | {"model.layers.1.mlp.experts.down_proj": torch.ones(32, 24)}), "unexpected: model.layers.1.mlp.experts.down_proj"),
    "no text section": ("qwen3_5", lambda f: f.config(model_type="qwen3_5"), f"{CONFIG}: text_config is None"),
    "flag is a text": ("llama", lambda f: f.config(tie_word_embeddings="false"), f"{CONFIG}: tie_word_embeddings is 'false'"),
}  # fmt: skip
