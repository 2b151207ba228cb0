import re
import shlex
from pathlib import Path

import pytest
from nemo_rl_cpp.argument_checks import nearest
from nemo_rl_cpp.config import ConfigError, load_grpo_config

ROOT = Path(__file__).resolve().parents[3]
TINY = f"defaults: {ROOT / 'configs/grpo_tiny.yaml'}\n"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def problems(text="", overrides=(), load=load_grpo_config):
    Path("run.yaml").write_text(TINY + text)
    with pytest.raises(ConfigError) as caught:
        load("run.yaml", list(overrides))
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("override, key", [("logger.wandb.name=1e5", "name"), ("logger.wandb.project=true", "project")])
def test_suggested_command_line_override_is_quoted_for_the_shell(override, key):
    (problem,) = problems(overrides=[override])
    advice = re.search(r"\(write (.*), with both pairs of quotes\)", problem)[1]
    (word,) = shlex.split(advice)
    assert load_grpo_config("run.yaml", [word]).logger.wandb[key] == override.partition("=")[2]


@pytest.mark.parametrize("text", ["grpo:\n  seed: 3\n\tval_period: 4\n", "grpo:\n\tseed: 3\n", "grpo:\tseed: 3\n"])
def test_tab_character_in_a_yaml_file_is_reported_with_its_line(text):
    (problem,) = problems(text)
    assert re.match(r"run.yaml:\d+: there is a tab in this line", problem)


def test_error_for_an_unknown_key_suggests_a_plus_only_if_the_key_can_be_added():
    (problem,) = problems(overrides=["env.mine.digits=3"])
    assert problem.endswith("env.mine is unknown (to add a key of your own write +env.mine.digits=3)")
    load_grpo_config("run.yaml", ["+env.mine.digits=3"])
    for plus in ("", "+"):  # keys of a free mapping are the user's own: no + is needed
        override = plus + "policy.hf_config_overrides={rope_scaling: {rope_type: yarn}}"
        assert load_grpo_config("run.yaml", [override]).policy.hf_config_overrides["rope_scaling"] == {
            "rope_type": "yarn"
        }
        load_grpo_config("run.yaml", [plus + "policy.generation.vllm_kwargs.top_k=3"])
    for override in ("grpo.sed=3", "env.reverse_digits.digits=3", "policy.generation.temprature=1"):
        (problem,) = problems(overrides=[override])
        assert "write +" not in problem
        with pytest.raises(ConfigError):  # it would not have helped
            load_grpo_config("run.yaml", ["+" + override])


@pytest.mark.parametrize("theirs", ["layers_pattern", "modules_to_save", "rank_pattern"])
def test_error_for_an_unknown_key_without_a_similar_key_suggests_nothing(theirs):
    (problem,) = problems(overrides=[f"++policy.dtensor_cfg.lora_cfg.{theirs}=8"])
    assert "is unknown; policy.dtensor_cfg.lora_cfg knows alpha, dim" in problem and "did you mean" not in problem


def test_error_for_an_unknown_key_lists_no_long_section():
    (problem,) = problems(overrides=["grpo.xyzzy=8"])
    assert re.search(r"grpo.xyzzy is unknown; grpo knows \d+ keys, see docs/configuration.md", problem)


@pytest.mark.parametrize(
    "override, meant",
    [("policy.lora.enabled=true", "policy.dtensor_cfg.lora_cfg"), ("policy.lora_cfg.dim=8", "policy.dtensor_cfg.lora_cfg"),
     ("lora.dim=8", "policy.dtensor_cfg.lora_cfg"), ("policy.optimizer.lr=1e-4", "policy.optimizer.kwargs.lr"),
     ("async_grpo.enabled=true", "grpo.async_grpo"), ("logger.wandb.enabled=true", "logger.wandb_enabled"),
     ("policy.lr=1e-4", "policy.optimizer.kwargs.lr"), ("policy.generation.vllm.precision=x", "policy.generation.vllm_cfg")],
)  # fmt: skip
def test_error_for_a_key_in_the_wrong_section_suggests_the_nearest_section_with_that_key(override, meant):
    (problem,) = problems(overrides=[override])
    assert problem.partition(" (to add")[0].endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    "override, meant",
    [("loss_fn.clip_ratio_high=0.28", "ratio_clip_max"), ("grpo.epsilon_low=0.2", "loss_fn.ratio_clip_min"),
     ("grpo.advantage_clip_max=2", "advantage_clip_high"), ("loss_fn.kl_coef=0.1", "reference_policy_kl_penalty"), ("loss_fn.beta=0.1", "reference_policy_kl_penalty"),
     ("grpo.kl_penalty=0.1", "loss_fn.reference_policy_kl_penalty"),
     ("loss_fn.ppo_kl_coeff=0.1", "ppo_kl_coef"), ("policy.generation.stop=[a]", "stop_strings or stop_token_ids"),
     ("policy.generation.max_tokens=9", "max_new_tokens"), ("policy.max_seq_len=9", "max_total_sequence_length"),
     ("loss_fn.clip=0.1", "ratio_clip_c or ratio_clip_max or ratio_clip_min"), ("logger.wandb_project=p", "logger.wandb.project"),
     ("grpo.save_steps=5", "checkpointing.save_period"), ("grpo.eval_steps=5", "val_period"), ("policy.max_steps=5", "grpo.max_num_steps"),
     ("++value_loss_fn.scale=1", "loss_fn"), ("checkpointing.save_interval=9", "save_period or ft_save_period"), ("policy.lora_rank=8", "policy.dtensor_cfg.lora_cfg.dim")],
)  # fmt: skip
def test_error_for_an_unknown_key_suggests_valid_keys_with_similar_meaning(override, meant):
    (problem,) = problems(overrides=[override])
    assert problem.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    "override, key",
    [("grpo.async_grpo=true", "grpo.async_grpo.enabled=true"), ("logger.wandb=true", "logger.wandb_enabled=true"),
     ("policy.dtensor_cfg.lora_cfg=false", "policy.dtensor_cfg.lora_cfg.enabled=false")],
)  # fmt: skip
def test_error_for_a_section_set_to_true_or_false_names_the_key_that_enables_the_section(override, key):
    (problem,) = problems(overrides=[override])
    assert problem.endswith(f"; set {key}")


