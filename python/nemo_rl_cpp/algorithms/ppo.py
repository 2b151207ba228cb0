"""PPO: the training loop, and NeMo RL's names around it.

`ppo_loop` is the algorithm. Everything that a configuration can switch on or off is a component of it; see
`algorithms/components.py` for what they are and `algorithms/setup.py` for how they are made. What it shares with GRPO is
in `algorithms/step.py`.
"""

from collections.abc import Callable
from typing import Any

from nemo_rl_cpp.algorithms import setup as build
from nemo_rl_cpp.algorithms.advantage_estimator import GeneralizedAdvantageEstimator, RawRewardAdvantageEstimator
from nemo_rl_cpp.algorithms.components import PPOComponents
from nemo_rl_cpp.algorithms.critic import Critic, NoCritic, critic_metrics
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn, MseValueLossFn
from nemo_rl_cpp.algorithms.observe import observe, observe_start
from nemo_rl_cpp.algorithms.resume import opened
from nemo_rl_cpp.algorithms.run import run_to_end
from nemo_rl_cpp.algorithms.step import (
    mask_by_logprob_error,
    report_step,
    require_valid_tokens,
    shape_rewards,
    valid_mask,
)
from nemo_rl_cpp.algorithms.step_metrics import mean_over_epochs, training_metrics
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.config.logger import LoggerConfig as PPOLoggerConfig
from nemo_rl_cpp.config.master import PPOMasterConfig
from nemo_rl_cpp.config.ppo import AsyncPPOConfig, PPOConfig
from nemo_rl_cpp.config.ppo import GAEConfig as AdvEstimatorConfig
from nemo_rl_cpp.config.python_values import checked
from nemo_rl_cpp.experience.logprobs import LogprobNeeds, add_logprobs
from nemo_rl_cpp.experience.train_batch import build_train_batch, spoken_by_assistant

__all__ = [
    "AdvEstimatorConfig", "AsyncPPOConfig", "MasterConfig", "PPOConfig", "PPOLoggerConfig", "PPOSaveState", "async_ppo_train", "dynamic_sampling",
    "main", "make_components", "ppo_loop", "ppo_train", "setup", "validate",
]  # fmt: skip

MasterConfig = PPOMasterConfig
PPOSaveState = TrainState
_compute_critic_metrics = critic_metrics


# ---- the loop


def ppo_loop(parts: PPOComponents, config: PPOMasterConfig, state: TrainState) -> None:
    """Each turn takes one batch of rollouts from version `state.step` of the policy, and trains the policy on it `ppo_epochs`
    times and the critic `critic_ppo_epochs` times, in turns."""
    ppo = config.ppo
    needs = LogprobNeeds.of(config.loss_fn, ppo.seq_logprob_error_threshold)
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
                    rollouts = shape_rewards(rollouts, ppo)
                with timer("dynamic_sampling"):
                    parts.sampler.add(rollouts)  # the limit and its error live in the sampler
            with timer("data_processing"):
                parts.generation.finish_generation()
                samples = parts.sampler.take(weight_version=state.step)
                batch = build_train_batch(
                    samples, pad_token_id=parts.tokenizer.pad_token_id, overlong_filtering=ppo.overlong_filtering,
                    divisible_by=config.policy.make_sequence_length_divisible_by, is_trained=spoken_by_assistant,
                )  # fmt: skip
            with timer("value_inference"):
                parts.critic.add_values(batch, timer)
            with timer("policy_and_reference_logprobs"):
                parts.refit.verify_before_training()
                metrics |= add_logprobs(parts.policy, batch, needs, weight_version=state.step)
                metrics |= mask_by_logprob_error(batch, ppo.seq_logprob_error_threshold)
                require_valid_tokens(samples, batch, "ppo")
            with timer("advantage_calculation"):
                add_advantages(parts, batch)
            epochs = []
            critic_epochs = ppo.critic_ppo_epochs or ppo.ppo_epochs
            for epoch in range(max(ppo.ppo_epochs, critic_epochs)):
                epochs.append({})
                if epoch < critic_epochs:
                    with timer("value_training"):
                        epochs[-1] |= parts.critic.train(batch, timer)
                if epoch < ppo.ppo_epochs and state.step >= ppo.policy_training_start_step:
                    with timer("policy_training"):
                        epochs[-1] |= train_policy(parts, batch, timer)
            with timer("metrics"):
                report = report_step(parts, ppo, samples, batch, metrics | mean_over_epochs(epochs))
        state.advance(ppo.num_prompts_per_step, int(valid_mask(batch).sum()))
        for _ in range(parts.prompts.pop_finished_epochs()):
            state.next_epoch()
        observe(parts, config, ppo, state, report)


