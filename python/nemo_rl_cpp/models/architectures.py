"""The table of supported architectures: the layers' structure and config.json's defaults of each model_type."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.files.yaml_text import Plain

Form = Mapping[str, Plain]  # a configuration with the defaults of its model_type
FULL, SLIDING, RECURRENT, MLP = "full_attention", "sliding_attention", "linear_attention", "mlp"
DENSE, SPARSE = "dense", "sparse"  # entries of mlp_layer_types
PATTERN = {"M": RECURRENT, "*": FULL, "-": MLP, "E": MLP}  # letters of hybrid_override_pattern; E: experts


def _all_sliding(form: Form) -> list[str]:
    return [SLIDING] * form["num_hidden_layers"]


def _sliding_unless_listed(form: Form) -> list[str]:
    return form.get("layer_types") or _all_sliding(form)


def _listed(form: Form, every: int, others: str = SLIDING) -> list[str]:
    """Return the kinds of the layers: layer_types if set, otherwise every `every`-th is FULL, and the rest `others`."""
    count = form["num_hidden_layers"]
    return form.get("layer_types") or [FULL if (i + 1) % every == 0 else others for i in range(count)]


def _where_switched_on(slides: Callable[[Form, int], bool]) -> Callable[[Form], list[str]]:
    """Return a function that maps a config.json to its layers' kinds: all FULL if use_sliding_window is false,
    otherwise layer_types. If that key is missing, the layers i with slides(form, i) are SLIDING, the others FULL."""

    def layer_types(form: Form) -> list[str]:
        if not form["use_sliding_window"]:
            return [FULL] * form["num_hidden_layers"]
        count = form["num_hidden_layers"]
        return form.get("layer_types") or [SLIDING if slides(form, i) else FULL for i in range(count)]

    return layer_types


def _smollm3_rotary(form: Form) -> list[bool]:
    every = form["no_rope_layer_interval"]
    return form.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(form["num_hidden_layers"])]


def _exaone_layers(form: Form) -> list[str]:
    if form["sliding_window"] is None:
        return form.get("layer_types") or [FULL] * form["num_hidden_layers"]
    return _listed(form, form["sliding_window_pattern"])


def _granite_factors(form: Form) -> dict[str, float]:
    return {
        "attention_scale": form["attention_multiplier"],
        "embedding_multiplier": form["embedding_multiplier"],
        "residual_multiplier": form["residual_multiplier"],
        "logit_multiplier": 1 / form["logits_scaling"],
    }


def _gemma4_factors(form: Form) -> dict[str, float]:
    softcap = form.get("final_logit_softcapping") or 0.0
    return {"attention_scale": 1.0, "embedding_multiplier": form["hidden_size"] ** 0.5, "logit_softcap": softcap}


def _gemma_factors(form: Form) -> dict[str, float]:
    return {
        "attention_scale": form["query_pre_attn_scalar"] ** -0.5,
        "embedding_multiplier": form["hidden_size"] ** 0.5,
        "attention_softcap": form.get("attn_logit_softcapping") or 0.0,
        "logit_softcap": form.get("final_logit_softcapping") or 0.0,
    }


class Experts(NamedTuple):
    """The keys of config.json and the tensor names for the mixture of experts of a model_type.

    Attributes:
        count, width, chosen: keys of the number of experts, of each expert's intermediate size, and of the number of
            experts that process a token.
        renormalise: key that sets whether the weights of a token's experts are scaled to sum to 1; None: always.
        shared: key of the intermediate size of the shared expert, an MLP that processes all tokens; or
            n_shared_experts, by which the experts' intermediate size is multiplied. None: no shared expert.
        shared_gate: a sigmoid gate multiplies the shared expert's output.
        has_biases: router and experts have biases.
        sigmoid: the router's scores are sigmoids, and a bias is added to them for choosing experts.
        epsilon: added to the sum by which a sigmoid router divides the scores of chosen experts.
        beside_mlp: the shared expert is the layer's MLP, and both have separate norms (Gemma 4).
        block, router, gate, up, down: checkpoint names of a layer's expert block (empty: the layer itself), of its
            router, and of an expert's matrices."""

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    renormalise: str | None = "norm_topk_prob"
    shared: str | None = None
    shared_gate: bool = True
    has_biases: bool = False
    sigmoid: bool = False
    epsilon: float = 1e-20
    chosen: str = "num_experts_per_tok"
    beside_mlp: bool = False
    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def sizes(self) -> tuple[str, ...]:
        groups = ("n_group", "topk_group") if self.sigmoid else ()
        return (self.count, self.chosen, self.width, *([self.shared] if self.shared else []), *groups)


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that config.json may use for the number of experts."""


DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers")
"""The names that config.json may use for the number of layers before the first with experts."""


def has_experts(form: Mapping[str, Plain]) -> bool:
    """Return whether the model of the config.json `form` has experts: not if hybrid_override_pattern has no E,
    num_local_experts is 0, or enable_moe_block is false."""
    has_pattern = "E" in str(form.get("hybrid_override_pattern", "E"))
    return has_pattern and form.get("num_local_experts") != 0 and bool(form.get("enable_moe_block", True))


def layers_with_experts(form: Form) -> list[int]:
    """Return the indices of the layers with a mixture of experts, according to hybrid_override_pattern, to
    mlp_layer_types, or to mlp_only_layers, decoder_sparse_step and the number of dense layers before the first."""
    if pattern := form.get("hybrid_override_pattern"):
        return [layer for layer, letter in enumerate(pattern) if letter == "E"]
    if "mlp_layer_types" in SUPPORTED_ARCHITECTURES[form["model_type"]].defaults and (kinds := form["mlp_layer_types"]):
        return [layer for layer, kind in enumerate(kinds) if kind == SPARSE]
    dense, every = form.get("mlp_only_layers") or (), form.get("decoder_sparse_step", 1)
    layers = range(next((form[key] for key in DENSE_LAYERS if key in form), 0), form["num_hidden_layers"])
    return [layer for layer in layers if layer not in dense and (layer + 1) % every == 0]


class Architecture(NamedTuple):
    """The description of a model_type: its class name in transformers, the structure of its layers, and the defaults of
    config.json.

    Attributes:
        title: prefix of the class names in transformers, such as Llama.
        norms: name of each norm of a layer, by place: before or after attention and MLP (csrc/model/config.h).
        qk_norm: norm of queries and keys: "none", "head" (each head separately) or "whole" (all heads together);
            if the defaults have the key use_qk_norm, only where it is true.
        biases: which biases the architecture has: "qkv" (q_proj, k_proj, v_proj), "qkv if set" (these if attention_bias
            is set), "attention" (these and o_proj if attention_bias is set), "mlp" (if mlp_bias is set).
        layer_types: returns the kind of each layer; a SLIDING layer attends to sliding_window tokens, or to all
            tokens if that key is null.
        lists_layers: the canonical config.json always has layer_types.
        rotary: returns, for each layer, whether it applies RoPE.
        rope_theta: default if config.json has none.
        local_rope: set if SLIDING layers have a separate RoPE: (key of its theta in transformers 4, default theta).
        partial_rotary: partial_rotary_factor is supported.
        fused: the fused matrices of the checkpoint: "qkv" (qkv_proj), "gate_up" (gate_up_proj).
        rope_interleaved: RoPE rotates adjacent dimensions of a head together, instead of those of its two halves.
        norm_offset: added to a norm's weight before multiplying.
        factors: returns the scales, multipliers and softcaps that differ from the defaults in `native_config`.
        only: maps a key of config.json to its only supported value.
        activation: key of the MLP's activation.
        experts: the mixture of experts; None: every layer has one MLP.
        output_gate: the query projection also returns a gate, whose sigmoid multiplies the attention's output.
        clamped: the experts' gated activation is clamped (csrc/kernels/swiglu.h).
        sinks: each attention head has a learned sink.
        rope_section: default for rope_parameters if config.json has none.
        reads_mxfp4: the experts' matrices may be quantised to MXFP4, and are read into bfloat16.
        recurrent: keys of the sizes of RECURRENT layers: RECURRENT_SIZES, MAMBA2_SIZES, GRANITE_SIZES or LFM2_SIZES.
        mlp_width: key of the MLP's intermediate size.
        one_block: each layer has only a mixer, or only an MLP or experts without gates (models/nemotron_h.py).
        latent: the model has multi-head latent attention (models/latent_attention.py)."""

    title: str
    defaults: dict[str, Plain]
    biases: tuple[str, ...] = ("attention",)
    qk_norm: str = "none"
    norms: Mapping[str, str] = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
    layer_types: Callable[[Form], list[str]] = lambda form: [FULL] * form["num_hidden_layers"]
    lists_layers: bool = False
    rotary: Callable[[Form], list[bool]] = lambda form: [True] * form["num_hidden_layers"]
    rope_theta: float = 10000.0
    local_rope: tuple[str | None, float] | None = None
    partial_rotary: bool = False
    fused: tuple[str, ...] = ()
    rope_interleaved: bool = False
    norm_offset: float = 0.0
    factors: Callable[[Form], dict[str, float]] = lambda form: {}
    only: Mapping[str, Plain] = {}
    activation: str = "hidden_act"
    experts: Experts | None = None
    output_gate: bool = False
    clamped: bool = False
    sinks: bool = False
    rope_section: Mapping[str, Plain] | None = None
    reads_mxfp4: bool = False
    recurrent: tuple[str, ...] = ()
    mlp_width: str = "intermediate_size"
    one_block: bool = False
    latent: bool = False


RECURRENT_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
"""Keys of config.json with the sizes of a gated delta net: key heads, value heads, their sizes, the convolution's width."""
MAMBA2_SIZES = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
"""Keys of config.json with the sizes of Mamba-2: groups, heads, state size, head size, the convolution's width."""
GRANITE_SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
"""The keys of the same sizes in Granite 4."""
LFM2_SIZES = ("conv_L_cache",)
"""Key of the width of LFM2's gated short convolution, whose other sizes are hidden_size."""
WITH_A_TEXT_SECTION = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "gemma4_unified": ("gemma4_text", "Gemma4ForCausalLM"),
    "mistral3": ("ministral3", "Ministral3ForCausalLM"),
}
"""model_type of a vision-language model -> model_type and class of its text_config. Only the text model is computed."""


