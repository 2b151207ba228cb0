"""Read a Hugging Face config.json for the native decoder, and reject what it does not support. Needs no torch.

transformers 4 and 5 write config.json differently, and both omit default values. `canonical_config` converts every
config.json to one canonical form, which the decoder and the saved config.json use."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import ModelFolderError, find_policy_weights
from nemo_rl_cpp.models import gemma4, granite_hybrid, latent_attention, lfm2, nemotron_h, rope
from nemo_rl_cpp.models.architectures import (
    DENSE,
    DENSE_LAYERS,
    EXPERT_COUNTS,
    FULL,
    LFM2_SIZES,
    MLP,
    RECURRENT,
    SLIDING,
    SPARSE,
    SUPPORTED_ARCHITECTURES,
    WITH_A_TEXT_SECTION,
    Architecture,
    Experts,
    has_experts,
    layers_with_experts,
)
from nemo_rl_cpp.models.config_checks import expect, is_number, is_size, is_whole

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # files of PEFT
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_qk_norm", "rope_interleave", "use_sliding_window",
)  # fmt: skip
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_FACTORS = (
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "query_pre_attn_scalar", "routed_scaling_factor",
)  # fmt: skip
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu_squared",
}
"""Activation functions of MLPs: the names in config.json, and the native core's names."""


def read_config_file(folder: str | Path) -> dict[str, Plain]:
    """Return the config.json of a model folder unchanged. Raise ModelFolderError if the file is missing or invalid, or
    if the folder holds an adapter, which transformers would apply but this package does not."""
    path = Path(folder) / "config.json"
    adapter = next((name for name in _ADAPTER_FILES if (Path(folder) / name).exists()), None)
    if adapter is not None:
        merged = Path(folder).parent
        if (Path(folder) / "base.json").is_file() and any(merged.glob("*.safetensors")):  # a run saved both
            raise ModelFolderError(f"{folder} holds an adapter: did you mean {merged}, the merged model?")
        alone = f", or remove {adapter} to use the model without it" if path.is_file() else ""
        raise ModelFolderError(
            f"{folder} holds {adapter}, an adapter, which is not applied to a model here: merge it into its base model with peft "
            f"(merge_and_unload, save_pretrained) and give that folder{alone}"
        )
    if not path.is_file():
        if (inner := find_policy_weights(str(folder))) != str(folder):
            base = Path(inner) / "adapter" / "base.json"
            if base.is_file() and not any(Path(inner).glob("*.safetensors")):
                raise ModelFolderError(adapter_alone(folder, read_json(base).get("model_name")))
            raise ModelFolderError(f"{folder} is a checkpoint of a run; did you mean {inner}?")
        raise ModelFolderError(f"{folder} is not a model folder: it has no config.json ({path} is missing)")
    return read_json(path)


def adapter_alone(folder: str | Path, base: Plain) -> str:
    """Return the error message for training on `folder`, a checkpoint of LoRA over the quantised model `base`."""
    return (
        f"{folder} is a checkpoint that holds an adapter and no weights: name its base {base}, or resume its run by "
        "checkpointing.checkpoint_dir"
    )


def read_json(path: Path) -> dict[str, Plain]:
    """Return the mapping in a JSON file. For anything else raise ModelFolderError with the file's path."""
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\xef\xbb\xbf"):
            raise ValueError("it begins with a byte order mark: save it as UTF-8 without one")
        if raw.startswith(b"version https://git-lfs"):
            raise ValueError("it is a git-lfs pointer: fetch the file itself with `git lfs pull`")
        content = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds {type(content).__name__} {str(content)[:40]!r}, not a JSON mapping")
    return content


