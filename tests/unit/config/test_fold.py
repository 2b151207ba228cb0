import json

import pytest
from nemo_rl_cpp import cli, run_grpo_math
from nemo_rl_cpp.checks import model, preflight
from nemo_rl_cpp.config import ConfigError, load_eval_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.fold import devices_of, fold_text, keys_without_effect_text, sizes_of
from nemo_rl_cpp.models.memory import certain_bytes, checkpoint_bytes, forecast, forecast_summary

EIGHT = ["cluster.gpus_per_node=8", "policy.dtensor_cfg.tensor_parallel_size=4", "policy.generation.backend=vllm"]


def test_message_for_an_eight_gpu_configuration_states_devices_engine_time_and_memory():
    config = load_grpo_config("grpo_math_1B.yaml", [*EIGHT, "policy.model_name=somebody/Great-8B-Instruct"])
    text = fold_text(config, forecast_summary(config))
    assert text.startswith(
        "written for 8 devices (cluster.gpus_per_node 8, policy.dtensor_cfg.tensor_parallel_size 4) and the engine vllm: "
        "runs on 1 device (cpu) with the native engine; same mathematics, about 8 times the time"
    )
    assert "about 144 GB for weights, gradients and AdamW of 8 billion parameters (by the model's name) alone" in text
    assert "\n" not in text
    assert config.cluster.gpus_per_node == 8 and config.policy.generation.backend == "vllm"  # as they stand


@pytest.mark.parametrize("backend", ["vllm", "sglang", "megatron", "trtllm", "dynamo"])
def test_every_generation_backend_of_nemo_rl_is_replaced_by_the_native_engine(backend):
    config = load_grpo_config("grpo_tiny.yaml", [f"policy.generation.backend={backend}"])
    assert fold_text(config) == f"written for the engine {backend}: runs with the native engine; same mathematics"


def test_note_on_a_multi_device_file_gives_the_maximum_of_cluster_size_and_parallel_sizes():
    def of(*overrides):
        return devices_of(load_grpo_config("grpo_math_1B.yaml", list(overrides)))

    assert of("cluster.num_nodes=16", "cluster.gpus_per_node=8") == 128
    assert of("policy.dtensor_cfg.tensor_parallel_size=4", "policy.dtensor_cfg.context_parallel_size=2") == 8
    assert of("policy.generation.vllm_cfg.tensor_parallel_size=4") == 4
    assert of("policy.megatron_cfg.tensor_model_parallel_size=4") == 1  # of a backend that is not enabled
    megatron = "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"
    assert of(*megatron, "policy.megatron_cfg.pipeline_model_parallel_size=3") == 3


def test_critic_parallel_sizes_are_checked_only_if_the_run_trains_a_critic():
    overrides = ["value.megatron_cfg.tensor_model_parallel_size=2", "cluster.strict_sizes=true"]
    with pytest.raises(ConfigError, match="value.megatron_cfg.tensor_model_parallel_size is 2.*set it to 1"):
        load_ppo_config(overrides=overrides)
    raw = load_ppo_config("ppo_tiny_raw_reward.yaml", ["value.dtensor_cfg.tensor_parallel_size=2"])
    assert sizes_of(raw) == {}


def test_unavailable_parallel_sizes_and_devices_are_errors_with_strict_sizes():
    overrides = [*EIGHT, "cluster.strict_sizes=true", "policy.generation.colocated.enabled=false"]
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("grpo_math_1B.yaml", overrides)
    assert [problem.key for problem in caught.value.problems] == [
        "cluster.gpus_per_node", "policy.dtensor_cfg.tensor_parallel_size", "policy.generation.colocated.enabled",
    ]  # fmt: skip


def test_evaluation_configured_for_eight_devices_prints_a_message_on_one_device():
    sizes = ["cluster.gpus_per_node=8", "generation.vllm_cfg.tensor_parallel_size=8"]
    text = fold_text(load_eval_config("evals/eval.yaml", ["generation.backend=vllm", *sizes]))
    assert text.startswith(f"written for 8 devices ({', '.join(sizes).replace('=', ' ')})")


def test_check_command_and_dry_run_print_the_message_about_fewer_devices_only_once(capsys, tmp_path):
    overrides = [*EIGHT, f"checkpointing.checkpoint_dir={tmp_path}", f"logger.log_dir={tmp_path}/logs"]
    for main, words in ((run_grpo_math.main, ["--dry-run"]), (cli.main, ["check"])):
        assert main([*words, "--config", "grpo_tiny.yaml", *overrides]) == 0
        shown = capsys.readouterr()
        assert (shown.out + shown.err).count("written for 8 devices") == 1


