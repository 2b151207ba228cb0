"""GRPO: the training loop, and NeMo RL's names around it.

`grpo_loop` is the algorithm. Everything that a configuration can switch on or off is a component of it; see
`algorithms/components.py` for what they are and `algorithms/setup.py` for how they are made.
"""

from collections.abc import Callable
from typing import Any

import torch

from nemo_rl_cpp.algorithms import setup as build
from nemo_rl_cpp.algorithms.advantage_estimator import (
    ADVANTAGE_ESTIMATORS,
    ReinforcePlusPlusAdvantageEstimator,  # noqa: F401  (the guides' place for it)
)
from nemo_rl_cpp.algorithms.components import GRPOComponents
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling  # noqa: F401  (the guides' place for it)
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.algorithms.observe import observe, observe_start
from nemo_rl_cpp.algorithms.resume import opened
from nemo_rl_cpp.algorithms.run import run_to_end
from nemo_rl_cpp.algorithms.step import mask_by_logprob_error, report_step, shape_rewards, valid_mask
from nemo_rl_cpp.algorithms.step_metrics import training_metrics
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config.grpo import GRPOConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig
from nemo_rl_cpp.config.python_values import checked
from nemo_rl_cpp.experience.logprobs import LogprobNeeds, add_logprobs
from nemo_rl_cpp.experience.train_batch import add_token_loss_masks, build_train_batch, sampled_by_policy
from nemo_rl_cpp.weight_sync.factory import create_weight_synchronizer

MasterConfig = GRPOMasterConfig
GRPOSaveState = TrainState


# ---- the loop


def grpo_loop(parts: GRPOComponents, config: GRPOMasterConfig, state: TrainState) -> None:
    """Each turn trains version `state.step` of the policy and yields the next one."""
    grpo = config.grpo
    needs = LogprobNeeds.of(config.loss_fn, grpo.seq_logprob_error_threshold)
    observe_start(parts, state)
    while not state.finished:
        with parts.run.timer.step(state.step + 1) as timer:
            with timer("prepare_for_generation/total"):
                metrics = parts.refit.sync_weights(timer=timer)
                parts.generation.prepare_for_generation()
            while not parts.sampler.full:  # one round, unless dynamic sampling asks for more
                prompts = parts.prompts.next()
                with timer("generation"):
                    rollouts = parts.rollouts.run(prompts, weight_version=state.step)
                with timer("reward_calculation"):
                    rollouts = shape_rewards(rollouts, grpo)
                with timer("dynamic_sampling"):
                    parts.sampler.add(rollouts)  # the limit and its error live in the sampler
            with timer("data_processing"):
                parts.generation.finish_generation()
                samples = parts.sampler.take(weight_version=state.step)
                batch = build_train_batch(
                    samples, pad_token_id=parts.tokenizer.pad_token_id, overlong_filtering=grpo.overlong_filtering,
                    divisible_by=config.policy.make_sequence_length_divisible_by,
                )  # fmt: skip
            with timer("policy_and_reference_logprobs"):
                parts.refit.verify_before_training()
                metrics |= add_logprobs(parts.policy, batch, needs, weight_version=state.step)
                metrics |= mask_by_logprob_error(batch, grpo.seq_logprob_error_threshold)
            with timer("advantage_calculation"):
                batch["advantages"] = _clip_grpo_advantages(
                    compute_advantages(parts, batch, grpo.masked_reward_policy), grpo
                )
            with timer("policy_training"):
                parts.policy.prepare_for_training()
                result = parts.policy.train(batch, parts.loss_fn, timer=timer)
                parts.refit.mark_stale()
            with timer("metrics"):
                report = report_step(parts, grpo, samples, batch, metrics | training_metrics(result))
        state.advance(grpo.num_prompts_per_step, int(valid_mask(batch).sum()))
        for _ in range(parts.prompts.pop_finished_epochs()):
            state.next_epoch()
        observe(parts, config, grpo, state, report)


def compute_advantages(parts: GRPOComponents, batch: Any, masked_reward_policy: str = "include") -> torch.Tensor:
    """[B, S], by the estimator. Groups go by `group_id`: two equal prompts of a batch are two groups. With `masked_reward_policy`
    exclude the samples that get no gradient have no say in their group's statistics."""
    voters = (batch["sample_mask"] != 0).float() if masked_reward_policy == "exclude" else None
    return parts.advantage_estimator.compute_advantage(
        prompt_ids=batch["input_ids"],
        group_id=batch["group_id"],
        rewards=batch["rewards"],
        mask=valid_mask(batch),
        valid_mask=voters,
        repeated_batch=batch,
        logprobs_policy=batch.get("prev_logprobs", batch["generation_logprobs"]),
        logprobs_reference=batch.get("reference_policy_logprobs"),
    )


def _clip_grpo_advantages(advantages: torch.Tensor, grpo_config: GRPOConfig) -> torch.Tensor:
    """Advantages within [advantage_clip_low, advantage_clip_high]; a bound that is None does not bind."""
    low, high = grpo_config.advantage_clip_low, grpo_config.advantage_clip_high
    return advantages if low is None and high is None else advantages.clamp(min=low, max=high)


