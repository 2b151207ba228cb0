import math

import pytest
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.hf_config import (
    TINY_CONFIG,
    canonical_config,
    check_length,
    config_remarks,
    max_positions,
    native_config,
)
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes

QWEN = {
    "model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 32, "vocab_size": 100, "intermediate_size": 64,
    "num_hidden_layers": 4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_configs_of_transformers_4_and_5_are_converted_to_equal_canonical_configs():
    four = TINY_CONFIG | {
        "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}, "eos_token_id": [1, 2], "my_own": None,
    }  # fmt: skip
    five = {k: v for k, v in four.items() if not k.startswith("rope")} | {
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2}
    }
    form = canonical_config(four)
    assert form == canonical_config(five) == canonical_config(form)
    assert (
        form["rope_theta"] == 500.0
        and form["rope_scaling"] == {"rope_type": "linear", "factor": 2}
        and "rope_parameters" not in form
    )
    assert form["eos_token_id"] == [1, 2] and form["my_own"] is None and form["attention_bias"] is False


THETA = TINY_CONFIG | {"rope_theta": 500.0}


@pytest.mark.parametrize(
    "config, overrides, expected",
    [
        ({"model_type": "llama"}, None, {"max_position_embeddings": 2048}),
        (QWEN, None, {"num_key_value_heads": 32, "head_dim": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}),
        (QWEN | {"model_type": "qwen3"}, None, {"head_dim": 128}),
        (QWEN | {"num_key_value_heads": None}, None, {"num_key_value_heads": 32}),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, {"hidden_size": 128, "num_key_value_heads": None},
         {"head_dim": 32, "num_key_value_heads": 4}),
        # null keeps the model's value
        *((THETA, overrides, {"rope_theta": 500.0}) for overrides in (
            {"rope_theta": None}, {"rope_parameters": {"rope_theta": None}}, {"rope_scaling": None}, {"rope_scaling": YARN | {"rope_theta": None}},
        )),
        # the ratio of the position counts
        (TINY_CONFIG | {"max_position_embeddings": 128, "rope_scaling": YARN | {"factor": None}}, None, {"rope_scaling": YARN}),
    ],
)  # fmt: skip
def test_omitted_and_null_config_values_get_the_defaults_of_transformers(config, overrides, expected):
    form = canonical_config(config, overrides)
    assert {key: form[key] for key in expected} == expected


SLIDING = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    "config, windows, positions",
    [
        (QWEN, [0, 0, 0, 0], 32768),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0, 4096], 32768),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 4}, [0, 0, 0, 0], 32768),
        (QWEN | SLIDING | {"sliding_window": None, "max_window_layers": 0}, [0, 0, 0, 0], 32768),
        (QWEN | {"sliding_window": 16, "max_window_layers": 0}, [0, 0, 0, 0], 32768),
        (QWEN | SLIDING | {"layer_types": ["full_attention"] * 4, "max_window_layers": 0}, [0, 0, 0, 0], 32768),
        (TINY_CONFIG | SLIDING, [0, 0], 512),
        (TINY_CONFIG | {"model_type": "mistral", "sliding_window": 16}, [16, 16], 512),
        (TINY_CONFIG | {"model_type": "mistral", "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, [0, 16], 512),
        (QWEN | {"model_type": "olmo3", "hidden_size": 256, "use_sliding_window": False}, [4096, 4096, 4096, 0], 2048),
        (QWEN | {"model_type": "olmo3", "hidden_size": 256}, [4096, 4096, 4096, 0], 2048),
        (QWEN | {"model_type": "smollm3", "hidden_size": 256} | SLIDING, [0, 0, 0, 16], 32768),
        (QWEN | {"model_type": "exaone4"}, [4096, 4096, 4096, 0], 2048),
        (QWEN | {"model_type": "exaone4", "sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"] * 2}, [4096, 0, 4096, 0], 2048),
        (QWEN | {"model_type": "exaone4", "sliding_window": None}, [0, 0, 0, 0], 2048),
        (QWEN | {"model_type": "gemma3_text", "sliding_window_pattern": 2}, [4096, 0, 4096, 0], 131072),
        (QWEN | {"model_type": "qwen3_moe", "use_sliding_window": True}, [4096] * 4, 32768),
        (QWEN | {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 2}, [4096, 0, 0, 0],
         32768),
        (TINY_CONFIG | {"rope_scaling": YARN}, [0, 0], 128),
        (TINY_CONFIG | {"rope_scaling": {"type": "linear", "factor": 1.5}}, [0, 0], 768),
    ],
)  # fmt: skip
def test_sliding_windows_and_maximum_length_match_the_model_config(config, windows, positions):
    form = canonical_config(config | {"head_dim": 16})
    assert [window for window, _ in native_config(form)["layers"]] == windows and max_positions(form) == positions


