"""The sizes of decoder models, from config.json or from the table of known models. Needs no torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.hub.sources import ModelFolderError, local_folder
from nemo_rl_cpp.models.architectures import (
    FULL,
    MAMBA2_SIZES,
    MLP,
    PATTERN,
    RECURRENT,
    RECURRENT_SIZES,
    SLIDING,
    SUPPORTED_ARCHITECTURES,
    has_experts,
    layers_with_experts,
)
from nemo_rl_cpp.models.hf_config import check_layers, is_size, read_config_file, text_section
from nemo_rl_cpp.models.latent_attention import SIZES
from nemo_rl_cpp.models.nemotron_h import canonical


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    experts: int = 1
    """number of expert MLPs per layer"""
    experts_per_token: int = 1
    shared_expert_size: int = 0
    """intermediate size of the shared expert, which processes all tokens; 0: none"""
    fused_tensors: bool = False
    """the checkpoint stores q, k, v in one matrix, and gate, up in one matrix"""
    recurrent_layers: tuple[int, ...] = ()
    """indices of the layers with a gated delta net or Mamba-2 (sizes below)"""
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    latent_size: int = 0
    """number of columns that an expert reads and writes; 0: hidden_size"""
    mlp_layers: tuple[int, ...] = ()
    """indices of the layers that have only an MLP or experts, without gates; the other layers then have only a mixer"""
    dense_mlps: int = 0
    """number of layers with a dense MLP in place of experts"""
    dense_size: int = 0
    """intermediate size of the dense MLPs of a model with experts"""
    has_router_biases: bool = False
    """the routers' scores are sigmoids, and have biases"""

    kv_lora_rank: int = 0
    """size of the latent vector of keys and values in latent attention (models/latent_attention.py); 0: none"""
    q_lora_rank: int = 0
    """size of the latent vector of queries; 0: none"""
    qk_rope_head_dim: int = 0
    """dimensions of a key that all heads share"""
    v_head_dim: int = 0
    """size of a value head; that of queries and keys is head_dim"""
    normalises_heads: bool = False
    """queries and keys have norms"""
    norms_of_results: int = 0
    """number of norms in a layer that follow attention or the MLP"""
    expert_layers: tuple[int, ...] = ()
    """indices of the layers with experts"""
    window: int = 0
    """number of tokens that attention with a sliding window reads; 0: no layer has one"""
    windowed_layers: int = 0
    """number of layers with a sliding window"""

    def as_config(self) -> dict[str, object]:
        """Return the sizes as {key of config.json: value}."""
        own = (
            "experts",
            "experts_per_token",
            "expert_layers",
            "shared_expert_size",
            "fused_tensors",
            "recurrent_layers",
            "mlp_layers",
        )
        own += ("latent_size", "dense_mlps", "dense_size", "has_router_biases", "normalises_heads", "norms_of_results")
        own += ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")  # no known model has latent attention
        own += ("window", "windowed_layers")
        if not self.recurrent_layers:
            own += RECURRENT_SIZES
        sizes = {name: value for name, value in asdict(self).items() if name not in own}
        sizes["sliding_window"] = self.window or None
        if self.recurrent_layers:
            sizes["layer_types"] = [
                RECURRENT if layer in self.recurrent_layers else MLP if layer in self.mlp_layers else FULL
                for layer in range(self.num_hidden_layers)
            ]
        if self.experts > 1:
            sizes |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.intermediate_size,
                "shared_expert_intermediate_size": self.shared_expert_size,
                "moe_latent_size": self.latent_size,
            }
        return sizes

    def slice(self, count: int) -> ModelSizes:
        """Return the sizes that each of `count` tensor-parallel ranks has."""
        return replace(
            self,
            intermediate_size=self.intermediate_size // count,
            num_attention_heads=self.num_attention_heads // count,
            num_key_value_heads=self.num_key_value_heads // count,
            vocab_size=self.vocab_size // count,
        )

    @property
    def layer_parameters(self) -> int:
        query, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        gates = query if self.recurrent_layers and not self.mlp_layers else 0
        if self.kv_lora_rank:
            queries = (self.hidden_size + query) * self.q_lora_rank if self.q_lora_rank else self.hidden_size * query
            shared, values = self.qk_rope_head_dim, self.num_attention_heads * self.v_head_dim
            expanded = query - self.num_attention_heads * shared + values
            keys_values = self.hidden_size * (self.kv_lora_rank + shared) + self.kv_lora_rank * expanded
            return queries + keys_values + self.hidden_size * values + self._mlp_beside_mixer
        return self.hidden_size * (2 * query + 2 * key_value + gates) + self._mlp_beside_mixer

    @property
    def mlp_matrices(self) -> int:
        """Return the number of matrices of an MLP: 3 with a gate, 2 without."""
        return 2 if self.mlp_layers else 3

    @property
    def _mlp_parameters(self) -> int:
        """Return the number of weights of a layer's MLP, or of all of its experts."""
        expert = self.intermediate_size * (self.latent_size or self.hidden_size)
        matrix = self.experts * expert + self.shared_expert_size * self.hidden_size
        return self.mlp_matrices * matrix + 2 * self.hidden_size * self.latent_size

    @property
    def _mlp_beside_mixer(self) -> int:
        """Return the weights besides the mixer in a layer with a mixer: norms, and the MLP if the layer has one."""
        return self.hidden_size if self.mlp_layers else self._mlp_parameters + 2 * self.hidden_size

    @property
    def recurrent_values(self) -> int:
        """Return the input size of a recurrent layer's output projection."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def convolved(self) -> int:
        """Return the number of channels of a recurrent layer's short convolution."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.recurrent_values

    def state_bytes(self, width: int) -> int:
        """Return the bytes of a sequence's state in one recurrent layer: the recurrence's state in float32, and the
        last three inputs of the convolution. `width`: bytes of a number in the run's precision."""
        return self.recurrent_values * self.linear_key_head_dim * 4 + 3 * self.convolved * width

    @property
    def recurrent_parameters(self) -> int:
        """Return the number of weights of a recurrent layer, including its MLP and norms."""
        gates = (1 if self.mlp_layers else 2) * self.linear_num_value_heads
        rows = self.convolved + self.recurrent_values + gates
        return self.hidden_size * (rows + self.recurrent_values) + self._mlp_beside_mixer

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Return the number of weights of the model, without biases and head norms (far below one percent)."""
        attention, recurrent = self.attention_layers * self.layer_parameters, len(self.recurrent_layers)
        mlps = len(self.mlp_layers) * (self._mlp_parameters + self.hidden_size)
        mlps -= self.dense_mlps * (self._mlp_parameters - self.mlp_matrices * self.hidden_size * self.dense_size)
        layers = attention + recurrent * self.recurrent_parameters + mlps
        return layers + self.embedding_parameters + self.hidden_size

    @property
    def quantised_parameters(self) -> int:
        """Return the number of weights in the matrices that `policy.quantization` stores in blocks: those of the
        layers, without the gates of gated delta nets and the projections of latent experts."""
        gates = 0 if self.mlp_layers else len(self.recurrent_layers) * 2 * self.linear_num_value_heads
        norms = (1 if self.mlp_layers else 2) * self.num_hidden_layers + 1
        latents = 2 * self.latent_size * len(self.expert_layers)
        return self.parameters - self.embedding_parameters - (norms + gates + latents) * self.hidden_size

    @property
    def value_parameters(self) -> int:
        """Return the number of weights in the matrices that a model in 4 bits stores in q8_0: `v_proj`."""
        has_values = not self.fused_tensors and not self.kv_lora_rank
        return has_values * self.attention_layers * self.hidden_size * self.num_key_value_heads * self.head_dim

    @property
    def attention_layers(self) -> int:
        """Return the number of layers with attention."""
        return self.num_hidden_layers - len(self.recurrent_layers) - len(self.mlp_layers)

    @property
    def backbone_parameters(self) -> int:
        """Return the number of weights of a critic: the model's without an untied LM head, plus a scalar head."""
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.parameters - head + self.hidden_size


