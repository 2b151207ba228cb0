"""Write a model folder as a GGUF file, the format of llama.cpp, Ollama and LM Studio (ggml's docs/gguf.md).

llama.cpp derives the computation from the architecture's name and from metadata, so a GGUF file cannot represent every
variant of a model family. Variants that it cannot represent raise ModelFolderError."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from nemo_rl_cpp._native import C
from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.gguf_conversion import (
    CONFIG_KEYS,
    NORM_TOPK_PROB,
    NUMBERS,
    RECURRENT_AND_EXPERTS,
    RENAMED,
    link_folder,
)
from nemo_rl_cpp.hub.gguf_tokenizer import SPLITS
from nemo_rl_cpp.hub.sources import GGUF_FILE, GGUF_TABLE, ModelFolderError
from nemo_rl_cpp.models import gemma4, hf_config, latent_attention, rope
from nemo_rl_cpp.models.architectures import (
    DENSE_LAYERS,
    FULL,
    GRANITE_SIZES,
    LFM2_SIZES,
    MAMBA2_SIZES,
    MLP,
    RECURRENT,
    RECURRENT_SIZES,
    SLIDING,
    SUPPORTED_ARCHITECTURES,
    has_experts,
)
from nemo_rl_cpp.models.gguf_weights import (
    FAMILIES,
    family_of,
    file_names,
    file_shapes,
    split_latent,
    stored_names,
    stored_shape,
    tensor_names,
    to_gguf,
)
from nemo_rl_cpp.models.model_folder import read_model_folder
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes
from nemo_rl_cpp.models.weight_files import RawTensor, all_entries, decoded, fill_parameters, raw_tensors, weight_files
from nemo_rl_cpp.models.weights import load_weights


def export_gguf(folder: Path, file: Path, kind: str) -> int:
    """Write the model and the tokenizer of a Hugging Face folder as one GGUF file with matrices of the `kind` f32, f16,
    bf16, q8_0 or q4_0, and return its size in bytes. Tensors are converted one at a time, those of a layer's experts
    together, and the complete file gets its final name. Raise ModelFolderError if GGUF cannot represent model and
    tokenizer so that llama.cpp computes the same results."""
    config = read_model_folder(folder).config
    check_family(config)
    tokenizer = Tokenizer.from_pretrained(folder, section="")
    files = weight_files(folder)
    shapes, read = parameter_shapes(hf_config.native_config(config)), []
    fill_parameters(folder, shapes, ((n, e) for _, n, e in all_entries(files)), lambda name, entry: read.append(name))
    names, stored, derived = tensor_names(config), stored_names(config), _rope_factors(config)
    last = {names[part]: place for place, name in enumerate(read) for part in file_names(name)}
    order = sorted(last, key=last.__getitem__)  # a tensor is written once the last parameter of it is read
    whole = {}  # the shapes of the tensors; several parameters are stacked along a new first dimension
    stored_shapes = file_shapes(config)
    for there in order:
        shape = stored_shape(config, stored[there][0], stored_shapes[stored[there][0]])
        whole[there] = shape if len(stored[there]) == 1 else [len(stored[there]), *shape]
        if there.endswith(".ssm_ba.weight"):
            whole[there] = [2 * shape[0], shape[1]]
    formats = {there: _format(there, whole[there], kind) for there in order}
    part = file.with_name(f".{file.name}.part")
    writer = gguf.GGUFWriter(part, family_of(config).architecture)
    try:
        _add_metadata(writer, config, folder.resolve().name, kind)
        add_tokenizer(writer, tokenizer, config["vocab_size"], end_token_ids(folder, config, tokenizer))
        for name, values in derived.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for there in order:
            size = gguf.quant_shape_to_byte_shape(whole[there], formats[there])
            writer.add_tensor_info(there, size, np.dtype(np.uint8), math.prod(size), raw_dtype=formats[there])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in derived.values():
            writer.write_tensor_data(values)

        held: dict[str, dict[str, np.ndarray]] = {}
        left = Counter(read)

        def write(name: str, tensor: RawTensor) -> None:
            left[name] -= 1
            if left[name]:  # a tied LM head, which comes before the embedding
                return
            numbers = decoded(tensor.dtype, tensor.data).astype(np.float32, copy=False).reshape(tensor.shape)
            for part, values in split_latent(config, name, numbers).items():
                write_part(part, values)

        def write_part(name: str, numbers: np.ndarray) -> None:
            there = names[name]
            values = _encoded(to_gguf(config, name, numbers), formats[there])
            if len(stored[there]) > 1:
                parts = held.setdefault(there, {})
                parts[name] = values.copy()  # the tensor's bytes are only valid until the next one is read
                if len(parts) < len(stored[there]):
                    return
                values = np.stack([parts[part] for part in stored[there]])
                if there.endswith(".ssm_ba.weight"):  # of each key head the rows of b, then those of a
                    heads = values.reshape(2, config["linear_num_key_heads"], -1, values.shape[-1])
                    values = np.ascontiguousarray(heads.swapaxes(0, 1))
                del held[there]
            writer.write_tensor_data(values)

        fill_parameters(folder, shapes, raw_tensors(files), write)
        writer.close()
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return file.stat().st_size


def _encoded(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the tensor `values` in the format `kind`; q8_0 and q4_0 are those of `policy.quantization`."""
    name = kind.name.lower()
    if name not in ("q8_0", "q4_0"):
        return gguf.quants.quantize(values, kind)
    values = values.reshape(-1, values.shape[-1])
    rows, columns = values.shape
    blocks = C.zero_blocks(rows, columns, name)
    C.pack_blocks(torch.from_numpy(np.require(values, requirements=["C", "W"])), blocks)
    return C.read_block_rows(blocks, columns, 0, rows).numpy()