def test_configuration_built_in_python_gives_the_same_message_about_fewer_devices(capsys, monkeypatch):
    from nemo_rl_cpp import errors
    from nemo_rl_cpp.algorithms.parts import make_cluster

    monkeypatch.setattr(errors, "_SAID", set())
    config = load_grpo_config("grpo_tiny.yaml", EIGHT)
    for _ in range(2):
        make_cluster(config)
    assert capsys.readouterr().err == f"warning: {fold_text(config, forecast_summary(config))}\n"
    errors._SAID.clear()
    preflight(config)
    make_cluster(config)
    make_cluster(load_grpo_config("grpo_tiny.yaml"))
    assert capsys.readouterr().err == ""


def test_dry_run_lists_each_configured_key_without_effect_exactly_once(capsys):
    ignored = ["policy.generation.vllm_cfg.gpu_memory_utilization=0.9", "policy.dtensor_cfg._v2=false"]
    run_grpo_math.main(["--config", "grpo_tiny.yaml", "--dry-run", *ignored, "policy.model_name=tiny-random"])
    listed = capsys.readouterr().out.partition("Keys without effect here")[2]
    assert "  policy.dtensor_cfg: _v2\n" in listed and listed.count("gpu_memory_utilization") == 1
    assert "  policy.generation.vllm_cfg: gpu_memory_utilization\n" in listed
    defaults = load_grpo_config("grpo_tiny.yaml", ["policy.dtensor_cfg._v2=true", "grpo.seed=3"])
    listed = keys_without_effect_text(defaults)
    assert "policy.dtensor_cfg:" not in listed and "grpo:" not in listed


def large_model(tmp_path, layers, optimizer=()):
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": layers, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 150000, **sizes}))
    kwargs = [f"++policy.optimizer.kwargs.{setting}" for setting in optimizer]
    return load_grpo_config("grpo_math_1B.yaml", [f"policy.model_name={tmp_path}", *kwargs])


def test_minimum_memory_of_a_run_covers_weights_master_weights_gradients_and_adamw_moments(tmp_path, monkeypatch):
    config = large_model(tmp_path, 1)
    query = 4096 * (2 * 4096 + 2 * 4096)
    parameters = query + 3 * 4096 * 16384 + (2 + 3) * 4096 + 2 * 150000 * 4096 + 4096  # with norms and biases
    kept = parameters * (2 + 4 + 8 + 4) + parameters * 2  # policy, gradients, and the reference weights of the KL term
    assert certain_bytes(config) == kept
    for memory, refused in ((kept, False), (kept - 1, True)):
        monkeypatch.setattr("nemo_rl_cpp.models.memory.machine_memory", lambda memory=memory: memory)
        assert any(finding.level == "error" for finding in model.check_memory(config)) == refused


def test_minimum_memory_with_8_bit_optimizer_state_matches_hand_computed_bytes_per_parameter(tmp_path):
    small = ["exp_avg_dtype=uint8", "exp_avg_sq_dtype=uint8", "store_param_remainders=true"]
    config, exact = large_model(tmp_path, 1, small), large_model(tmp_path, 1)
    parameters = certain_bytes(exact) / (2 + 4 + 8 + 4 + 2)
    assert certain_bytes(config) == parameters * (2 + 2 + 2 + 4 + 2)
    assert checkpoint_bytes(config) == parameters * (2 + 2 + 2) and checkpoint_bytes(exact) == parameters * (2 + 4 + 8)


def test_configuration_keys_of_the_newest_nemo_rl_version_are_accepted():
    config = load_ppo_config("ppo_math_1B.yaml", [
        "+ppo.critic_ppo_epochs='${ppo.ppo_epochs}'", "+ppo.warm_start_value_checkpoint=null", "+policy.dtensor_cfg.save_consolidated='false'",
        "+policy.dtensor_cfg.lora_cfg.restore_from=null", "+policy.generation.mcore_generation_config.logprobs_mode=processed_logprobs",
        "+policy.generation.vllm_cfg.refit_with_reload_api=false", "+policy.router_replay={enabled: true, dtype: bfloat16}",
    ])  # fmt: skip
    assert config.ppo.critic_ppo_epochs == config.ppo.ppo_epochs == 4


def test_model_of_unknown_size_gives_a_memory_warning_and_no_error():
    config = load_grpo_config("grpo_math_1B.yaml", ["policy.model_name=owner/nameless", "cluster.gpus_per_node=8"])
    assert forecast_summary(config) == "not known, the sizes of owner/nameless are not on this machine"
    assert [finding.level for finding in model.check_memory(config)] == ["warning"]


@pytest.mark.parametrize("override, expected", [
    ("policy.tokenizer.chat_template_kwargs.enable_thinking=true", {"enable_thinking": True}),
    ("policy.tokenizer.chat_template_kwargs={enable_thinking: true}", {"enable_thinking": True}),
    ("+policy.tokenizer.chat_template_kwargs.enable_thinking=true", {"enable_thinking": True}),
])  # fmt: skip
def test_overrides_can_add_keys_to_free_form_mappings_without_a_plus(override, expected):
    assert load_grpo_config("grpo_math_1B.yaml", [override]).policy.tokenizer.chat_template_kwargs == expected
    evaluation = load_eval_config("evals/eval.yaml", [override.replace("policy.", "")])
    assert evaluation.tokenizer.chat_template_kwargs == expected