def test_each_layer_uses_the_rope_table_of_its_attention_type_or_no_rope():
    tables = lambda config: [table for _, table in native_config(QWEN | {"hidden_size": 256} | config)["layers"]]  # noqa: E731
    assert tables({"model_type": "smollm3"}) == [0, 0, 0, None]
    assert tables({"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0]}) == [None, 0, 0, None]
    assert tables({"model_type": "exaone4"}) == [0, 0, 0, None]
    assert tables({"model_type": "exaone4", "sliding_window": None}) == [0, 0, 0, 0]
    gemma = {"model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_theta": 9.0, "rope_local_base_freq": 4.0}
    assert tables(gemma) == [1, 0, 1, 0]
    full, local = native_config(QWEN | gemma | {"head_dim": 8})["ropes"]
    assert (full[0][1], local[0][1]) == pytest.approx((9**-0.25, 4**-0.25))


LINEAR = {"rope_type": "linear", "factor": 2.0}
GEMMA = QWEN | {"model_type": "gemma3_text"}
BY_KIND = GEMMA | {
    "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
}


@pytest.mark.parametrize(
    "config, overrides, full, sliding_theta",
    [
        (BY_KIND, {"rope_theta": 9.0}, LINEAR | {"rope_theta": 9.0}, 7.0),
        (BY_KIND, {"rope_local_base_freq": 9.0}, LINEAR | {"rope_theta": 5.0}, 9.0),
        (BY_KIND, {"rope_scaling": {"type": "linear", "factor": 3.0}}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 5.0}, 7.0),
        (BY_KIND, {"rope_scaling": {"factor": 3.0}}, {"rope_type": "linear", "factor": 3.0, "rope_theta": 5.0}, 7.0),
        (BY_KIND, {"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5.0}, 7.0),
        (BY_KIND, {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, LINEAR | {"rope_theta": 5.0}, 9.0),
        (BY_KIND | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, None, {"rope_type": "linear", "factor": 3.0, "rope_theta": 5.0}, 7.0),
        ({"model_type": "gemma3", "text_config": BY_KIND}, {"text_config": {"rope_theta": 9.0}}, LINEAR | {"rope_theta": 9.0}, 7.0),
    ],
)  # fmt: skip
def test_overrides_change_the_rope_of_one_kind_of_layers_and_keep_the_rest(config, overrides, full, sliding_theta):
    sections = canonical_config(config, overrides)["rope_parameters"]
    assert sections == {
        "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
    }  # fmt: skip


def test_model_config_determines_the_moe_layers_and_the_shapes_of_their_tensors():
    config = QWEN | {
        "model_type": "qwen2_moe", "hidden_size": 256, "num_local_experts": 6, "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
    }  # fmt: skip
    experts = native_config(config)["experts"]
    assert experts["layers"] == [3] and experts["count"] == 6 and experts["shared_size"] == 5632
    shapes = parameter_shapes(native_config(config))
    assert shapes["model.layers.3.mlp.experts.5.gate_proj.weight"] == [1408, 256]
    assert "model.layers.3.mlp.gate_proj.weight" not in shapes and "model.layers.2.mlp.gate_proj.weight" in shapes
    assert canonical_config(config)["num_experts"] == 6 and "num_local_experts" not in canonical_config(config)


def test_maximum_sequence_length_selects_the_short_or_long_longrope_table():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = QWEN | {"model_type": "phi3", "hidden_size": 256, "rope_scaling": scaling, "max_position_embeddings": 8192}
    short, factor = native_config(config, max_length=4096)["ropes"][0]
    long, same = native_config(config, max_length=4097)["ropes"][0]
    assert short == [2 * f for f in long] and factor == same == pytest.approx(
        math.sqrt(1 + math.log(2) / math.log(4096))
    )


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
        ({"model_type": "qwen3_next", "hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', which is not supported: .silu. was expected"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported: null was expected"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', which is not supported"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, but a number of layers that leaves one of each kind before them"),
        ({"model_type": "gemma4_text", "global_head_dim": 520}, "global_head_dim is 520, but a multiple of 8 up to 512"),
        ({"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config is .*, but one head_dim and num_key_value_heads for the layers .'3'."),
        ({"model_type": "gemma4_text", "vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input is 5, but vocab_size"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1}, "final_logit_softcapping is -1, but a number above 0 was expected"),
        ({"model_type": "olmo3", "layer_types": ["chunked_attention"] * 4}, "layer_types has .'chunked_attention'., which is not supported"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is .1., but a list of num_hidden_layers 4 entries"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier is 0, but a number above 0 was expected"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 3, "num_experts": 2}, "num_experts_per_tok is 3, but there are 2 experts"),
        ({"model_type": "qwen3_moe", "output_router_logits": True}, "output_router_logits is true, which adds the router's auxiliary loss"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0}, "decoder_sparse_step is 0, but a whole number above 0"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported"),
        ({"model_type": "glm4_moe", "n_group": 3}, "num_experts_per_tok 8 of topk_group 1 of n_group 3 groups of the 128 experts is no possible choice"),
        ({"model_type": "glm4_moe", "n_group": 64, "topk_group": 3}, "is no possible choice"),
        ({"model_type": "glm4_moe", "n_group": 0}, "n_group is 0, but a whole number above 0 was expected"),
        ({"model_type": "glm4_moe", "first_k_dense_replace": -1}, "first_k_dense_replace is -1, but a whole number from 0 was expected"),
        ({"model_type": "glm4_moe", "routed_scaling_factor": "x"}, "routed_scaling_factor is 'x', but a number above 0 was expected"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 1}, "num_key_value_heads is 1, but num_attention_heads 32 was expected"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 32, "head_dim": 48}, "head_dim is 48, but qk_rope_head_dim 64 was expected"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 32, "v_head_dim": 200}, "values of at most qk_nope_head_dim . qk_rope_head_dim = 192 are"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 32, "qk_nope_head_dim": 0}, "qk_nope_head_dim is 0, but a whole number above 0"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 32, "q_lora_rank": 0}, "q_lora_rank is 0, but a whole number above 0 or null"),
        ({"model_type": "glm4_moe_lite", "num_key_value_heads": 32, "qk_nope_head_dim": 256}, "qk_nope_head_dim . qk_rope_head_dim 320 is not supported"),
        ({"model_type": "glm4_moe_lite", "num_key_value_heads": 32, "mlp_layer_types": ["dense"]}, "mlp_layer_types is .'dense'., but a list of num_hidden_layers 4"),
        ({"is_causal": False}, "is_causal is False, but true, for causal attention, was expected"),
        ({"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config is .*, but null, one size of layers, was expected"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported: only 1 is"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.short_factor is .1.0., but a list of 4 numbers"),
    ],
)  # fmt: skip
def test_error_for_an_unsupported_layer_setting_of_a_model_names_its_config_key(config, sentence):
    with pytest.raises(ModelFolderError, match=sentence):
        native_config(QWEN | {"hidden_size": 256} | config)


