"""Functions that make the components of a run, each from its configuration section. `algorithms/build.py` calls
them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from nemo_rl_cpp.algorithms import reward_functions, teachers
from nemo_rl_cpp.algorithms.algorithm import AnswerValidator, NoEngine, NoRefit, given_answers
from nemo_rl_cpp.algorithms.checkpointing import Resume
from nemo_rl_cpp.algorithms.collector import AsyncCollector, RolloutCollector, SyncCollector
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.hooks import StepLog, Validation
from nemo_rl_cpp.algorithms.loss import LossFunction, MseValueLossFn
from nemo_rl_cpp.algorithms.step import Critic, NoCritic
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import Validator
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.config.cluster import engines_of, launched_ranks, trainers_of
from nemo_rl_cpp.config.data import DataConfig, too_few_rows
from nemo_rl_cpp.config.distillation import absolute_folder
from nemo_rl_cpp.config.fold import exactness_text, fold_text
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.master import (
    DistillationMasterConfig,
    GRPOMasterConfig,
    SFTMasterConfig,
    TaughtMasterConfig,
    TrainMasterConfig,
)
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.chat_template import choose_template
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.data.texts import bytes_of_token
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.data.tokenizer import get_tokenizer
from nemo_rl_cpp.distributed.cluster import Cluster, check_device, use_threads
from nemo_rl_cpp.distributed.launch import visible_gpus
from nemo_rl_cpp.environments.loading import Environments
from nemo_rl_cpp.environments.remote import ActorSettings
from nemo_rl_cpp.environments.response_data import Datasets, RunData, load_response_data
from nemo_rl_cpp.errors import say_once
from nemo_rl_cpp.files.folder_lock import FolderError, make_folder
from nemo_rl_cpp.loggers.folders import get_experiment_dir
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.metrics.memory import PhaseMemory
from nemo_rl_cpp.metrics.timer import Devices, Timer
from nemo_rl_cpp.models.distributed_models import DistributedPolicy, DistributedValue
from nemo_rl_cpp.models.generation.distributed import DedicatedGeneration
from nemo_rl_cpp.models.generation.interfaces import Pause
from nemo_rl_cpp.models.generation.vllm.vllm_generation import vllm_of
from nemo_rl_cpp.models.hf.trained import HfPolicy, HfValue
from nemo_rl_cpp.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.memory import forecast_summary
from nemo_rl_cpp.models.model_folder import TINY_RANDOM
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.policy.train_step import Scoring
from nemo_rl_cpp.report import ReportWriter
from nemo_rl_cpp.rollouts.agent_rollouts import is_agent
from nemo_rl_cpp.rollouts.batches import Rollouts
from nemo_rl_cpp.rollouts.rollouts import PromptSource, run_multi_turn_rollout, with_greedy_baseline
from nemo_rl_cpp.serving.generation import ServedDedicatedGeneration
from nemo_rl_cpp.weight_sync import create_weight_synchronizer


def make_tokenizer(policy: PolicyConfig) -> TokenizerType:
    """Return the tokenizer of the section `policy.tokenizer`; for the name tiny-random, a character-level one."""
    if (policy.tokenizer.name or policy.model_name) == TINY_RANDOM:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = choose_template(
            policy.tokenizer.chat_template, tokenizer.chat_template, "policy.tokenizer.chat_template"
        )
        return tokenizer
    return get_tokenizer(policy.tokenizer)


def make_data(config: TrainMasterConfig, tokenizer: TokenizerType) -> RunData:
    """Load the data sets, and start the environments, of which supervised fine-tuning has none."""
    limit = config.policy.max_total_sequence_length
    actors = ActorSettings.of(config.cluster) if config.cluster.executor == "ray" else None
    env = None if config.algorithm == "sft" else config.env  # supervised fine-tuning scores nothing
    return load_response_data(tokenizer, config.data, env, limit, actors)


def make_dataloader(
    data: DataConfig, dataset: Datasets, num_prompts: int, seed: int, section: str = "grpo"
) -> StatefulDataLoader | MultipleDataloaderWrapper:
    """Return the training loader, which yields `num_prompts` prompts at a time. If `dataset` is a dictionary of data
    sets, return a wrapper around one loader for each. Raise ValueError if a data set has fewer rows than a batch;
    `section` is the section of the keys in the message."""

    def one(rows: AllTaskProcessedDataset, batch_size: int) -> StatefulDataLoader:
        if text := too_few_rows(len(rows), batch_size, section):
            raise ValueError(f"data.train {text}")
        return StatefulDataLoader(
            rows, batch_size, shuffle=data.shuffle, drop_last=True, seed=seed, num_workers=data.num_workers
        )

    if not isinstance(dataset, dict):
        return one(dataset, num_prompts)
    each = data.num_prompts_per_dataloader or num_prompts
    return MultipleDataloaderWrapper(num_prompts, data, {name: one(rows, each) for name, rows in dataset.items()})


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def planned_steps(loop: LoopConfig, loader: StatefulDataLoader | MultipleDataloaderWrapper) -> int:
    """Return the planned number of steps: the smaller of max_num_steps and the number of batches in max_num_epochs, or
    max_num_steps if there are several loaders, which never end. With dynamic sampling, which may use several batches
    per step, a run may have fewer steps."""
    if isinstance(loader, MultipleDataloaderWrapper):
        return loop.max_num_steps
    return min(loop.max_num_steps, loop.max_num_epochs * len(loader))


def make_cluster(config: TrainMasterConfig) -> Cluster:
    """Return the cluster of workers that train. A single process may run a configuration that was written for any
    number of devices (`config/fold.py`). Raise ValueError if `cluster.device` is a GPU that cannot be used."""
    if (text := fold_text(config, forecast_summary(config))) is not None:
        say_once("warning", text)
    use_threads(config.cluster)
    use_gpus = check_device(config.cluster.device) == "cuda"
    if use_gpus and config.cluster.chosen_executor == "processes" and launched_ranks() == 1:
        count, gpus = config.cluster.processes, len(visible_gpus())
        if count > gpus:
            say_once(
                "note",
                f"{count} processes share {gpus} GPU{'s' if gpus > 1 else ''} (cluster.gpus_per_node * num_nodes)",
            )
    return Cluster([trainers_of(config)], use_gpus=use_gpus, name="train_cluster", settings=config.cluster)


def make_engine_cluster(config: TrainMasterConfig) -> Cluster | None:
    """Return the cluster of workers that only generate (`policy.generation.colocated.resources`), None without any."""
    count = engines_of(config)
    if count == 0:
        return None
    options = dict(use_gpus=config.cluster.device == "cuda", first_gpu=trainers_of(config))  # behind the trainers'
    return Cluster([count], name="inference_cluster", settings=config.cluster, role="engine worker", **options)


def make_generation(
    config: TrainMasterConfig, policy: PolicyInterface, tokenizer: TokenizerType, cluster: Cluster | None
) -> GenerationInterface:
    """Return the engine: one that shares the policy's weights, one in the workers `cluster`, vLLM, or `NoEngine`."""
    if config.algorithm == "sft":
        return NoEngine()
    if config.policy.generation.runs_vllm:
        return vllm_of(policy, config.policy, tokenizer, config.loop.seed)
    if cluster is None:
        return policy.create_generation(config.policy.generation, seed=config.loop.seed)
    engine = ServedDedicatedGeneration if config.policy.generation.expose_http_server else DedicatedGeneration
    return engine(cluster, config.policy, tokenizer, seed=config.loop.seed)