def check_family(config: Mapping[str, Plain]) -> None:
    """Raise ModelFolderError if llama.cpp would compute other results for the model of this canonical config.json."""
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise ModelFolderError(
            f"a model of type {kind} is not written as GGUF; {', '.join(FAMILIES)} are. Convert the folder with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    if (wrong := next(_differences(config), None)) is not None:
        raise ModelFolderError(f"a {kind} model with {wrong} is not computed by llama.cpp, so no GGUF file is written")


def _differences(config: Mapping[str, Plain]) -> Iterator[str]:
    """Yield each property of the model that llama.cpp does not compute, or that a GGUF file cannot describe."""
    kind = config["model_type"]
    family, made, native = family_of(config), SUPPORTED_ARCHITECTURES[kind], hf_config.native_config(config)
    kinds = made.layer_types(config)
    yield from _rope_differences(config)
    gelu = dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), "gelu_tanh")
    activations = gelu | {"gpt_oss": "clamped", "nemotron_h": "relu_squared"}
    if native["activation"] != activations.get(kind, "silu"):
        yield f"the activation {native['activation']}"
    biases = native["output_bias"] or native["mlp_bias"]
    if biases != (kind == "gpt_oss") and family.architecture not in ("llama", "granite", "granitehybrid"):
        yield f"{'' if biases else 'no '}biases (attention_bias, mlp_bias)"
    width = config["num_attention_heads"] * config["head_dim"]
    if kind in ("qwen2", "olmo2", "olmo3", "phi3", "exaone4", "qwen2_moe", "olmoe") and width != config["hidden_size"]:
        yield f"heads of {width} numbers together and hidden_size {config['hidden_size']}"
    untied = dict.fromkeys(("olmo2", "olmo3", "qwen2_moe", "olmoe", "gpt_oss"), False)
    tied = untied | {"gemma2": True, "lfm2_moe": True}
    if config["tie_word_embeddings"] != tied.get(kind, config["tie_word_embeddings"]):
        yield f"tie_word_embeddings {str(config['tie_word_embeddings']).lower()}"
    if kind == "gemma2" and not (config["attn_logit_softcapping"] and config["final_logit_softcapping"]):
        yield "a softcapping of null"
    if kind in ("gemma2", "gpt_oss") and kinds != [FULL if i % 2 else SLIDING for i in range(len(kinds))]:
        yield "windows in other layers than every second"
    if kind in ("gemma3_text", "olmo3") and SLIDING not in kinds:
        yield "full attention in every layer"
    if kind == "gemma4_text" and (shared := config["num_kv_shared_layers"]):
        before = kinds[: len(kinds) - shared]
        if before[-2:] != [SLIDING, FULL]:  # whose keys and values llama.cpp takes
            yield f"num_kv_shared_layers {shared} behind other layers than one with a window and one without"
    if kind in ("gemma2", "gemma3_text") and config["query_pre_attn_scalar"] != config["head_dim"]:
        yield f"query_pre_attn_scalar {config['query_pre_attn_scalar']} with heads of {config['head_dim']}"
    if kind == "granitemoehybrid" and RECURRENT not in kinds and ("experts" in native or not any(made.rotary(config))):
        yield "attention in every layer and experts or no rotary embeddings"
    if kind == "granitemoehybrid" and RECURRENT in kinds and config["mamba_expand"] != 2:
        yield f"mamba_expand {config['mamba_expand']}"
    if "step_limits" in native.get("recurrent", {}) and native["recurrent"]["step_limits"] != (0, math.inf):
        yield f"time_step_limit {config['time_step_limit']}"
    if kind == "exaone4" and config["sliding_window"] is not None:
        yield "windows"
    if "experts" in native:
        yield from _expert_differences(config, native)
    if made.recurrent == RECURRENT_SIZES:
        yield from _recurrent_differences(config, kinds)


