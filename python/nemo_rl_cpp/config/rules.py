"""Rules between keys of several sections. A violation is reported with a key, what is wrong and what to change."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line
from nemo_rl_cpp.dotted_names import is_dotted, is_user_defined

from . import rules_model
from .cluster import engines_of, trainers_of
from .data import (
    DATASET_ALIASES,
    DATASET_REGISTRY,
    DatasetConfig,
    DatasetDefaults,
    EvalDataConfig,
    dataset_keys,
    datasets_of,
    environments_of,
    takes,
)
from .distillation import check_sft, check_teachers
from .env import EnvConfigs, GuessNumberEnvConfig
from .errors import Report
from .logger import LOGGER_BACKENDS
from .loop import check_loop
from .loss import check_policy_loss
from .policy import check_trained_model

if TYPE_CHECKING:
    from .master import EvalMasterConfig, GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig


_GYM_SWITCHES = ("should_use_nemo_gym", "should_log_nemo_gym_responses", "should_mask_flagged_samples")
"""Keys of `env` that are not environments. NeMo RL reads them if it uses NeMo Gym."""


def sound_environments(env: EnvConfigs, report: Report) -> bool:
    """Report mistakes in the section `env`, among them NeMo RL's switch for a reward model: if it were ignored, another
    environment would score the responses. Return whether the section has no mistakes, so that other rules may read
    it."""
    model = env.get("reward_model")
    if isinstance(model, dict) and model.get("enabled"):
        instead = "write an environment (register_env) or a reward function (env.reward_functions) that asks it"
        text = f"cannot be true: a reward model as environment is not supported; set it to false, or {instead}"
        report.add("env.reward_model.enabled", text)
    for name, section in env.items():
        if section is not None and not isinstance(section, Mapping) and name not in _GYM_SWITCHES:
            report.add(f"env.{name}", f"must be a section (lines of key: value), not {in_a_line(section)}")
    return not report.has_problem("env")


def check_training(config: GRPOMasterConfig | PPOMasterConfig, report: Report) -> None:
    loop, name = config.loop, config.algorithm
    if name == "sft":
        check_sft(config, report)
    else:
        check_loop(loop, name, report)
    _check_async(config, report)
    check_policy_loss(config.loss_fn, report)
    loss, divided = config.loss_fn, "seq-mean-token-sum-norm"
    if loss.loss_scale_factor is not None and loss.loss_agg_mode != divided and not is_user_defined(loss.name):
        _not_read(report, "loss_fn.loss_scale_factor", f"another loss_agg_mode than {divided}")
    _check_kl(config, report)
    for key, section in (("loss_fn", config.loss_fn), (f"{name}.adv_estimator", loop.adv_estimator)):
        if section.kwargs and not is_user_defined(section.name):
            text = f"go to a class or function of yours, but {key}.name is {section.name}: leave them out"
            report.add(f"{key}.kwargs", text, f"{key}.name")
    _check_force_on_policy(config, report)
    _check_distributions(config, report)
    if name == "grpo":
        _check_advantages(config, report)
    if name != "sft":
        check_teachers(config, report)
    rules_model.check_policy(config.policy, report)
    _check_batches(config, "policy", report)
    if name == "ppo":
        _check_critic(config, report)
    _check_run(config, report)


# ---- loss and advantages


def _check_async(config: TrainMasterConfig, report: Report) -> None:
    if not config.loop.beside_training.enabled:
        return
    name, loss = f"{config.algorithm}.async_{config.algorithm}.enabled", config.loss_fn
    colocated = "policy.generation.colocated.enabled"
    if engines_of(config) == 0:  # overlapping rollouts need an engine, so this is an error
        text = f"needs engines with weights of their own: set {colocated}=false, and cluster.executor to auto"
        report.add(name, text, colocated)
    # NeMo RL requires it of async_grpo and async_ppo, and trains without it by async_rl; the run then prints a note
    if not loss.use_importance_sampling_correction and not loss.bypass_mode and config.async_rl is None:
        key = "loss_fn.use_importance_sampling_correction"
        report.add(name, f"trains on responses of older weights: set {key}=true", key)
    if config.loop.beside_training.in_flight_weight_updates and config.loop.adv_estimator.name == "remax":
        text = "is remax, whose greedy answers are drawn with one version of the weights: set in_flight_weight_updates to false"
        report.add(f"{config.algorithm}.adv_estimator.name", text, name)


def _check_distributions(config: TrainMasterConfig, report: Report) -> None:
    """Report loss terms that need the distribution over the whole vocabulary, if this run does not compute it."""
    loss, backend, generation = config.loss_fn, config.policy.backend, config.policy.generation
    for name, off in (("entropy_coef", 0), ("top_entropy_quantile", 1), ("score_centering_k", None)):
        value = getattr(loss, name)
        if value != off and backend != "native":
            text = f"is {value:g}, but policy.backend {backend} gives no distributions: set policy.backend to native, or leave this out"
            report.add(f"loss_fn.{name}", text, "policy.backend")
    if loss.score_centering_k is None:
        return
    if config.cluster.device != "cpu":
        text = "needs the likeliest tokens, which are found on the CPU only: leave it out, or set cluster.device to cpu"
        report.add("loss_fn.score_centering_k", text, "cluster.device")
    if (generation.top_p or 1) < 1 or (generation.top_k or 0) > 0:
        text = "needs unfiltered generation: set policy.generation.top_p and top_k to null"
        report.add("loss_fn.score_centering_k", text, "policy.generation.top_p")
    if config.loop.beside_training.enabled:
        text = "needs the distributions that the responses were drawn from, which stale responses lack: leave it out"
        report.add("loss_fn.score_centering_k", text, f"{config.algorithm}.async_{config.algorithm}.enabled")


def _check_kl(config: GRPOMasterConfig | PPOMasterConfig, report: Report) -> None:
    loss, loop, name = config.loss_fn, config.loop, config.algorithm
    penalty = loss.reference_policy_kl_penalty
    if penalty == 0:
        return
    if loop.skip_reference_policy_logprobs_calculation:
        key = "loss_fn.reference_policy_kl_penalty"
        text = f"is true but {key} is {penalty:g}; set the penalty to 0 or this to false"
        report.add(f"{name}.skip_reference_policy_logprobs_calculation", text, key)
    takes_kl = "reinforce_plus_plus" if name == "grpo" else "gae"  # the estimator that adds the KL to the reward
    estimator = loop.adv_estimator.name
    if loss.use_kl_in_reward and estimator != takes_kl and not is_user_defined(estimator):
        text = f"needs {name}.adv_estimator.name {takes_kl}, not {estimator}; set it to false or change the estimator"
        report.add("loss_fn.use_kl_in_reward", text, f"{name}.adv_estimator.name")
    # as in NeMo RL, these settings belong to the KL term of the loss
    for key in ("kl_input_clamp_value", "kl_output_clamp_value", "use_on_policy_kl_approximation"):
        if loss.use_kl_in_reward and getattr(loss, key) != type(loss).model_fields[key].default:
            _not_read(report, f"loss_fn.{key}", "use_kl_in_reward: true")


def _check_force_on_policy(config: TrainMasterConfig, report: Report) -> None:
    """Report force_on_policy_ratio if a batch has several optimizer steps, because the ratio is truly 1 only in the
    first. Report use_kl_in_reward if force_on_policy_ratio skips the old policy's log-probabilities, from which the KL
    penalty is computed."""
    loss, loop, name = config.loss_fn, config.loop, config.algorithm
    if not loss.force_on_policy_ratio:
        return
    key, given = "loss_fn.force_on_policy_ratio", config.policy.train_global_batch_size
    if (batch := loop.num_prompts_per_step * loop.num_generations_per_prompt) != given:
        text = f"needs one optimizer step a batch: set policy.train_global_batch_size to {batch}, not {given}"
        report.add(key, text, "policy.train_global_batch_size")
    if loop.policy_epochs > 1:
        text = f"needs one optimizer step a batch: set {name}.ppo_epochs to 1, not {loop.policy_epochs}"
        report.add(key, text, f"{name}.ppo_epochs")
    in_reward = loss.use_kl_in_reward and loss.reference_policy_kl_penalty
    if name == "grpo" and in_reward and loop.seq_logprob_error_threshold is None:
        text = "needs the old policy's log-probabilities, which force_on_policy_ratio skips; set one of them to false"
        report.add("loss_fn.use_kl_in_reward", text, key)


def _check_advantages(config: GRPOMasterConfig, report: Report) -> None:
    loop, estimator = config.grpo, config.grpo.adv_estimator
    low, high = loop.advantage_clip_low, loop.advantage_clip_high
    if low is not None and high is not None and low > high:
        text = f"{low} is above advantage_clip_high {high}; swap them"
        report.add("grpo.advantage_clip_low", text, "grpo.advantage_clip_high")
    by_teacher = estimator.name == "opd" and estimator.outcome_advantage_weight == 0
    whitens = estimator.name == "reinforce_plus_plus" and not estimator.minus_baseline
    learns = by_teacher or whitens or loop.use_dynamic_sampling or config.loss_fn.positive_example_nll_weight > 0
    if loop.num_generations_per_prompt == 1 and not learns and not is_user_defined(estimator.name):
        text = "is 1: a response alone in its group is its own baseline, so every advantage is 0; set at least 2"
        report.add("grpo.num_generations_per_prompt", text, "grpo.adv_estimator.name")
    weights, functions = "grpo.adv_estimator.reward_weights", config.env.get("reward_functions") or {}
    if estimator.name != "gdpo" and estimator.reward_weights is not None:
        text = f"is read by adv_estimator.name gdpo only, not {estimator.name}; set it to null"
        report.add(weights, text, "grpo.adv_estimator.name")
    both = estimator.reward_weights is not None and functions.get("weights") is not None
    if estimator.name == "gdpo" and both and "reward_functions" in environments_of(config.data, "data.train"):
        text = f"and {weights} are the same thing: give one of them"
        report.add("env.reward_functions.weights", text, weights)
    changed = {"reward_shaping.enabled": loop.reward_shaping.enabled, "length_penalty": loop.length_penalty is not None}
    for name in [name for name, given in changed.items() if given and estimator.name == "gdpo"]:
        text = "changes the total reward, but adv_estimator.name gdpo reads the parts of the reward; switch it off"
        report.add(f"grpo.{name}", text, "grpo.adv_estimator.name")
    group = loop.num_generations_per_prompt
    if estimator.name == "pass_at_k" and estimator.pass_k >= group:
        text = f"is {estimator.pass_k}, but a group has {group} responses: sets that hold them all do not differ; take fewer"
        report.add("grpo.adv_estimator.pass_k", text, "grpo.num_generations_per_prompt")
    for key, owner in (("minus_baseline", "reinforce_plus_plus"), ("pass_k", "pass_at_k")):
        if estimator.name != owner and getattr(estimator, key) != type(estimator).model_fields[key].default:
            _not_read(report, f"grpo.adv_estimator.{key}", f"adv_estimator.name {estimator.name}")


def _not_read(report: Report, key: str, beside: str) -> None:
    """Report that `key` has no effect with the setting `beside`, unless `key` is set only in a parent file, which may
    serve other runs."""
    if report.nearness(key) >= 2:
        report.add(key, f"has no effect with {beside}: leave it out")


def _check_critic(config: PPOMasterConfig, report: Report) -> None:
    loop, estimator, chosen = config.ppo, config.ppo.adv_estimator, "ppo.adv_estimator.name"
    named = f"adv_estimator.name {estimator.name}"
    if estimator.name == "opd" and not config.has_critic:
        named += " and outcome_advantage_weight 0"
    if not config.has_critic and loop.critic_ppo_epochs is not None:
        _not_read(report, "ppo.critic_ppo_epochs", f"{named}, which has no critic")
    alpha = estimator.length_adaptive_alpha
    for name in ("gae_lambda", "gae_gamma", "gae_lambda_value", "gae_lambda_policy", "length_adaptive_alpha"):
        changed = getattr(estimator, name) != type(estimator).model_fields[name].default
        if changed and not estimator.computes_gae:
            _not_read(report, f"ppo.adv_estimator.{name}", named)
        elif changed and name == "gae_lambda_policy" and alpha > 0:
            _not_read(report, f"ppo.adv_estimator.{name}", f"length_adaptive_alpha {alpha:g}")
    warm_start = "ppo.warm_start_value_checkpoint"
    if config.has_critic:
        if not estimator.uses_critic:
            text = f"is for an estimator of yours, but {chosen} {estimator.name} needs a critic: leave it out"
            report.add("ppo.adv_estimator.uses_critic", text, chosen)
        check_trained_model(config.value, "value", report)
        if config.value.lora is not None and loop.warm_start_value_checkpoint is not None:
            lora = f"{config.value.lora_key('value')}.enabled"
            text = f"has all weights of a critic, but {lora} trains adapters: name it in value.model_name, not here"
            report.add(warm_start, text, lora)
        _check_batches(config, "value", report)
        longest, key = config.policy.max_total_sequence_length, "max_total_sequence_length"
        if (given := config.value.max_total_sequence_length) < longest:
            text = f"is {given}, but the policy makes sequences of up to {longest}; set it to ${{policy.{key}}}"
            report.add(f"value.{key}", text, f"policy.{key}")
    elif loop.warm_start_value_checkpoint is not None:
        report.add(warm_start, f"must be null with {named}, which has no critic", chosen)
    elif loop.policy_training_start_step > 0:
        text = f"must be 0 with {named}: there is no critic to warm up"
        report.add("ppo.policy_training_start_step", text, chosen)


def _check_batches(config: TrainMasterConfig, model: str, report: Report) -> None:
    loop, name, wanted = config.loop, config.algorithm, getattr(config, model).train_global_batch_size
    prompts, generations = f"{name}.num_prompts_per_step", f"{name}.num_generations_per_prompt"
    batch = loop.num_prompts_per_step * loop.num_generations_per_prompt
    if batch % wanted == 0:
        return
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    nearest = [d for d in divisors if d < wanted][-1:] + [d for d in divisors if d > wanted][:1]
    legal = " or ".join(map(str, nearest))
    samples = f"{prompts} {loop.num_prompts_per_step} x {generations} {loop.num_generations_per_prompt}"
    text = f"is {wanted}, which does not divide the {batch} samples of a step ({samples})"
    key = f"{model}.train_global_batch_size"
    report.add(key, f"{text}; the nearest legal values are {legal}", prompts, generations)


# ---- the run as a whole


def _check_run(config: TrainMasterConfig, report: Report) -> None:
    cluster = config.cluster
    _check_data(config, report)
    limit, prompt = config.policy.max_total_sequence_length, config.data.max_input_seq_length
    if prompt is not None and prompt > limit:
        text = f"is {prompt}, more than policy.max_total_sequence_length {limit}: lower it, to have room for a response"
        report.add("data.max_input_seq_length", text, "policy.max_total_sequence_length")
    rules_model.check_cluster(cluster, report)
    if cluster.max_restarts > 0 and not cluster.has_workers:
        text = f"is {cluster.max_restarts}, but there are no workers: set cluster.executor=processes or ray, or 0 here"
        report.add("cluster.max_restarts", text, "cluster.executor")
    elif cluster.max_restarts > 0 and not config.checkpointing.enabled:
        text = f"is {cluster.max_restarts}, but a restart needs a checkpoint: set checkpointing.enabled=true, or 0 here"
        report.add("cluster.max_restarts", text, "checkpointing.enabled")
    rules_model.check_resources(config, report)
    count = trainers_of(config)
    for model, section in config.trained_models().items():
        rules_model.check_blocks(section, model, count // section.tensor_parallel(count), report)
        rules_model.check_model(section, model, report)
    rules_model.check_gpus(config, report)
    rules_model.check_engines(config, report)
    rules_model.check_quantized_run(config, report)
    rules_model.check_vllm_run(config, report)
    rules_model.check_sizes(config, report)
    rules_model.check_offload(config, report)
    rules_model.check_serving(config, report)
    _check_checkpointing(config, report)
    _check_loaders(config, report)
    for backend, entry in LOGGER_BACKENDS.data.items():
        package = entry.package if getattr(config.logger, f"{backend}_enabled") else None
        if package is not None and importlib.util.find_spec(package) is None:
            text = f"is true but {backend} is not installed; install the extra `{backend}`, or set it to false"
            report.add(f"logger.{backend}_enabled", text)


def _check_loaders(config: TrainMasterConfig, report: Report) -> None:
    """Report keys that have no effect, or an invalid value, with the number of data loaders: one, or with
    `data.use_multiple_dataloader` one per dataset."""
    data, name, several = config.data, config.algorithm, "data.use_multiple_dataloader"
    if not data.use_multiple_dataloader:
        for key in ("num_prompts_per_dataloader", "custom_dataloader"):
            if getattr(data, key) is not None:
                _not_read(report, f"data.{key}", f"{several}=false")
        return
    each, prompts = data.num_prompts_per_dataloader, config.loop.prompts_per_round
    if each is not None and data.custom_dataloader is None and prompts % each:
        step = "policy.train_global_batch_size" if name == "sft" else f"{name}.num_prompts_per_step"
        text = f"is {each}, which does not divide the {prompts} prompts that are drawn at a time (see {step}): take a divisor, or null"
        report.add("data.num_prompts_per_dataloader", text, step)
    epochs, steps = f"{name}.max_num_epochs", f"{name}.max_num_steps"
    written = report.nearness(epochs)
    if written >= 2 and written > report.nearness(steps):
        text = f"ends no run with {several}, whose loaders begin again without end: leave it out, and set {steps}"
        report.add(epochs, text, several)


def _check_checkpointing(config: TrainMasterConfig, report: Report) -> None:
    settings, section = config.checkpointing, "checkpointing"
    if settings.push_to_hub is not None and not settings.enabled:
        text = "uploads the last checkpoint, but checkpointing.enabled is false: set it to true"
        report.add(f"{section}.push_to_hub", text, f"{section}.enabled")
    metric, limit = settings.metric_name, settings.checkpoint_must_save_by
    if metric is not None and not (metric.startswith(("train:", "val:")) and metric.partition(":")[2]):
        text = f"must be train:NAME, val:NAME or null, not {metric!r}; for example val:accuracy"
        report.add(f"{section}.metric_name", text)
    parts = [] if limit is None else limit.split(":")
    if limit is not None and (len(parts) != 4 or not all(part.isdigit() for part in parts)):
        text = f"must be DD:HH:MM:SS (days, hours, minutes, seconds), not {limit!r}"
        report.add(f"{section}.checkpoint_must_save_by", text)


def check_eval(config: EvalMasterConfig, report: Report) -> None:
    wanted, generation, several = config.eval, config.generation, "eval.num_tests_per_prompt"
    if wanted.k_value > wanted.num_tests_per_prompt:
        text = f"is {wanted.k_value}, but each prompt gets {wanted.num_tests_per_prompt} responses; raise {several}"
        report.add("eval.k_value", text, several)
    if wanted.num_tests_per_prompt > 1 and (generation.temperature == 0 or generation.top_k == 1):
        text = f"is greedy, so the responses of {several} would be equal: set it above 0, and top_k to null"
        report.add("generation.temperature", text, "generation.top_k", several)
    if generation.num_prompts_per_step == 0:
        report.add("generation.num_prompts_per_step", "cannot be 0; set -1 for all prompts at once")
    rules_model.check_engine(generation, "generation", report)
    rules_model.check_evaluation(generation, report)
    rules_model.check_sizes(config, report)
    rules_model.check_cluster(config.cluster, report)
    if config.cluster.has_workers:
        cluster = config.cluster
        text = f"{cluster.executor_text} is for training: an evaluation runs in one process; {cluster.one_process_text}"
        report.add("cluster.executor", text)
    _check_eval_data(config.data, config.env, report)


# ---- data and environments


def _check_data(config: TrainMasterConfig, report: Report) -> None:
    data, env, turns = config.data, config.env, config.loop.max_rollout_turns
    if data.train is None or data.train == []:
        report.add("data.train", "is missing: name a data set, for example dataset_name: arithmetic")
    if report.nearness("data.dataset_name") == 3:
        report.add("data.dataset_name", "is read by nothing, in NeMo RL neither: set data.train.dataset_name")
    default = data.default or DatasetDefaults()
    if default.dataset_name is None or _is_known(default.dataset_name, "data.default", report):
        every = tuple({key for keys in dataset_keys().values() for key in keys})
        _check_extra_keys(default, "data.default", every, default.dataset_name, report)
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
            sets = ", ".join(sorted(map(str, names)))
            report.add(f"data.default.{key}", f"is taken by none of the data sets {sets}; remove it")
    if "guess_number" in used & env.keys():
        guesses = GuessNumberEnvConfig(**(env["guess_number"] or {})).max_guesses
        if guesses > turns:
            text = f"is {turns}, but a game of env.guess_number takes up to {guesses} turns (max_guesses); raise it"
            report.add(f"{config.algorithm}.max_rollout_turns", text, "env.guess_number.max_guesses")


def _check_eval_data(data: EvalDataConfig, env: EnvConfigs, report: Report) -> None:
    _check_dataset(data, "data", report)
    if data.env_name is None and len(env) != 1:
        known = ", ".join(env) or "no entry"
        report.add("data.env_name", f"is missing: which environment scores the responses? env has {known}; name one")
    _check_env_name(data.env_name, "data", env, report)


def _check_dataset(dataset: DatasetConfig, dotted: str, report: Report, default: DatasetDefaults | None = None) -> None:
    inherits = "dataset_name" not in dataset.model_fields_set and default is not None
    name = default.dataset_name if inherits else dataset.dataset_name
    if name is None:
        report.add(f"{dotted}.dataset_name", "is missing: name a data set, here or in data.default")
        return
    if not _is_known(name, "data.default" if inherits else dotted, report) or is_dotted(name):
        return
    name = DATASET_ALIASES.get(name, name)
    _check_extra_keys(dataset, dotted, DATASET_REGISTRY.data[name].keys, name, report)
    given = {*(dataset.model_extra or {}), *((default.model_extra or {}) if default is not None else ())}
    if name == "ResponseDataset" and "data_path" not in given:
        text = "is missing: ResponseDataset reads a file or a data set of the hub"
        report.add(f"{dotted}.data_path", text, f"{dotted}.dataset_name")


def _is_known(name: str, dotted: str, report: Report) -> bool:
    """Return whether `name` is a known dataset or a user's class; if not, report `dotted`.dataset_name."""
    if name in DATASET_REGISTRY or name in DATASET_ALIASES or is_dotted(name):
        return True
    names = [*DATASET_REGISTRY, *DATASET_ALIASES]
    meant = next((known for known in names if known.lower() == name.lower()), name)
    hint = did_you_mean(meant, names, f"known are {', '.join(DATASET_REGISTRY)}", 0.5)
    more = "a data set of the hub is ResponseDataset with data_path: OWNER/NAME; your class is package.module.Name"
    report.add(f"{dotted}.dataset_name", f"{name} is unknown; {hint} ({more})")
    return False


def _check_extra_keys(
    dataset: DatasetDefaults, dotted: str, allowed: tuple[str, ...], name: str | None, report: Report
) -> None:
    if name is not None and is_dotted(name):
        return
    known = sorted({*type(dataset).model_fields, *allowed})
    for key in dataset.model_extra or {}:
        if key == "_override_":
            report.add(f"{dotted}.{key}", "works in a section at the top of the file only, not deeper")
        elif key not in allowed:
            report.add(f"{dotted}.{key}", f"is unknown; {did_you_mean(key, known, 'known are ' + ', '.join(known))}")


def _check_env_name(name: str | None, dotted: str, env: EnvConfigs, report: Report) -> None:
    if name is not None and name not in env:
        hint = did_you_mean(name, env, f"env has {', '.join(env) or 'no entry'}", 0.5)
        if is_dotted(name):
            hint = f"give your class one, which may be empty: {name}: {{}} under env"
        report.add(f"{dotted}.env_name", f"{name} has no section env.{name}; {hint}")
