"""PPO under NeMo RL's names."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from nemo_rl_cpp.algorithms.advantage_estimator import RawRewardAdvantageEstimator
from nemo_rl_cpp.algorithms.build import Parts
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.loss import MseValueLossFn
from nemo_rl_cpp.algorithms.ppo import MasterConfig, PPOSaveState, make_advantages
from nemo_rl_cpp.algorithms.step import critic_metrics as _compute_critic_metrics
from nemo_rl_cpp.compat.algorithms._run import environments, main, nothing_but, parts_of, require_beside_training, train
from nemo_rl_cpp.compat.algorithms._run import validate as validated
from nemo_rl_cpp.compat.algorithms.advantage_estimator import GeneralizedAdvantageEstimator
from nemo_rl_cpp.config.logger import LoggerConfig as PPOLoggerConfig
from nemo_rl_cpp.config.ppo import AsyncPPOConfig, PPOConfig
from nemo_rl_cpp.config.ppo import GAEConfig as AdvEstimatorConfig
from nemo_rl_cpp.config.python_values import checked


def setup(
    master_config: MasterConfig,
    tokenizer: Any,
    dataset: Any,
    val_dataset: Any,
    processor: Any = None,
    policy_factory: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:
    """Everything that `ppo_train` takes but the environments, in NeMo RL's order: (policy, generation, value model,
    (cluster, cluster), loader, validation loader, policy loss, value loss, logger, checkpoints, state, configuration).

    As `grpo.setup`. With the estimator `raw_reward` the value model is None.
    """
    config = checked(master_config, MasterConfig)
    made = parts_of(config, tokenizer, dataset, val_dataset, processor, policy_factory)
    clusters = made.cluster, made.engine_cluster or made.cluster
    return (
        made.policy, made.generation, made.value, clusters, made.loader, made.val_loader, made.loss_fn,
        made.value_loss_fn or MseValueLossFn(config.value_loss_fn), made.logger, made.checkpoints, made.state, config,
    )  # fmt: skip


def ppo_train(
    policy: Any,
    policy_generation: Any,
    value_model: Any,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: Any,
    value_loss_fn: Any,
    task_to_env: dict[str, Any],
    val_task_to_env: dict[str, Any] | None,
    logger: Any,
    checkpointer: Any,
    ppo_save_state: PPOSaveState,
    master_config: MasterConfig,
) -> None:
    """Trains to the end, with NeMo RL's arguments. `value_model` None: no critic (`raw_reward` only)."""
    train(master_config, Parts(
        policy=policy, generation=policy_generation, value=value_model, tokenizer=tokenizer, loader=dataloader,
        val_loader=val_dataloader, environments=environments(task_to_env, val_task_to_env), loss_fn=loss_fn,
        value_loss_fn=value_loss_fn, logger=logger, checkpoints=checkpointer, state=ppo_save_state,
    ))  # fmt: skip


def async_ppo_train(*args: Any, **kwargs: Any) -> None:
    """`ppo_train`, with its arguments, and with rollouts beside training: of a configuration with `ppo.async_ppo.enabled`, and engines of
    their own from `setup`. ValueError where the configuration says otherwise."""
    require_beside_training(signature(ppo_train).bind(*args, **kwargs).arguments["master_config"])
    ppo_train(*args, **kwargs)


def validate(
    policy_generation: Any,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: dict[str, Any] | None,
    step: int,
    master_config: MasterConfig,
    logger: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, timings) of one validation, see `Validator.run`; empty ones, with a message, without a loader."""
    return validated(master_config, nothing_but(
        generation=policy_generation, val_loader=val_dataloader, tokenizer=tokenizer, logger=logger,
        environments=environments({}, val_task_to_env),
    ), step)  # fmt: skip


def _create_advantage_estimator(master_config: MasterConfig) -> Any:
    """By `ppo.adv_estimator.name`; ValueError for a name that PPO has no estimator for."""
    return make_advantages(master_config).estimator
