"""The walk over NeMo RL's recipes: which load as they stand, with `backend: vllm` and their device counts, and why the others do not.

`nemo_rl_recipes.json` holds, by path below examples/configs (nemo_gym and modelopt: below examples), the keys and values that a recipe
sets over its parent; the parents' values are those of tests/unit/config/nemo_rl_values.json. Names of logs and checkpoints are left out,
and so are the settings of NeMo Gym's judges. Files for images and sound are among them, since they run by GRPO."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from nemo_rl_cpp.config import (
    ConfigError,
    load_distillation_config,
    load_eval_config,
    load_grpo_config,
    load_ppo_config,
    rules,
)
from nemo_rl_cpp.config.cluster import engines_of, trainers_of
from nemo_rl_cpp.files.yaml_text import dump_yaml

HERE = Path(__file__).parent
VALUES = json.loads((HERE.parent / "config" / "nemo_rl_values.json").read_text())
RECIPES = json.loads((HERE / "nemo_rl_recipes.json").read_text())
PARENTS = {
    "grpo_math_1B_megatron.yaml": "grpo_math_1B.yaml", "grpo_multiple_datasets.yaml": "grpo_math_1B.yaml", "prorlv2.yaml": "grpo_math_1B.yaml",
    "recipes/llm/dapo-qwen2.5-7b.yaml": "grpo_math_1B.yaml", "ppo_math_1B_megatron.yaml": "ppo_math_1B.yaml",
}  # fmt: skip
NAMES = sorted({*RECIPES, *VALUES})
LOADS = {
    "evals/": load_eval_config,
    "ppo": load_ppo_config,
    "distillation": load_distillation_config,
    "": load_grpo_config,
}

WHOLE = {"images or sound": re.compile("vlm|audio"), "teachers with another tokenizer": re.compile("xtoken")}
"""Reason -> names of the files that have it, whatever keys are reported besides."""
REASONS = {
    "quantised training or generation": (
        "fp8_cfg", "vllm_cfg.precision", "kv_cache_dtype", "quant", "exp_avg", "is_mx", "modelopt", "op_fuser", "glu_interleave",
        "freeze_config", "pow2_weight_scaling", "refit_cache_loader",
    ),
    "LoRA": ("lora_cfg", "peft"),
    "speculative decoding trained along": ("draft",),
    "distillation over the whole vocabulary": ("on_policy_distillation.full",),
    "a truncation of weights without its type": ("truncated_importance_sampling_ratio",),
    "keys of an earlier NeMo Gym": ("data.train", "jsonl_fpath", "agent_name", "should_use_nemo_gym"),
    "rewards by levels of effort": ("effort_levels",),
    "an environment that is not there": ("sliding_puzzle", "add_system_prompt", "reward_model", "env_name"),
    "keys that nothing reads": ("num_train_samples_to_print",),
}  # fmt: skip


def tree(flat):
    root = {}
    for dotted, value in flat.items():
        *path, last = dotted.split(".")
        node = root
        for part in path:
            node[part] = node[part] if isinstance(node.get(part), dict) else {}
            node = node[part]
        node[last] = value
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All recipes as files that inherit from one another, below one folder."""
    root = tmp_path_factory.mktemp("recipes")
    for name in NAMES:
        recipe = RECIPES.get(name, {"shipped": True})
        flat = VALUES[name] if recipe.get("shipped") else recipe["set"]
        parent = PARENTS.get(name) if recipe.get("shipped") else recipe["parent"]
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        inherits = "" if parent is None else f"defaults: {Path(*['..'] * (len(Path(name).parts) - 1), parent)}\n"
        file.write_text(inherits + dump_yaml(tree(flat)))
    return root


@pytest.fixture(scope="module")
def walk(folder):
    """name -> configuration, or the ConfigError. Trackers that a recipe enables count as installed."""
    found, spec = {}, importlib.util.find_spec
    trackers = pytest.MonkeyPatch()
    trackers.setattr(
        rules.importlib.util,
        "find_spec",
        lambda name, *rest: object() if name in ("wandb", "mlflow", "swanlab") else spec(name, *rest),
    )
    for name in NAMES:
        load = next(load for word, load in LOADS.items() if word in name)
        try:
            found[name] = load(folder / name)
        except ConfigError as error:
            found[name] = error
    trackers.undo()
    return found


