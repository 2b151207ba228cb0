import json
import math
import shutil
import struct
import subprocess
import sys

import pytest
from nemo_rl_cpp.checks.model import check
from nemo_rl_cpp.cli import main
from nemo_rl_cpp.config import load_eval_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.parameter_shapes import parameter_shapes

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
STARTED_VLLM = f"policy.generation.backend=vllm policy.generation.vllm_cfg.python={sys.executable}"


def write_weights(folder, config):
    entries, place = {}, 0
    for name, shape in parameter_shapes(native_config(config)).items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(place))


def write_tokenizer(folder, tokens=40, added=()):
    vocabulary = {f"w{i}": i for i in range(tokens)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = [{"id": i, "content": f"<{i}>", "special": True, **plain} for i in added]
    content = {"version": "1.0", "added_tokens": names, "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
               "decoder": None, "truncation": None, "padding": None, "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1", "pad_token": "w0"}))


def model_folder(folder, **keys):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | keys))
    write_weights(folder, CONFIG | keys)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NEMO_RL_CPP_CACHE", str(tmp_path / "cache"))
    return model_folder(tmp_path / "model")


def grpo(name, *overrides):
    return load_grpo_config(
        "grpo_tiny.yaml",
        [f"policy.model_name={name}", "policy.tokenizer.name=null", "~policy.hf_config_overrides", *overrides],
    )


def said(config):
    return [(f.level, str(f)) for f in check(config)]


def only(config, level="error"):
    [(found, text)] = said(config)
    assert found == level
    return text


@pytest.mark.parametrize(
    "key, near", [("rope_teta", "rope_theta"), ("hiden_size", "hidden_size"), ("rms_norm_eps", None)]
)
def test_misspelt_key_in_hf_config_overrides_gives_a_warning(model, key, near):
    text = f"policy.model_name is {model}: {key} is not in the config.json of {model}: did you mean {near}?"
    assert said(grpo(model, f"policy.hf_config_overrides={{{key}: 0.1}}")) == ([("warning", text)] if near else [])


def test_preflight_check_of_a_compatible_model_and_configuration_gives_no_error(model):
    assert said(grpo(model)) == [] == said(grpo("model"))
    assert said(load_grpo_config("grpo_tiny.yaml")) == [] == said(load_ppo_config("ppo_tiny.yaml"))


def test_lora_modules_that_match_no_matrix_of_the_model_are_an_error(model):
    lora = "policy.dtensor_cfg.lora_cfg"
    some = [f"++{lora}.enabled=true", f"++{lora}.match_all_linear=false"]
    assert said(grpo(model, *some, f"++{lora}.target_modules=['*.layers.0.*']")) == []
    text = only(grpo(model, *some, f"++{lora}.target_modules=['*.layers.31.*']"))
    assert text.startswith(f"{lora}.target_modules is ['*.layers.31.*'], which no matrix of {model} with its 1 layers")
    text = only(grpo(model, *some, f"++{lora}.exclude_modules=['*.layers.0.*']"))
    assert text.startswith(f"{lora}.exclude_modules is ['*.layers.0.*'")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("keys, positions", [
    ({}, 512), ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024), ({"rope_scaling": YARN}, 400),
    ({"rope_scaling": LLAMA3}, 512), ({"model_max_length": 600}, 600),
])  # fmt: skip
def test_maximum_sequence_length_beyond_the_position_limit_of_the_model_is_an_error(keys, positions, tmp_path, model):
    folder = model_folder(tmp_path / "other", **keys)
    assert said(grpo(folder, f"policy.max_total_sequence_length={positions}")) == []
    longer = f"policy.max_total_sequence_length={positions + 1}"
    text = only(grpo(folder, longer))
    assert f"policy.max_total_sequence_length is {positions + 1}, but {folder} has positions for" in text
    key = "rope_scaling.factor" if keys == {"rope_scaling": YARN} else "max_position_embeddings"
    advice = f"lower policy.max_total_sequence_length, or set policy.hf_config_overrides.{key} if the model can do more"
    assert text.endswith(advice)
    if "model_max_length" not in keys:  # the advice works
        assert said(grpo(folder, longer, f"++policy.hf_config_overrides.{key}=1000")) == []


