import json
from dataclasses import replace
from types import MappingProxyType

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny
import tokenizer_folders
import torch
from block_matrices import blocks_in, blocks_of
from nemo_rl_cpp import load
from nemo_rl_cpp._native import C
from nemo_rl_cpp.checks.model import check
from nemo_rl_cpp.config import ConfigError, load_grpo_config
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.hub.sources import SourceError, resolve_model
from nemo_rl_cpp.models.gguf_export import compare_with_folder, export_gguf
from nemo_rl_cpp.models.hf_config import read_config
from nemo_rl_cpp.models.model_folder import read_model_folder, tiny_random
from nemo_rl_cpp.models.weights import initialize_weights, named_views, save_weights
from test_gguf_export import TEXTS, TOKENIZERS, WRITTEN, make, tokenizer_folder, write_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_RL_CPP_CACHE", str(tmp_path / "cache"))


def weights_of(path):
    """Return {name: weight} of the native model, whatever names the folder's tensors have."""
    opened = read_model_folder(path)
    model = C.DecoderModel(opened.native(), torch.float32, False)
    opened.fill(model)
    return named_views(model.specs, model.compute)


@pytest.mark.parametrize("name", WRITTEN)
def test_model_read_from_a_gguf_file_has_configuration_and_weights_of_the_exported_model(name, tmp_path, monkeypatch):
    """A file that cannot store a sliding window has positions for one window only, so that the window makes no
    difference."""
    folder, _ = make(name, tmp_path, monkeypatch)
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    expected, found = read_model_folder(folder), read_model_folder(resolve_model(tmp_path / "model.gguf"))
    found.check_weights()
    before, after = expected.native(), found.native()
    if before["layers"] != after["layers"]:
        assert after["layers"] == [(0, rotary) for _, rotary in before["layers"]]
        assert found.config["max_position_embeddings"] <= expected.config["sliding_window"]
    unequal = {"layers": None, "fused_mlps": None}  # Granite 4 without Mamba-2 becomes Granite
    assert {**before, **unequal} == {**after, **unequal}
    before, after = weights_of(folder), weights_of(found.path)
    assert before.keys() == after.keys()
    inexact = (
        "gemma",
        "qwen3_5",
        "qwen3_next",
        "granite_4",
        "nemotron_h",
    )  # norms are 1 + w in the file, A_log is -exp(A_log)
    offset = 1e-6 if name.startswith(inexact) else 0
    assert all((before[key] - after[key]).abs().max() <= offset for key in before)
    assert compare_with_folder(tmp_path / "model.gguf", folder).max_logit <= 1e3 * offset


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_read_from_a_gguf_file_encodes_and_decodes_like_the_exported_tokenizer(name, tmp_path):
    folder = tokenizer_folder(name, tmp_path)
    if name == "qwen":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    export_gguf(folder, tmp_path / "model.gguf", "f16")
    expected, found = (Tokenizer.from_pretrained(path) for path in (folder, resolve_model(tmp_path / "model.gguf")))
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == expected.decode(ids)
    assert (found.bos_token, found.eos_token) == (expected.bos_token, expected.eos_token)
    assert set(found.eos_token_ids) == set(expected.eos_token_ids)
    assert found.chat_template == expected.chat_template


SAME_RULES = {
    "gpt2": ("olmo", "granite-docling", "exaone4", "smollm", "refact"),
    "llama3": ("llama-bpe", "lfm2", "pixtral", "dbrx", "glm4", "chatglm-bpe"),
}