def test_automodel_cfg_is_accepted_as_an_alias_of_dtensor_cfg():
    config = load_grpo_config("grpo_math_1B.yaml", ["++policy.automodel_cfg.activation_checkpointing=true"])
    assert config.policy.activation_checkpointing


def test_data_default_section_accepts_the_keys_of_its_data_set_class(tmp_path):
    file = tmp_path / "data.yaml"
    file.write_text(
        "policy: {model_name: m}\nenv: {math: {}}\ndata:\n  train: {data_path: a.jsonl, input_key: q}\n  validation: {data_path: b.jsonl}\n"
        "  default: {dataset_name: ResponseDataset, input_key: question, output_key: answer, env_name: math}\n"
    )
    data = load_grpo_config(file).data
    assert data.default.dataset_name == "ResponseDataset" and data.default["output_key"] == "answer"


def test_evaluation_with_one_environment_needs_no_env_name():
    one = load_eval_config("evals/eval.yaml", ["~data.env_name"])
    assert one.data.env_name == "math"
    with pytest.raises(ConfigError, match="data.env_name is missing.*env has math, arithmetic"):
        load_eval_config("evals/eval.yaml", ["~data.env_name", "+env.arithmetic={}"])


def test_evaluation_accepts_nemo_rl_names_of_data_keys():
    data = load_eval_config("evals/local_eval.yaml", ["data.dataset_name=mine.jsonl", "data.problem_key=p"]).data
    assert (data.dataset_name, data["data_path"]) == ("ResponseDataset", "mine.jsonl")
    assert (data["input_key"], data["output_key"]) == ("p", "Answer")


def of_workers(*overrides):
    return load_grpo_config("grpo_tiny.yaml", ["cluster.executor=processes", *overrides])


TP = "policy.dtensor_cfg.tensor_parallel_size=2"
ENGINE_TP = "policy.generation.vllm_cfg.tensor_parallel_size=2"


def test_supported_tensor_parallel_size_is_used_without_a_message():
    config = of_workers("cluster.gpus_per_node=4", TP, ENGINE_TP)
    assert config.policy.tensor_parallel(4) == 2 and sizes_of(config) == {} and fold_text(config) is None
    of_workers("cluster.gpus_per_node=4", TP, ENGINE_TP, "cluster.strict_sizes=true")
    assert sizes_of(of_workers("cluster.gpus_per_node=4", ENGINE_TP)) == {ENGINE_TP.partition("=")[0]: 2}


def test_tensor_parallel_size_that_does_not_divide_the_process_count_becomes_1_or_an_error():
    config = of_workers("cluster.gpus_per_node=3", TP)
    assert config.policy.tensor_parallel(3) == 1
    assert f"written for 2 devices ({TP.replace('=', ' ')}): runs on 3 processes" in fold_text(config)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but the run has 3 processes"):
        of_workers("cluster.gpus_per_node=3", TP, "cluster.strict_sizes=true")
    assert load_grpo_config("grpo_tiny.yaml", [TP]).policy.tensor_parallel(1) == 1  # all in this process


def test_tensor_parallelism_with_engines_in_separate_processes_is_an_error():
    apart = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=2")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but separate engines have whole models"):
        of_workers("cluster.gpus_per_node=4", TP, *apart)
    config = of_workers("cluster.gpus_per_node=3", TP, *apart)  # one trainer: folded
    assert list(sizes_of(config)) == [TP.partition("=")[0]]


def test_memory_estimate_divides_the_weights_over_tensor_parallel_ranks():
    def weights(*overrides):
        small = "policy.precision=bfloat16", "policy.hf_config_overrides.vocab_size=4096"
        return {name: size for phase in forecast(of_workers(*small, *overrides)) for name, size in phase.parts}

    one, two, sliced = weights(), weights("cluster.gpus_per_node=2"), weights("cluster.gpus_per_node=2", TP)
    assert two["policy weights"] == 2 * one["policy weights"] and two["policy gradients"] == 2 * one["policy gradients"]
    for name in ("policy weights", "policy gradients", "policy master weights", "policy optimizer", "KV cache"):
        assert sliced[name] == pytest.approx(one[name], rel=0.01), name
    assert sliced["logits"] == 2 * one["logits"]  # whole rows in both


def test_preflight_check_reports_a_model_that_cannot_be_split_over_the_tensor_parallel_ranks():
    sizes = "policy.dtensor_cfg.tensor_parallel_size=4", "policy.hf_config_overrides.num_key_value_heads=2"
    findings = [finding.message for finding in preflight(of_workers("cluster.gpus_per_node=4", *sizes))]
    assert any("tensor_parallel_size is 4, but the model has 2 key/value heads" in message for message in findings)