def add_advantages(parts: PPOComponents, batch: Any) -> None:
    """`advantages` and, where there is a critic, `returns` of the batch, both [B, S], by the estimator."""
    advantages, returns = parts.advantage_estimator.compute_advantage(
        prompt_ids=batch["input_ids"],
        rewards=batch["rewards"],
        mask=valid_mask(batch),
        values=batch.get("values"),
        logprobs=batch.get("prev_logprobs", batch["generation_logprobs"]),
        reference_logprobs=batch.get("reference_policy_logprobs"),
    )
    batch["advantages"] = advantages
    if returns is not None:
        batch["returns"] = returns


def train_policy(parts: PPOComponents, batch: Any, timer: Any = None) -> dict[str, float]:
    """One pass over the batch. The first one leaves the old policy's log-probabilities in it for those that follow."""
    parts.policy.prepare_for_training()
    result = parts.policy.train(batch, parts.loss_fn, timer=timer)
    parts.policy.finish_training()
    parts.refit.mark_stale()
    batch["prev_logprobs"] = result["prev_logprobs"]
    return training_metrics(result)


def _create_advantage_estimator(master_config: PPOMasterConfig) -> Any:
    """By `ppo.adv_estimator.name`; ValueError for a name that PPO has no estimator for."""
    settings = master_config.ppo.adv_estimator
    known = {"gae": GeneralizedAdvantageEstimator, "raw_reward": RawRewardAdvantageEstimator}
    if settings.name not in known:
        raise ValueError(f"ppo.adv_estimator.name is {settings.name!r}; expected {' or '.join(known)}")
    return known[settings.name](settings, master_config.loss_fn)


# ---- from a configuration to a finished run


def main(config: PPOMasterConfig) -> None:
    """A whole run: data, environments, policy, critic, engine, training (resumed where it was), summary. What
    `run_ppo.py` calls. A model or data set that cannot be had ends the program with one sentence."""
    config = checked(config, PPOMasterConfig)
    with build.run_data(config, config.ppo.seed) as (tokenizer, data):
        policy, generation, value, _, loader, val_loader, loss_fn, value_loss_fn, logger, checkpoints, state, config = (
            setup(config, tokenizer, data.train, data.validation)
        )
        ppo_train(
            policy, generation, value, loader, val_loader, tokenizer, loss_fn, value_loss_fn, data.task_to_env,
            data.val_task_to_env, logger, checkpoints, state, config,
        )  # fmt: skip