def _create_advantage_estimator(master_config: GRPOMasterConfig) -> Any:
    """By `grpo.adv_estimator.name`; ValueError for a name that GRPO has no estimator for."""
    settings = master_config.grpo.adv_estimator
    known = ("grpo", "gdpo", "reinforce_plus_plus", "opd")
    if settings.name not in known:
        raise ValueError(f"grpo.adv_estimator.name is {settings.name!r}; expected one of {', '.join(known)}")
    return ADVANTAGE_ESTIMATORS[settings.name](settings, master_config.loss_fn)


# ---- from a configuration to a finished run


def main(config: GRPOMasterConfig) -> None:
    """A whole run: data, environments, policy, engine, training (resumed where it was), summary. What
    `run_grpo_math.py` calls. A model or data set that cannot be had ends the program with one sentence."""
    config = checked(config, GRPOMasterConfig)
    with build.run_data(config, config.grpo.seed) as (tokenizer, data):
        policy, generation, _, _, loader, val_loader, loss_fn, logger, checkpoints, state, config, *_ = setup(
            config, tokenizer, data.train, data.validation
        )
        grpo_train(
            policy, generation, loader, val_loader, tokenizer, loss_fn, data.task_to_env, data.val_task_to_env, logger,
            checkpoints, state, config,
        )  # fmt: skip


def setup(
    master_config: GRPOMasterConfig,
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
    `Policy`, with its arguments. `processor` (images, sound) is not supported. The configuration may be a
    mapping, too; however it was made, it is checked as a file would be (ConfigError).
    """
    if processor is not None:
        raise ValueError("processor: images and sound are not supported, only text")
    config = checked(master_config, GRPOMasterConfig)
    loop = config.grpo
    with opened(config, loop, tokenizer, dataset, val_dataset) as (checkpoints, resume):
        state = resume.state
        loader = build.make_dataloader(config.data, dataset, build.prompts_per_round(loop), loop.seed)
        resume.load_data_position(loader, config.data)
        val_loader = build.make_val_dataloader(val_dataset, loop)
        cluster = build.make_cluster(config)
        policy = build.make_policy(config, tokenizer, resume, cluster, loop, policy_factory)
        generation = policy.create_generation(config.policy.generation, seed=loop.seed)
        logger = build.make_logger(config, state)
    return (
        policy, generation, None, (cluster, cluster), loader, val_loader, ClippedPGLossFn(config.loss_fn), logger, checkpoints,
        state, config, {}, {},
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
    grpo_save_state: TrainState,
    master_config: GRPOMasterConfig,
    processor: Any = None,
) -> None:
    """Trains to the end, with NeMo RL's arguments: `grpo_loop` on the components that `make_components` makes of them."""
    if processor is not None:
        raise ValueError("processor: images and sound are not supported, only text")
    parts = make_components(
        policy, policy_generation, wrapped_dataloader, val_dataloader, tokenizer, loss_fn, task_to_env, val_task_to_env,
        logger, checkpointer, grpo_save_state, master_config,
    )  # fmt: skip
    run_to_end(grpo_loop, parts, master_config, grpo_save_state, f"GRPO {master_config.policy.model_name}")


def make_components(
    policy: Any,
    policy_generation: Any,
    dataloader: Any,
    val_dataloader: Any,
    tokenizer: Any,
    loss_fn: Any,
    task_to_env: dict[str, Any],
    val_task_to_env: dict[str, Any] | None,
    logger: Any,
    checkpoints: Any,
    state: TrainState,
    config: GRPOMasterConfig,
) -> GRPOComponents:
    """The components of `grpo_loop`. The state gets the limits of the configuration.

    `policy_generation` None: an engine on the policy's own weights. `loss_fn`: `ClippedPGLossFn`, or any callable on
    log-probabilities (see `algorithms/loss`).
    """
    shared = build.shared_components(
        config, config.grpo, policy, policy_generation, dataloader, val_dataloader, tokenizer, task_to_env, val_task_to_env,
        logger, checkpoints, state, f"GRPO {config.policy.model_name}",
    )  # fmt: skip
    parts = GRPOComponents(**shared, advantage_estimator=_create_advantage_estimator(config), loss_fn=loss_fn)
    build.resume_of(checkpoints, state).load_sampler(parts.sampler)
    return parts


def async_grpo_train(*args: Any, **kwargs: Any) -> None:
    """NeMo RL's training beside generation; always an error here."""
    raise NotImplementedError(
        "training while generating (grpo.async_grpo.enabled) is not supported: policy and engine share one set of weights. "
        "Set grpo.async_grpo.enabled=false and call grpo_train"
    )


# ---- further names of NeMo RL


def validate(
    policy_generation: Any,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: dict[str, Any] | None,
    step: int,
    master_config: GRPOMasterConfig,
    logger: Any = None,
    processor: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, timings) of one validation, see `Validator.run`; empty ones, with a message, without a loader."""
    if val_dataloader is None:
        print("no validation data: nothing is validated")
        return {}, {}
    validator = build.make_validator(
        master_config, master_config.grpo, policy_generation, val_dataloader, tokenizer, val_task_to_env, logger
    )
    metrics, timings = validator.run(step)
    return metrics, timings


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