def _rope_differences(config: Mapping[str, Plain]) -> Iterator[str]:
    full, made = rope.of_kind(config, FULL), SUPPORTED_ARCHITECTURES[config["model_type"]]
    if config["model_type"] == "gemma4_text" and (full["rope_scaling"] or {}).get("rope_type") != "proportional":
        yield "other RoPE than proportional in layers without windows"
    scaling, layers = full["rope_scaling"], range(config["num_hidden_layers"])
    if scaling is not None and scaling["rope_type"] not in FAMILIES[config["model_type"]].scalings:
        yield f"rope scaling of type {scaling['rope_type']}"
    elif scaling is not None and scaling["rope_type"] == "yarn":
        plain = {key: scaling[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
        if config["model_type"] == "gpt_oss":  # llama.cpp rounds its bounds all the same
            plain["truncate"] = False
        if made.latent or rope.scales_queries(full):  # llama.cpp takes mscale as equal to the other one, or as 1
            mscale = scaling.get("mscale_all_dim") or 1.0
            plain |= {"mscale": mscale if made.latent else 1.0, "mscale_all_dim": mscale}
            plain["llama_4_scaling_beta"] = scaling.get("llama_4_scaling_beta")
        if rope.rope_frequencies(full, 0) != rope.rope_frequencies({**full, "rope_scaling": plain}, 0):
            yield f"yarn by {', '.join(sorted(key for key in scaling | plain if scaling.get(key) != plain.get(key)))}"
    if made.latent and not config["rope_interleave"]:
        yield "rope_interleave false"
    if made.latent and (config["q_lora_rank"] is None) != (len(layers) in (26, 27)):  # by which llama.cpp knows it
        yield f"q_lora_rank {json.dumps(config['q_lora_rank'])} and {len(layers)} layers"
    if made.local_rope is not None and rope.of_kind(config, SLIDING)["rope_scaling"] is not None:
        yield "rope scaling of layers with windows"
    if config["model_type"] == "olmo3" and rope.of_kind(config, SLIDING)["rope_theta"] != full["rope_theta"]:
        yield "another rope_theta in layers with windows"
    if config["model_type"] == "smollm3" and made.rotary(config) != [(i + 1) % 4 != 0 for i in layers]:
        yield "no rotary embeddings in other layers than every fourth"


def _expert_differences(config: Mapping[str, Plain], native: Mapping[str, Plain]) -> Iterator[str]:
    kind, made, experts = config["model_type"], SUPPORTED_ARCHITECTURES[config["model_type"]], native["experts"]
    if kind in NORM_TOPK_PROB or not made.experts.sigmoid:  # a file cannot say it
        if config.get("routed_scaling_factor", 1) != 1:
            yield f"routed_scaling_factor {config['routed_scaling_factor']}"
        renormalises = NORM_TOPK_PROB.get(kind, True)
        if experts["renormalise"] != renormalises:
            yield f"norm_topk_prob {str(not renormalises).lower()}"
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    if kind == "olmoe" and heads != keys:
        yield f"num_attention_heads {heads} and num_key_value_heads {keys}"
    dense = next((config[key] for key in DENSE_LAYERS if key in config), 0)
    if made.one_block:
        if "-" in config["hybrid_override_pattern"]:
            yield "MLPs and experts"
    elif experts["layers"] != list(range(dense, config["num_hidden_layers"])):
        yield "layers without experts"


def _recurrent_differences(config: Mapping[str, Plain], kinds: Sequence[str]) -> Iterator[str]:
    value_dim, key_dim = config["linear_value_head_dim"], config["linear_key_head_dim"]
    every = [*kinds, FULL].index(FULL) + 1  # the first layer with full attention, from 1
    if value_dim != key_dim:
        yield f"linear_value_head_dim {value_dim} and linear_key_head_dim {key_dim}"
    if any((each == FULL) != ((layer + 1) % every == 0) for layer, each in enumerate(kinds)):
        yield "full attention in other layers than every n-th"
    if RECURRENT not in kinds:
        yield "full attention in every layer"


def _add_metadata(writer: GGUFWriter, config: Mapping[str, Plain], name: str, kind: str) -> None:
    family, made = family_of(config), SUPPORTED_ARCHITECTURES[config["model_type"]]
    window, kinds = config.get("sliding_window"), made.layer_types(config)
    # llama.cpp scales queries, which limits the positions here
    longest = config["max_position_embeddings"] if rope.scales_queries(config) else hf_config.max_positions(config)
    if window is not None and SLIDING in kinds and not family.has_windows:
        longest = min(longest, window)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{kind.upper()}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    _add_head_sizes(writer, config)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    written = {**config, "max_position_embeddings": longest, "full_attention_interval": [*kinds, FULL].index(FULL) + 1}
    if made.latent:  # llama.cpp attends to one head of latents
        written["num_key_value_heads"] = 1
    if config["model_type"] == "gemma4_text":
        _, written["num_key_value_heads"], written["intermediate_size"], *_ = map(
            list, zip(*gemma4.layer_sizes(config))
        )
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    if made.one_block:
        width = config[made.experts.width if has_experts(config) else "intermediate_size"]
        written["intermediate_size"] = [width if each == MLP else 0 for each in kinds]
    # layers without attention have no keys
    if made.recurrent in (LFM2_SIZES, GRANITE_SIZES, MAMBA2_SIZES) and RECURRENT in kinds:
        written["num_key_value_heads"] = [config["num_key_value_heads"] if each == FULL else 0 for each in kinds]
    renamed = RENAMED.get(config["model_type"], {})
    optional = {key: renamed.get(known, known) for key, known in RECURRENT_AND_EXPERTS.items()}
    if made.experts is not None and has_experts(config):
        optional |= {"expert_count": made.experts.count, "expert_feed_forward_length": made.experts.width}
    else:
        optional = {key: known for key, known in optional.items() if not key.startswith("expert")}
        written["intermediate_size"] = written[made.mlp_width]
    absent = () if RECURRENT in kinds else ("ssm.",)
    optional = {key: known for key, known in optional.items() if known in made.defaults and not key.startswith(absent)}
    for key, known in (CONFIG_KEYS | optional).items():
        if isinstance(written[known], list):
            writer.add_array(f"{family.architecture}.{key}", written[known])
        elif written[known] is not None:
            writer.add_uint32(f"{family.architecture}.{key}", written[known])
    for key, known in NUMBERS.items():
        if (known in made.defaults or known == "final_logit_softcapping") and config.get(known):
            writer.add_float32(f"{family.architecture}.{key}", config[known])
    if family.has_windows and window is not None:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([each == SLIDING for each in kinds])
    if made.experts is not None and made.experts.sigmoid:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if RECURRENT in kinds and made.recurrent != LFM2_SIZES:
        writer.add_ssm_inner_size(config[made.recurrent[1]] * config[made.recurrent[3]])
    if made.recurrent == GRANITE_SIZES:
        writer.add_rope_scaling_finetuned(any(made.rotary(config)))
    if made.recurrent == RECURRENT_SIZES:
        pairs = rope.rotary_size(config) // 2  # time, height and width of an image take turns; of text all are equal
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    if made.one_block:  # llama.cpp requires this key, too
        writer.add_layer_norm_eps(float(config["rms_norm_eps"]))
    else:
        _add_rope(writer, config)


def _add_head_sizes(writer: GGUFWriter, config: Mapping[str, Plain]) -> None:
    if not SUPPORTED_ARCHITECTURES[config["model_type"]].latent:
        size = config.get("global_head_dim", config["head_dim"])
        writer.add_key_length(size)
        writer.add_value_length(size)
        if "global_head_dim" in config:
            writer.add_key_length_swa(config["head_dim"])
            writer.add_value_length_swa(config["head_dim"])
        return
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(latent_attention.key_size(config))
    writer.add_value_length_mla(config["v_head_dim"])


def _add_rope(writer: GGUFWriter, config: Mapping[str, Plain]) -> None:
    full = rope.of_kind(config, FULL)
    writer.add_rope_dimension_count(config.get("global_head_dim", rope.rotary_size(config)))
    writer.add_rope_freq_base(float(full["rope_theta"]))
    if config["model_type"] in ("gemma3_text", "gemma4_text"):
        writer.add_rope_freq_base_swa(float(rope.of_kind(config, SLIDING)["rope_theta"]))
    if "global_head_dim" in config:
        writer.add_rope_dimension_count_swa(config["head_dim"])
    scaling = full["rope_scaling"]
    if scaling is None or scaling["rope_type"] in ("llama3", "proportional"):  # their factors are stored as a tensor
        return
    original = scaling.get("original_max_position_embeddings")
    if scaling["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(rope.rope_frequencies(full, hf_config.max_positions(config))[1])
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
    writer.add_rope_scaling_factor(float(scaling["factor"]))
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original)
        if SUPPORTED_ARCHITECTURES[config["model_type"]].latent:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
        if rope.scales_queries(config):
            writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
            writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])


