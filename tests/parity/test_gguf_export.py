import copy
import json

import llama_cpp
import models
import pytest
import tokenizer_folders
import torch
from nemo_rl_cpp import cli
from nemo_rl_cpp._native import C
from nemo_rl_cpp.commands.export import FORMATS
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.generate import TextGenerator
from nemo_rl_cpp.hub.sources import ModelFolderError
from nemo_rl_cpp.models.gguf_export import check_family, compare_with_folder, export_gguf
from nemo_rl_cpp.models.hf_config import canonical_config
from nemo_rl_cpp.models.model_folder import tiny_random
from nemo_rl_cpp.models.weights import initialize_weights, save_weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models as token_models
from tokenizers import pre_tokenizers

# settings that llama.cpp supports only with the values of released models
KINDS = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
LONGROPE = {**models.configurations()["phi3_longrope"].rope_parameters, "attention_factor": 1.3}
CHANGES = {
    "gemma2": dict(query_pre_attn_scalar=16, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma3": dict(query_pre_attn_scalar=16, final_logit_softcapping=2.0, num_hidden_layers=7, layer_types=KINDS),
    "gemma4": dict(num_kv_shared_layers=2),
    **dict.fromkeys(("gemma4_without_inputs", "gemma4_experts"), dict(final_logit_softcapping=1.0)),
    "smollm3": dict(num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1], layer_types=["full_attention"] * 5),
    **dict.fromkeys(("mistral_window", "qwen3_windows", "mixtral_window", "phi3"), dict(sliding_window=70)),
    "olmo3": dict(sliding_window=9, rope_parameters={**models.configurations()["olmo3"].rope_parameters, "sliding_attention": dict(rope_type="default", rope_theta=10000.0)}),
    "olmoe": dict(num_key_value_heads=4),
    # with this theta, the upper bound of YaRN is 1.99997, which llama.cpp rounds to 2
    "gpt_oss": dict(rope_parameters={**models.configurations()["gpt_oss"].rope_parameters, "rope_theta": 10766.0}),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite_layers"), dict(rope_parameters={**models.configurations()["deepseek_v3"].rope_parameters, "mscale": 1.3})),
    "deepseek_v3_queries_without_latent": dict(num_hidden_layers=27),
    **dict.fromkeys(("nemotron_h_latent_experts", "nemotron_h_groups_of_experts"), dict(intermediate_size=24)),
    "nemotron_h_experts": dict(intermediate_size=24, layers_block_type=models.layers("MEM*EE")),
    # the queries of positions from 32 on are scaled
    "ministral3": dict(rope_parameters={**models.configurations()["ministral3"].rope_parameters, "original_max_position_embeddings": 32}),
    "phi3_longrope": dict(rope_parameters=LONGROPE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_tied_other_layers"), dict(linear_key_head_dim=32)),
    "qwen3_next": dict(linear_key_head_dim=32, num_experts=5),
}  # fmt: skip
EXPORTED = (
    "llama", "mistral", "ministral3", "smollm3", "granite", "granitemoe", "granitemoehybrid", "qwen2", "qwen3", "olmo2", "olmo3", "exaone4", "glm4", "ernie4_5", "seed_oss", "gpt_oss", "phi3", "gemma2", "gemma3_text", "gemma4_text",
    "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "nemotron_h", "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip
REFUSED = {
    "llama_gelu": "the activation gelu_tanh",
    "olmo2_gelu": "the activation gelu_tanh",
    "exaone4": "windows",
    "seed_oss_other_biases": "biases",
    **dict.fromkeys(("qwen3_moe_dense_layer", "qwen3_moe_window"), "norm_topk_prob false"),
    "deepseek_v3_halves": "yarn by mscale",
    "glm4_moe_lite_layers": "layers without experts",
    "nemotron_h_other_layers": "time_step_limit",
    "lfm2_moe_other_layers": "routed_scaling_factor 2.5",
    "qwen2_moe_sparse_step": "norm_topk_prob true",
    "qwen3_5_moe_tied_other_layers": "linear_value_head_dim 32 and linear_key_head_dim 16",
    "qwen3_5_tied_other_layers": "full attention in other layers than every n-th",
    "qwen3_next_tied_other_layers": "norm_topk_prob false",
} | {
    name: f"a model of type {config.model_type} is not written as GGUF"
    for name, config in models.configurations().items()
    if config.model_type not in EXPORTED
}
WRITTEN = sorted(models.configurations().keys() - REFUSED.keys())
PROMPT = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def write_tokenizer(folder):
    """Write a tokenizer with 96 tokens of one byte each and one token of two bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:93]
    vocab = {text: i for i, text in enumerate(["<pad>", "<s>", "</s>", *letters, letters[0] + letters[1]])}
    tokenizer = Backend(token_models.BPE(vocab=vocab, merges=[(letters[0], letters[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make(name, root, monkeypatch):
    """Write the folder of a tiny random model. Its name has no "phi3", for which llama.cpp would change the special
    tokens."""
    folder = root / name.replace("phi3", "small")
    configuration = copy.deepcopy(models.configurations()[name])
    for key, value in CHANGES.get(name, {}).items():
        setattr(configuration, key, value)
    with monkeypatch.context() as patched:
        patched.setattr(models, "configurations", lambda: {name: configuration})
        model = models.build(name, folder)
    write_tokenizer(folder)
    return folder, model


def greedy(model, count):
    """Return the token ids of transformers' greedy response, up to its end, and their log-probabilities."""
    ids, logprobs = torch.tensor([PROMPT]), []
    with torch.no_grad():
        for _ in range(count):
            best = model(ids).logits[0, -1].log_softmax(-1).max(-1)
            ids, logprobs = torch.cat([ids, best.indices.view(1, 1)], 1), [*logprobs, best.values.item()]
            if best.indices == 2:
                break
    return ids[0, len(PROMPT) :].tolist(), logprobs


def test_llama_cpp_with_an_exported_gguf_file_generates_the_same_tokens_as_transformers(tmp_path, monkeypatch):
    """llama.cpp looks up GELU in a table of half precision, and computes the rest in float32."""
    jobs, expected = [], []
    for name in WRITTEN:
        folder, model = make(name, tmp_path, monkeypatch)
        export_gguf(folder, folder / "model.gguf", "f32")
        jobs.append({"file": str(folder / "model.gguf"), "prompt": PROMPT})
        expected.append(greedy(model, 16))
    for name, found, (ids, logprobs) in zip(WRITTEN, llama_cpp.answers(jobs, tmp_path), expected, strict=True):
        assert found["ids"] == ids, name
        assert found["logprobs"] == pytest.approx(logprobs, abs=2e-3 if name.startswith("gemma") else 1e-4), name


def test_logit_error_of_exported_gguf_files_grows_with_fewer_bits_per_weight(tmp_path, monkeypatch):
    """Rows of 48 and 80 weights, which are no multiples of 32, have 16 bits per weight in all quantised formats."""
    folder, _ = make("llama_tied", tmp_path, monkeypatch)
    gaps = {}
    for kind in FORMATS:
        export_gguf(folder, tmp_path / "model.gguf", kind)
        gaps[kind] = compare_with_folder(tmp_path / "model.gguf", folder)
    assert gaps["f32"].max_logit == gaps["f32"].mean_kl == 0
    assert 0 < gaps["f16"].max_logit < gaps["bf16"].max_logit
    assert gaps["f16"].mean_kl < gaps["q8_0"].mean_kl < gaps["q4_0"].mean_kl < 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_gguf_export_of_a_model_that_llama_cpp_does_not_support_is_an_error(name, tmp_path, monkeypatch):
    folder, _ = make(name, tmp_path, monkeypatch)
    with pytest.raises(ModelFolderError, match=REFUSED[name]):
        export_gguf(folder, tmp_path / "model.gguf", "f32")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


GRANITE_4 = {"layer_types": ["mamba", "attention"] * 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LFM2 = {"layer_types": ["conv", "full_attention"] * 16}


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"model_type": "llama", "rope_scaling": YARN | {"attention_factor": 0.7}}, "yarn by attention_factor"),
        ({"model_type": "qwen2", "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}, "yarn by mscale, mscale_all_dim"),
        ({"model_type": "qwen3", "rope_scaling": YARN | {"beta_slow": 2}}, "yarn by beta_slow"),
        ({"model_type": "llama", "rope_scaling": YARN | {"truncate": False}}, "yarn by truncate"),
        ({"model_type": "deepseek_v3", "rope_scaling": YARN}, "yarn by mscale, mscale_all_dim"),
        ({"model_type": "ministral3", "rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}, "yarn by mscale"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave false"),
        ({"model_type": "deepseek_v3", "q_lora_rank": None}, "q_lora_rank null and 61 layers"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 27}, "q_lora_rank 1536 and 27 layers"),
        ({"model_type": "smollm3", "mlp_bias": True}, "biases"),
        ({"model_type": "olmo2", "attention_bias": True}, "biases"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "no biases"),
        ({"model_type": "gpt_oss", "rope_scaling": YARN | {"truncate": True}}, "yarn by truncate"),
        ({"model_type": "olmo2", "tie_word_embeddings": True}, "tie_word_embeddings true"),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, "tie_word_embeddings false"),
        ({"model_type": "lfm2_moe", **LFM2, "tie_word_embeddings": False}, "tie_word_embeddings false"),
        ({"model_type": "olmoe", "num_key_value_heads": 8}, "num_attention_heads 16 and num_key_value_heads 8"),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, "a softcapping of null"),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", *["full_attention"] * 25]}, "windows in other layers than every second"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"] * 32}, "full attention in every layer"),
        ({"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}}, "another rope_theta"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"] * 26}, "full attention in every layer"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 2}, "num_kv_shared_layers 2 behind other layers than one with a window and one without"),
        ({"model_type": "gemma4_text", "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "other RoPE than proportional"),
        ({"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope scaling of layers with windows"),
        ({"model_type": "granitemoehybrid", **GRANITE_4, "mamba_expand": 1, "mamba_n_heads": 64}, "mamba_expand 1"),
        ({"model_type": "granitemoehybrid", **GRANITE_4, "time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 32, "num_local_experts": 0}, "attention in every layer and .* no rotary"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-"}, "MLPs and experts"),
        ({"model_type": "qwen2", "head_dim": 64}, "heads of 2048 numbers together and hidden_size 4096"),
        ({"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 32}, "full attention in every layer"),
    ],
)  # fmt: skip
def test_gguf_export_of_a_variant_of_a_family_that_llama_cpp_does_not_compute_is_an_error(config, reason):
    layers = {"lfm2_moe": LFM2, "granitemoehybrid": GRANITE_4, "nemotron_h": {"hybrid_override_pattern": "ME*M"}}.get(
        config["model_type"], {}
    )
    check_family(canonical_config({"model_type": config["model_type"], **layers}))
    with pytest.raises(ModelFolderError, match=f"a {config['model_type']} model with {reason}.* is not computed"):
        check_family(canonical_config(config))


WORDS = {
    "qwen3.5": tokenizer_folders.QWEN_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),
    "gpt-oss": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}  # fmt: skip
WORDS["kimi"] = r"[\p{Han}]+|" + (
    WORDS["gpt-oss"].replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
)
WORDS["tekken"] = WORDS["gpt-oss"].replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
WORDS["deepseek"] = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
TOKENIZERS = ("gpt2", "qwen", *WORDS, "llama3", "llama2", "gemma4")


def tokenizer_folder(name, root):
    """Write the tokenizer `name`, one of TOKENIZERS. Those of WORDS are Qwen's with other words. That of Gemma 4 is Llama
    2's without a space before the text, and split at newlines."""
    kind = {"gemma4": "llama2"}.get(name, "qwen" if name in WORDS else name)
    folder = tokenizer_folders.write(tokenizer_folders.KINDS[kind], root / name)
    if name == "gemma4":
        written = json.loads((folder / "tokenizer.json").read_text())
        written["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        written["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "\n+"},
            "behavior": "Isolated",
            "invert": False,
        }
        written["decoder"]["decoders"] = [each for each in written["decoder"]["decoders"] if each["type"] != "Strip"]
        (folder / "tokenizer.json").write_text(json.dumps(written))
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        described = tiny_random(
            {"model_type": "gemma4_text", "vocab_size": vocab_size, "hidden_size_per_layer_input": 8}
        )
        model = C.DecoderModel(described.native(), torch.float32, False)
        initialize_weights(model, 0)
        save_weights(model, folder, described.config)
    if name in WORDS:
        written = json.loads((folder / "tokenizer.json").read_text())
        split, *rest = written["pre_tokenizer"]["pretokenizers"]
        before = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+") if name == "deepseek" else ()
        splits = [{**split, "pattern": {"Regex": regex}} for regex in (*before, WORDS[name])]
        written["pre_tokenizer"]["pretokenizers"] = [*splits, *rest]
        (folder / "tokenizer.json").write_text(json.dumps(written))
    return folder


TEXTS = (
    "Hello there, what is 12 plus 30?", "  two  spaces\n\n\tand a tab", "don't we'll", "1234567 3.14", "naïve 北京 🙂", "हिन्दी में",
)  # fmt: skip


def test_llama_cpp_with_an_exported_tokenizer_gives_the_token_ids_of_the_original_tokenizer(tmp_path):
    jobs, expected = [], []
    for name in TOKENIZERS:
        folder = tokenizer_folder(name, tmp_path)
        export_gguf(folder, folder / "model.gguf", "f16")
        tokenizer = Tokenizer.from_pretrained(folder)
        jobs.append({"file": str(folder / "model.gguf"), "prompt": [5, 6, 7], "count": 1, "texts": TEXTS})
        expected.append([tokenizer(text)["input_ids"] for text in TEXTS])
    for job, found, ids in zip(jobs, llama_cpp.answers(jobs, tmp_path), expected, strict=True):
        assert found["tokens"] == ids, job["file"]


def test_llama_cpp_with_an_exported_model_ends_responses_at_the_third_end_token(tmp_path):
    folder = tokenizer_folder("llama3", tmp_path)
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    answer = TextGenerator(folder, precision="float32").generate(tokenizer_folders.TEXT, greedy=True)
    prompt = Tokenizer.from_pretrained(folder)(tokenizer_folders.TEXT)["input_ids"]
    (found,) = llama_cpp.answers([{"file": str(tmp_path / "model.gguf"), "prompt": prompt, "count": 60}], tmp_path)
    assert answer.token_ids[-1] == 304 and found["count"] == len(answer.token_ids)


@pytest.mark.parametrize("name, reason", [("unigram", "of type Unigram"), ("other_end", "of type WordLevel")])
def test_gguf_export_of_a_tokenizer_that_llama_cpp_does_not_support_is_an_error(name, reason, tmp_path):
    folder = tokenizer_folders.write(tokenizer_folders.KINDS[name], tmp_path / name)
    with pytest.raises(ModelFolderError, match=reason):
        export_gguf(folder, tmp_path / "model.gguf", "f32")


def test_gguf_export_of_a_tokenizer_with_more_tokens_than_the_model_is_an_error(tmp_path):
    folder = tokenizer_folder("gpt2", tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([f"<{i}>" for i in range(9)])  # the model has embeddings for five more tokens
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelFolderError, match="token '<8>' has the id 309, but the model has a vocabulary of 306"):
        export_gguf(folder, tmp_path / "model.gguf", "f32")


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_gguf_export_of_tied_weights_whose_files_hold_an_lm_head_too_has_the_logits_of_the_folder(
    factor, tmp_path, monkeypatch
):
    folder, _ = make("llama_tied", tmp_path, monkeypatch)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
    save_file(tensors, folder / "model.safetensors")
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    assert compare_with_folder(tmp_path / "model.gguf", folder).max_logit == 0


def test_export_command_prints_the_file_size_and_the_logprob_difference_to_the_model(tmp_path, monkeypatch, capsys):
    folder, _ = make("llama", tmp_path, monkeypatch)
    assert cli.main(["export", "--model", str(folder), "--gguf", "q8_0", "--out", str(tmp_path / "a" / "x.gguf")]) == 0
    said = capsys.readouterr().out
    assert "x.gguf: 0." in said and "read back over" in said and "nats a token" in said
    made = str(tmp_path / "a" / "x.gguf")
    for model, out, reason in ((folder, str(tmp_path / "x.bin"), "ends in .gguf"), (made, made, "is the model itself")):
        with pytest.raises(SystemExit):
            cli.main(["export", "--model", str(model), "--gguf", "q8_0", "--out", out])
        assert reason in capsys.readouterr().err