def _read_defaults() -> dict[str, dict[str, Plain]]:
    """Return {model_type: transformers 5's defaults for keys that config.json omits}, from config_defaults.json. An
    entry of this file that names an earlier one as `like` also has the keys of the earlier one."""
    defaults: dict[str, dict[str, Plain]] = {}
    for name, own in json.loads(Path(__file__).with_name("config_defaults.json").read_text(encoding="utf-8")).items():
        defaults[name] = defaults.get(own.pop("like", ""), {}) | own
    return defaults


_DEFAULTS = _read_defaults()
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_MINISTRAL_ROPE = {
    "rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_QWEN3_5_LAYERS = Architecture(
    "Qwen3_5Text", _DEFAULTS["qwen3_5_text"], biases=(), qk_norm="head", norm_offset=1.0, partial_rotary=True,
    layer_types=lambda form: _listed(form, form["full_attention_interval"], RECURRENT), lists_layers=True, output_gate=True,
    only={"attention_bias": False, "hidden_act": "silu"},  # also the activation of gated delta nets
    recurrent=RECURRENT_SIZES,
)  # fmt: skip
_GEMMA4_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_BEHIND = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
AROUND = {"before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm", **_BEHIND}
"""The norms of Gemma's layers."""
_BEHIND_THE_FIRST = _where_switched_on(lambda form, i: i >= form["max_window_layers"])
_LFM2_LAYERS = Architecture(
    "Lfm2", _DEFAULTS["lfm2"], biases=(), qk_norm="head", norms={"before_attention": "operator_norm", "before_mlp": "ffn_norm"}, rope_theta=1000000.0,
    layer_types=lambda form: [FULL if kind == FULL else RECURRENT for kind in form["layer_types"]], recurrent=LFM2_SIZES,
    only={"conv_bias": False, "hidden_act": "silu"},
)  # fmt: skip
_SIGMOID_EXPERTS = Experts("n_routed_experts", shared="n_shared_experts", shared_gate=False, sigmoid=True)
SUPPORTED_ARCHITECTURES = {
    "llama": Architecture("Llama", _DEFAULTS["llama"], biases=("attention", "mlp")),
    "mistral": Architecture("Mistral", _DEFAULTS["mistral"], biases=(), layer_types=_sliding_unless_listed),
    "ministral3": Architecture(
        "Ministral3", _DEFAULTS["ministral3"], biases=(), rope_theta=1000000.0, rope_section=_MINISTRAL_ROPE, only={"sliding_window": None}
    ),
    "olmo2": Architecture("Olmo2", _DEFAULTS["olmo2"], qk_norm="whole", norms=_BEHIND),
    "olmo3": Architecture(
        "Olmo3", _DEFAULTS["olmo3"], qk_norm="whole", norms=_BEHIND, layer_types=lambda form: _listed(form, 4),
        lists_layers=True, rope_theta=500000.0, local_rope=(None, 500000.0),
    ),
    "qwen2": Architecture("Qwen2", _DEFAULTS["qwen2"], biases=("qkv",), layer_types=_BEHIND_THE_FIRST),
    "qwen3": Architecture(
        "Qwen3", _DEFAULTS["qwen3"], qk_norm="head", layer_types=_BEHIND_THE_FIRST
    ),
    "smollm3": Architecture(
        "SmolLM3", _DEFAULTS["smollm3"], biases=("attention", "mlp"), rotary=_smollm3_rotary, rope_theta=2000000.0,
        layer_types=_where_switched_on(lambda form, i: not _smollm3_rotary(form)[i]),
    ),
    "exaone4": Architecture(
        "Exaone4", _DEFAULTS["exaone4"], biases=(), qk_norm="head", norms=_BEHIND, layer_types=_exaone_layers, lists_layers=True,
        rotary=lambda form: [form["sliding_window"] is None or kind == SLIDING for kind in _exaone_layers(form)],
    ),
    "seed_oss": Architecture(
        "SeedOss", _DEFAULTS["seed_oss"], biases=("qkv if set", "mlp"), only={"attention_out_bias": False}
    ),
    "ernie4_5": Architecture(
        "Ernie4_5", _DEFAULTS["ernie4_5"], biases=(), rope_theta=500000.0, rope_interleaved=True, only={"use_bias": False}
    ),
    "glm4": Architecture(
        "Glm4", _DEFAULTS["glm4"], biases=("qkv if set",), partial_rotary=True, rope_interleaved=True, fused=("gate_up",),
        norms={
            "before_attention": "input_layernorm", "after_attention": "post_self_attn_layernorm",
            "before_mlp": "post_attention_layernorm", "after_mlp": "post_mlp_layernorm",
        },
    ),
    "granite": Architecture("Granite", _DEFAULTS["granite"], biases=("attention", "mlp"), factors=_granite_factors),
    "granitemoe": Architecture(
        "GraniteMoe", _DEFAULTS["granitemoe"], factors=_granite_factors, experts=Experts("num_local_experts", "intermediate_size", None, router="router")
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybrid", _DEFAULTS["granitemoehybrid"], factors=_granite_factors, recurrent=GRANITE_SIZES, mlp_width="shared_intermediate_size",
        layer_types=lambda form: [RECURRENT if kind == "mamba" else FULL for kind in form["layer_types"]],
        rotary=lambda form: [form["position_embedding_type"] == "rope"] * form["num_hidden_layers"],
        experts=Experts("num_local_experts", "intermediate_size", None, shared="shared_intermediate_size", shared_gate=False, router="router"),
        only={"hidden_act": "silu", "mamba_conv_bias": True, "mamba_proj_bias": False},
    ),
    "phi3": Architecture(
        "Phi3", _DEFAULTS["phi3"], biases=(), layer_types=_all_sliding, partial_rotary=True, fused=("qkv", "gate_up")
    ),
    "gemma2": Architecture(
        "Gemma2", _DEFAULTS["gemma2"], norm_offset=1.0, activation="hidden_activation", layer_types=lambda form: _listed(form, 2), lists_layers=True,
        norms=AROUND, factors=_gemma_factors, only={"use_bidirectional_attention": False},
    ),
    "gemma3_text": Architecture(
        "Gemma3Text", _DEFAULTS["gemma3_text"], qk_norm="head", norm_offset=1.0, activation="hidden_activation",
        layer_types=lambda form: _listed(form, form["sliding_window_pattern"]), lists_layers=True,
        norms=AROUND, rope_theta=1000000.0, local_rope=("rope_local_base_freq", 10000.0), factors=_gemma_factors,
        only={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    ),
    "gemma4_text": Architecture(
        "Gemma4Text", _DEFAULTS["gemma4_text"], biases=(), qk_norm="head", activation="hidden_activation",
        layer_types=lambda form: form["layer_types"], norms=AROUND,
        rope_theta=1000000.0, local_rope=(None, 10000.0), rope_section=_GEMMA4_ROPE, factors=_gemma4_factors, only={"attention_bias": False},
        experts=Experts(chosen="top_k_experts", renormalise=None, shared="intermediate_size", shared_gate=False, beside_mlp=True, block="", router="router.proj"),
    ),
    "qwen3_moe": Architecture(
        "Qwen3Moe", _DEFAULTS["qwen3_moe"], qk_norm="head", experts=Experts(),
        layer_types=lambda form: [SLIDING if form["use_sliding_window"] else FULL] * form["num_hidden_layers"],
    ),
    "olmoe": Architecture(
        "Olmoe", _DEFAULTS["olmoe"], qk_norm="whole", only={"clip_qkv": None}, experts=Experts(width="intermediate_size")
    ),
    "mixtral": Architecture(
        "Mixtral", _DEFAULTS["mixtral"], biases=(), layer_types=_all_sliding, rope_theta=1000000.0, only={"router_jitter_noise": 0.0},
        experts=Experts("num_local_experts", "intermediate_size", None, block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "qwen2_moe": Architecture(
        "Qwen2Moe", _DEFAULTS["qwen2_moe"], biases=("qkv",), only={"qkv_bias": True},
        layer_types=_where_switched_on(lambda form, i: i % 2 == 0 and i < form["max_window_layers"]),
        experts=Experts(shared="shared_expert_intermediate_size"),
    ),
    "glm4_moe": Architecture(
        "Glm4Moe", _DEFAULTS["glm4_moe"], biases=("qkv if set",), qk_norm="head", partial_rotary=True, experts=_SIGMOID_EXPERTS
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3", _DEFAULTS["deepseek_v3"], biases=(), latent=True, only={"attention_bias": False}, experts=_SIGMOID_EXPERTS
    ),
    "glm4_moe_lite": Architecture(
        "Glm4MoeLite", _DEFAULTS["glm4_moe_lite"], biases=(), latent=True, only={"attention_bias": False}, experts=_SIGMOID_EXPERTS
    ),
    "qwen3_5_text": _QWEN3_5_LAYERS,
    "qwen3_5_moe_text": _QWEN3_5_LAYERS._replace(
        title="Qwen3_5MoeText", defaults=_DEFAULTS["qwen3_5_moe_text"], experts=Experts(renormalise=None, shared="shared_expert_intermediate_size")
    ),
    "qwen3_next": _QWEN3_5_LAYERS._replace(
        title="Qwen3Next", defaults=_DEFAULTS["qwen3_next"], experts=Experts(shared="shared_expert_intermediate_size")
    ),
    "nemotron_h": Architecture(
        "NemotronH", _DEFAULTS["nemotron_h"], biases=(), norms={"before_attention": "norm", "before_mlp": "norm"}, activation="mlp_hidden_act",
        layer_types=lambda form: [PATTERN[letter] for letter in form["hybrid_override_pattern"]],
        rotary=lambda form: [False] * form["num_hidden_layers"], recurrent=MAMBA2_SIZES, one_block=True,
        experts=Experts("n_routed_experts", shared="moe_shared_expert_intermediate_size", shared_gate=False, sigmoid=True),
        only={
            "attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True,
            "mamba_hidden_act": "silu", "sliding_window": None, "tie_word_embeddings": False,
        },
    ),
    "lfm2": _LFM2_LAYERS,
    "lfm2_moe": _LFM2_LAYERS._replace(
        title="Lfm2Moe", defaults=_DEFAULTS["lfm2_moe"], experts=Experts(sigmoid=True, epsilon=1e-6), only=_LFM2_LAYERS.only | {"use_expert_bias": True}
    ),
    "gpt_oss": Architecture(
        "GptOss", _DEFAULTS["gpt_oss"], layer_types=lambda form: _listed(form, 2), lists_layers=True, rope_theta=150000.0, rope_section=_GPT_OSS_ROPE,
        sinks=True, clamped=True, reads_mxfp4=True, only={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        experts=Experts("num_local_experts", "intermediate_size", None, has_biases=True, router="router"),
    ),
}  # fmt: skip
"""model_type -> its description. Add an entry to support a new architecture."""
