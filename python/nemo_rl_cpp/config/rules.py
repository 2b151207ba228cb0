"""Rules that tie several sections of a run or an evaluation together. Each reports a key, what is wrong, and what to change."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line
from nemo_rl_cpp.dotted_names import is_user_defined
from nemo_rl_cpp.files.prompt_files import find_prompt

from . import rules_model
from .cluster import engines_of, trainers_of
from .data import (
    DATASET_ALIASES,
    DATASET_REGISTRY,
    DataConfig,
    DatasetConfig,
    DatasetDefaults,
    EvalDataConfig,
    dataset_keys,
    datasets_of,
    is_class_name,
    takes,
)
from .distillation import check_teachers
from .env import EnvConfigs, GuessNumberEnvConfig
from .errors import Report
from .logger import LOGGER_BACKENDS
from .loop import GRPOConfig, LoopConfig, PPOConfig, check_loop
from .loss import ClippedPGLossConfig, check_policy_loss
from .policy import check_tokenizer, check_trained_model
from .sft import check_sft

if TYPE_CHECKING:
    from .master import EvalMasterConfig, GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig


def sound_environments(env: EnvConfigs, report: Report) -> bool:
    """Whether `env` can be read by the rules."""
    check_env(env, report)
    for name, section in env.items():
        if section is not None and not isinstance(section, Mapping) and name != "should_use_nemo_gym":
            report.add(f"env.{name}", f"must be a section (lines of key: value), not {in_a_line(section)}")
    return not report.has_problem("env")


def check_training(config: GRPOMasterConfig | PPOMasterConfig, report: Report) -> None:
    loop, name, policy = config.loop, config.algorithm, config.policy
    check_loop(loop, name, report)
    _check_beside_training(config, report)
    check_policy_loss(config.loss_fn, report)
    estimator = "reinforce_plus_plus" if config.algorithm == "grpo" else "gae"
    check_kl(config.loss_fn, loop, name, estimator, report)
    if config.checkpointing.push_to_hub is not None and not config.checkpointing.enabled:
        report.add(
            "checkpointing.push_to_hub",
            "uploads the last checkpoint, but checkpointing.enabled is false: set it to true, or call nemo_rl_cpp.push_to_hub on a folder",
            "checkpointing.enabled",
        )
    for key, section in (("loss_fn", config.loss_fn), (f"{name}.adv_estimator", loop.adv_estimator)):
        if section.kwargs and not is_user_defined(section.name):
            report.add(
                f"{key}.kwargs",
                f"go to a class or function of yours, but {key}.name is {section.name}: leave them out, or give a dotted name",
                f"{key}.name",
            )
    _check_force_on_policy(config, report)
    if config.algorithm == "grpo":
        _check_advantages(config, report)
    if config.algorithm in ("grpo", "distillation"):
        check_teachers(config, report)
    if config.algorithm == "sft":
        check_sft(config, report)
    rules_model.check_policy(policy, report)
    _check_batches(loop, name, policy.train_global_batch_size, "policy", report)
    if config.algorithm == "ppo":
        _check_critic(config, report)
    _check_run(config, loop, name, report)


def _check_beside_training(config: TrainMasterConfig, report: Report) -> None:
    if not config.loop.beside_training.enabled:
        return
    name = f"{config.algorithm}.async_{config.algorithm}.enabled"
    if engines_of(config) == 0:  # another algorithm than training step by step, so it is never folded onto one device
        report.add(
            name,
            "needs engines with weights of their own: set policy.generation.colocated.enabled=false and its resources, with "
            "cluster.executor processes or ray",
            "policy.generation.colocated.enabled",
        )
    if not config.loss_fn.use_importance_sampling_correction:
        report.add(
            name,
            "trains on responses of older weights, which the loss must correct: set loss_fn.use_importance_sampling_correction=true",
            "loss_fn.use_importance_sampling_correction",
        )
    if config.loss_fn.force_on_policy_ratio:
        report.add(
            name,
            "trains on responses of older weights: set loss_fn.force_on_policy_ratio=false",
            "loss_fn.force_on_policy_ratio",
        )


def _check_advantages(config: GRPOMasterConfig, report: Report) -> None:
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        report.add(
            "grpo.advantage_clip_low",
            f"{low} is above advantage_clip_high {high}; swap them",
            "grpo.advantage_clip_high",
        )
    _check_group(config, report)
    _check_gdpo(config, report)
    estimator = config.grpo.adv_estimator
    if estimator.name != "reinforce_plus_plus" and not estimator.minus_baseline:
        _not_read(report, "grpo.adv_estimator.minus_baseline", f"adv_estimator.name {estimator.name}")


def _not_read(report: Report, key: str, beside: str) -> None:
    """Refuses a key without effect where the user has written it, in the run's own file or nearer; a parent's may stand."""
    if report.nearness(key) >= 2:
        report.add(key, f"has no effect with {beside}: leave it out")


def _check_unread(config: PPOMasterConfig, report: Report) -> None:
    """Keys of the critic where there is none, and of GAE where another estimator or key decides."""
    loop, estimator = config.ppo, config.ppo.adv_estimator
    if not config.has_critic and loop.critic_ppo_epochs is not None:
        _not_read(report, "ppo.critic_ppo_epochs", f"adv_estimator.name {estimator.name}, which has no critic")
    if estimator.name != "gae":
        for name in ("gae_lambda", "gae_gamma", "gae_lambda_value", "gae_lambda_policy", "length_adaptive_alpha"):
            if getattr(estimator, name) != type(estimator).model_fields[name].default:
                _not_read(report, f"ppo.adv_estimator.{name}", f"adv_estimator.name {estimator.name}")
    elif estimator.length_adaptive_alpha > 0 and estimator.gae_lambda_policy is not None:
        beside = (
            f"length_adaptive_alpha {estimator.length_adaptive_alpha:g}, which gives each response a lambda of its own"
        )
        _not_read(report, "ppo.adv_estimator.gae_lambda_policy", beside)


def _check_critic(config: PPOMasterConfig, report: Report) -> None:
    loop = config.ppo
    _check_unread(config, report)
    if config.has_critic and not loop.adv_estimator.uses_critic:
        report.add(
            "ppo.adv_estimator.uses_critic",
            f"is read with an estimator of yours only, but ppo.adv_estimator.name is {loop.adv_estimator.name}, which needs a critic: leave it "
            "out, or take raw_reward",
            "ppo.adv_estimator.name",
        )
    if config.has_critic:  # raw_reward builds no value model
        check_trained_model(config.value, "value", report)
        if config.value.lora is not None and loop.warm_start_value_checkpoint is not None:
            report.add(
                "ppo.warm_start_value_checkpoint",
                "begins with all weights of a critic, but value.dtensor_cfg.lora_cfg.enabled trains adapters of value.model_name: name the "
                "critic's folder (value/weights) by value.model_name, and write null here",
                "value.dtensor_cfg.lora_cfg.enabled",
            )
        _check_batches(loop, "ppo", config.value.train_global_batch_size, "value", report)
        _check_value_length(config, report)
    elif loop.warm_start_value_checkpoint is not None:
        report.add(
            "ppo.warm_start_value_checkpoint",
            "must be null with adv_estimator raw_reward: there is no critic to begin with weights",
            "ppo.adv_estimator.name",
        )
    elif loop.policy_training_start_step > 0:
        report.add(
            "ppo.policy_training_start_step",
            "must be 0 with adv_estimator raw_reward: there is no critic to warm up",
            "ppo.adv_estimator.name",
        )


def check_eval(config: EvalMasterConfig, report: Report) -> None:
    wanted, generation = config.eval, config.generation
    if wanted.k_value > wanted.num_tests_per_prompt:
        report.add(
            "eval.k_value",
            f"is {wanted.k_value} but each prompt gets {wanted.num_tests_per_prompt} responses; "
            "raise eval.num_tests_per_prompt or lower eval.k_value",
            "eval.num_tests_per_prompt",
        )
    if wanted.num_tests_per_prompt > 1 and (generation.temperature == 0 or generation.top_k == 1):
        report.add(
            "generation.temperature",
            "is greedy, so all responses to a prompt would be equal; with eval.num_tests_per_prompt above 1 "
            "set generation.temperature above 0 and top_k to null",
            "generation.top_k",
            "eval.num_tests_per_prompt",
        )
    if generation.num_prompts_per_step == 0:
        report.add("generation.num_prompts_per_step", "cannot be 0; set -1 for all prompts at once")
    rules_model.check_engine(generation, "generation", report)
    rules_model.check_evaluation(generation, report)
    rules_model.check_vllm_evaluation(generation, report)
    rules_model.check_sizes(config, report)
    check_tokenizer(config.tokenizer, "tokenizer", report)
    rules_model.check_cluster(config.cluster, report)
    if config.cluster.has_workers:
        report.add(
            "cluster.executor",
            f"{config.cluster.executor_text} is for training: an evaluation runs in one process; {config.cluster.one_process_text}",
        )
    check_eval_data(config.data, config.env, report)


def _check_run(config: TrainMasterConfig, loop: LoopConfig, name: str, report: Report) -> None:
    check_data(config.data, config.env, loop.max_rollout_turns, f"{name}.max_rollout_turns", report)
    limit = config.policy.max_total_sequence_length
    longest_prompt = config.data.max_input_seq_length
    if longest_prompt is not None and longest_prompt > limit:
        report.add(
            "data.max_input_seq_length",
            f"is {longest_prompt}, more than policy.max_total_sequence_length {limit}: a prompt must leave "
            "room for a response; lower it",
            "policy.max_total_sequence_length",
        )
    rules_model.check_cluster(config.cluster, report)
    if config.cluster.max_restarts > 0 and not config.cluster.has_workers:
        report.add(
            "cluster.max_restarts",
            f"is {config.cluster.max_restarts}, but there are no workers that can be lost: set cluster.executor=processes or ray, or max_restarts=0",
            "cluster.executor",
        )
    elif config.cluster.max_restarts > 0 and not config.checkpointing.enabled:
        report.add(
            "cluster.max_restarts",
            f"is {config.cluster.max_restarts}, but a restart goes on from a checkpoint and checkpointing.enabled is false; set it true, or max_restarts=0",
            "checkpointing.enabled",
        )
    rules_model.check_resources(config, report)
    for model in ("policy", "value") if config.has_critic else ("policy",):
        section = getattr(config, model)
        count = trainers_of(config)
        rules_model.check_blocks(section, model, count // section.tensor_parallel(count), report)
        rules_model.check_model(section, model, report)
    rules_model.check_engines(config, report)
    rules_model.check_vllm_run(config, report)
    rules_model.check_sizes(config, report)
    rules_model.check_offload(config, report)
    rules_model.check_serving(config, report)
    _check_checkpointing(config, report)
    _check_epochs(config, report)
    for name, entry in LOGGER_BACKENDS.entries.items():
        package = entry.package if config.logger.is_enabled(name) else None
        if package is not None and importlib.util.find_spec(package) is None:
            report.add(
                f"logger.{name}_enabled",
                f"is true but {name} is not installed; install it (the extra `{name}` of this package) "
                "or set it to false",
            )


def _check_epochs(config: TrainMasterConfig, report: Report) -> None:
    """Several loaders begin again without end. Who writes a number of epochs beside a number of steps from further away is told."""
    epochs, steps = f"{config.algorithm}.max_num_epochs", f"{config.algorithm}.max_num_steps"
    written = report.nearness(epochs)
    if config.data.use_multiple_dataloader and written >= 2 and written > report.nearness(steps):
        report.add(
            epochs,
            "ends no run with data.use_multiple_dataloader, whose loaders begin again without end: leave it out, and set "
            f"{steps}",
            "data.use_multiple_dataloader",
        )


def _check_force_on_policy(config: TrainMasterConfig, report: Report) -> None:
    """The ratio is 1 in the first update of a batch only: a later one needs the policy of before it."""
    if not config.loss_fn.force_on_policy_ratio:
        return
    loop, name = config.loop, config.algorithm
    batch = loop.num_prompts_per_step * loop.num_generations_per_prompt
    if batch != config.policy.train_global_batch_size:
        report.add(
            "loss_fn.force_on_policy_ratio",
            f"needs one optimizer step a batch: set policy.train_global_batch_size to {batch} "
            f"(num_prompts_per_step x num_generations_per_prompt), not {config.policy.train_global_batch_size}",
            "policy.train_global_batch_size",
        )
    if loop.policy_epochs > 1:
        report.add(
            "loss_fn.force_on_policy_ratio",
            f"needs one optimizer step a batch: set {name}.ppo_epochs to 1, not {loop.policy_epochs} "
            f"({name}.critic_ppo_epochs gives the critic more)",
            f"{name}.ppo_epochs",
        )
    if (
        config.algorithm == "grpo"
        and config.loss_fn.use_kl_in_reward
        and config.loss_fn.reference_policy_kl_penalty
        and loop.seq_logprob_error_threshold is None
    ):
        report.add(
            "loss_fn.use_kl_in_reward",
            "needs the old policy's log-probabilities, which force_on_policy_ratio skips; set one of the two to false",
            "loss_fn.force_on_policy_ratio",
        )


def _check_group(config: GRPOMasterConfig, report: Report) -> None:
    """A group of one is its own baseline: rewards teach nothing."""
    loop, estimator = config.grpo, config.grpo.adv_estimator
    if (
        loop.num_generations_per_prompt > 1
        or loop.use_dynamic_sampling
        or config.loss_fn.positive_example_nll_weight > 0
    ):
        return
    if estimator.name == "opd" and estimator.outcome_advantage_weight == 0:
        return
    if is_user_defined(estimator.name) or (estimator.name == "reinforce_plus_plus" and not estimator.minus_baseline):
        return
    report.add(
        "grpo.num_generations_per_prompt",
        "is 1: a response that is alone in its group is its own baseline, so every advantage is 0 and nothing is learnt; "
        "set at least 2, or take grpo.adv_estimator.name reinforce_plus_plus with minus_baseline false",
        "grpo.adv_estimator.name",
    )


def _check_gdpo(config: GRPOMasterConfig, report: Report) -> None:
    loop = config.grpo
    if loop.adv_estimator.name != "gdpo":
        if loop.adv_estimator.reward_weights is not None:
            report.add(
                "grpo.adv_estimator.reward_weights",
                f"is read by adv_estimator.name gdpo only, not {loop.adv_estimator.name}; set it to null or change the estimator",
                "grpo.adv_estimator.name",
            )
        return
    for name, given in (
        ("reward_shaping.enabled", loop.reward_shaping.enabled),
        ("length_penalty", loop.length_penalty is not None),
    ):
        if given:
            report.add(
                f"grpo.{name}",
                "changes the total reward, which adv_estimator.name gdpo does not read: it takes the parts of the reward; switch it off or "
                "change the estimator",
                "grpo.adv_estimator.name",
            )


def _check_batches(loop: LoopConfig, name: str, global_batch: int, model: str, report: Report) -> None:
    prompts, generations = loop.num_prompts_per_step, loop.num_generations_per_prompt
    batch = prompts * generations
    if batch % global_batch == 0:
        return
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    below = max((d for d in divisors if d < global_batch), default=None)
    above = min((d for d in divisors if d > global_batch), default=None)
    legal = " or ".join(str(d) for d in (below, above) if d is not None)
    report.add(
        f"{model}.train_global_batch_size",
        f"is {global_batch}, which does not divide the {batch} samples of a step "
        f"({name}.num_prompts_per_step {prompts} x {name}.num_generations_per_prompt {generations}); "
        f"the nearest legal values are {legal}",
        f"{name}.num_prompts_per_step",
        f"{name}.num_generations_per_prompt",
    )


def _check_value_length(config: PPOMasterConfig, report: Report) -> None:
    if config.value.max_total_sequence_length < config.policy.max_total_sequence_length:
        report.add(
            "value.max_total_sequence_length",
            f"is {config.value.max_total_sequence_length}, but the policy makes sequences of up to "
            f"{config.policy.max_total_sequence_length}; set it to ${{policy.max_total_sequence_length}}",
            "policy.max_total_sequence_length",
        )


def _check_checkpointing(config: TrainMasterConfig, report: Report) -> None:
    checkpoints = config.checkpointing
    metric = checkpoints.metric_name
    if metric is not None and not (metric.startswith(("train:", "val:")) and metric.partition(":")[2]):
        report.add(
            "checkpointing.metric_name",
            f"must be train:NAME, val:NAME or null, not {metric!r}; for example val:accuracy",
        )
    limit = checkpoints.checkpoint_must_save_by
    if limit is not None:
        parts = limit.split(":")
        if len(parts) != 4 or not all(part.isdigit() for part in parts):
            report.add(
                "checkpointing.checkpoint_must_save_by",
                f"must be DD:HH:MM:SS (days, hours, minutes, seconds), not {limit!r}",
            )


def check_data(data: DataConfig, env: EnvConfigs, turns: int, turns_key: str, report: Report) -> None:
    """`turns`: the value of `turns_key`, grpo.max_rollout_turns or ppo.max_rollout_turns."""
    check_env(env, report)
    if data.train is None or data.train == []:
        report.add("data.train", "is missing: name a data set, for example dataset_name: arithmetic")
    default = data.default or DatasetDefaults()
    _check_files(default, "data.default", report)
    _check_default(default, report)
    used, names = set(), set()
    for split in ("train", "validation"):
        for dotted, dataset in datasets_of(getattr(data, split), f"data.{split}"):
            _check_dataset(dataset, dotted, report, default)
            names.add(default.dataset_name if "dataset_name" not in dataset.model_fields_set else dataset.dataset_name)
            inherits = dataset.env_name is None
            name = default.env_name if inherits else dataset.env_name
            _check_env_name(name, "data.default" if inherits else dotted, env, report)
            used.add(name)
    for key in default.model_extra or {}:
        if not any(name is not None and takes(name, key) for name in names):
            report.add(
                f"data.default.{key}",
                f"is taken by none of the data sets {', '.join(sorted(map(str, names)))}; remove it",
            )
    if "guess_number" in used & env.keys():
        guesses = GuessNumberEnvConfig(**(env["guess_number"] or {})).max_guesses
        if guesses > turns:
            report.add(
                turns_key,
                f"is {turns}, but a game of env.guess_number takes up to {guesses} turns (max_guesses) and would be cut "
                "off; raise it, or lower max_guesses",
                "env.guess_number.max_guesses",
            )


def check_eval_data(data: EvalDataConfig, env: EnvConfigs, report: Report) -> None:
    check_env(env, report)
    _check_dataset(data, "data", report)
    if data.env_name is None and len(env) != 1:
        report.add(
            "data.env_name",
            f"is missing: which environment scores the responses? env has {', '.join(env) or 'no entry'}; name one",
        )
    _check_env_name(data.env_name, "data", env, report)


def _check_dataset(dataset: DatasetConfig, dotted: str, report: Report, default: DatasetDefaults | None = None) -> None:
    _check_files(dataset, dotted, report)
    inherits = "dataset_name" not in dataset.model_fields_set and default is not None
    name = default.dataset_name if inherits else dataset.dataset_name
    if name is None:
        report.add(f"{dotted}.dataset_name", "is missing: name a data set, here or in data.default")
        return
    if not _is_known(name, "data.default" if inherits else dotted, report) or is_class_name(name):
        return
    name = DATASET_ALIASES.get(name, name)
    _check_extra_keys(dataset, dotted, DATASET_REGISTRY.entries[name].keys, report)
    given = {*(dataset.model_extra or {}), *((default.model_extra or {}) if default is not None else ())}
    if name == "ResponseDataset" and "data_path" not in given:
        report.add(
            f"{dotted}.data_path",
            "is missing: ResponseDataset reads a file or a data set of the hub",
            f"{dotted}.dataset_name",
        )


def _is_known(name: str, dotted: str, report: Report) -> bool:
    """Whether there is such a data set; reports a name that is neither known nor a class."""
    if name in DATASET_REGISTRY or name in DATASET_ALIASES or is_class_name(name):
        return True
    names = [*DATASET_REGISTRY, *DATASET_ALIASES]
    meant = next((known for known in names if known.lower() == name.lower()), name)
    hint = did_you_mean(meant, names, f"known are {', '.join(DATASET_REGISTRY)}", 0.5)
    report.add(
        f"{dotted}.dataset_name",
        f"{name} is unknown; {hint} (a data set of the hub is read by dataset_name: ResponseDataset with data_path: OWNER/NAME, "
        "input_key and output_key; a class of your own is written package.module.Name)",
    )
    return False


def _check_default(default: DatasetDefaults, report: Report) -> None:
    """Its keys may be those of any data set: which one takes them is not known here."""
    name = default.dataset_name
    if name is not None and (not _is_known(name, "data.default", report) or is_class_name(name)):
        return
    _check_extra_keys(default, "data.default", tuple({key for keys in dataset_keys().values() for key in keys}), report)


def _check_extra_keys(dataset: DatasetDefaults, dotted: str, allowed: tuple[str, ...], report: Report) -> None:
    known = sorted({*type(dataset).model_fields, *allowed})
    for key in dataset.model_extra or {}:
        if key in allowed:
            continue
        if key == "_override_":
            report.add(f"{dotted}.{key}", "works in a section at the top of the file only, not deeper")
            continue
        hint = did_you_mean(key, known, f"known are {', '.join(known)}")
        report.add(f"{dotted}.{key}", f"is unknown; {hint}")


def _check_files(dataset: DatasetDefaults, dotted: str, report: Report) -> None:
    for name in ("prompt_file", "system_prompt_file"):
        path = getattr(dataset, name)
        if path is not None and find_prompt(path) is None:
            report.add(
                f"{dotted}.{name}", f"names the file {path}, which does not exist; correct the path or write null"
            )


def check_env(env: EnvConfigs, report: Report) -> None:
    """NeMo RL's switches below `env` for what scores or runs the responses elsewhere: they would leave another environment in charge."""
    instead = "write an environment (register_env) or a reward function (env.reward_functions) that asks it"
    if env.get("should_use_nemo_gym"):
        report.add(
            "env.should_use_nemo_gym", f"cannot be true: NeMo Gym is not supported; set it to false, or {instead}"
        )
    model = env.get("reward_model")
    if isinstance(model, dict) and model.get("enabled"):
        report.add(
            "env.reward_model.enabled",
            f"cannot be true: a reward model as environment is not supported; set it to false, or {instead}",
        )