STOP, VOCABULARY = "policy.generation.stop_token_ids", "policy.hf_config_overrides.vocab_size"
# (override of a run with random weights, level, what the only finding begins with, and how it goes on)
RANDOM = [
    ("policy.max_total_sequence_length=33", "error", "policy.model_name is", "33, but tiny-random has positions for 32"),
    (f"{VOCABULARY}=8", "error", f"{VOCABULARY} is 8, but the tokens of policy.tokenizer.name tiny-random have ids up to 15: set at least 16"),
    (f"{VOCABULARY}=300", None),
    (f"{STOP}=[1, 151645]", "error", f"{STOP} has 151645, but policy.model_name tiny-random has a vocabulary of 16"),
    (f"{STOP}=[15]", None),
    ("policy.tokenizer.name=/no/such/folder", "error", "policy.tokenizer.name is", "no such folder"),
    ("policy.tokenizer.name=smollm2-135m-instrct", "error", "policy.tokenizer.name is", "did you mean"),
    ("policy.generation.max_new_tokens=4", "warning",
     "grpo.reward_shaping.max_response_length is 6, so the overlong penalty begins after 4 tokens"),
    ("policy.generation.max_new_tokens=5", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "level", "words"), [(override, level, words) for override, level, *words in RANDOM]
)
def test_settings_that_do_not_fit_a_randomly_initialised_model_are_reported_before_the_run(override, level, words):
    file = "dapo_tiny.yaml" if "max_new_tokens" in override else "grpo_tiny.yaml"
    found = said(load_grpo_config(file, [override]))
    assert [level for level, _ in found] == ([] if level is None else [level])
    for _, text in found:
        assert text.startswith(words[0]) and all(word in text for word in words)


def test_maximum_sequence_length_is_checked_for_the_critic_too():
    found = said(load_ppo_config("ppo_tiny.yaml", ["policy.max_total_sequence_length=33"]))
    assert [text.split()[0] for _, text in found] == ["policy.model_name", "value.model_name"]


def evaluation(name, *overrides):
    return load_eval_config(
        "evals/eval.yaml", [f"generation.model_name={name}", "generation.backend=native", *overrides]
    )


def test_maximum_sequence_length_of_an_evaluation_is_checked_only_if_configured(model):
    without = ["~generation.vllm_cfg.max_model_len", "generation.max_new_tokens=16", "data.max_input_seq_length=32"]
    assert said(evaluation(model, *without)) == []
    assert said(evaluation(model, "generation.vllm_cfg.max_model_len=null", *without[1:])) == []
    text = only(evaluation(model, "generation.vllm_cfg.max_model_len=1024", "generation.max_new_tokens=16"))
    assert text.startswith("generation.model_name is") and "generation.vllm_cfg.max_model_len is 1024, but" in text
    assert text.endswith("lower generation.vllm_cfg.max_model_len")


def test_stop_token_beyond_the_vocabulary_of_an_evaluated_model_is_an_error(model):
    lengths = ["generation.vllm_cfg.max_model_len=64", "generation.max_new_tokens=16"]
    text = only(evaluation(model, *lengths, "generation.stop_token_ids=[2, 151645]"))
    assert text.startswith("generation.stop_token_ids has 151645, but generation.model_name")


def test_max_new_tokens_beyond_the_sequence_length_gives_a_warning(model):
    text = only(grpo(model, "policy.generation.max_new_tokens=1000", "policy.max_total_sequence_length=128"), "warning")
    assert text.startswith("policy.generation.max_new_tokens is 1000, but") and "max_total_sequence_length=128" in text
    assert said(grpo(model, "policy.generation.max_new_tokens=128", "policy.max_total_sequence_length=128")) == []


