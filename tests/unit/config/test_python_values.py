import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from nemo_rl_cpp.config import (
    ConfigError,
    EvalMasterConfig,
    GRPOMasterConfig,
    PPOMasterConfig,
    load_eval_config,
    load_grpo_config,
    load_ppo_config,
)
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.config.loop import GRPOConfig, PPOConfig, RewardScalingConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.config.master import checked
from nemo_rl_cpp.config.rules_model import checked_policy

TEXTS = [
    "\n", "\t", "é", "日本", "🙂", "\\n", "${x}", "${", "a'b\"c", "???", "null", "true", "1e5", "[1,2]", "{a: 1}", "a=b",
    " ", "#", "given_value_0_0_",
]  # fmt: skip
NOTEBOOK = {"grpo.num_prompts_per_step": 4, "grpo.num_generations_per_prompt": 8, "policy.train_global_batch_size": 32}


@pytest.fixture(scope="module")
def tiny():
    return load_grpo_config("grpo_tiny.yaml").model_dump()


def changed(tree, dotted, value):
    tree = copy.deepcopy(tree)
    node = tree
    *sections, name = dotted.split(".")
    for part in sections:
        node = node[part]
    node[name] = value
    return tree


@pytest.mark.parametrize("text", TEXTS)
def test_configuration_strings_given_in_python_are_not_parsed_as_yaml(text):
    config = load_grpo_config("grpo_notebook.yaml", values=NOTEBOOK | {
        "policy.generation.stop_strings": [text, "x"], "policy.model_name": text,
        "policy.hf_config_overrides": {"a": [text]},
    })  # fmt: skip
    assert config.policy.generation.stop_strings == [text, "x"]
    assert config.policy.model_name == config.policy.tokenizer.name == text  # the file's ${policy.model_name} sees it
    assert config.policy.hf_config_overrides == {"a": [text]}


def test_interpolations_in_the_configuration_file_use_values_given_in_python():
    config = load_grpo_config(
        "grpo_math_1B.yaml", values={"policy.max_total_sequence_length": 96, "policy.generation.max_new_tokens": 7}
    )
    assert config.policy.generation.vllm_cfg.max_model_len == 96 and config.policy.generation.max_new_tokens == 7
    assert config.positions["policy.generation.max_new_tokens"] == "value of policy.generation.max_new_tokens"


@pytest.mark.parametrize(("key", "given", "held"), [
    ("policy.generation.stop_strings", "###", ["###"]),
    ("policy.generation.stop_token_ids", 3, [3]),
    ("policy.optimizer.kwargs.betas", (0.9, 0.95), [0.9, 0.95]),
    ("policy.optimizer.kwargs.lr", np.float64(1e-5), 1e-5),
    ("policy.optimizer.kwargs.lr", 0.1 + 0.2, 0.1 + 0.2),
    ("grpo.seed", np.int64(7), 7),
    ("grpo.max_num_steps", 1e3, 1000),
    ("policy.model_name", Path("a") / "b", "a/b"),
    ("grpo.reward_scaling", {"enabled": True, "correct": 2.0}, RewardScalingConfig(enabled=True, target_max=2.0)),
    ("grpo.max_num_gen_batches", 3, 3),
])  # fmt: skip
def test_configuration_values_given_in_python_are_converted_to_the_types_of_their_keys(key, given, held):
    found = load_grpo_config("grpo_notebook.yaml", values=NOTEBOOK | {key: given})
    for part in key.split("."):
        found = found[part]
    assert found == held and type(found) is type(held)


@pytest.mark.parametrize(("values", "message"), [
    ({"grpo.seed": True}, "argument x: grpo.seed must be a number, not true"),
    ({"grpo.seed": 10**30}, "argument x: grpo.seed must be an integer of at most 64 bits"),
    ({"grpo.seeed": 7}, "argument x: grpo.seeed is unknown; did you mean seed?"),
    ({"policy.model_name": b"a"}, "argument x: policy.model_name must be a text, not b'a'"),
    ({"policy.generation.stop_strings": {"a"}}, "argument x: policy.generation.stop_strings must be a list, not {'a'}"),
    ({"policy.generation.temperature": float("nan")}, "argument x: policy.generation.temperature must be a finite number, not nan"),
    ({"policy.generation.temperature": 1e-40},
     "argument x: policy.generation.temperature must lie between 1e-38 and 1e+38, or be 0 for greedy decoding, not 1e-40"),
    ({"policy.train_global_batch_size": 7}, "argument x: policy.train_global_batch_size is 7, which does not divide the 32 samples"),
    ({"grpo.reward_scaling": {1: 2}}, "argument x: grpo.reward_scaling the keys of a mapping must be texts, not int (1)"),
    ({"größe": 1}, "argument x: größe is unknown"),
])  # fmt: skip
def test_error_for_an_invalid_configuration_value_given_in_python_names_its_argument(values, message):
    with pytest.raises(ConfigError) as caught:
        load_grpo_config("grpo_notebook.yaml", values=NOTEBOOK | values, places=dict.fromkeys(values, "argument x"))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


