"""The sizes of decoder models, from config.json or from the table of known models. Needs no torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.lora import FUSED, MATRICES, OF_A_DELTA_NET, Adapters, LayerKinds, adapted_modules
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.hub.sources import TINY_RANDOM, ModelFolderError, local_folder
from nemo_rl_cpp.models.architectures import EXPERT_COUNTS, FULL, SLIDING
from nemo_rl_cpp.models.config_checks import is_size
from nemo_rl_cpp.models.gemma4 import own_sizes
from nemo_rl_cpp.models.hf_config import TINY_CONFIG, canonical_config, native_config, read_config_file, text_section
from nemo_rl_cpp.models.parameter_shapes import Shapes, layer_shapes


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder model. `native` are the arguments of the native `DecoderModel`."""

    native: Mapping[str, Plain] = field(repr=False)
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    experts: int = 1
    """number of expert MLPs per layer"""
    experts_per_token: int = 1
    shared_expert_size: int = 0
    """intermediate size of the shared expert, which processes all tokens; 0: none"""
    recurrent_layers: tuple[int, ...] = ()
    """indices of the layers with a gated delta net, Mamba-2 or a gated short convolution (sizes below)"""
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    latent_size: int = 0
    """number of columns that an expert reads and writes; 0: hidden_size"""
    mlp_layers: tuple[int, ...] = ()
    """indices of the layers that have only an MLP or experts, without gates; the other layers then have only a mixer"""
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
    """number of norms in a layer that follow attention, the MLP or experts beside it"""
    expert_layers: tuple[int, ...] = ()
    """indices of the layers with experts"""
    window: int = 0
    """number of tokens that attention with a sliding window reads; 0: no layer has one"""
    windowed_layers: int = 0
    """number of layers with a sliding window"""

    @classmethod
    def of(cls, native: Mapping[str, Plain]) -> ModelSizes:
        """Return the sizes of a native model. `native`: the result of `native_config`."""
        experts, recurrent, latent = (native.get(part, {}) for part in ("experts", "recurrent", "latent"))
        mixers, layers = native.get("one_block") or (), len(native["layers"])
        mlp_layers = tuple(layer for layer, has_mixer in enumerate(mixers) if not has_mixer)
        expert_layers, windows = tuple(experts.get("layers", ())), [window for window, _ in native["layers"] if window]
        inner = sum(own_sizes(native, layer)["intermediate_size"] for layer in range(layers)) // layers
        return cls(
            native=native,
            hidden_size=native["hidden_size"],
            intermediate_size=experts.get("intermediate_size", inner),
            num_hidden_layers=layers,
            num_attention_heads=native["num_heads"],
            vocab_size=native["vocab_size"],
            tie_word_embeddings=native["tie_word_embeddings"],
            experts=experts.get("count", 1),
            experts_per_token=experts.get("chosen", 1),
            shared_expert_size=experts.get("shared_size", 0),
            recurrent_layers=tuple(recurrent.get("layers", ())),
            linear_num_key_heads=recurrent.get("key_heads", 0),
            linear_num_value_heads=recurrent.get("value_heads", 0),
            linear_key_head_dim=recurrent.get("key_dim", 0),
            linear_value_head_dim=recurrent.get("value_dim", 0),
            latent_size=experts.get("latent_size", 0),
            mlp_layers=mlp_layers,
            has_router_biases="sigmoid" in experts,
            kv_lora_rank=latent.get("rank", 0),
            q_lora_rank=latent.get("query_rank", 0),
            qk_rope_head_dim=latent.get("rope_dim", 0),
            v_head_dim=latent.get("value_dim", 0),
            normalises_heads=native["qk_norm"] != "none",
            norms_of_results=sum(place.startswith("after") for place in native["norms"])
            + 2 * experts.get("beside_mlp", False),
            expert_layers=expert_layers,
            window=max(windows, default=0),
            windowed_layers=len(windows),
        )

    def slice(self, count: int) -> ModelSizes:
        """Return the sizes that each of `count` tensor-parallel ranks has."""
        names = ("intermediate_size", "num_heads", "num_kv_heads", "vocab_size")
        cut = {name: self.native[name] // count for name in names}
        return self.of({**self.native, **cut})

    @cached_property
    def matrices(self) -> list[dict[str, Tensors]]:
        """The tensors of each layer: {name in MATRICES, or name of a vector: `Tensors`}."""
        made: dict[tuple[Plain, ...], dict[str, Tensors]] = {}  # names of layers with the same sizes have one shape
        own = self.native.get("layer_sizes") or [()] * self.num_hidden_layers
        layers = [((*shapes, *sizes), shapes) for shapes, sizes in zip(layer_shapes(self.native), own)]
        return [made.get(kind) or made.setdefault(kind, _matrices(shapes)) for kind, shapes in layers]

    @cached_property
    def attention(self) -> list[Attention]:
        """The attention of each layer that has one."""
        found = []
        for layer, (window, _) in enumerate(self.native["layers"]):
            own = own_sizes(self.native, layer)
            query, key_value = (own[heads] * own["head_dim"] for heads in ("num_heads", "num_kv_heads"))
            if layer not in (*self.recurrent_layers, *self.mlp_layers):
                found.append(Attention(query, key_value, window > 0, own.get("keys_of", -1) < 0))
        return found

    @property
    def query_size(self) -> float:
        """Return the columns of a layer's queries, averaged over the layers with attention."""
        return sum(each.query for each in self.attention) / max(1, len(self.attention))

    @property
    def key_value_size(self) -> float:
        """Return the columns of a layer's keys, or of its values, averaged over the layers with attention."""
        return sum(each.key_value for each in self.attention) / max(1, len(self.attention))

    def cached_values(self, windowed: bool) -> int:
        """Return the keys and values of a token in the KV cache, of the layers with a sliding window or of those
        without."""
        return sum(2 * each.key_value for each in self.attention if each.is_cached and each.has_window == windowed)

    @property
    def per_layer_inputs(self) -> int:
        """Return the inputs of a token for all layers (Gemma 4); 0: none."""
        return self.native.get("per_layer_input", 0) * self.num_hidden_layers

    @property
    def layer_parameters(self) -> int:
        """The number of weights of the largest layer."""
        return max(map(_weights, self.matrices))

    @property
    def mlp_matrices(self) -> int:
        """Return 3 for an MLP with a gate, 2 without."""
        return 2 if self.mlp_layers else 3

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
        last inputs of the convolution. `width`: bytes of a number in the run's precision."""
        inputs = self.native["recurrent"]["conv_width"] - 1
        return self.recurrent_values * self.linear_key_head_dim * 4 + inputs * self.convolved * width

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * (self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.per_layer_inputs)

    @cached_property
    def parameters(self) -> int:
        projection = self.per_layer_inputs * self.hidden_size + self.native.get("per_layer_input", 0)
        return sum(map(_weights, self.matrices)) + self.embedding_parameters + projection + self.hidden_size

    @property
    def quantised_parameters(self) -> int:
        """The number of weights in the matrices that `policy.quantization` stores in blocks."""
        return sum(layer[name].weights for layer in self.matrices for name in layer.keys() & _QUANTISED)

    @property
    def value_parameters(self) -> int:
        """The number of weights in the matrices that a model in 4 bits stores in q8_0: `v_proj`."""
        return sum(layer["v_proj"].weights for layer in self.matrices if "v_proj" in layer)

    @property
    def attention_layers(self) -> int:
        return len(self.attention)

    @property
    def backbone_parameters(self) -> int:
        """Return the number of weights of a critic: the model's without an untied LM head, plus a scalar head."""
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.parameters - head + self.hidden_size


class Attention(NamedTuple):
    """A layer's attention: the columns of queries and of keys, whether it has a sliding window, and whether the KV
    cache holds its keys and values (not if it reads those of an earlier layer)."""

    query: int
    key_value: int
    has_window: bool
    is_cached: bool


class Tensors(NamedTuple):
    """The shape of one tensor, and the number of weights in all tensors of the same name (one for each expert)."""

    shape: list[int]
    weights: int


def _matrices(shapes: Shapes) -> dict[str, Tensors]:
    """Return {name of a matrix, or full name of a vector: its `Tensors`} of a layer with the parameters `shapes`. The
    matrices of all experts together are named "experts"."""
    found: dict[str, Tensors] = {}
    for name, shape in shapes.items():
        matrix = "experts" if ".experts." in f".{name}" else name.removesuffix(".weight").rpartition(".")[2]
        key = matrix if len(shape) == 2 else name
        first, weights = found.get(key, (shape, 0))
        found[key] = Tensors(first, weights + prod(shape))
    return found


def _weights(layer: Mapping[str, Tensors]) -> int:
    return sum(tensors.weights for tensors in layer.values())


_SIDE_BY_SIDE = (
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("q_b_proj",), ("kv_b_proj",), ("qkv_proj",), ("o_proj",), OF_A_DELTA_NET, ("in_proj",), ("out_proj",), ("experts",),
    ("shared_expert_gate",), ("gate_proj", "up_proj"), ("gate_up_proj",), ("down_proj",), ("per_layer_input_gate",), ("per_layer_projection",),
)  # fmt: skip
"""Groups of matrices that a layer stores as one matrix (csrc/model/parameters.cpp)."""


class AdapterSizes(NamedTuple):
    """The numbers of weights that LoRA adds to a model: `trained`, those of all matrices A and B, and `kept`, those in
    the frozen copy that `lora_cfg.merge` keeps of the adapted base matrices and of those stored together with them."""

    trained: int
    kept: int


def adapter_sizes(lora: Adapters, sizes: ModelSizes) -> AdapterSizes:
    """Return the numbers of weights that LoRA adds to a model with the sizes `sizes`."""
    layers = LayerKinds.of(sizes, lora.joins)
    modules, trained, kept = set(adapted_modules(lora, layers)), 0, 0
    for layer, matrices in enumerate(sizes.matrices):
        for name, parts in FUSED.items():
            rows = sum(matrices[part].shape[0] for part in parts if part in matrices)
            matrices = {name: Tensors([rows, sizes.hidden_size], rows * sizes.hidden_size), **matrices}
        adapted = {name for name in layers.matrices(layer) if layers.module(layer, name) in modules}
        trained += lora.dim * sum(sum(matrices[name].shape) for name in adapted - {"experts"})
        if "experts" in adapted:  # gate and up share A
            inner = sizes.mlp_matrices * sizes.intermediate_size
            trained += lora.dim * sizes.experts * (inner + 2 * (sizes.latent_size or sizes.hidden_size))
        together = {name for group in _SIDE_BY_SIDE if adapted.intersection(group) for name in group}
        kept += sum(matrices[name].weights for name in together if name in matrices)
    return AdapterSizes(trained, kept)


class KnownModel(NamedTuple):
    """A model on the Hub: its name, its `model_type`, and the keys of its config.json that set its sizes."""

    name: str
    model_type: str
    config: dict[str, Plain]

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(native_config(self.config))


_QUANTISED = MATRICES.keys() - {"in_proj_a", "in_proj_b", "shared_expert_gate"}
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_COLUMNS = (*_NEEDED[:-1], "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")


def _known_models() -> Iterator[KnownModel]:
    table = tomllib.loads(Path(__file__).with_name("known_models.toml").read_text(encoding="utf-8"))
    for model_type, rows in table.items():
        for name, row in rows.items():
            more = row[len(_COLUMNS)] if len(row) > len(_COLUMNS) else {}
            config = {"model_type": model_type, "sliding_window": None, **dict(zip(_COLUMNS, row)), **more}
            if "layer_types" in config:
                kinds = {"M": "mamba", "*": "attention", "S": SLIDING, "F": FULL}
                config["layer_types"] = [kinds[letter] for letter in config["layer_types"]]
            yield KnownModel(name, model_type, config)


KNOWN_MODELS = tuple(_known_models())
_VARIANT = re.compile(r"-(base|instruct|chat(-v[\d.]+)?|v0\.[123]|it|sft|dpo|coder|thinking(-2507)?|instruct-2507)$")


def known_model(name: str) -> KnownModel | None:
    """Return the known model `name`, also if the name lacks the owner or ends in a suffix such as -Instruct; otherwise
    None."""
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


def model_sizes(model_name: str, overrides: dict[str, object] | None) -> ModelSizes | None:
    """Return the sizes of the model `model_name` on this machine, from its folder's config.json and `overrides` of it.
    Return None if the folder is missing, or if its file is unreadable or lacks sizes, which other checks report."""
    config: Mapping[str, Plain] = TINY_CONFIG if model_name == TINY_RANDOM else {}
    folder = local_folder(model_name)
    try:
        if folder is not None and (folder / "config.json").is_file():
            config = text_section(read_config_file(folder))
        elif model_name.rpartition("/")[2].lower() == "smollm2-135m-instruct" and (packaged := known_model(model_name)):
            config = packaged.config  # the packaged model may not be downloaded yet
    except ModelFolderError:
        return None
    try:
        return ModelSizes.of(native_config(canonical_config(config, overrides)))
    except ModelFolderError:
        return _sizes_for_transformers({**config, **(overrides or {})})


def _sizes_for_transformers(config: Mapping[str, Plain]) -> ModelSizes | None:
    """Return the sizes of a model that the native core does not compute, with all layers like those of a Llama or, with
    experts, of a Mixtral; None if the config.json lacks sizes."""
    optional = [name for name in ("num_key_value_heads", "head_dim") if config.get(name)]
    sizes = {name: value for name in (*_NEEDED, *optional) if is_size(value := config.get(name))}
    if len(sizes) < len(_NEEDED) + len(optional):
        return None
    heads = sizes["num_attention_heads"]
    latent = [config.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    head_dim = sum(latent) if all(map(is_size, latent)) else sizes["hidden_size"] // heads
    native = native_config(KNOWN_MODELS[0].config) | {
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "layers": [(0, 0)] * sizes["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": sizes.get("num_key_value_heads", heads),
        "head_dim": sizes.get("head_dim", head_dim),
        "vocab_size": sizes["vocab_size"],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    count = next((value for name in EXPERT_COUNTS if is_size(value := config.get(name))), 1)
    if count > 1:
        names = ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
        chosen, width, shared = (value if is_size(value := config.get(name)) else None for name in names)
        width = width or sizes["intermediate_size"]
        native["experts"] = {
            "layers": list(range(sizes["num_hidden_layers"])), "count": count, "chosen": chosen or 1, "intermediate_size": width,
            "shared_size": (shared or 0) * width, "latent_size": 0, "has_biases": False, "block": "mlp", "router": "gate", "gate": "gate_proj",
            "up": "up_proj", "down": "down_proj", "shared": "shared_experts", "shared_gate": False, "beside_mlp": False,
        }  # fmt: skip
    return ModelSizes.of(native)