class KnownModel(NamedTuple):
    """A model on the Hub: its name, its `model_type`, and its sizes."""

    name: str
    model_type: str
    sizes: ModelSizes


def recurrent_between(layers: int, every: int) -> tuple[int, ...]:
    """Return the indices of the recurrent ones of `layers` layers: all but every `every`-th, which has attention."""
    return tuple(layer for layer in range(layers) if (layer + 1) % every)


def _layers_in(pattern: str) -> dict[str, tuple[int, ...]]:
    """Return {"recurrent_layers": indices, "mlp_layers": indices} of a Nemotron-H pattern such as "M-M*-"."""
    named = {"recurrent_layers": RECURRENT, "mlp_layers": MLP}
    return {
        name: tuple(layer for layer, letter in enumerate(pattern) if PATTERN.get(letter) == kind)
        for name, kind in named.items()
    }


def _listed_sizes(row: list[object]) -> ModelSizes:
    """Return the sizes in `row`, a row of known_models.toml. It gives the recurrent layers by full_attention_interval
    or by a pattern of letters; {window = ...} may be the last entry."""
    more = row[-1] if isinstance(row[-1], dict) else {}
    sizes = dict(zip((field.name for field in fields(ModelSizes)), row[:-1] if more else row)) | more
    if isinstance(pattern := sizes.get("recurrent_layers"), str):
        sizes |= _layers_in(pattern)
    elif pattern:
        sizes["recurrent_layers"] = recurrent_between(sizes["num_hidden_layers"], pattern)
    return ModelSizes(**sizes)