def test_tokenizers_whose_rule_has_another_name_in_llama_cpp_encode_like_llama_cpp(tmp_path):
    """Without add_bos_token, as in many files of Llama 3, the rule determines whether a text begins with BOS."""
    jobs, expected, replaced = [], [], ("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    for name, rules in SAME_RULES.items():
        folder = tokenizer_folder(name, tmp_path)
        export_gguf(folder, folder / "model.gguf", "f32")
        for rule in rules:
            add = lambda writer, rule=rule: writer.add_tokenizer_pre(rule)  # noqa: E731
            file = rewritten(folder / "model.gguf", tmp_path / f"{rule}.gguf", *replaced, change=add)
            jobs.append({"file": str(file), "prompt": [5, 6, 7], "count": 1, "texts": TEXTS})
            expected.append(Tokenizer.from_pretrained(resolve_model(file)))
    for job, found, tokenizer in zip(jobs, llama_cpp.answers(jobs, tmp_path), expected, strict=True):
        assert found["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS], job["file"]


def test_end_of_a_turn_that_a_gguf_file_of_phi_3_does_not_name_ends_a_response_as_in_llama_cpp(tmp_path):
    words = lambda: tokenizer_folders.byte_level(["<|endoftext|>", "<|end|>"])  # noqa: E731
    template = tokenizer_folders.CHATML.replace("<|im_end|>", "<|end|>")
    settings, text = {"eos_token": "<|endoftext|>", "chat_template": template}, tokenizer_folders.TEXT
    kind = tokenizer_folders.Kind(words, settings, "<|end|>", ["<|endoftext|>"], config="<|endoftext|>")
    export_gguf(tokenizer_folders.write(kind, tmp_path / "folder"), tmp_path / "model.gguf", "f32")
    model = TextGenerator(tmp_path / "model.gguf", precision="float32")
    answer = model.generate(text, greedy=True)
    job = {"file": str(tmp_path / "model.gguf"), "prompt": model.tokenizer(text)["input_ids"], "count": 60}
    (found,) = llama_cpp.answers([job], tmp_path)
    assert answer.finish_reason == "stop" and found["count"] == len(answer.token_ids)


SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # fmt: skip


RECURRENT = SIZES | dict(
    model_type="qwen3_5_moe_text", full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32,
    linear_value_head_dim=32, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64,
)  # fmt: skip

QWEN3_NEXT = RECURRENT | dict(model_type="qwen3_next")
GRANITE_4 = SIZES | dict(
    model_type="granitemoehybrid", layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_state=16, intermediate_size=32, shared_intermediate_size=64,
    num_local_experts=3, num_experts_per_tok=2,
)  # fmt: skip
NEMOTRON_H = SIZES | dict(
    model_type="nemotron_h", hidden_act="relu2", mlp_hidden_act="relu2", hybrid_override_pattern="ME*", n_groups=2, mamba_num_heads=4, mamba_head_dim=32,
    ssm_state_size=16, n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, intermediate_size=32, layer_norm_epsilon=1e-5,
)  # fmt: skip
DEEPSEEK = SIZES | dict(
    model_type="deepseek_v3", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
GEMMA_4 = SIZES | dict(
    model_type="gemma4_text", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, global_head_dim=32,
    hidden_size_per_layer_input=32, use_double_wide_mlp=True,
)  # fmt: skip
GEMMA_4_EXPERTS = SIZES | dict(
    model_type="gemma4_text", layer_types=["sliding_attention", "full_attention"], global_head_dim=32, hidden_size_per_layer_input=0, attention_k_eq_v=True,
    num_global_key_value_heads=1, enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=32,
)  # fmt: skip
GPT_OSS = SIZES | dict(model_type="gpt_oss", intermediate_size=32, num_local_experts=3, num_experts_per_tok=2)


def folder_of_blocks(folder, sizes=SIZES):
    """Write the folder of a tiny model whose rows are divisible into blocks of 32 weights."""
    described = tiny_random(sizes)
    model = C.DecoderModel(described.native(), torch.float32, False)
    initialize_weights(model, 0, std=0.1)
    save_weights(model, folder, described.config)
    write_tokenizer(folder)
    return folder


def quantised(path, kind):
    opened = replace(read_model_folder(resolve_model(path)), quantization=kind)
    opened.check_weights()
    model = C.DecoderModel(opened.native(), torch.bfloat16, False)
    opened.fill(model)
    return {spec.name: blocks_in(model, spec) for spec in model.blocks if len(spec.shape) > 1}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantised_base_model_keeps_the_quantised_blocks_of_a_gguf_file_unchanged(kind, tmp_path):
    """The file gets a block that quantising its dequantised weights would not restore."""
    folder, file = folder_of_blocks(tmp_path / "folder"), tmp_path / "model.gguf"
    export_gguf(folder, file, kind)
    expected, found = quantised(folder, kind), quantised(file, kind)
    for name in expected if kind == "q4_0" else ():
        if ".v_proj." in name:  # has 8 bits in a model of 4, so the file's weights are rounded to these
            expected[name] = blocks_of(weights_of(resolve_model(file))[name].view(-1, 64), "q8_0")
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)

    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_up.weight")
    block = np.float16(0.5).tobytes() + {"q8_0": b"\x02" * 32, "q4_0": b"\xaa" * 16}[kind]
    with file.open("r+b") as handle:
        handle.seek(tensor.data_offset)
        handle.write(block)
    blocks = quantised(file, kind)["model.layers.1.mlp.up_proj.weight"]
    assert bytes(blocks[0, : len(block)].tolist()) == block
    text = TextGenerator(file, quantization=kind).generate("12+3=", greedy=True, max_new_tokens=16).text
    assert [text] == load(file, precision="bfloat16", quantization=kind).generate("12+3=", max_new_tokens=16)


@pytest.mark.parametrize(
    "sizes",
    [RECURRENT, QWEN3_NEXT, GRANITE_4, DEEPSEEK, GEMMA_4, GEMMA_4_EXPERTS, NEMOTRON_H, GPT_OSS],
    ids=lambda sizes: sizes["model_type"] + " with experts" * ("enable_moe_block" in sizes),
)
def test_quantised_recurrent_layers_and_experts_keep_the_quantised_blocks_of_a_gguf_file_unchanged(sizes, tmp_path):
    folder, file = folder_of_blocks(tmp_path / "folder", sizes), tmp_path / "model.gguf"
    export_gguf(folder, file, "q8_0")
    expected, found = quantised(folder, "q8_0"), quantised(file, "q8_0")
    assert expected.keys() == found.keys()
    # llama.cpp transposes a part of kv_b_proj
    assert all(torch.equal(expected[name], found[name]) for name in expected if ".kv_b_proj." not in name)


def test_gguf_blocks_that_span_several_value_heads_of_a_recurrent_layer_are_dequantised(tmp_path):
    """The file holds the value heads in the order 0, 3, 1, 4, 2, 5: first the first one of every key head."""
    heads_of_16 = RECURRENT | dict(linear_key_head_dim=16, linear_value_head_dim=16)
    folder, file = folder_of_blocks(tmp_path / "folder", heads_of_16), tmp_path / "model.gguf"
    export_gguf(folder, file, "q8_0")
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.0.ssm_out.weight")
    heads = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(64, 6, 16)
    found = weights_of(resolve_model(file))["model.layers.0.linear_attn.out_proj.weight"].view(64, 6, 16)
    assert np.array_equal(found[:, [0, 3, 1, 4, 2, 5]], heads)


def rewritten(file, target, *left_out, change=lambda writer: None, mxfp4=MappingProxyType({})):
    """Write a GGUF file as `target` without the metadata and tensors `left_out`, with those that `change` adds, and with the blocks
    `mxfp4` of some tensors."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", *left_out)):
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in (each for each in reader.tensors if not (left_out and each.name.startswith(left_out))):
        kind = gguf.GGMLQuantizationType.MXFP4 if tensor.name in mxfp4 else tensor.tensor_type
        writer.add_tensor(tensor.name, mxfp4.get(tensor.name, tensor.data), raw_dtype=kind)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("sizes", [GEMMA_4_EXPERTS, RECURRENT], ids=lambda sizes: sizes["model_type"])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_gguf_file_with_gate_and_up_of_experts_in_one_tensor_gives_the_same_weights(kind, sizes, tmp_path):
    file = tmp_path / "model.gguf"
    export_gguf(folder_of_blocks(tmp_path / "folder", sizes), file, kind)
    tensors = {each.name: each for each in gguf.GGUFReader(file).tensors}
    apart = [f"blk.{layer}.ffn_{matrix}_exps." for layer in range(2) for matrix in ("gate", "up")]

    def change(writer):
        for gate, up in zip(apart[::2], apart[1::2]):
            both = [tensors[f"{name}weight"] for name in (gate, up)]
            rows = np.concatenate([each.data for each in both], axis=1)
            writer.add_tensor(f"{gate.replace('gate', 'gate_up')}weight", rows, raw_dtype=both[0].tensor_type)

    fused = rewritten(file, tmp_path / "fused.gguf", *apart, change=change)
    expected, found = (weights_of(resolve_model(path)) for path in (file, fused))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_multi_token_prediction_layers_of_a_gguf_file_are_ignored(tmp_path):
    def change(writer):
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.2.nextn.enorm.weight", np.ones(64, np.float32))

    folder, file = folder_of_blocks(tmp_path / "folder", RECURRENT), tmp_path / "model.gguf"
    export_gguf(folder, file, "f32")
    rewritten(file, tmp_path / "mtp.gguf", "qwen35moe.block_count", change=change)
    expected, found = (read_model_folder(resolve_model(path)) for path in (file, tmp_path / "mtp.gguf"))
    found.check_weights()
    assert found.config == expected.config and found.config["num_hidden_layers"] == 2


def test_gguf_file_of_mistral_small_3_is_read_as_mistral_without_windows(tmp_path):
    """It has the architecture of Ministral 3, but no scaling of RoPE."""
    folder, file = folder_of_blocks(tmp_path / "folder", SIZES | dict(model_type="ministral3")), tmp_path / "model.gguf"
    export_gguf(folder, file, "f32")
    found = read_model_folder(resolve_model(rewritten(file, tmp_path / "small.gguf", "mistral3.rope.scaling")))
    found.check_weights()
    assert found.config["model_type"] == "mistral" and found.config["sliding_window"] is None


def test_gguf_file_of_phi_4_mini_rotates_a_part_of_each_head_and_names_no_head_size(tmp_path, monkeypatch):
    folder, _ = make("phi3_longrope", tmp_path, monkeypatch)
    export_gguf(folder, folder / "model.gguf", "f32")
    file = rewritten(folder / "model.gguf", tmp_path / "model.gguf", "phi3.attention.key", "phi3.attention.value")
    assert read_model_folder(resolve_model(file)).native()["head_dim"] == 16


def test_fused_projection_in_an_older_gguf_file_of_qwen3_next_is_split(tmp_path):
    """It holds of each of two key heads 32 rows of q and of k, and 96 of v and of z."""
    folder, file = folder_of_blocks(tmp_path / "folder", QWEN3_NEXT), tmp_path / "model.gguf"
    export_gguf(folder, file, "f32")
    tensors = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    q, k, v = np.split(tensors["blk.0.attn_qkv.weight"], [64, 128])
    parts = [each.reshape(2, -1, 64) for each in (q, k, v, tensors["blk.0.attn_gate.weight"])]
    add = lambda writer: writer.add_tensor("blk.0.ssm_in.weight", np.concatenate(parts, 1).reshape(-1, 64))  # noqa: E731
    older = rewritten(file, tmp_path / "older.gguf", "blk.0.attn_qkv", "blk.0.attn_gate", change=add)
    before, after = (weights_of(resolve_model(path)) for path in (file, older))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_older_gguf_file_of_deepseek_v3_without_compressed_keys_and_values_has_equal_weights(tmp_path):
    def change(writer):
        writer.add_key_length(48)
        writer.add_value_length(32)
        writer.add_tensor("blk.0.attn_kv_b.weight", before["model.layers.0.self_attn.kv_b_proj.weight"].numpy())

    folder, file = folder_of_blocks(tmp_path / "folder", DEEPSEEK), tmp_path / "model.gguf"
    export_gguf(folder, file, "f32")
    before, lengths = (
        weights_of(resolve_model(file)),
        [f"deepseek2.attention.{name}_length" for name in ("key", "value")],
    )
    older = rewritten(file, tmp_path / "older.gguf", *lengths, "blk.0.attn_k_b", "blk.0.attn_v_b", change=change)
    after = weights_of(resolve_model(older))
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(SourceError, match="no sigmoids, as in DeepSeek-V2"):
        resolve_model(rewritten(file, tmp_path / "v2.gguf", "deepseek2.expert_gating_func"))


def test_gguf_tensors_in_a_quantisation_format_without_kernels_are_dequantised_on_loading(tmp_path):
    folder, file = folder_of_blocks(tmp_path / "folder"), tmp_path / "model.gguf"
    export_gguf(folder, file, "q5_1")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = weights_of(resolve_model(file))["model.layers.0.mlp.down_proj.weight"]
    tensor = tensors["blk.0.ffn_down.weight"]
    assert tensor.tensor_type.name == "Q5_1"
    assert np.array_equal(found, gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_experts_of_a_gguf_file_in_mxfp4_are_read_into_equal_bfloat16_weights(tmp_path):
    folder, file = folder_of_blocks(tmp_path / "folder", GPT_OSS), tmp_path / "model.gguf"
    export_gguf(folder, file, "f32")
    blocks = lambda tensor: gguf.quants.quantize(tensor.data, gguf.GGMLQuantizationType.MXFP4)  # noqa: E731
    experts = {each.name: blocks(each) for each in gguf.GGUFReader(file).tensors if each.name.endswith("_exps.weight")}
    found = weights_of(resolve_model(rewritten(file, tmp_path / "mxfp4.gguf", mxfp4=experts)))
    for name, part in {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}.items():
        expected = gguf.quants.dequantize(experts[f"blk.1.{part}.weight"], gguf.GGMLQuantizationType.MXFP4)
        for expert, values in enumerate(expected):
            weight = found[f"model.layers.1.mlp.experts.{expert}.{name}.weight"]
            assert np.array_equal(weight, values) and torch.equal(weight, weight.bfloat16().float())


def test_lora_run_on_a_gguf_model_has_equal_logprobs_and_a_checkpoint_that_names_the_file(tmp_path):
    file = tmp_path / "base.gguf"
    export_gguf(folder_of_blocks(tmp_path / "folder"), file, "q8_0")
    more = (f"policy.model_name={file}", "policy.hf_config_overrides=null", f"policy.tokenizer.name={file}")
    lora = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.quantization=q8_0", "grpo.max_num_steps=2")
    with tiny.make(tmp_path, *tiny.SMALL, *more, *lora) as run:
        run.train()
        assert all(row["token_mult_prob_error"] == 1 for row in run.history if "token_mult_prob_error" in row)
        run.policy.save_checkpoint(tmp_path / "weights")
    assert json.loads((tmp_path / "weights/adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        file
    )
    assert read_model_folder(tmp_path / "weights").path == resolve_model(file)


def test_text_generated_from_a_gguf_file_equals_that_of_the_exported_model(tmp_path):
    folder, file = folder_of_blocks(tmp_path / "folder"), tmp_path / "model.gguf"
    export_gguf(folder, file, "f32")
    texts = [
        TextGenerator(path, precision="float32").generate("ab", max_new_tokens=12, seed=3) for path in (folder, file)
    ]
    assert texts[0].token_ids == texts[1].token_ids and len(texts[0].token_ids) > 3


@pytest.mark.parametrize("keys, engine", [
    (["policy.backend=hf"], "policy.backend"),
    (["policy.generation.backend=vllm", "policy.generation.vllm_cfg.server_url=http://127.0.0.1:9"], "policy.generation.backend"),
])  # fmt: skip
def test_gguf_file_with_an_engine_other_than_native_is_an_error(keys, engine):
    with pytest.raises(ConfigError, match=f"policy.model_name is a GGUF file, .*: set {engine} to native"):
        load_grpo_config("grpo_tiny.yaml", ["policy.model_name=model.gguf", "policy.hf_config_overrides={}", *keys])


def test_corrupt_and_unsupported_gguf_files_are_errors_and_leave_no_converted_folder(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(SourceError, match="is not a whole GGUF file"):
        resolve_model(file)
    config = load_grpo_config("grpo_tiny.yaml", [f"policy.model_name={file}", f"policy.tokenizer.name={file}"])
    [problem] = check(config)
    assert problem.level == "error" and "is not a whole GGUF file" in problem.message
    little, big = gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG
    reason = "of the architecture 'mamba', which is not read; llama, qwen2"
    for order, parts, said in ((little, 1, reason), (little, 3, "one of 3 parts"), (big, 1, "for big-endian machines")):
        writer = gguf.GGUFWriter(file, "mamba", endianess=order)
        writer.add_uint16("split.count", parts)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(SourceError, match=said):
            resolve_model(file)
    assert not list((tmp_path / "cache/models").iterdir())


def test_omitted_metadata_of_a_gguf_file_have_the_defaults_of_llama_cpp(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 32)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.scale_linear", 2.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eot_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    folder = resolve_model(tmp_path / "model.gguf")
    config = read_config(folder)
    assert config["num_key_value_heads"] == 32
    assert config["rope_scaling"]["rope_type"] == "linear" and config["rope_scaling"]["factor"] == 2
    assert Tokenizer.from_pretrained(folder).eos_token_ids == [1]