def read_config(folder: str | Path, overrides: Mapping[str, Plain] | None = None) -> dict[str, Plain]:
    """Return the folder's config.json in canonical form, after applying `policy.hf_config_overrides` (which may add
    keys, as in transformers). Raise ModelFolderError with the file and the key."""
    raw = read_config_file(folder)
    try:
        return canonical_config(raw, overrides)
    except ModelFolderError as error:
        laid_over = " with hf_config_overrides" if overrides else ""
        raise ModelFolderError(f"{Path(folder) / 'config.json'}{laid_over}: {error}") from None


def canonical_config(config: Mapping[str, Plain], overrides: Mapping[str, Plain] | None = None) -> dict[str, Plain]:
    """Return a configuration in canonical form: omitted keys with transformers 5's defaults, RoPE keys as in
    `models.rope`, and `overrides` (as for transformers 4 or 5) applied. transformers 4 and 5 read it identically.
    Idempotent. Raise ModelFolderError, with the key, for an unsupported architecture or option, or an invalid value."""
    overrides = _text_overrides(config, overrides or {})
    config = text_section(config)
    kind = overrides.get("model_type", config.get("model_type"))
    if not isinstance(kind, str) or kind not in SUPPORTED_ARCHITECTURES:
        raise ModelFolderError(
            f"model_type {kind!r} (architectures {config.get('architectures')}) is not supported by policy.backend=native; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}; policy.backend=hf trains what transformers loads"
        )
    made = SUPPORTED_ARCHITECTURES[kind]
    form = _respelt(config, made)
    if overrides:
        form.update({key: value for key, value in overrides.items() if key not in rope.KEYS})
        if made.local_rope is None:
            form = _respelt(rope.lay_rope_over(form, overrides), made)
        else:
            form = _respelt(rope.lay_kinds_over(form, overrides, made.local_rope[0]), made)
    if made.experts is not None:
        for name in EXPERT_COUNTS:  # transformers 5 writes another key than released models have
            if name != made.experts.count and name in form:
                form.setdefault(made.experts.count, form.pop(name))
    form = {**made.defaults, **form}
    if made.one_block:
        form = nemotron_h.canonical(form)
    if kind == granite_hybrid.HYBRID:
        _check_sizes(form, ("num_hidden_layers", "hidden_size", "mamba_n_heads", "mamba_expand"))
        form = granite_hybrid.canonical(form)
    if kind in lfm2.MODEL_TYPES:
        _check_sizes(form, ("num_hidden_layers",))
        form = lfm2.canonical(form)
    if kind == "gemma4_text":
        _check_sizes(form, ("num_hidden_layers",))
        form = gemma4.canonical(form)
    if made.latent:
        _check_sizes(form, latent_attention.SIZES)
        form = latent_attention.canonical(form)
    _derive(form)
    _check(form)
    # transformers reads a null section as the default
    if made.rope_section is not None and made.local_rope is None and not form.get("rope_scaling"):
        raise ModelFolderError(f"rope_type default is not supported for {kind}, whose RoPE is scaled by yarn")
    if "mlp_layer_types" in made.defaults:
        form["mlp_layer_types"] = _mlp_layer_types(form)
    if made.lists_layers:
        form["layer_types"] = made.layer_types(form)
    section = rope.section_name(overrides if "rope_scaling" in overrides or "rope_parameters" in overrides else config)
    for kind_of_layer in form.get("rope_parameters", ("",)):
        key = f"{section}.{kind_of_layer}" if kind_of_layer else section
        rope.check_rope(rope.of_kind(form, kind_of_layer), key, is_partial=made.partial_rotary)
    return form