_TABLE = tomllib.loads(Path(__file__).with_name("known_models.toml").read_text(encoding="utf-8"))
KNOWN_MODELS = tuple(
    KnownModel(name, model_type, _listed_sizes(sizes))
    for model_type, rows in _TABLE.items()
    for name, sizes in rows.items()
)
_VARIANT = re.compile(r"-(base|instruct|chat(-v[\d.]+)?|v0\.[123]|it|sft|dpo|coder|thinking(-2507)?|instruct-2507)$")


def known_model(name: str) -> KnownModel | None:
    """Return the known model with this name on the Hub, with or without the owner; None if there is none. Variants such
    as -Instruct are found too, because they have the same sizes."""
    owner, _, short = name.lower().rpartition("/")
    short = short.replace("mistral-7b-v0.3", "mistral-7b").replace("mistral-7b-instruct-v0.3", "mistral-7b")
    while short:
        for model in KNOWN_MODELS:
            known = model.name.lower()
            if short == known.rpartition("/")[2] and owner in ("", known.rpartition("/")[0]):
                return model
        shorter = _VARIANT.sub("", short)
        if shorter == short:
            return None
        short = shorter
    return None


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def expert_sizes(known: Mapping[str, object]) -> dict[str, int]:
    """Return {field of `ModelSizes`: value} for the experts in the config.json `known`; {} if it has none."""
    count = next((value for name in _EXPERTS if is_size(value := known.get(name))), None)
    if count is None:
        return {}
    chosen = known.get("num_experts_per_tok")
    found = {"experts": count, "experts_per_token": chosen if is_size(chosen) else 1}
    if is_size(width := known.get("moe_intermediate_size")):
        found["intermediate_size"] = width
    if is_size(shared := known.get("shared_expert_intermediate_size")):
        found["shared_expert_size"] = shared
    elif is_size(shared := known.get("moe_shared_expert_intermediate_size")):
        found["shared_expert_size"] = shared
    elif is_size(shared := known.get("n_shared_experts")):
        found["shared_expert_size"] = shared * found.get("intermediate_size", 0)
    if is_size(latent := known.get("moe_latent_size")):
        found["latent_size"] = latent
    if is_size(width := known.get("intermediate_size")):
        found["dense_size"] = width
    return found