UNSUPPORTED = [
    ("policy.dtensor_cfg.lora_cfg", {"enabled": True, "dropout": 0.1}, "dropout is not supported"),
    ("grpo.async_grpo", {"enabled": True}, "needs engines with weights of their own"),
    ("cluster", {"gpus_per_node": 8, "strict_sizes": True}, "strict_sizes"),
    ("loss_fn.ratio_clip_c", 0.5, "must be greater than 1"),
    ("policy.train_global_batch_size", 7, "does not divide the 256 samples"),
    ("grpo.num_generations_per_prompt", 1, "is its own baseline"),
    ("grpo.reward_shaping", {"enabled": True}, "overlong_buffer_length is missing"),
    ("env.math", 3, "env.math must be a section"),
]


@pytest.mark.parametrize(("key", "value", "message"), UNSUPPORTED)
def test_configuration_constructed_or_changed_in_python_is_checked_like_a_file(tiny, key, value, message):
    from nemo_rl_cpp.algorithms.build import build_run

    with pytest.raises(ConfigError, match=message) as caught:
        GRPOMasterConfig(**changed(tiny, key, value))
    assert key in str(caught.value)
    config = GRPOMasterConfig(**tiny)
    node = config
    *sections, name = key.split(".")
    for part in sections:
        node = node[part]
    node[name] = value
    for start in (lambda: build_run(config), lambda: checked(config, GRPOMasterConfig)):
        with pytest.raises(ConfigError, match=message):
            start()