def test_tokenizer_with_more_token_ids_than_the_models_vocabulary_is_an_error(model):
    write_tokenizer(model, 40, added=[40])
    text = f"is {model}, whose tokens have ids up to 40, but the model {model} has a vocabulary of 40"
    assert f"policy.tokenizer.name {text}: remove the others from tokenizer.json" in only(grpo(model))
    write_tokenizer(model, 39, added=[39])
    assert said(grpo(model)) == []


def test_critic_vocabulary_smaller_than_the_policys_tokenizer_is_an_error(model, tmp_path):
    critic = model_folder(tmp_path / "critic", vocab_size=32)
    keys = (f"policy.model_name={model}", f"value.model_name={critic}", "policy.tokenizer.name=null")
    overrides = [*keys, "~policy.hf_config_overrides", "value.hf_config_overrides=null"]
    text = (
        f"is {critic}, which has a vocabulary of 32, but the tokens of policy.tokenizer.name {model} have ids up to 39"
    )
    assert f"value.model_name {text}" in only(load_ppo_config("ppo_tiny.yaml", overrides))


def test_vocab_size_override_below_the_tokenizers_size_is_one_error_of_policy_and_critic():
    critic = ["value.hf_config_overrides=null", "++value.hf_config_overrides.vocab_size=8"]
    assert only(load_ppo_config("ppo_tiny.yaml", critic)).startswith("value.hf_config_overrides.vocab_size is 8, but")
    assert only(load_ppo_config("ppo_tiny.yaml", [f"{VOCABULARY}=8"])).startswith(VOCABULARY)


def test_tokenizer_with_far_fewer_token_ids_than_the_models_vocabulary_gives_a_warning(model):
    write_tokenizer(model, 36)
    assert said(grpo(model)) == []  # vocabularies are padded to round sizes
    write_tokenizer(model, 35)
    assert "has 35 tokens, while the model" in only(grpo(model), "warning")


@pytest.mark.parametrize("content, sentence", [
    (None, "holds no tokenizer.json"), ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ("{}", "tokenizer"), ("no JSON", "tokenizer"),
])  # fmt: skip
def test_unreadable_tokenizer_file_is_reported_with_the_name_of_its_folder(content, sentence, model):
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    text = only(grpo(model))
    assert text.startswith("policy.tokenizer.name is") and sentence in text and str(model) in text and "\n" not in text


@pytest.mark.parametrize("name, level, near", [
    ("smollm2-135m-instrct", "error", "smollm2-135m-instruct"), ("tiny_random", "error", "tiny-random"),
    ("SmolLM2_135M-Instruct", "error", "smollm2-135m-instruct"), ("modle", "error", "model"), ("./modle", "error", "model"),
    ("HuggingFaceTB/SmolLM2-135M-Instrct", "warning", "HuggingFaceTB/SmolLM2-135M-Instruct"),
])  # fmt: skip
def test_error_for_a_misspelt_model_name_suggests_an_available_model(name, level, near, model):
    text = only(grpo(name), level)
    assert f"did you mean {near}?" in text and "policy.model_name is" in text


def test_preflight_check_reports_a_model_path_that_does_not_exist(model):
    assert only(grpo("./nothing/like/it")) == "policy.model_name is './nothing/like/it', but there is no such folder"
    assert "is the file" in only(grpo(model / "config.json"))


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-1.5B", "gpt2", "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_preflight_check_accepts_a_model_that_is_not_downloaded_yet(name, model):
    assert said(grpo(name)) == []