def _check_env_name(name: str | None, dotted: str, env: EnvConfigs, report: Report) -> None:
    if name is None or name in env:
        return
    hint = did_you_mean(name, env, f"env has {', '.join(env) or 'no entry'}", 0.5)
    report.add(f"{dotted}.env_name", f"{name} has no section env.{name}; {hint}")


def check_kl(
    loss: ClippedPGLossConfig, loop: GRPOConfig | PPOConfig, name: str, kl_estimator: str, report: Report
) -> None:
    """`kl_estimator` is the advantage estimator that takes the KL into the reward."""
    penalty = loss.reference_policy_kl_penalty
    if penalty == 0:
        return
    if loop.skip_reference_policy_logprobs_calculation:
        report.add(
            f"{name}.skip_reference_policy_logprobs_calculation",
            f"is true but loss_fn.reference_policy_kl_penalty is {penalty:g}; set the penalty to 0 or this to false",
            "loss_fn.reference_policy_kl_penalty",
        )
    if (
        loss.use_kl_in_reward
        and loop.adv_estimator.name != kl_estimator
        and not is_user_defined(loop.adv_estimator.name)
    ):
        report.add(
            "loss_fn.use_kl_in_reward",
            f"has an effect with {name}.adv_estimator.name {kl_estimator} only, not {loop.adv_estimator.name}; set it to false "
            "or change the estimator",
            f"{name}.adv_estimator.name",
        )
