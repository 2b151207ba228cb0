"""GRPO under NeMo RL's names."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from nemo_rl_cpp.algorithms.advantage_estimator import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    OPDAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl_cpp.algorithms.build import Parts
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.grpo import GRPOSaveState, MasterConfig, make_advantages
from nemo_rl_cpp.algorithms.reward_functions import apply_reward_shaping, scale_rewards
from nemo_rl_cpp.algorithms.step import compute_and_apply_seq_logprob_error_masking
from nemo_rl_cpp.algorithms.utils import calculate_baseline_and_std_per_prompt, set_seed
from nemo_rl_cpp.compat.algorithms._run import (
    environments,
    main,
    nothing_but,
    parts_of,
    refuse_processor,
    require_beside_training,
    train,
)
from nemo_rl_cpp.compat.algorithms._run import validate as validated
from nemo_rl_cpp.compat.weight_sync.factory import create_weight_synchronizer
from nemo_rl_cpp.config.grpo import AdvEstimatorConfig, AsyncGRPOConfig, GRPOConfig, RewardPenaltyConfig
from nemo_rl_cpp.config.logger import LoggerConfig as GRPOLoggerConfig
from nemo_rl_cpp.config.loop import RewardScalingConfig, RewardShapingConfig
from nemo_rl_cpp.config.python_values import checked
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.group import Environments
from nemo_rl_cpp.experience.rollout_metrics import join_of
from nemo_rl_cpp.experience.train_batch import add_token_loss_masks, sampled_by_policy


def setup(
    master_config: MasterConfig,
    tokenizer: Any,
    dataset: Any,
    val_dataset: Any,
    processor: Any = None,
    policy_factory: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:
    """Everything that `grpo_train` takes but the environments, in NeMo RL's order: (policy, generation, None, (cluster,
    cluster), loader, validation loader, loss, logger, checkpoints, state, configuration, {}, {}).

    Locks checkpointing.checkpoint_dir until `CheckpointManager.shutdown` and goes on from the newest whole checkpoint there, as
    checkpointing.resume says; ResumeError (a ValueError) where it is of another run. `policy_factory` makes the policy instead of
    `Policy`, with its arguments. `processor` (images, sound) is not supported. The configuration may be a mapping, too; however
    it was made, it is checked as a file would be (ConfigError).
    """
    config = checked(master_config, MasterConfig)
    made = parts_of(config, tokenizer, dataset, val_dataset, processor, policy_factory)
    clusters = made.cluster, made.engine_cluster or made.cluster
    return (
        made.policy, made.generation, None, clusters, made.loader, made.val_loader, made.loss_fn, made.logger,
        made.checkpoints, made.state, config, {}, {},
    )  # fmt: skip


def grpo_train(
    policy: Any,
    policy_generation: Any,
    wrapped_dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: Any,
    task_to_env: dict[str, Any],
    val_task_to_env: dict[str, Any] | None,
    logger: Any,
    checkpointer: Any,
    grpo_save_state: GRPOSaveState,
    master_config: MasterConfig,
    processor: Any = None,
) -> None:
    """Trains to the end, with NeMo RL's arguments. `policy_generation` None: an engine on the policy's own weights."""
    refuse_processor(processor)
    train(master_config, Parts(
        policy=policy, generation=policy_generation, value=None, tokenizer=tokenizer, loader=wrapped_dataloader,
        val_loader=val_dataloader, environments=environments(task_to_env, val_task_to_env), loss_fn=loss_fn, value_loss_fn=None,
        logger=logger, checkpoints=checkpointer, state=grpo_save_state,
    ))  # fmt: skip


def async_grpo_train(
    policy: Any,
    policy_generation: Any,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: Any,
    task_to_env: dict[str, Any],
    val_task_to_env: dict[str, Any] | None,
    logger: Any,
    checkpointer: Any,
    grpo_save_state: GRPOSaveState,
    master_config: MasterConfig,
    max_trajectory_age_steps: int = 1,
    teacher_worker_groups: None = None,
    alias_to_group_alias: None = None,
    processor: Any = None,
) -> None:
    """`grpo_train` with rollouts beside training: of a configuration with `grpo.async_grpo.enabled`, and engines of their own from `setup`.

    ValueError where the configuration says otherwise, and for teachers, which are not supported."""
    require_beside_training(master_config, max_trajectory_age_steps)
    if teacher_worker_groups or alias_to_group_alias:
        raise ValueError("async_grpo_train: teacher_worker_groups and alias_to_group_alias (distillation) are not supported; leave them out")  # fmt: skip
    grpo_train(
        policy, policy_generation, dataloader, val_dataloader, tokenizer, loss_fn, task_to_env, val_task_to_env, logger, checkpointer,
        grpo_save_state, master_config, processor,
    )  # fmt: skip


def validate(
    policy_generation: Any,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: dict[str, Any] | None,
    step: int,
    master_config: MasterConfig,
    logger: Any = None,
    processor: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, timings) of one validation, see `Validator.run`; empty ones, with a message, without a loader."""
    refuse_processor(processor)
    return validated(master_config, nothing_but(
        generation=policy_generation, val_loader=val_dataloader, tokenizer=tokenizer, logger=logger,
        environments=environments({}, val_task_to_env),
    ), step)  # fmt: skip