def make_policy(
    config: TrainMasterConfig, tokenizer: TokenizerType, resume: Resume, cluster: Cluster, steps: int,
    factory: Callable[..., PolicyInterface] | None = None,
) -> PolicyInterface:  # fmt: skip
    """Return the policy with the checkpoint's weights and optimizer, or with the weights of policy.model_name. `steps`
    is the number of planned steps, for the learning-rate schedule; `factory` replaces the configured class. Without a
    KL weight there is no reference model."""
    runs_vllm = config.policy.generation.runs_vllm
    if (config.policy.backend == "hf" or runs_vllm) and (text := exactness_text(config)) is not None:
        print(f"note: {text}", file=sys.stderr, flush=True)
    if factory is None and not cluster.in_process:
        factory = DistributedPolicy
    elif factory is None and config.policy.backend == "hf":
        factory = HfPolicy
    weights, optimizer = CheckpointManager.get_resume_paths(resume.path, model_component="policy")
    changes = {}
    if engines_of(config) or runs_vllm:  # the activations of generation are in other processes
        changes["kept_activations_gb"] = 0.0
    if runs_vllm:  # the log-probabilities of vLLM differ from those of training
        changes["reuse_generation_logprobs"] = "never"
    return (factory or Policy)(
        cluster=cluster, config=config.policy.model_copy(update=changes) if changes else config.policy, tokenizer=tokenizer,
        weights_path=weights, optimizer_path=optimizer, init_reference_model=config.loss_fn.reference_policy_kl_penalty != 0,
        total_steps=max(steps - config.loop.first_policy_step, 0) * config.loop.policy_epochs, seed=config.loop.seed,
        **({"teachers": config.teachers} if config.teachers else {}),
    )  # fmt: skip