_EXACT = (".bias", "ssm_a", "ssm_d", "ssm_norm.weight", "shortconv.conv.weight", "ssm_conv1d.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_ba.weight", "ffn_gate_inp.weight")  # fmt: skip
"""Small matrices that are float32 in every file: experts' biases, scales of Mamba-2, convolutions, gates of gated delta
nets, and routers."""


def _format(name: str, shape: Sequence[int], kind: str) -> GGMLQuantizationType:
    """Return the format in which a GGUF file of `kind` stores the tensor `name`: mostly `kind`, but float32 for vectors
    and a few other tensors, q8_0 for embeddings and LM head in a q4_0 file, and f16 for rows that blocks of 32 do not
    divide."""
    if len(shape) < 2 or name.endswith(_EXACT):
        kind = "f32"
    elif kind == "q4_0" and name in ("token_embd.weight", "per_layer_token_embd.weight", "output.weight"):
        kind = "q8_0"
    if kind.startswith("q") and shape[-1] % 32:  # a block holds 32 elements of a row
        kind = "f16"
    return gguf.GGMLQuantizationType[kind.upper()]


def _rope_factors(config: Mapping[str, Plain]) -> dict[str, np.ndarray]:
    """Return {GGUF's tensor name: factors by which llama.cpp divides RoPE frequencies} for llama3 and longrope."""
    full = rope.of_kind(config, FULL)
    scaling = full["rope_scaling"] or {}
    if scaling.get("rope_type") == "longrope":
        return {f"rope_factors_{which}.weight": np.float32(scaling[f"{which}_factor"]) for which in ("long", "short")}
    if scaling.get("rope_type") == "proportional":  # a large factor leaves dimensions as they are
        pairs = config["global_head_dim"] // 2
        turned = int(scaling.get("partial_rotary_factor", 1.0) * pairs)
        return {"rope_freqs.weight": np.float32([scaling.get("factor", 1.0)] * turned + [1e30] * (pairs - turned))}
    if scaling.get("rope_type") == "llama3":
        plain, _ = rope.rope_frequencies({**full, "rope_scaling": None}, 0)
        scaled, _ = rope.rope_frequencies(full, 0)
        return {"rope_freqs.weight": np.float32([before / after for before, after in zip(plain, scaled)])}
    return {}