def cached(model, tmp_path, *names):
    """Files of the model in the hub's cache under org/name, as links to blobs."""
    repo = tmp_path / "hf/hub/models--org--name"
    snapshot, blobs = repo / "snapshots/abc", repo / "blobs"
    for folder in (snapshot, blobs, repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs/main").write_text("abc")
    for name in names:
        (model / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


@pytest.mark.slow
def test_preflight_check_reads_a_model_in_the_hub_cache_without_a_download(model, tmp_path):
    code = """
import sys
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.checks.model import check
names = ["policy.model_name=org/name", "policy.tokenizer.name=null", "~policy.hf_config_overrides", *sys.argv[1:]]
print([str(f) for f in check(load_grpo_config("grpo_tiny.yaml", names))])
"""

    def asked(*overrides):  # in a process of its own: the hub's library reads its folder when it is imported
        return subprocess.run([sys.executable, "-c", code, *overrides], capture_output=True, text=True).stdout

    snapshot = cached(model, tmp_path, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert asked().strip() == "[]"
    longer, said = "policy.max_total_sequence_length=1024", "policy.max_total_sequence_length is 1024"
    assert f"{said}, but org/name has positions for 512" in asked(longer)
    # a download that was broken off: the run continues with it
    (snapshot / "model.safetensors").rename(snapshot / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert asked(longer).strip() == "[]"


def test_error_for_a_run_folder_as_model_name_suggests_the_weights_folder_inside_it(model, tmp_path):
    weights = tmp_path / "run/step_2/policy/weights"
    weights.parent.mkdir(parents=True)
    model.rename(weights)
    for name in ("run", "run/step_2"):
        ((level, text),) = said(grpo(name))
        assert level == "error" and text.startswith("policy.model_name")
        assert text.endswith("did you mean run/step_2/policy/weights?")
    assert said(evaluation("run", "generation.vllm_cfg.max_model_len=16", "generation.max_new_tokens=16")) == []


def test_error_for_the_checkpoint_of_a_quantised_run_as_model_name_names_the_base_model(model, tmp_path):
    weights = tmp_path / "run/step_2/policy/weights"
    shutil.copytree(model, weights)
    (weights / "model.safetensors").unlink()
    (weights / "adapter").mkdir()
    saved = {"base.json": {"quantization": "q8_0", "model_name": "model", "seed": 0}, "adapter_config.json": {"r": 4, "lora_alpha": 4}}  # fmt: skip
    for file, content in saved.items():
        (weights / "adapter" / file).write_text(json.dumps(content))
    (weights / "adapter/adapter_model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    for name in ("run", "run/step_2", str(weights)):
        ((level, text),) = said(grpo(name))
        assert level == "error" and "holds an adapter and no weights: name its base model, or resume its run by" in text


def test_error_for_an_adapter_folder_as_model_name_suggests_the_merged_model(model):
    (model / "adapter").mkdir()
    for name in ("adapter_config.json", "base.json"):
        (model / "adapter" / name).write_text("{}")
    assert only(grpo(model / "adapter")).endswith(f"did you mean {model}, the merged model?")


def tied_with_a_head_of_its_own(folder):
    """The model's weights, and a head beside them that is not the (zero) embedding."""
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header["lm_head.weight"] = {"dtype": "F32", "shape": [40, 16], "data_offsets": [len(data), len(data) + 4 * 40 * 16]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data + struct.pack("<640f", *range(640))
    )


def resumed(model, tmp_path, saved_keys, *overrides):
    """What is refused when a run of `model` resumes from a checkpoint whose config.json has `saved_keys`."""
    from nemo_rl_cpp.checks.folders import Saved, _model_refusals

    (tmp_path / "step_1/policy/weights").mkdir(parents=True)
    (tmp_path / "step_1/policy/weights/config.json").write_text(json.dumps(CONFIG | saved_keys))
    fields = dict.fromkeys(Saved._fields) | {"path": tmp_path / "step_1", "config": None}
    return [text for _, text in _model_refusals(Saved(**fields), "policy", grpo(model, *overrides).policy)]


def test_run_whose_lm_head_was_untied_on_loading_can_resume_from_its_checkpoint(model, tmp_path):
    tied_with_a_head_of_its_own(model)
    assert "tie_word_embeddings" in only(grpo(model), "warning")
    assert resumed(model, tmp_path, {"tie_word_embeddings": False}) == []


def rewrite(folder, **keys):
    (folder / "config.json").write_text(json.dumps(CONFIG | keys))


BROKEN = {
    "gemma": lambda folder: rewrite(folder, model_type="gemma"),
    "quantised": lambda folder: rewrite(folder, quantization_config={"quant_method": "awq"}),
    "dynamic rope": lambda folder: rewrite(folder, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no weights and no tokenizer": lambda folder: [
        (folder / name).unlink() for name in ("model.safetensors", "tokenizer.json")
    ],
    "adapter only": lambda folder: [
        (folder / "config.json").rename(folder / "adapter_config.json"),
        (folder / "model.safetensors").unlink(),
    ],
    "adapter beside the model": lambda folder: [
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"})),
        (folder / "adapter_model.safetensors").write_bytes(b""),
    ],
    "weights of an adapter beside the model": lambda folder: (folder / "adapter_model.bin").write_bytes(b""),
    "config is no JSON": lambda folder: (folder / "config.json").write_text("{"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_check_command_dry_run_and_training_report_the_same_error_for_a_broken_model_folder(damage, model, capsys):
    from nemo_rl_cpp.run_grpo_math import main as run

    BROKEN[damage](model)
    overrides = [f"policy.model_name={model}", "policy.tokenizer.name=null", "~policy.hf_config_overrides"]
    assert main(["check", "--config", "grpo_tiny.yaml", *overrides]) == 2
    [text] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert text.startswith("error: policy.model_name is") and str(model) in text
    for arguments in (["--dry-run"], []):
        assert run(["--config", "grpo_tiny.yaml", *arguments, *overrides]) == 2
        assert text in capsys.readouterr().err


def test_preflight_check_reports_a_broken_model_folder_of_the_critic(model, tmp_path):
    (tmp_path / "critic").mkdir()
    overrides = [f"policy.model_name={model}", "policy.tokenizer.name=null", f"value.model_name={tmp_path / 'critic'}", "~policy.hf_config_overrides",
                 "value.hf_config_overrides=null"]  # fmt: skip
    assert [f.key for f in check(load_ppo_config("ppo_tiny.yaml", overrides))] == ["value.model_name"]
    without = ["ppo.adv_estimator.name=raw_reward", "ppo.policy_training_start_step=0"]
    assert list(check(load_ppo_config("ppo_tiny.yaml", [*overrides, *without]))) == []


# model_type -> (the keys of its config.json, [(overrides, what the only error says; None if there is none)])
LORA = "policy.dtensor_cfg.lora_cfg"
SERVER = "policy.generation.backend=vllm policy.generation.vllm_cfg.server_url=http://localhost:1"
SOME = f"{LORA}.enabled=true {LORA}.match_all_linear=false {LORA}.target_modules"
MEGATRON = "policy.megatron_cfg.enabled=true policy.dtensor_cfg.enabled=false policy.megatron_cfg"
ACCEPTED = [
    (part, None) for part in ("policy.max_total_sequence_length=256", "cluster.device=cuda", f"{LORA}.enabled=true")
]
SETTINGS = {
    "mixtral": (dict(num_local_experts=3, num_experts_per_tok=2), [
        *ACCEPTED,
        ("policy.router_replay.enabled=true", None),
        ("policy.hf_config_overrides.output_router_logits=true", "output_router_logits is true, which adds"),
        (f"{SOME}=[gate_proj]", "is ['gate_proj'], which no matrix of"),
        (f"{MEGATRON}.moe_aux_loss_coeff=0.01", "is 0.01, but moe_router_load_balancing_type is none"),
        (f"{MEGATRON}.moe_router_load_balancing_type=aux_loss", None),
        (f"{MEGATRON}.moe_router_bias_update_rate=0.1",
         "is 0.1, which balances the experts of sigmoid routers in the native core; this model has softmax routers: set it to 0.0"),
    ]),
    "glm4_moe": (dict(tie_word_embeddings=False, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0), [
        (f"{MEGATRON}.moe_router_bias_update_rate=0.001", None),
        (f"{MEGATRON}.moe_aux_loss_coeff=0.01", "moe_router_load_balancing_type is none"),
        (f"{MEGATRON}.moe_router_load_balancing_type=seq_aux_loss", "balances the experts of softmax routers"),
    ]),
    "nemotron_h": (dict(
        tie_word_embeddings=False, hybrid_override_pattern="M*-", n_groups=1, mamba_num_heads=2, ssm_state_size=16, mamba_head_dim=16,
    ), [
        *ACCEPTED,
        (f"{SOME}=[gate_proj]", "which no matrix of"),
        (f"{LORA}.enabled=true policy.quantization=q4_0", "policy.quantization is q4_0, whose blocks hold 32 weights"),
        (SERVER, "policy.generation.backend is vllm, but nemotron_h has Mamba-2, whose weights are not sent to vLLM"),
    ]),
    "granitemoehybrid": (dict(
        num_hidden_layers=2, layer_types=["mamba", "attention"], shared_intermediate_size=32, num_local_experts=0, mamba_n_heads=2, mamba_d_state=16,
    ), [
        *ACCEPTED,
        (f"{SOME}=[gate_proj]", "which no matrix of"),
        (f"{SOME}=[gate_up_proj,in_proj]", None),
        (SERVER, "policy.generation.backend is vllm, but granitemoehybrid has matrices that hold gate and up, whose weights are not sent to vLLM"),
    ]),
    "lfm2": (dict(num_hidden_layers=2, layer_types=["conv", "full_attention"]), [
        *ACCEPTED,
        (f"{SOME}=[gate_proj]", "which no matrix of"),
        (f"{SOME}=[o_proj]", "layers is called: name some of in_proj, out_proj, w1, w3, w2, q_proj, k_proj, v_proj"),
        (f"{SOME}=[w1,out_proj]", None),
        (SERVER, "policy.generation.backend is vllm, but lfm2 has gated short convolutions, whose weights are not sent to vLLM"),
    ]),
    "deepseek_v3": (dict(
        num_key_value_heads=2, head_dim=8, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
    ), [
        *ACCEPTED,
        (SERVER, "policy.generation.backend is vllm, but deepseek_v3 has latent attention, whose weights are not sent to vLLM"),
    ]),
    "qwen3_5_text": (dict(
        full_attention_interval=2, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    ), [
        *ACCEPTED,
        (f"{SOME}=[*.layers.0.*.q_proj]",
         "layers is called: name some of in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj, gate_proj, "),
        (SERVER, None),
        (f"policy.precision=float32 {STARTED_VLLM}",
         "python starts a vLLM that computes in float32, but on CPUs its recurrent layers (qwen3_5_text) compute only in bfloat16"),
        (f"policy.precision=float32 policy.generation.vllm_cfg.precision=bfloat16 {STARTED_VLLM}", None),
        (f"policy.precision=bfloat16 policy.generation.vllm_cfg.enable_prefix_caching=true {STARTED_VLLM}",
         "enable_prefix_caching is true, but vLLM on CPUs caches no prefixes of the recurrent layers of qwen3_5_text: set it to null"),
    ]),
    "qwen3_next": (dict(
        full_attention_interval=2, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
    ), [*ACCEPTED, (SERVER, None)]),
}  # fmt: skip


@pytest.mark.parametrize("targets, is_told", [("[in_proj]", False), ("['*_proj']", True)])
def test_lora_on_mambas_output_projection_gives_a_warning_that_peft_cannot_load_it(model, tmp_path, targets, is_told):
    folder = model_folder(tmp_path / "other", model_type="nemotron_h", **SETTINGS["nemotron_h"][0])
    settings = grpo(folder, *(f"++{part}" for part in f"{SOME}={targets}".split(" ")))
    told = [finding.message for finding in check(settings) if "out_proj of Nemotron-H" in finding.message]
    assert len(told) == is_told


@pytest.mark.parametrize(
    "kind, override, sentence", [(kind, *case) for kind, (_, cases) in SETTINGS.items() for case in cases]
)
def test_settings_unsupported_by_an_architecture_are_reported_before_a_run(model, tmp_path, kind, override, sentence):
    folder = model_folder(tmp_path / "other", model_type=kind, **SETTINGS[kind][0])
    settings = grpo(folder, *(f"++{part}" for part in override.split(" ")))
    found = [finding.message for finding in check(settings) if finding.level == "error"]
    assert found == [] if sentence is None else len(found) == 1 and sentence in found[0]