def make_teachers(
    config: TrainMasterConfig, policy: PolicyInterface, tokenizer: TokenizerType
) -> teachers.Teachers | teachers.NoTeacher:
    """Return the run's teachers, or `NoTeacher`. Raise ValueError if a local one has another vocabulary."""
    if isinstance(config, DistillationMasterConfig) and config.teacher.is_outside:
        return teachers.OutsideTeacher(_outside_teacher(config, tokenizer).score)
    if not config.teachers:
        return teachers.NoTeacher()
    for key, name in config.teachers.items():
        teachers.check_vocabulary(tokenizer, name, key)
    if isinstance(config, TaughtMasterConfig):
        section = config.on_policy_distillation
        return teachers.Teachers(policy, section.models(), section.default_teacher)
    options = policy, config.teachers, "teacher.model_name"
    if config.candidates is None:
        return teachers.Teachers(*options)
    return teachers.TopKTeachers(*options, k=config.candidates, of_student=config.distillation.topk_of == "student")


def _outside_teacher(
    config: DistillationMasterConfig, tokenizer: TokenizerType
) -> teachers.ServerTeacher | teachers.HfTeacher:
    teacher, policy = config.teacher, config.policy
    if teacher.base_url is not None:
        return teachers.ServerTeacher(teacher.base_url, teacher.model_name, teacher.api_key_env)
    name = absolute_folder(teacher.model_name)
    teachers.check_vocabulary(tokenizer, name, "teacher.model_name")
    temperature = Scoring.of(policy.generation).temperature
    return teachers.HfTeacher(name, policy.precision, temperature, config.cluster.device)


def make_critic(
    config: TrainMasterConfig, tokenizer: TokenizerType, resume: Resume, cluster: Cluster, steps: int
) -> Critic | NoCritic:
    """Return PPO's critic, or `NoCritic` for a run without one. Its weights are the checkpoint's, or those of
    ppo.warm_start_value_checkpoint or value.model_name. `steps` is the number of planned steps, for its learning-rate
    schedule. Raise ValueError if ppo.warm_start_value_checkpoint has no critic."""
    if not config.has_critic:
        return NoCritic()
    loop = config.ppo
    weights, optimizer = CheckpointManager.get_resume_paths(resume.path, model_component="value")
    if weights is None and (checkpoint := loop.warm_start_value_checkpoint) is not None:
        weights = Path(checkpoint).expanduser() / "value" / "weights"
        if not weights.is_dir():
            raise ValueError(
                f"ppo.warm_start_value_checkpoint is {checkpoint}, but {weights} is not there: name a folder step_N that a PPO run "
                "with a critic has saved, or write null"
            )
        print(f"the critic begins with the weights of {weights}; its optimizer and schedule begin anew", flush=True)
    model = DistributedValue if not cluster.in_process else HfValue if config.value.backend == "hf" else Value
    value = model(
        cluster=cluster, config=config.value, tokenizer=tokenizer, weights_path=weights, optimizer_path=optimizer, seed=loop.seed,
        total_steps=steps * loop.critic_epochs,
    )  # fmt: skip
    return Critic(value, MseValueLossFn(config.value_loss_fn))