KL_IN_REWARD = [
    "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.01", "grpo.adv_estimator.name=reinforce_plus_plus",
    "grpo.skip_reference_policy_logprobs_calculation=false",
]  # fmt: skip


@pytest.mark.parametrize(
    "override", ["loss_fn.kl_input_clamp_value=5", "loss_fn.kl_output_clamp_value=null", "loss_fn.use_on_policy_kl_approximation=true"]
)  # fmt: skip
def test_command_line_key_of_the_kl_term_in_the_loss_is_an_error_if_the_kl_is_in_the_reward(override):
    (problem,) = problems(overrides=[*KL_IN_REWARD, override])
    assert override.partition("=")[0] in problem and "has no effect with use_kl_in_reward: true" in problem
    load_grpo_config("run.yaml", [override])
    load_grpo_config("run.yaml", [*KL_IN_REWARD, "loss_fn.kl_input_clamp_value=20"])


@pytest.mark.parametrize("override", ["loss_fn.dro_beta=0.2", "loss_fn.ppo_kl_coef=0.2", "loss_fn.clip_cov_lb=2.0"])
def test_command_line_key_that_only_affects_another_loss_is_an_error(override):
    (problem,) = problems(overrides=[override])
    assert "has no effect with loss_fn.name clipped_pg, only with" in problem
    owner = problem.rpartition("only with ")[2].partition(":")[0]
    load_grpo_config("run.yaml", [f"loss_fn.name={owner}", override])


@pytest.mark.parametrize(
    "name, known, meant",
    [("use_rslora", "use_triton", None), ("layers_to_transform", "restore_from", None), ("a.b.use_rslora", "a.b.use_triton", None),
     ("num_train_epochs", "num_workers", None), ("use_tritan", "use_triton", "use_triton"), ("restor_from", "restore_from", "restore_from"),
     ("max_model_length", "max_model_len", "max_model_len"), ("keep_topk", "keep_top_k", "keep_top_k"), ("clip", "cliprange", "cliprange"),
     ("numsamples", "num_samples", "num_samples"), ("max_model", "max_model_len", "max_model_len")],
)  # fmt: skip
def test_suggestion_for_a_misspelt_key_contains_the_distinguishing_words_of_that_key(name, known, meant):
    assert nearest(name, [known], 0.55) == meant


def test_error_for_a_verl_configuration_section_names_the_verl_migration_guide():
    (problem,) = problems(overrides=["algorithm.filter_groups.enable=true"])
    assert problem.endswith(
        "algorithm is a section of verl's: docs/coming-from-verl.md names the keys that mean the same"
    )


def test_lora_keys_without_effect_because_lora_is_disabled_are_reported():
    """By the place where each is written: what a parent says is switched off, what is nearer than `enabled: false` is asked for."""
    lora = "policy.dtensor_cfg.lora_cfg"
    Path("parent.yaml").write_text(
        f"defaults: {ROOT / 'configs/grpo_tiny.yaml'}\npolicy: {{dtensor_cfg: {{lora_cfg: {{enabled: false, dim: 16}}}}}}\n"
    )
    Path("child.yaml").write_text("defaults: parent.yaml\npolicy: {dtensor_cfg: {lora_cfg: {alpha: 16}}}\n")
    Path("off.yaml").write_text(
        "defaults: grpo_arithmetic_smollm2_lora.yaml\npolicy: {dtensor_cfg: {lora_cfg: {enabled: false, dim: 8}}}\n"
    )
    for file, overrides, key in (
        ("parent.yaml", [], None),
        ("parent.yaml", [f"++{lora}.enabled=false", f"++{lora}.alpha=16"], None),
        ("off.yaml", [], None),
        ("parent.yaml", [f"++{lora}.alpha=32"], None),
        ("parent.yaml", [f"++{lora}.alpha=16"], "alpha"),
        ("child.yaml", [], "alpha"),
        ("child.yaml", [f"{lora}.enabled=true"], None),
        ("child.yaml", [f"{lora}.enabled=false"], None),
        ("parent.yaml", [f"++{lora}.exclude_modules=[q_proj]"], "exclude_modules"),
    ):
        if key is None:
            load_grpo_config(file, overrides)
            continue
        with pytest.raises(ConfigError) as caught:
            load_grpo_config(file, overrides)
        assert [problem.key for problem in caught.value.problems] == [f"{lora}.{key}"], (file, overrides)