@pytest.mark.parametrize(
    "keys, remark",
    [
        ({}, None),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 10000.0}}, None),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
         "rope_scaling and rope_parameters differ: rope_scaling counts"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling has factor but no rope_type that reads them"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, but training computes without dropout"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
         "auto_map names code of the model's own, which is not run"),
    ],
)  # fmt: skip
def test_contradictory_or_ignored_settings_of_a_model_config_give_a_warning(keys, remark):
    said = list(config_remarks(TINY_CONFIG | keys))
    assert said == [] if remark is None else [text for text in said if remark in text] == said != []


VALUES = [None, True, 0, -1, 1.5, float("nan"), float("inf"), 10**400, "", "x", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "hidden_act",
                                 "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "max_window_layers", "sliding_window",
                                 "original_max_position_embeddings", "partial_rotary_factor", "max_position_embeddings", "quantization_config", "no_rope_layers",
                                 "no_rope_layer_interval", "sliding_window_pattern", "query_pre_attn_scalar", "final_logit_softcapping", "residual_multiplier", "num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
                                 "shared_expert_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "output_router_logits", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "rope_interleave",
                                 "mlp_layer_types"])  # fmt: skip
def test_arbitrary_model_config_values_are_accepted_or_give_an_error_with_a_message(key):
    base = QWEN | {"hidden_size": 256, "use_sliding_window": True, "rope_scaling": YARN}
    for value in VALUES:
        for arguments in (
            *(
                (base | {"model_type": kind, key: value},)
                for kind in ("smollm3", "granite", "phi3", "olmo3", "gemma2", "gemma3_text", "qwen2_moe")
            ),
            (base | {"model_type": "glm4_moe_lite", "num_key_value_heads": 32, key: value},),
            (base | {key: value},),
            (base, {key: value}),
            (base | {"rope_scaling": YARN | {key: value}},),
            (base | {key: value}, {"rope_scaling": {"factor": 2.0}}),
            (TINY_CONFIG, {"rope_scaling": {key: value}}),
        ):
            try:
                native_config(canonical_config(*arguments), max_length=8)
            except ModelFolderError as refusal:
                assert "\n" not in str(refusal)


@pytest.mark.parametrize("kind", ["ministral3", "mistral"])
def test_text_model_of_a_mistral3_is_read_from_its_section(kind):
    text = {"model_type": kind, "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    whole = {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}, "text_config": text}
    assert canonical_config(whole) == canonical_config(text) | {"architectures": [f"{kind.capitalize()}ForCausalLM"]}


def test_sequences_in_which_ministral_3_would_scale_queries_are_an_error():
    config = canonical_config({"model_type": "ministral3"})
    check_length(config, 16384, "policy.max_total_sequence_length", "it")
    with pytest.raises(ModelFolderError, match="is 16385, but it has positions for 16384 .*llama_4_scaling_beta"):
        check_length(config, 16385, "policy.max_total_sequence_length", "it")