def refit_policy_generation(
    policy: Any,
    policy_generation: Any,
    colocated_inference: bool,
    _refit_buffer_size_gb: float | None = None,
    timer: Any = None,
    kv_scales: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Brings the policy's weights to the engine; with shared weights nothing moves and the digests are compared."""
    synchronizer = create_weight_synchronizer(policy, policy_generation, "native", colocated_inference)
    return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales)


def add_grpo_token_loss_masks_and_generation_logprobs(message_logs: list[Any]) -> None:
    """In place: `token_loss_mask` and `generation_logprobs` of every message, see `add_token_loss_masks`."""
    add_token_loss_masks(message_logs, sampled_by_policy)


def shutdown_environments(
    task_to_env: dict[str, Any] | None, val_task_to_env: dict[str, Any] | None, patience: float | None = None
) -> None:
    """Ends the processes of all environments, each once; one that does not answer for `patience` seconds is left behind."""
    Environments(task_to_env or {}, val_task_to_env or {}).close(patience)


def _clip_grpo_advantages(advantages: Tensor, grpo_config: GRPOConfig) -> Tensor:
    """Advantages within [advantage_clip_low, advantage_clip_high]; a bound that is None does not bind."""
    low, high = grpo_config.advantage_clip_low, grpo_config.advantage_clip_high
    return advantages if low is None and high is None else advantages.clamp(min=low, max=high)


def _create_advantage_estimator(master_config: MasterConfig) -> Any:
    """By `grpo.adv_estimator.name`; ValueError for a name that GRPO has no estimator for."""
    return make_advantages(master_config).estimator


def aggregate_rollout_metrics(per_group_metrics: Mapping[str, list[object]]) -> dict[str, object]:
    """One value a name from the values of several groups: the highest of `max_*` and `*/max`, the lowest of `min_*` and
    `*/min`, the sum of `total_*`, the mean of other numbers (rates, `trajectory_duration_s/mean`), and lists joined."""
    result: dict[str, object] = {}
    for name, values in per_group_metrics.items():
        if not values:
            continue
        if all(isinstance(value, list) for value in values):
            result[name] = [item for value in values for item in value]
        elif not all(isinstance(value, (int, float)) for value in values):
            result[name] = values
        else:
            join = join_of(name)
            result[name] = sum(values) / len(values) if join is None else join(values)
    return result


def extract_initial_prompt_messages(
    message_logs: list[LLMMessageLogType], original_prompt_lengths: Tensor
) -> list[LLMMessageLogType]:
    """The messages of each conversation that make up its prompt: those before `original_prompt_lengths` [B] tokens.

    An empty prompt has none. ValueError when a message straddles the length, which then is not that of the prompt.
    """
    prompts = []
    for row, (log, length) in enumerate(zip(message_logs, original_prompt_lengths.tolist(), strict=True)):
        prompt, tokens = [], 0
        for message in log:
            if tokens >= length:
                break
            prompt.append(message)
            tokens += len(message["token_ids"])
        if tokens > length and prompt and prompt[-1]["role"] == "assistant":
            raise ValueError(
                f"conversation {row}: its prompt is said to have {length} tokens, which ends inside a response"
            )
        prompts.append(prompt)
    return prompts