def text_section(config: Mapping[str, Plain]) -> Mapping[str, Plain]:
    """Return the text model's section of a vision-language model's config.json, since vision towers and
    multi-token-prediction heads are not computed. A Ministral becomes a Mistral with `layer_types`, as transformers
    reads it, and the text model of Gemma 4 12B a `gemma4_text`. Other configurations are returned unchanged."""
    if config.get("model_type") == "ministral":
        return {**config, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    if config.get("model_type") == "gemma4_unified_text":
        config = {"model_type": "gemma4_unified", "text_config": config}
    known, section = WITH_A_TEXT_SECTION.get(str(config.get("model_type"))), config.get("text_config")
    if known is None:
        return config
    expect(isinstance(section, Mapping), "text_config", section, "the section of the text model")
    if section.get("model_type") == "mistral":  # Mistral Small 3.1
        known = ("mistral", "MistralForCausalLM")
    if config["model_type"] == "gemma4_unified":
        section = {**gemma4.UNIFIED, **section}
    above = ("tie_word_embeddings", "quantization_config", "eos_token_id")
    named = {"model_type": known[0], "architectures": [known[1]]}
    return {**section, **{key: config[key] for key in above if key in config}, **named}


def _text_overrides(config: Mapping[str, Plain], overrides: Mapping[str, Plain]) -> Mapping[str, Plain]:
    """Return `overrides` with the keys of the section `text_config`, if they have it, moved to the top level, as
    `text_section` does with those of config.json."""
    section = overrides.get("text_config")
    if section is None or str(config.get("model_type")) not in WITH_A_TEXT_SECTION:
        return overrides
    expect(isinstance(section, Mapping), "text_config", section, "keys of the text model")
    return {**{key: value for key, value in overrides.items() if key != "text_config"}, **section}


def _respelt(config: Mapping[str, Plain], made: Architecture) -> dict[str, Plain]:
    """Return the configuration `config` of the architecture `made` with its RoPE keys in canonical form."""
    positions = made.defaults["max_position_embeddings"]
    if made.rope_section is not None and not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": made.rope_section}
    if made.local_rope is not None:
        return rope.respell_kinds(config, positions, made.rope_theta, *made.local_rope)
    original = "original_max_position_embeddings"
    if original not in made.defaults:
        return rope.respell(config, positions, made.rope_theta)
    # Phi 3: the top-level key takes precedence over the key in the section, even with its default value
    beside = {original: config.get(original) or made.defaults[original]}
    return rope.respell({**config, **beside}, positions, made.rope_theta) | beside


def _derive(form: dict[str, Plain]) -> None:
    """Set a layer's sizes that the config.json `form` omits and that follow from its other keys."""
    heads, hidden, made = form["num_attention_heads"], form["hidden_size"], SUPPORTED_ARCHITECTURES[form["model_type"]]
    if form.get("num_key_value_heads") is None:
        form["num_key_value_heads"] = heads
    if form.get("head_dim") is None and is_size(heads) and is_size(hidden):
        form["head_dim"] = hidden // heads
    if form["max_position_embeddings"] is None:
        form["max_position_embeddings"] = made.defaults["max_position_embeddings"]
    quantized = form.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    is_read = method == "bitsandbytes" or (made.reads_mxfp4 and method == "mxfp4")  # models/weight_files.py
    if not quantized or is_read:  # transformers 4 fails on a null section
        form.pop("quantization_config", None)
    # transformers 5 fails on sliding layers without a window
    switched_off = "use_sliding_window" in made.defaults and form["use_sliding_window"] is False
    if switched_off and isinstance(form.get("layer_types"), list):
        form["layer_types"] = [FULL if kind == SLIDING else kind for kind in form["layer_types"]]


def _check_sizes(form: Mapping[str, Plain], keys: Iterable[str]) -> None:
    for key in keys:
        expect(is_size(form.get(key)), key, form.get(key), "a whole number above 0")


def _check(form: Mapping[str, Plain]) -> None:
    made = SUPPORTED_ARCHITECTURES[form["model_type"]]
    _check_sizes(form, (*_SIZES, made.mlp_width))
    for key in _FLAGS:
        expect(form.get(key) in (None, False, True), key, form.get(key), "true or false")
    eps = form["rms_norm_eps"]
    is_zero = eps == 0 and not isinstance(eps, bool)
    expect(is_zero or (is_number(eps) and eps < 1), "rms_norm_eps", eps, "a number from 0 to below 1")
    if form["num_attention_heads"] % form["num_key_value_heads"]:
        raise ModelFolderError(
            f"num_attention_heads {form['num_attention_heads']} is not a multiple of num_key_value_heads {form['num_key_value_heads']}"
        )
    expect(form.get("is_causal", True), "is_causal", form.get("is_causal"), "true, for causal attention,")
    sizes = form.get("per_layer_config")
    expect(not sizes, "per_layer_config", sizes, "null, one size of layers,")
    activation = form[made.activation]
    if not isinstance(activation, str) or activation not in _ACTIVATIONS or made.one_block != (activation == "relu2"):
        computed = "relu2" if made.one_block else "silu and gelu_pytorch_tanh"
        raise ModelFolderError(f"{made.activation} {activation!r} is not supported: the native core has {computed}")
    if form.get("quantization_config"):
        raise ModelFolderError(
            "quantization_config: only bitsandbytes' quantized checkpoints are supported: use the float32, float16 or bfloat16 weights"
        )
    if form.get("transformers_weights"):
        raise ModelFolderError(
            f"transformers_weights names the weights {form['transformers_weights']!r}, which is not supported: name the file model.safetensors"
        )
    for key, value in made.only.items():
        if (form.get(key) or None) != (value or None):
            raise ModelFolderError(f"{key} is {form[key]!r}, which is not supported: {json.dumps(value)} was expected")
    for key in (*_FACTORS, *(key for key in _SOFTCAPS if form.get(key) is not None)):
        expect(key not in form or is_number(form[key]), key, form.get(key), "a number above 0")
    check_layers(form)
    if form["model_type"] == "gemma4_text":
        gemma4.check(form)
    if made.experts is not None and has_experts(form):
        _check_experts(form, made.experts)
    if made.recurrent and set(made.layer_types(form)) != {FULL}:
        _check_recurrent(form, made)
    if made.latent:
        latent_attention.check(form)


def _check_experts(form: Mapping[str, Plain], experts: Experts) -> None:
    latent = ["moe_latent_size"] if form.get("moe_latent_size") is not None else []
    _check_sizes(form, (*experts.sizes, *latent))
    count, chosen = form[experts.count], form[experts.chosen]
    if experts.sigmoid:
        _check_router(form, count, chosen)
    if chosen > count:
        raise ModelFolderError(f"{experts.chosen} is {chosen}, but there are {count} experts ({experts.count})")
    if form.get("output_router_logits") and form.get("router_aux_loss_coef"):
        raise ModelFolderError(
            f"output_router_logits is true, which adds the router's auxiliary loss (router_aux_loss_coef {form['router_aux_loss_coef']}) to a loss: "
            "the native core does not compute it; set output_router_logits to false, or policy.backend to hf"
        )
    dense = form.get("mlp_only_layers") or []
    _check_sizes({"decoder_sparse_step": 1, **form}, ["decoder_sparse_step"])
    is_list = isinstance(dense, list) and all(isinstance(layer, int) for layer in dense)
    expect(is_list, "mlp_only_layers", dense, "a list of numbers of layers")


def _check_router(form: Mapping[str, Plain], count: int, chosen: int) -> None:
    groups, of = form["n_group"], form["topk_group"]
    if count % groups or (groups > 1 and count // groups < 2) or of > groups or chosen > of * (count // groups):
        raise ModelFolderError(
            f"num_experts_per_tok {chosen} of topk_group {of} of n_group {groups} groups of the {count} experts is no possible choice"
        )
    for key in form.keys() & DENSE_LAYERS:
        expect(is_whole(form[key], 0), key, form[key], "a whole number from 0")


def _mlp_layer_types(form: Mapping[str, Plain]) -> list[str]:
    """Return mlp_layer_types, or if it is null the list in which the first first_k_dense_replace layers are DENSE."""
    layers, kinds = form["num_hidden_layers"], form["mlp_layer_types"]
    if kinds is None:
        dense = min(form["first_k_dense_replace"], layers)
        return [DENSE] * dense + [SPARSE] * (layers - dense)
    fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in (DENSE, SPARSE) for kind in kinds)
    expected = f"a list of num_hidden_layers {layers} entries, {DENSE} or {SPARSE},"
    expect(fits, "mlp_layer_types", kinds, expected)
    return kinds


def _check_recurrent(form: Mapping[str, Plain], made: Architecture) -> None:
    """Raise ModelFolderError for an invalid size of the recurrent layers or an invalid list of layer types."""
    names = made.recurrent
    _check_sizes(form, names)
    if form[names[-1]] > 8:
        raise ModelFolderError(f"{names[-1]} {form[names[-1]]} is not supported: the kernels need at most 8")
    if names == LFM2_SIZES:
        expect(form["hidden_size"] % 16 == 0, "hidden_size", form["hidden_size"], "a multiple of 16 for convolutions")
        return
    key_heads, value_heads, key_dim, value_dim, _ = (form[key] for key in names)
    if value_heads % key_heads:
        raise ModelFolderError(f"{names[1]} {value_heads} is not a multiple of {names[0]} {key_heads}")
    if key_dim % 16 or key_dim > 256 or value_dim % 16:
        raise ModelFolderError(
            f"{names[2]} {key_dim} and {names[3]} {value_dim} are not supported: the kernels need multiples of 16, {names[2]} up to 256"
        )
    if "full_attention_interval" not in made.defaults:
        return
    _check_sizes(form, ["full_attention_interval"])
    kinds = made.layer_types(form)
    _check_layer_list("layer_types", kinds, form)
    _check_kinds(kinds, FULL, RECURRENT)


def _check_layer_list(key: str, entries: Plain, form: Mapping[str, Plain]) -> None:
    layers = form["num_hidden_layers"]
    fits = isinstance(entries, list) and len(entries) == layers
    expect(fits, key, entries, f"a list of num_hidden_layers {layers} entries")


def _check_kinds(kinds: Iterable[Plain], *supported: str) -> None:
    if other := {kind for kind in kinds if kind not in supported}:
        raise ModelFolderError(
            f"layer_types has {sorted(map(str, other))}, which is not supported: {' and '.join(supported)} are"
        )


def check_layers(form: Mapping[str, Plain]) -> None:
    """Raise ModelFolderError for invalid keys in `form`, a config.json in canonical form, that set which layers use
    sliding-window attention and which use RoPE."""
    defaults = SUPPORTED_ARCHITECTURES[form["model_type"]].defaults
    if not defaults.keys() & {"sliding_window", "no_rope_layer_interval"}:
        return
    switched = form.get("use_sliding_window", True)
    numbers = {"sliding_window": 1, "max_window_layers": 0, "no_rope_layer_interval": 1, "sliding_window_pattern": 1}
    for key, least in numbers.items():
        value = form.get(key)
        is_unread = (key == "sliding_window" and value is None) or (
            key == "sliding_window_pattern" and form.get("layer_types")
        )
        absent = key not in defaults or is_unread
        if not absent and (switched or key == "no_rope_layer_interval"):
            expect(is_whole(value, least), key, value, f"a whole number from {least}")
    for key in ("layer_types", "no_rope_layers"):
        if form.get(key) is not None:
            _check_layer_list(key, form[key], form)
    _check_kinds((kind for kind in form.get("layer_types") or () if kind != "attention"), FULL, SLIDING)


def max_positions(config: Mapping[str, Plain]) -> int:
    """Return the longest sequence that the model has positions for, in tokens, including RoPE scaling as in vLLM."""
    positions, factor = rope.position_factor(rope.of_kind(config, FULL))
    return int((positions or config["max_position_embeddings"]) * factor)


def check_length(config: Mapping[str, Plain], length: int, key: str, model: str) -> None:
    """Raise ModelFolderError if sequences of `length` tokens, which the configuration key `key` sets, are too long for
    the model. vLLM applies the same rule."""
    positions = max_positions(config)
    section, _, name = key.partition(".")
    stated = config.get("model_max_length")  # the model's authors allow longer sequences, which vLLM accepts, too
    if length > max(positions, stated if is_size(stated) else 0):
        of_pretraining, factor = rope.position_factor(rope.of_kind(config, FULL))
        scaled = f", with its rope scaling by {factor:g}" if factor != 1 else ""
        advice = ""
        if rope.scales_queries(config):
            scaled = "; llama_4_scaling_beta scales the queries of later positions, which is not computed"
        elif name == "max_total_sequence_length":  # an evaluation has no section with hf_config_overrides
            raises = "max_position_embeddings" if of_pretraining is None else "rope_scaling.factor"
            advice = f", or set {section}.hf_config_overrides.{raises} if the model can do more"
        raise ModelFolderError(
            f"{key} is {length}, but {model} has positions for {positions} tokens (max_position_embeddings "
            f"{config['max_position_embeddings']}{scaled}): lower {key}{advice}"
        )


def config_remarks(config: Mapping[str, Plain]) -> Iterator[str]:
    """Yield a sentence for each property of a model that may surprise users, such as an ignored key. `config` is the
    config.json as the model's authors released it."""
    yield from rope.rope_remarks(config)
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        if config.get(key):
            yield f"{key} is {config[key]}, but training computes without dropout"
    if config.get("auto_map"):
        yield f"auto_map names code of the model's own, which is not run: the model is computed as {config.get('model_type')}"


def native_config(
    config: Mapping[str, Plain], *, value_head: bool = False, max_length: int | None = None
) -> dict[str, Plain]:
    """Return the keyword arguments of the native `DecoderModel` for a config.json in any form. `value_head`: for a
    critic, with one scalar per token in place of the LM head. `max_length`: tokens of the longest sequence (None: all
    positions), by which longrope chooses its factors. Raise ModelFolderError for an unsupported option."""
    form = canonical_config(config)
    made = SUPPORTED_ARCHITECTURES[form["model_type"]]
    head_dim = latent_attention.key_size(form) if made.latent else form["head_dim"]
    if head_dim % 8 or head_dim > 256:
        name = "qk_nope_head_dim + qk_rope_head_dim" if made.latent else "head_dim"
        raise ModelFolderError(f"{name} {head_dim} is not supported: attention needs a multiple of 8 up to 256")
    longest = max_length or max_positions(form)
    layers, ropes = _layers(form, made, longest)
    bias = "attention" in made.biases and bool(form["attention_bias"])
    experts = made.experts if made.experts is not None and has_experts(form) else None
    return {
        **({} if experts is None else {"experts": _experts(form, experts)}),
        **_recurrent(form, made),
        **({"one_block": [kind != MLP for kind in made.layer_types(form)]} if made.one_block else {}),
        "output_gate": made.output_gate,
        "vocab_size": form["vocab_size"],
        "hidden_size": form["hidden_size"],
        "intermediate_size": form[made.mlp_width],
        "layers": layers,
        "ropes": ropes,
        "num_heads": form["num_attention_heads"],
        "num_kv_heads": form["num_key_value_heads"],
        "head_dim": head_dim,
        "rms_norm_eps": float(form["rms_norm_eps"]),
        "tie_word_embeddings": bool(form["tie_word_embeddings"]) and not value_head,
        "qkv_bias": "qkv" in made.biases or bias or ("qkv if set" in made.biases and bool(form["attention_bias"])),
        "output_bias": bias,
        "mlp_bias": "mlp" in made.biases and bool(form["mlp_bias"]),
        "qk_norm": made.qk_norm if form.get("use_qk_norm") or "use_qk_norm" not in made.defaults else "none",
        "norms": dict(made.norms),
        "activation": "clamped" if made.clamped else _ACTIVATIONS[form[made.activation]],
        "attention_sinks": made.sinks,
        "value_head": value_head,
        "fused_qkv": "qkv" in made.fused,
        "fused_gate_up": "gate_up" in made.fused,
        "rope_interleaved": made.rope_interleaved,
        "fused_mlps": form["model_type"] in granite_hybrid.MODEL_TYPES,
        "norm_offset": made.norm_offset,
        "attention_scale": head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logit_multiplier": 1.0,
        "attention_softcap": 0.0,
        "logit_softcap": 0.0,
        **(latent_attention.native(form) if made.latent else {}),
        **(gemma4.native(form) if form["model_type"] == "gemma4_text" else {}),
        **{name: value for name, value in made.factors(form).items() if not (value_head and name.startswith("logit"))},
    }


_NATIVE_EXPERTS = ("shared_gate", "has_biases", "beside_mlp", "block", "router", "gate", "up", "down")


def _experts(form: Mapping[str, Plain], experts: Experts) -> dict[str, Plain]:
    shared, sigmoid = form[experts.shared] if experts.shared else 0, {}
    if experts.shared == "n_shared_experts":
        shared *= form[experts.width]
    if experts.sigmoid:
        groups = {"groups": form["n_group"], "chosen_groups": form["topk_group"]}
        factors = {"scale": float(form["routed_scaling_factor"]), "epsilon": experts.epsilon}
        sigmoid = {"sigmoid": {**groups, **factors}}
    return {
        **sigmoid,
        "layers": layers_with_experts(form),
        "count": form[experts.count],
        "chosen": form[experts.chosen],
        "intermediate_size": form[experts.width],
        "renormalise": experts.renormalise is None or bool(form[experts.renormalise]),
        "shared_size": shared,
        "latent_size": form.get("moe_latent_size") or 0,
        "shared": "mlp" if experts.beside_mlp else "shared_expert" if experts.shared_gate else "shared_experts",
        **{name: getattr(experts, name) for name in _NATIVE_EXPERTS},
    }


def _recurrent(form: Mapping[str, Plain], made: Architecture) -> dict[str, Plain]:
    """Return the sizes and indices of the recurrent layers as arguments of the native `DecoderModel`."""
    layers = [layer for layer, kind in enumerate(made.layer_types(form)) if kind == RECURRENT]
    if not layers:
        return {}
    if made.recurrent == LFM2_SIZES:
        heads = {"key_heads": 0, "value_heads": 1, "key_dim": 0, "value_dim": form["hidden_size"]}
        return {"recurrent": {"layers": layers, **heads, "conv_width": form["conv_L_cache"], "gated_conv": True}}
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "conv_width")
    limits = {"step_limits": nemotron_h.step_limits(form)} if "time_step_limit" in made.defaults else {}
    return {"recurrent": {"layers": layers, **{name: form[key] for name, key in zip(names, made.recurrent)}, **limits}}


def _layers(
    form: Mapping[str, Plain], made: Architecture, longest: int
) -> tuple[list[tuple[int, int | None]], list[tuple[list[float], float]]]:
    """Return for each layer (sliding window or 0, index of its RoPE table or None), and for each RoPE table (inverse
    frequencies, factor of cos and sin), for sequences of up to `longest` tokens."""
    kinds = form.get("rope_parameters", (FULL,)) if any(made.rotary(form)) else ()
    heads = {FULL: {"head_dim": form["global_head_dim"]}} if "global_head_dim" in made.defaults else {}
    ropes = [rope.rope_frequencies(rope.of_kind(form, kind) | heads.get(kind, {}), longest) for kind in kinds]
    layers = []
    for kind, rotary in zip(made.layer_types(form), made.rotary(form), strict=True):
        slides = kind == SLIDING and form.get("sliding_window") is not None
        table = rope.KINDS.index(kind) if made.local_rope is not None else 0
        layers.append((form["sliding_window"] if slides else 0, table if rotary and kind != RECURRENT else None))
    return layers, ropes