TEXT = (
    "The quick brown fox jumps over the lazy dog. If a train leaves at 9:40 and arrives at 11:05, the journey takes 85 minutes, "
    "because 20 minutes remain of the first hour and 65 follow. def add(a, b): return a + b\n"
)


class Gap(NamedTuple):
    """The difference between the model in the GGUF file and the model in the folder, on the tokens of `TEXT`."""

    tokens: int
    mean_kl: float
    """Mean over positions of KL(folder's next-token distribution || file's), in nats."""
    max_logit: float
    """Largest absolute difference between two logits."""


def compare_with_folder(file: Path, folder: Path) -> Gap:
    """Return the `Gap` between the logits of the model in `file`, which `export_gguf` wrote, and of the model in
    `folder`. Both are computed in float32."""
    opened = read_model_folder(folder)
    ids = torch.tensor(Tokenizer.from_pretrained(folder, section="")(TEXT)["input_ids"])
    model = C.DecoderModel(opened.native(), torch.float32, trainable=False)
    opened.fill(model)
    ours = C.Trainer(model).logits(ids)
    with tempfile.TemporaryDirectory() as made:
        link_folder(file, Path(made, GGUF_FILE), Path(made, GGUF_TABLE))
        load_weights(model, made)
    theirs = C.Trainer(model).logits(ids)
    kl = torch.nn.functional.kl_div(
        theirs.log_softmax(-1), ours.log_softmax(-1), reduction="batchmean", log_target=True
    )
    return Gap(len(ids), float(kl), float((ours - theirs).abs().max()))