def make_logger(config: TrainMasterConfig, state: TrainState) -> Logger:
    """Return a logger for a new folder exp_NNN in logger.log_dir, or for a resumed run's folder, whose logs are
    truncated to the checkpoint's step. It stays locked until `finish`. Raise FolderError if it cannot be written."""
    saves = config.checkpointing.enabled
    home = Path(config.checkpointing.checkpoint_dir)
    logger = None
    try:
        make_folder(Path(config.logger.log_dir), "logger.log_dir")
        folder = get_experiment_dir(config.logger.log_dir, state.log_dir, home / f"step_{state.step}")
        logger = Logger(config.logger.model_copy(update={"log_dir": folder}))
        logger.claim(home if saves else None)
        if state.log_dir is not None:
            logger.truncate_after(state.step)
        state.log_dir = folder
        logger.log_hyperparams(config)
        return logger
    except BaseException as error:
        if logger is not None:
            logger.finish()
        if not isinstance(error, OSError):
            raise
        raise FolderError(
            f"logger.log_dir={config.logger.log_dir}: the logs cannot be written there ({error.strerror or error})"
        ) from error


def make_collector(
    config: TrainMasterConfig, policy: PolicyInterface, generation: GenerationInterface, tokenizer: TokenizerType,
    loader: StatefulDataLoader | MultipleDataloaderWrapper, environments: Environments, state: TrainState,
) -> RolloutCollector:  # fmt: skip
    """Return the collector of a step's rollouts, which overlap training if `async_grpo` or `async_ppo` is enabled."""
    prompts = PromptSource(loader, config.loop.num_generations_per_prompt, state)
    if isinstance(config, SFTMasterConfig):
        sampler = GroupSampler(config.sft.num_prompts_per_step, group_size=1)
        return SyncCollector(generation, NoRefit(), prompts, given_answers, sampler, state)
    loop, settings, penalties = config.loop, config.loop.beside_training, config.reward_penalties
    length_penalty = config.grpo.length_penalty if isinstance(config, GRPOMasterConfig) else None
    if warning := reward_functions.shaping_warning(loop.reward_shaping):
        print(warning, flush=True)

    def shape_rewards(rollouts: Rollouts) -> Rollouts:
        return reward_functions.apply_reward_shaping(
            reward_functions.scale_rewards(rollouts, loop.reward_scaling), loop.reward_shaping
        )

    def penalize(rollouts: Rollouts) -> dict[str, float]:
        if penalties is None or not penalties.any_enabled:
            return {}
        return reward_functions.apply_reward_penalties(rollouts, penalties, tokenizer)

    def change_rewards(rollouts: Rollouts) -> dict[str, float]:
        metrics = penalize(rollouts)
        if length_penalty is not None:
            metrics |= reward_functions.apply_length_penalty(rollouts, length_penalty, tokenizer)
        return metrics

    def greedy_rewards(rollouts: Rollouts) -> torch.Tensor:
        penalize(rollouts)  # a length penalty compares the samples of a group, so a greedy response gets none
        return shape_rewards(rollouts).total_reward

    roll_out = partial(
        run_multi_turn_rollout, generation, tokenizer=tokenizer, task_to_env=environments.train,
        max_seq_len=config.policy.max_total_sequence_length, max_rollout_turns=loop.max_rollout_turns,
    )  # fmt: skip
    if config.algorithm == "grpo" and loop.adv_estimator.name == "remax":
        roll_out = partial(with_greedy_baseline, roll_out, greedy_rewards)

    def version() -> int:  # the critic's warm-up does not change the policy's weights
        return state.step if state.step > loop.first_policy_step else 0

    refit = create_weight_synchronizer(policy, generation, engines_of(config) == 0, version)
    sampler = GroupSampler.from_config(loop)
    parts = (generation, refit, prompts, roll_out, sampler, state, shape_rewards, change_rewards)
    if not settings.enabled:
        return SyncCollector(*parts)
    return AsyncCollector(
        *parts, failures_left=settings.failures_allowed, age=settings.max_trajectory_age_steps, pause=_pause(config, environments),
        keeps=config.checkpointing.enabled, groups=(loop.num_prompts_per_step, loop.num_generations_per_prompt),
    )  # fmt: skip


