import inspect
import json
from pathlib import Path

import pytest
from nemo_rl_cpp import _config
from nemo_rl_cpp.config import find_config, load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.data import DATASET_REGISTRY, DatasetConfig
from nemo_rl_cpp.config.env import ENV_REGISTRY, environment_sections
from nemo_rl_cpp.config.loader import LOADERS, kind_of
from nemo_rl_cpp.environments.loading import environment_class
from nemo_rl_cpp.files.yaml_text import dump_yaml
from nemo_rl_cpp.models.policy.updates import create_schedule

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
NEMO_RL = json.loads(Path(__file__).with_name("nemo_rl_values.json").read_text())
EXCEPTIONS = {
    "policy.generation.backend": None,  # that of policy.backend
    "generation.backend": "native",
    "logger.tensorboard_enabled": True,  # event files cost nothing: always written
    "logger.mlflow.tracking_uri": None,  # MLflow's own, or its variable
    # the recipe's 16 machines of 8 GPUs: training is on one device
    "policy.dtensor_cfg.context_parallel_size": 1,
    "cluster.gpus_per_node": 1,
    "cluster.num_nodes": 1,
}
MUST_BE_GIVEN = {
    "grpo_jsonl.yaml": ["data.train.data_path=my.jsonl", "env.reward_functions.functions=[my_rewards.right]"]
}


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "agents").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_agent_configurations_load_without_errors(path):
    assert load_grpo_config(path).policy.generation.expose_http_server


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_configuration_written_to_a_file_loads_with_identical_values(path, tmp_path):
    load = LOADERS[kind_of(path)]
    config = load(path, MUST_BE_GIVEN.get(path.name, []))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config.model_dump()))
    assert load(copy).model_dump() == config.model_dump()


PARENTS = {
    "grpo_math_1B_megatron.yaml": "grpo_math_1B.yaml",
    "grpo_multiple_datasets.yaml": "grpo_math_1B.yaml",
    "prorlv2.yaml": "grpo_math_1B.yaml",
    "recipes/llm/dapo-qwen2.5-7b.yaml": "grpo_math_1B.yaml",
    "ppo_math_1B_megatron.yaml": "ppo_math_1B.yaml",
}


def without_null(value):
    """Without keys that are null or empty: our schema spells out what may be left away."""
    if isinstance(value, dict):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None and inner != {}}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NEMO_RL)
def test_shipped_configurations_have_the_values_of_nemo_rl_except_for_listed_keys(name, tmp_path):
    """The same after inheritance and interpolation: NeMo RL's values, as one file without a parent, and ours resolved."""
    theirs = dict(NEMO_RL.get(PARENTS.get(name, ""), {}))
    for key, value in NEMO_RL[name].items():
        theirs = {k: v for k, v in theirs.items() if not k.startswith(f"{key}.")} | {key: EXCEPTIONS.get(key, value)}
    tree: dict = {}
    for key, value in theirs.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node[part] = node.get(part) or {}
            node = node[part]
        node[last] = value
    (tmp_path / "theirs.yaml").write_text(dump_yaml(tree))
    resolved = _config.load(str(tmp_path / "theirs.yaml"), [], [], set())[0]
    ours = LOADERS[kind_of(name)](ROOT / "configs" / name).model_dump()
    different = {}
    for key in theirs:
        expected, actual = resolved, ours
        for part in key.split("."):
            expected, actual = expected[part], actual[part]
        if without_null(actual) != without_null(expected) and key not in EXCEPTIONS:
            different[key] = (expected, actual)
    assert different == {}


def test_shipped_configuration_file_is_found_by_each_of_its_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    math = ROOT / "configs/grpo_math_1B.yaml"
    for folder in ("", "configs/", "examples/configs/"):
        for name in ("grpo_math_1B.yaml", "grpo.yaml"):
            assert find_config(folder + name) == math
    dapo = "configs/recipes/llm/dapo-qwen2.5-7b"
    assert find_config(f"examples/{dapo}.v2.yaml") == ROOT / f"{dapo}.yaml"
    (tmp_path / "grpo.yaml").write_text("a: 1\n")
    assert find_config("grpo.yaml") == Path("grpo.yaml")  # the user's own comes first


def test_deprecated_key_name_in_a_child_file_overrides_the_current_name_in_the_parent_file(tmp_path):
    (tmp_path / "dapo.yaml").write_text(
        f"defaults: {ROOT}/configs/grpo_math_1B.yaml\n"
        "grpo:\n  use_dynamic_sampling: true\n  dapo_batch_multiplier: 3\n  max_num_gen_batches: 5\n"
        "  reward_scaling: {enabled: true, correct: 1.0, incorrect: -1.0}\n"
    )
    config = load_grpo_config(tmp_path / "dapo.yaml")
    assert (config.grpo.batch_multiplier, config.grpo.dynamic_sampling_max_gen_batches) == (3, 5)
    assert config.grpo.reward_scaling.target_min == -1.0