def loaded(walk):
    return {name: config for name, config in walk.items() if not isinstance(config, ConfigError)}


NATIVE = re.compile(
    r"Llama|Qwen2|Qwen3-[\d.]+B|DeepSeek-R1-Distill-Qwen|Qwen3\.[58]-[\d.]+B|gemma-[34]-|gpt-oss|Nemotron-Nano-(9|12)B-v2"
    r"|DeepSeek-V3|deepseek-v3|guides/deepseek\.md|Moonlight-16B-A3B|GLM-4\.7-Flash"
    r"|Nemotron-3-(Nano-30B|Super)|Nemotron-3.5-Lightning"
)
"""Names of models whose architecture is Llama, Qwen2, Qwen3 and Qwen3.5 (also of Qwen3.8) with and without experts, Gemma 3 and 4, gpt-oss,
Nemotron Nano v2, 3 Nano, 3 Super or 3.5 Lightning, DeepSeek-V3 (also Moonlight) or GLM-4.7-Flash."""


def model_of(config):
    return config.policy.model_name if hasattr(config, "policy") else config.generation.model_name


def uses_gym(name):
    """Whether a file or one that it inherits from sets keys of NeMo Gym, whose examples have many keys of their own."""
    recipe = RECIPES.get(name, {})
    return any("nemo_gym" in key for key in recipe.get("set", ())) or (
        bool(recipe.get("parent")) and uses_gym(recipe["parent"])
    )


def reason_of(key):
    return next((reason for reason, parts in REASONS.items() if any(part in key for part in parts)), key)


def reason_of_file(name, error):
    """The first reason for which a file does not load, in the order of WHOLE and REASONS."""
    keys = {problem.key for problem in error.problems}
    if whole := next((reason for reason, names in WHOLE.items() if names.search(name)), None):
        return whole
    found = {reason_of(key) for key in keys}
    return next((reason for reason in REASONS if reason in found), min(found))


@pytest.mark.slow
def test_most_nemo_rl_recipes_load_unchanged(walk):
    native = [name for name, config in loaded(walk).items() if NATIVE.search(model_of(config))]
    assert len(walk) >= 279 and len(loaded(walk)) >= 206 and len(native) >= 194


@pytest.mark.slow
def test_nemo_rl_recipes_that_do_not_load_fail_for_a_known_reason(walk):
    unknown = {
        f"{name}: {problem}" for name, error in walk.items() if isinstance(error, ConfigError) for problem in error.problems
        if reason_of_file(name, error) not in WHOLE and not uses_gym(name) and reason_of(problem.key) not in REASONS
    }  # fmt: skip
    assert unknown == set()


def test_nemo_rl_recipes_with_unsupported_quantization_are_errors(walk):
    for name in loaded(walk):
        assert not any(word in name for word in ("fp8", "nvfp4", "eagle", "vlm", "modelopt")), name


def test_asynchronous_nemo_rl_recipes_use_separate_processes_for_training_and_generation(walk):
    beside = {name: config for name, config in loaded(walk).items() if "async" in name and "gym" not in name}
    assert len(beside) >= 11
    for name, config in beside.items():
        section = config.loop.beside_training
        assert section.enabled, name
        assert section.in_flight_weight_updates or config.async_rl is not None or "ppo" in name, name
        assert (trainers_of(config), engines_of(config)) == (1, 1), name


def test_transformer_engine_adam_is_replaced_by_adamw_with_the_same_moment_dtype(walk):
    config = walk["recipes/llm/grpo-glm47-flash-4n8g-automodel.yaml"].policy.optimizer
    assert (config.name, config.kwargs.lr, config.kwargs.weight_decay) == ("torch.optim.AdamW", 1e-6, 0.1)
    assert (config.kwargs.exp_avg_dtype, config.kwargs.exp_avg_sq_dtype) == ("bfloat16", "bfloat16")


def test_windowed_sampler_of_nemo_rl_sets_the_maximum_age_of_rollouts(walk):
    name = "recipes/llm/grpo-llama3.1-8b-instruct-2n8g-async-1off-single-controller-streaming2.yaml"
    assert walk[name].async_rl.sampler.name == "windowed"
    assert walk[name].grpo.async_grpo.enabled and walk[name].grpo.async_grpo.max_trajectory_age_steps == 1