def test_ppo_and_evaluation_configurations_changed_in_python_are_checked_before_the_run():
    from nemo_rl_cpp.algorithms.build import build_run
    from nemo_rl_cpp.evals import eval as evals

    tree = load_ppo_config("ppo_tiny.yaml").model_dump()
    with pytest.raises(ConfigError, match="must be greater than 1"):
        build_run(changed(tree, "loss_fn.ratio_clip_c", 0.5))
    with pytest.raises(ConfigError, match="is greedy, so the responses of eval.num_tests_per_prompt"):
        evals.main(changed(
            load_eval_config("evals/eval.yaml", ["generation.model_name=tiny-random"]).model_dump(),
            "eval.num_tests_per_prompt", 2,
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("load", "name", "model"),
    [(load_grpo_config, "grpo_tiny.yaml", GRPOMasterConfig), (load_ppo_config, "ppo_tiny.yaml", PPOMasterConfig),
     (load_eval_config, "evals/eval.yaml", EvalMasterConfig), (load_grpo_config, "dapo_tiny.yaml", GRPOMasterConfig)],
)  # fmt: skip
def test_configuration_keeps_its_values_when_dumped_pickled_or_copied(load, name, model):
    config = load(name)
    tree = config.model_dump()
    assert checked(config, model) is config and config.model_dump() == tree
    assert model(**tree).model_dump() == tree == checked(tree, model).model_dump()
    assert pickle.loads(pickle.dumps(config)).model_dump() == copy.deepcopy(config).model_dump() == tree


def test_invalid_assignment_to_a_configuration_section_raises_immediately(tiny):
    config = GRPOMasterConfig(**tiny)
    with pytest.raises(ConfigError, match="^GRPOConfig: seed must be an integer, not 'x'$"):
        config.grpo.seed = "x"
    with pytest.raises(ConfigError, match="^GRPOConfig: sed is unknown; did you mean seed?"):
        config["grpo"]["sed"] = 1
    config.policy.generation.stop_strings = "a"
    assert config.policy.generation.stop_strings == ["a"]
    config.policy.generation.stop_strings.append(3)
    with pytest.raises(ConfigError, match="policy.generation.stop_strings.1 must be a text"):
        checked(config, GRPOMasterConfig)


def test_configuration_names_used_in_nemo_rl_guides_are_accepted_in_python():
    assert GRPOConfig(dapo_batch_multiplier=3, max_num_gen_batches=2, reward_scaling={"incorrect": -1}).model_dump(exclude_unset=True) == {
        "batch_multiplier": 3.0, "dynamic_sampling_max_gen_batches": 2, "reward_scaling": {"target_min": -1.0}}  # fmt: skip
    assert PPOConfig(dapo_batch_multiplier=3)["dapo_batch_multiplier"] == 3
    assert GenerationConfig(max_model_len=9).vllm_cfg.max_model_len == 9
    policy = checked_policy({"model_name": "m", "generation": {"max_model_len": 9}})
    assert policy.generation.vllm_cfg.max_model_len == 9
    scaling = RewardScalingConfig(enabled=True, correct=1.0, incorrect=-1.0)
    assert (scaling.target_min, scaling.target_max, scaling["correct"]) == (-1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="correct and target_max are one key with two values"):
        RewardScalingConfig(correct=1.0, target_max=2.0)


def test_losses_and_estimators_validate_settings_given_as_dictionaries():
    import torch
    from nemo_rl_cpp.algorithms.advantage_estimator import ADVANTAGE_ESTIMATORS
    from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
    from nemo_rl_cpp.algorithms.reward_functions import scale_rewards

    with pytest.raises(ConfigError, match="ratio_clip_mx is unknown; did you mean ratio_clip_max?"):
        ClippedPGLossFn({"ratio_clip_mx": 0.28})
    with pytest.raises(ConfigError, match="expected a ClippedPGLossConfig or a mapping, not int"):
        ClippedPGLossFn(3)
    assert ClippedPGLossFn({"ratio_clip_max": 0.28}).ratio_clip_max == 0.28
    given = {"enabled": True, "correct": 1.0, "incorrect": -1.0}
    for config in (RewardScalingConfig(**given), given):
        assert scale_rewards({"total_reward": torch.tensor([0.0, 1.0])}, config)["total_reward"].tolist() == [-1.0, 1.0]
    said = "use_leave_one_out_baselin is unknown; did you mean use_leave_one_out_baseline?"
    with pytest.raises(ConfigError, match=said):
        ADVANTAGE_ESTIMATORS["grpo"]({"use_leave_one_out_baselin": False}, {})


def test_configuration_section_accepts_only_keyword_arguments():
    with pytest.raises(ConfigError, match=r"ClippedPGLossConfig\(\*\*mapping\)"):
        ClippedPGLossConfig({"ratio_clip_max": 0.28})
    with pytest.raises(ConfigError, match="must be a GRPOMasterConfig or a mapping, not list"):
        checked([], GRPOMasterConfig)


@pytest.mark.parametrize(("changes", "refused"), [
    ({}, True),
    ({"grpo.adv_estimator.use_leave_one_out_baseline": False, "grpo.adv_estimator.normalize_rewards": False}, True),
    ({"grpo.adv_estimator.name": "reinforce_plus_plus"}, True),
    ({"grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.adv_estimator.minus_baseline": False}, False),
    ({"loss_fn.positive_example_nll_weight": 0.5}, False),
])  # fmt: skip
def test_one_generation_per_prompt_is_an_error_if_every_advantage_would_be_zero(changes, refused):
    values = {"grpo.num_generations_per_prompt": 1, "grpo.num_prompts_per_step": 32} | changes
    values["policy.train_global_batch_size"] = 32
    if not refused:
        assert load_grpo_config("grpo_tiny.yaml", values=values).grpo.num_generations_per_prompt == 1
        return
    with pytest.raises(ConfigError, match="grpo.num_generations_per_prompt is 1: .* set at least 2") as caught:
        load_grpo_config("grpo_tiny.yaml", values=values)
    assert len(caught.value.problems) == 1


def test_ppo_accepts_one_generation_per_prompt():
    config = load_ppo_config("ppo_tiny.yaml", values={"ppo.num_generations_per_prompt": 1, "ppo.num_prompts_per_step": 32,
                                                      "policy.train_global_batch_size": 32, "value.train_global_batch_size": 32})  # fmt: skip
    assert config.ppo.num_generations_per_prompt == 1


def test_policy_configuration_created_separately_is_checked():
    good = {"model_name": "tiny-random", "dtensor_cfg": {"tensor_parallel_size": 1}}
    assert checked_policy(good).generation.max_new_tokens == 512
    with pytest.raises(ConfigError, match="dtensor_cfg.lora_cfg.dropout cannot be 0.1: dropout is not supported"):
        checked_policy(good | {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dropout": 0.1}}})
    with pytest.raises(ConfigError, match="policy.generation.temperature cannot be 0 in training"):
        checked_policy(good | {"generation": {"temperature": 0}})


def test_single_configuration_override_need_not_be_in_a_list():
    assert load_grpo_config("grpo_tiny.yaml", "grpo.seed=5").grpo.seed == 5