def test_optimizer_and_schedule_settings_are_read_from_the_section_of_the_enabled_backend():
    dtensor = load_grpo_config("grpo_math_1B.yaml", ["policy.dtensor_cfg.activation_checkpointing=true"]).policy
    assert dtensor.effective_optimizer().lr == 5e-6
    schedule, rates = create_schedule(dtensor), []
    for _ in range(61):
        rates.append(schedule.lr)
        schedule.step()
    assert (rates[0], rates[25], rates[60]) == pytest.approx((5e-7, 2.75e-6, 5e-6)) and schedule.weight_decay == 0.01
    assert (dtensor.effective_max_grad_norm(), dtensor.activation_checkpointing) == (1.0, True)

    megatron = load_ppo_config("ppo_math_1B_megatron.yaml", ["value.megatron_cfg.optimizer.clip_grad=0"])
    assert megatron.value.effective_optimizer().lr == 2e-6
    schedule = create_schedule(megatron.policy)
    assert (schedule.lr, schedule.weight_decay) == (1e-7, 0.1)
    for _ in range(20):
        schedule.step()
    assert (schedule.lr, schedule.weight_decay) == (1e-6, 0.1)
    assert (megatron.policy.effective_max_grad_norm(), megatron.value.effective_max_grad_norm()) == (1.0, None)


def test_omitted_configuration_keys_get_default_values_derived_from_other_keys(tmp_path):
    (tmp_path / "small.yaml").write_text(
        "policy: {model_name: m, max_total_sequence_length: 64, train_micro_batch_size: 2}\nloss_fn: {reference_policy_kl_penalty: 0}\n"
        "data: {train: {dataset_name: arithmetic}}\n"
    )
    policy = load_grpo_config(tmp_path / "small.yaml").policy
    assert policy.generation.max_new_tokens == policy.generation.vllm_cfg.max_model_len == 64
    assert policy.sequence_packing.train_mb_tokens == policy.sequence_packing.logprob_mb_tokens == 128
    assert (policy.logprob_batch_size, policy.tokenizer.name, policy.generation.val_temperature) == (2, "m", 1.0)
    value = load_ppo_config(tmp_path / "small.yaml").value
    assert (value.model_name, value.max_total_sequence_length, value.precision) == ("m", 64, "bfloat16")


def test_configuration_sections_can_be_read_by_attribute_and_by_key():
    config = load_grpo_config("grpo_tiny.yaml")
    assert config.grpo.num_prompts_per_step == config["grpo"]["num_prompts_per_step"] == 32
    assert config.policy["dtensor_cfg"]["_v2"] is True
    assert config.data["train"]["num_digits"] == config.data.train.num_digits == 3
    assert "seed" in config.grpo and "sed" not in config.grpo
    assert config.policy.get("nothing", 5) == 5
    assert dict(config.policy.tokenizer.items())["chat_template"] is None
    with pytest.raises(KeyError):
        config.policy["nothing"]


def test_strings_and_floats_are_converted_to_integers_and_booleans_as_in_nemo_rl(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "8")
    given = ["grpo.max_num_steps='${oc.env:STEPS}'", "grpo.seed=8.0", "grpo.val_at_end='yes'"]
    config = load_grpo_config("grpo_tiny.yaml", given)
    assert (config.grpo.max_num_steps, config.grpo.seed, config.grpo.val_at_end) == (8, 8, True)


def test_keys_registered_for_each_data_set_are_exactly_its_constructor_arguments():
    for name, entry in DATASET_REGISTRY.data.items():
        accepted: set[str] = set()
        for cls in DATASET_REGISTRY[name].__mro__[:-1]:
            if "__init__" in vars(cls):
                parameters = inspect.signature(cls.__init__).parameters.values()
                accepted |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
                if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                    break
        assert set(entry.keys) == accepted - {"self", *DatasetConfig.model_fields}, name


def test_configuration_schema_has_a_section_for_every_registered_environment():
    assert {name for name in ENV_REGISTRY if name not in environment_sections()} == {"reward_functions"}
    for name in ENV_REGISTRY:
        environment_class(name)


@pytest.mark.parametrize("parent", ["grpo_tiny.yaml", "configs/grpo_tiny.yaml", "[grpo_math_1B.yaml, grpo_tiny.yaml]"])
def test_configuration_file_can_name_a_shipped_configuration_as_parent(tmp_path, monkeypatch, parent):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"defaults: {parent}\ngrpo:\n  max_num_steps: 7\n")
    config = load_grpo_config("mine.yaml")
    assert (config.policy.model_name, config.grpo.max_num_steps) == ("tiny-random", 7)
    assert kind_of("mine.yaml") == "grpo"


def test_parent_file_in_the_same_folder_takes_precedence_over_a_shipped_file_of_equal_name(tmp_path):
    (tmp_path / "grpo_tiny.yaml").write_text("defaults: configs/grpo_tiny.yaml\ngrpo:\n  max_num_steps: 3\n")
    (tmp_path / "mine.yaml").write_text("defaults: grpo_tiny.yaml\n")
    assert load_grpo_config(tmp_path / "mine.yaml").grpo.max_num_steps == 3