def recurrent_sizes(known: Mapping[str, object]) -> dict[str, object]:
    """Return {field of `ModelSizes`: value} for the recurrent layers in a config.json; {} if it has none."""
    kinds, every, layers = (known.get(key) for key in ("layer_types", "full_attention_interval", "num_hidden_layers"))
    names = RECURRENT_SIZES[:4]
    if isinstance(pattern := known.get("hybrid_override_pattern"), str) and all(
        map(is_size, map(known.get, MAMBA2_SIZES))
    ):
        return _layers_in(pattern) | {name: known[key] for name, key in zip(names, MAMBA2_SIZES)}
    if not all(is_size(known.get(name)) for name in names) or not is_size(layers):
        return {}
    if isinstance(kinds, list) and kinds:
        found, mlps = (tuple(layer for layer, each in enumerate(kinds) if each == kind) for kind in (RECURRENT, MLP))
    else:
        found, mlps = recurrent_between(layers, every) if is_size(every) else (), ()
    return {"recurrent_layers": found, "mlp_layers": mlps, **{name: known[name] for name in names}} if found else {}


def latent_sizes(known: Mapping[str, object]) -> dict[str, int]:
    """Return {field of `ModelSizes`: value} for the latent attention in a config.json; {} if it has none."""
    sizes = {name: value for name in SIZES if is_size(value := known.get(name))}
    if len(sizes) < len(SIZES):
        return {}
    rank = known.get("q_lora_rank")
    head_dim = sizes.pop("qk_nope_head_dim") + sizes["qk_rope_head_dim"]
    return {**sizes, "q_lora_rank": rank if is_size(rank) else 0, "head_dim": head_dim}


def window_sizes(known: Mapping[str, object]) -> dict[str, int]:
    """Return {field of `ModelSizes`: value} for the sliding window in a config.json with the defaults of its
    model_type; an empty mapping if no layer has one."""
    try:
        check_layers(known)
    except ModelFolderError:
        return {}  # the checks of the model report this error
    window, kinds = known.get("sliding_window"), SUPPORTED_ARCHITECTURES[known["model_type"]].layer_types(known)
    layers = sum(kind == SLIDING for kind in kinds)
    return {"window": window, "windowed_layers": layers} if window is not None and layers else {}


def model_sizes(model_name: str, overrides: dict[str, object] | None) -> ModelSizes | None:
    """Return the sizes of a model on this machine, from its folder's config.json and the overrides of it.

    Return None if the folder is missing, or if its file is unreadable or lacks sizes, which other checks report."""
    known: dict[str, object] = {}
    folder = local_folder(model_name)
    if folder is not None and (folder / "config.json").is_file():
        try:
            known = dict(text_section(read_config_file(folder)))
        except ModelFolderError:
            return None  # the checks of the model report this error
    elif model_name.rpartition("/")[2].lower() == "smollm2-135m-instruct" and (packaged := known_model(model_name)):
        known = packaged.sizes.as_config()  # the packaged model may not be downloaded yet
    known |= overrides or {}
    made = SUPPORTED_ARCHITECTURES.get(str(known.get("model_type")))
    if made is not None:
        known = {**made.defaults, **known}
    if made is not None and made.one_block:
        try:
            known = canonical(known)
        except ModelFolderError:
            return None
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    optional = [name for name in ("num_key_value_heads", "head_dim") if known.get(name)]
    sizes = {name: value for name in (*needed, *optional) if is_size(value := known.get(name))}
    if len(sizes) < len(needed) + len(optional):
        return None
    heads = sizes["num_attention_heads"]
    derived = {"num_key_value_heads": heads, "head_dim": sizes["hidden_size"] // heads}
    tied = bool(known.get("tie_word_embeddings", False))
    structure: dict[str, object] = {}
    if made is not None:
        structure = {
            "fused_tensors": made.fused_tensors,
            "has_router_biases": made.experts is not None and made.experts.sigmoid,
            "normalises_heads": made.qk_norm != "none" and bool(known.get("use_qk_norm", True)),
            "norms_of_results": sum(place.startswith("after") for place in made.norms),
            **window_sizes(known),
        }
    more = (expert_sizes(known) if has_experts(known) else {}) | recurrent_sizes(known) | latent_sizes(known)
    if "experts" in more:
        mlps = more.get("mlp_layers") or range(sizes["num_hidden_layers"])
        try:
            more["expert_layers"] = tuple(mlps if made is None else layers_with_experts(known))
        except (TypeError, ZeroDivisionError):  # the checks of the model report the key
            return None
        more["dense_mlps"] = len(mlps) - len(more["expert_layers"])
    return ModelSizes(**derived | sizes | more | structure, tie_word_embeddings=tied)