# ---- the tokenizer. llama.cpp supports two kinds. For a byte-level BPE the file names the rule that splits text into
# words. For a SentencePiece BPE, which tokenizer.json stores as merges, a token's score is the rank of its merge.

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
    """Write the tokenizer of a model with `vocab_size` tokens and the end tokens `ends`. Raise ModelFolderError for a
    kind of tokenizer that llama.cpp does not support."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    model = written["model"]
    if model["type"] != "BPE":
        raise ModelFolderError(f"the tokenizer is of type {model['type']}; as GGUF only BPE is written")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    text, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= vocab_size:
        raise ModelFolderError(
            f"the tokenizer's token {text!r} has the id {last}, but the model has a vocabulary of {vocab_size}, beyond which a "
            "GGUF file names no token: remove it from tokenizer.json and tokenizer_config.json"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [int(gguf.TokenType.UNUSED)] * vocab_size
    for text, i in model["vocab"].items():
        tokens[i], kinds[i] = text, int(gguf.TokenType.NORMAL)
    for added in written["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(kind)
    if "ByteLevel" in json.dumps(written["pre_tokenizer"]):
        writer.add_tokenizer_model("gpt2")
        rule = _split_name(written["pre_tokenizer"])
        # the rule of Llama 3 takes a word that is a token as it is, without merges
        writer.add_tokenizer_pre("dbrx" if rule == "llama-bpe" and not model.get("ignore_merges") else rule)
        writer.add_token_merges(merges)
    elif model.get("byte_fallback"):
        writer.add_tokenizer_model("gemma4" if writer.arch == "gemma4" else "llama")
        if writer.arch == "gemma4":
            writer.add_token_merges(merges)
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0] != "a")
        for i, token in enumerate(tokens):
            if _BYTE.fullmatch(token):
                kinds[i] = int(gguf.TokenType.BYTE)
        if tokenizer.unk_token_id is not None:
            kinds[tokenizer.unk_token_id] = int(gguf.TokenType.UNKNOWN)
    else:
        raise ModelFolderError("the tokenizer has no byte-level tokens and no byte fallback, which llama.cpp needs")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_special_tokens(writer, tokenizer, ends)


def _split_name(pre_tokenizer: Mapping[str, Plain]) -> str:
    """Return llama.cpp's name of the rule by which the pre-tokenizer splits text into words."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part["type"] for part in parts]
    patterns = tuple(part["pattern"].get("Regex") for part in parts if part["type"] == "Split")
    if kinds == [*["Split"] * len(patterns), "ByteLevel"] and patterns in SPLITS:
        return SPLITS[patterns]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    raise ModelFolderError(
        f"the tokenizer splits a text into words by {json.dumps(parts)[:200]}, of which llama.cpp's name is not known here; known are "
        "those of Llama 3, Qwen, SmolLM, gpt-oss, DeepSeek-V3, Kimi K2, Mistral's Tekken and GPT-2"
    )


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Return a score for each token: llama.cpp applies the merge whose resulting token has the highest one."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [float(-ranks.get(token, len(merges) + i)) for i, token in enumerate(tokens)]


def _add_special_tokens(writer: GGUFWriter, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        if (i := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    others = [i for i in ends if i != tokenizer.eos_token_id]
    # a file can name three end tokens; llama.cpp recognises further ones by their texts
    for add, i in zip((writer.add_eot_token_id, writer.add_eom_token_id), others):
        add(i)
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and encoded[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template is not None:
        writer.add_chat_template(template)