def _pause(config: TrainMasterConfig, environments: Environments) -> Pause | None:
    """Return the point at which responses pause for in-flight weight updates. Return None if the run has no such
    updates, or has agents, whose rollouts cannot pause."""
    loop, settings = config.loop, config.loop.beside_training
    section = f"{loop.section_name}.async_{loop.section_name}"
    if not config.loss_fn.use_importance_sampling_correction and not config.loss_fn.bypass_mode:
        text = "steps train on responses of older weights, and loss_fn.use_importance_sampling_correction is false"
        print(f"note: {section}: {text}", flush=True)
    if not settings.in_flight_weight_updates:
        return None
    if any(map(is_agent, environments.train.values())):
        text = "agents make the rollouts, so their weights change only between two batches"
        print(f"note: {section}.in_flight_weight_updates: {text}", flush=True)
        return None
    longest = config.policy.generation.max_new_tokens or config.policy.max_total_sequence_length
    after = settings.in_flight_after_tokens or max(-(-longest // 2), 2)
    return Pause(after, keep_cache=not settings.recompute_kv_cache_after_weight_updates)


def make_validation(
    config: TrainMasterConfig, policy: PolicyInterface, loss_fn: LossFunction, tokenizer: TokenizerType, data: RunData,
    collector: RolloutCollector, logger: Logger, timer: Timer,
) -> Validation | None:  # fmt: skip
    """Return the validation of a run, None without validation data. It generates responses, or in supervised
    fine-tuning computes the loss on held-out answers. Raise ValueError if a validation is to end the run, without
    data."""
    rows, loop, environments = data.validation, config.loop, data.environments
    if rows is None:
        if loop.stop_at_validation_metric is not None:
            key = f"{loop.section_name}.stop_at_validation_metric={loop.stop_at_validation_metric}"
            raise ValueError(f"{key} needs validation data, and there is none: set data.validation, or the key to null")
        for key in ("val_at_start", "val_at_end"):
            if getattr(loop, key) and key in loop.model_fields_set:
                text = f"{loop.section_name}.{key} is true, but no validation runs without data: set data.validation"
                say_once("warning", text)
        return None
    sizes = [size for size in (loop.val_batch_size, loop.max_val_samples, len(rows)) if size is not None]
    loader = StatefulDataLoader(rows, min(sizes))  # in the order of the data
    task_to_env = environments.validation or environments.train
    parts = (collector.generation, loader, tokenizer, task_to_env, loop, config.policy)
    if config.algorithm == "sft":
        validator = AnswerValidator(*parts, model=policy, loss_fn=loss_fn)
    else:
        validator = Validator(*parts, logger, config.logger.num_val_samples_to_print)
    return Validation(validator, collector, timer)


def make_log(config: TrainMasterConfig, logger: Logger, timer: Timer, policy: PolicyInterface) -> StepLog:
    """Return the log of steps. Without separate engines, the trainers' devices also count as generating devices."""
    trainers, engines = trainers_of(config), engines_of(config)
    devices = Devices(trainers + engines, trainers, engines or trainers)
    return StepLog(logger, timer, PhaseMemory(), devices, policy.performance)


def make_report(config: TrainMasterConfig, logger: Logger, tokenizer: TokenizerType) -> ReportWriter | None:
    if not config.logger.report:
        return None
    steps, spelled = config.loop.max_num_steps, bytes_of_token(tokenizer)
    return ReportWriter(logger.log_dir, config, total_steps=steps, title=config.title, token_bytes=spelled)