def setup(
    master_config: PPOMasterConfig,
    tokenizer: Any,
    dataset: Any,
    val_dataset: Any,
    processor: Any = None,
    policy_factory: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:
    """Everything that `ppo_train` takes but the environments, in NeMo RL's order: (policy, generation, value model,
    (cluster, cluster), loader, validation loader, policy loss, value loss, logger, checkpoints, state, configuration).

    Locks checkpointing.checkpoint_dir until `CheckpointManager.shutdown` and goes on from the newest whole checkpoint there, as
    checkpointing.resume says; ResumeError (a ValueError) where it is of another run. With the estimator `raw_reward` the value
    model is None. `processor` (images, sound) is not supported. The configuration may be a
    mapping, too; however it was made, it is checked as a file would be (ConfigError).
    """
    if processor is not None:
        raise ValueError("processor: images and sound are not supported, only text")
    config = checked(master_config, PPOMasterConfig)
    loop = config.ppo
    with opened(config, loop, tokenizer, dataset, val_dataset) as (checkpoints, resume):
        state = resume.state
        loader = build.make_dataloader(config.data, dataset, build.prompts_per_round(loop), loop.seed)
        resume.load_data_position(loader, config.data)
        val_loader = build.make_val_dataloader(val_dataset, loop)
        cluster = build.make_cluster(config)
        policy = build.make_policy(config, tokenizer, resume, cluster, loop, policy_factory)
        value = build.make_value(config, tokenizer, resume, cluster, loop) if loop.adv_estimator.name == "gae" else None
        generation = policy.create_generation(config.policy.generation, seed=loop.seed)
        logger = build.make_logger(config, state)
    return (
        policy, generation, value, (cluster, cluster), loader, val_loader, ClippedPGLossFn(config.loss_fn),
        MseValueLossFn(config.value_loss_fn), logger, checkpoints, state, config,
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
    ppo_save_state: TrainState,
    master_config: PPOMasterConfig,
) -> None:
    """Trains to the end, with NeMo RL's arguments: `ppo_loop` on the components that `make_components` makes of them."""
    parts = make_components(
        policy, policy_generation, value_model, dataloader, val_dataloader, tokenizer, loss_fn, value_loss_fn, task_to_env,
        val_task_to_env, logger, checkpointer, ppo_save_state, master_config,
    )  # fmt: skip
    run_to_end(ppo_loop, parts, master_config, ppo_save_state, f"PPO {master_config.policy.model_name}")


def async_ppo_train(*args: Any, **kwargs: Any) -> None:
    """NeMo RL's training beside generation; always an error here."""
    raise NotImplementedError(
        "training while generating (ppo.async_ppo.enabled) is not supported: policy and engine share one set of weights. "
        "Set ppo.async_ppo.enabled=false and call ppo_train"
    )


def make_components(
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
    checkpoints: Any,
    state: TrainState,
    config: PPOMasterConfig,
) -> PPOComponents:
    """The components of `ppo_loop`. The state gets the limits of the configuration.

    `policy_generation` None: an engine on the policy's own weights. `value_model` None: no critic (`raw_reward` only).
    """
    estimator = config.ppo.adv_estimator.name
    if (value_model is None) != (estimator == "raw_reward"):
        given = "no value model" if value_model is None else "a value model"
        raise ValueError(f"ppo.adv_estimator.name is {estimator} but there is {given}; gae needs one, raw_reward none")
    shared = build.shared_components(
        config, config.ppo, policy, policy_generation, dataloader, val_dataloader, tokenizer, task_to_env, val_task_to_env,
        logger, checkpoints, state, f"PPO {config.policy.model_name}",
    )  # fmt: skip
    build.keep_bad_batches(value_model, logger)
    parts = PPOComponents(
        **shared,
        advantage_estimator=_create_advantage_estimator(config),
        loss_fn=loss_fn,
        critic=NoCritic() if value_model is None else Critic(value_model, value_loss_fn),
    )
    build.resume_of(checkpoints, state).load_sampler(parts.sampler)
    return parts


def validate(
    policy_generation: Any,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: dict[str, Any] | None,
    step: int,
    master_config: PPOMasterConfig,
    logger: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, timings) of one validation, see `Validator.run`; empty ones, with a message, without a loader."""
    if val_dataloader is None:
        print("no validation data: nothing is validated")
        return {}, {}
    validator = build.make_validator(
        master_config, master_config.ppo, policy_generation, val_dataloader, tokenizer, val_task_to_env, logger
    )
    metrics, timings = validator.run(step)
    return metrics, timings
