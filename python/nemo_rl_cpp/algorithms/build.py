"""From a configuration to a run.

The order matters in two places: environments start their worker processes before this process computes on several
threads, and the checkpoint to resume from is known before the model is loaded.
"""

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rl_cpp.algorithms import grpo, ppo
from nemo_rl_cpp.algorithms.checkpointing import Resume
from nemo_rl_cpp.algorithms.collector import AsyncCollector, RolloutCollector, RolloutMaker, SyncCollector
from nemo_rl_cpp.algorithms.custom_components import make_loss
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.loss import LossFunction, MseValueLossFn
from nemo_rl_cpp.algorithms.resume import opened
from nemo_rl_cpp.algorithms.reward_functions import apply_length_penalty, shaping_warning
from nemo_rl_cpp.algorithms.run import Algorithm, TrainingRun, make_services
from nemo_rl_cpp.algorithms.run_data import RunData, make_data, make_dataloader, make_tokenizer, make_val_dataloader
from nemo_rl_cpp.algorithms.step import Critic, NoCritic, shape_rewards
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.utils import set_seed
from nemo_rl_cpp.algorithms.validation import Validator
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.config.exactness import exactness_text
from nemo_rl_cpp.config.fold import say_fold
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig
from nemo_rl_cpp.config.python_values import checked
from nemo_rl_cpp.config.resources import engines_of, trainers_of
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster, check_device, shut_down, use_threads
from nemo_rl_cpp.environments.group import Environments
from nemo_rl_cpp.files.folder_lock import FolderError, make_folder
from nemo_rl_cpp.interrupts import GRACE_SECONDS
from nemo_rl_cpp.loggers.backends import check_trackers
from nemo_rl_cpp.loggers.folders import get_experiment_dir
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.models.distributed_models import DistributedPolicy, DistributedValue, value_class
from nemo_rl_cpp.models.generation.dedicated import DedicatedGeneration
from nemo_rl_cpp.models.generation.interfaces import end_engine
from nemo_rl_cpp.models.generation.vllm.vllm_generation import check_vllm, vllm_of
from nemo_rl_cpp.models.interfaces import GenerationInterface, PolicyInterface, ValueInterface
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.models.value.lm_value import Value
from nemo_rl_cpp.rollouts.batches import Rollouts
from nemo_rl_cpp.rollouts.rollouts import PromptSource, RolloutRunner
from nemo_rl_cpp.serving.attach import listener_of, serve_policy
from nemo_rl_cpp.stages import stage
from nemo_rl_cpp.weight_sync import create_weight_synchronizer

ALGORITHMS: dict[str, Algorithm] = {"grpo": grpo.ALGORITHM, "ppo": ppo.ALGORITHM}
"""By the name of their section of the configuration."""


@dataclass
class Parts:
    """What a run is put together from.

    Attributes:
        generation: None: an engine on the policy's own weights.
        engine_cluster: the workers that only generate; None where the policy's own do.
        value: PPO's value model; None: there is no critic.
        listener: where the policy will be served.
        loss_fn: `ClippedPGLossFn`, or any callable on log-probabilities (see `algorithms/loss`).
    """

    policy: PolicyInterface
    generation: GenerationInterface | None
    value: ValueInterface | None
    tokenizer: TokenizerType
    loader: StatefulDataLoader | MultipleDataloaderWrapper
    val_loader: StatefulDataLoader | None
    environments: Environments
    loss_fn: LossFunction
    value_loss_fn: LossFunction | None
    logger: Logger | None
    checkpoints: CheckpointManager | None
    state: TrainState
    cluster: Cluster | None = None
    engine_cluster: Cluster | None = None
    listener: socket.socket | None = None

    def release(self) -> None:
        """Ends the workers and gives logs and checkpoint folder free, of parts that become no run."""
        shut_down(self.engine_cluster, self.cluster)
        end_engine(self.generation)
        if self.listener is not None:
            self.listener.close()
        if self.logger is not None:
            self.logger.finish()
        if self.checkpoints is not None:
            self.checkpoints.shutdown()


def build_run(
    config: TrainMasterConfig | Mapping[str, object],
    *,
    data: Callable[[TrainMasterConfig, TokenizerType], RunData] = make_data,
    policy_factory: Callable[..., PolicyInterface] | None = None,
) -> TrainingRun:
    """Everything that a configuration describes, ready to `train`: data, environments, policy, critic, engine, logs.

    Locks checkpointing.checkpoint_dir until the run's end and goes on from the newest whole checkpoint there, as
    checkpointing.resume says. However the configuration was made, it is checked as a file would be.

    Args:
        data: gives data sets and environments of (configuration, tokenizer); by default what the configuration says.
        policy_factory: makes the policy instead of `Policy` (`DistributedPolicy` in a cluster of several workers), with its arguments.

    Raises ConfigError, ResumeError (a checkpoint of another run), FolderError (a folder that another run holds), all
    ValueErrors, before a model is loaded.
    """
    config = _checked(config)
    set_seed(config.loop.seed)
    stage("preparing tokenizer, data and environments")
    tokenizer = make_tokenizer(config.policy)
    made = data(config, tokenizer)
    parts = None
    try:
        parts = make_parts(config, tokenizer, made, policy_factory)
        return assemble(config, parts)
    except BaseException as error:
        if parts is not None:
            parts.release()
        made.environments.close(GRACE_SECONDS if isinstance(error, (KeyboardInterrupt, SystemExit)) else None)
        raise


def _checked(config: TrainMasterConfig | Mapping[str, object]) -> TrainMasterConfig:
    is_ppo = isinstance(config, PPOMasterConfig) or (isinstance(config, Mapping) and "ppo" in config)
    return checked(config, PPOMasterConfig if is_ppo else GRPOMasterConfig)


def make_parts(
    config: TrainMasterConfig,
    tokenizer: TokenizerType,
    data: RunData,
    policy_factory: Callable[..., PolicyInterface] | None = None,
) -> Parts:
    """The parts of a run, as they are in the newest checkpoint or new; the checkpoint folder is locked from here on."""
    loop = config.loop
    with opened(config, tokenizer, data.train, data.validation) as (checkpoints, resume):
        loader = make_dataloader(config.data, data.train, loop.prompts_per_round, loop.seed, config.algorithm)
        resume.load_data_position(loader, config.data)
        if config.policy.generation.runs_vllm:
            check_vllm(config.policy, config.cluster.device)  # before a model is loaded
        check_trackers(config.logger)
        cluster, engine_cluster = make_cluster(config), make_engine_cluster(config)
        stage("loading the model")
        generation, listener = None, listener_of(config.policy)
        try:
            length = planned_steps(loop, loader)
            policy = make_policy(config, tokenizer, resume, cluster, length, policy_factory)
            generation = make_generation(config, policy, tokenizer, engine_cluster)
            value = (
                make_value(config, tokenizer, resume, cluster, length) if isinstance(config, PPOMasterConfig) else None
            )
            return Parts(
                policy=policy,
                generation=generation,
                value=value,
                tokenizer=tokenizer,
                loader=loader,
                val_loader=make_val_dataloader(data.validation, loop),
                environments=data.environments,
                loss_fn=make_loss(config.loss_fn),
                value_loss_fn=None if value is None else MseValueLossFn(config.value_loss_fn),
                logger=make_logger(config, resume.state),
                checkpoints=checkpoints,
                state=resume.state,
                cluster=cluster,
                engine_cluster=engine_cluster,
                listener=listener,
            )
        except BaseException:
            if listener is not None:
                listener.close()
            shut_down(engine_cluster, cluster)
            end_engine(generation)
            raise


def assemble(config: TrainMasterConfig, parts: Parts) -> TrainingRun:
    """A run of these parts. The state gets the limits of the configuration. ValueError where critic and estimator do not fit."""
    loop, policy, state = config.loop, parts.policy, parts.state
    if config.has_critic != (parts.value is not None):
        name, given = loop.adv_estimator.name, "no value model" if parts.value is None else "a value model"
        raise ValueError(
            f"{config.algorithm}.adv_estimator.name is {name} but there is {given}; gae needs one, raw_reward none"
        )
    if warning := shaping_warning(loop.reward_shaping):
        print(warning, flush=True)
    state.max_num_steps, state.max_num_epochs = loop.max_num_steps, loop.max_num_epochs
    if parts.logger is not None:
        keep_bad_batches(parts)
        if parts.checkpoints is not None:
            parts.checkpoints.facts["run"] = parts.logger.run_id
    generation = parts.generation or policy.create_generation(config.policy.generation, seed=loop.seed)
    if config.policy.generation.expose_http_server:
        generation = serve_policy(policy, generation, config.policy, lambda: state.step, loop.seed, parts.listener)
    try:
        return _assembled(config, parts, generation)
    except BaseException:
        if config.policy.generation.expose_http_server:
            generation.shutdown()
        raise


def _assembled(config: TrainMasterConfig, parts: Parts, generation: GenerationInterface) -> TrainingRun:
    loop, policy, environments, state = config.loop, parts.policy, parts.environments, parts.state
    algorithm = ALGORITHMS[config.algorithm]
    refit = create_weight_synchronizer(
        policy, generation, "native", colocated=engines_of(config) == 0, version=lambda: state.step
    )
    prompts = PromptSource(parts.loader, loop.num_generations_per_prompt, state, config.algorithm)
    rollouts = RolloutRunner(
        generation, parts.tokenizer, environments.train, config.policy.max_total_sequence_length,
        loop.max_rollout_turns, length_penalty_of(config, parts.tokenizer),
    )  # fmt: skip
    sampler = GroupSampler.from_config(loop)
    maker = RolloutMaker(generation, refit, prompts, rollouts, sampler, partial(shape_rewards, loop=loop))
    run = TrainingRun(
        config=config,
        state=state,
        algorithm=algorithm,
        tokenizer=parts.tokenizer,
        environments=environments,
        policy=policy,
        critic=NoCritic() if parts.value is None else Critic(parts.value, parts.value_loss_fn),
        maker=maker,
        collection=make_collection(config, maker, state),
        advantages=algorithm.make_advantages(config),
        loss_fn=parts.loss_fn,
        validator=make_validator(config, generation, parts),
        services=make_services(config, parts.logger, parts.checkpoints, parts.state, parts.tokenizer),
        cluster=parts.cluster,
        engine_cluster=parts.engine_cluster,
    )  # fmt: skip
    resume = resume_of(parts.checkpoints, state)
    resume.load_sampler(run.sampler)
    resume.load_ready_batches(run.collection)
    return run


# ---- the parts


def planned_steps(loop: LoopConfig, loader: StatefulDataLoader | MultipleDataloaderWrapper) -> int:
    """Steps of the whole run, as far as they are known before it: max_num_steps, or the batches of max_num_epochs where these are
    fewer. Dynamic sampling may need several batches a step. Several loaders never end."""
    if isinstance(loader, MultipleDataloaderWrapper):
        return loop.max_num_steps
    return min(loop.max_num_steps, loop.max_num_epochs * len(loader))


def make_cluster(config: TrainMasterConfig) -> Cluster:
    """One device, whatever sizes the configuration was written for (`config/fold.py`), or the workers of `cluster.executor`
    processes and ray. ValueError where `cluster.device` asks for a GPU that cannot be used."""
    say_fold(config)
    use_threads(config.cluster)
    use_gpus = check_device(config.cluster.device) == "cuda"
    return Cluster([trainers_of(config)], use_gpus=use_gpus, name="train_cluster", settings=config.cluster)


def make_engine_cluster(config: TrainMasterConfig) -> Cluster | None:
    """The workers that only generate (`policy.generation.colocated.resources`); None where there are none."""
    count = engines_of(config)
    if count == 0:
        return None
    return Cluster([count], use_gpus=False, name="inference_cluster", settings=config.cluster, role="engine worker")


def make_generation(
    config: TrainMasterConfig, policy: PolicyInterface, tokenizer: TokenizerType, cluster: Cluster | None
) -> GenerationInterface:
    """Engines on the policy's weights, in workers of their own, or vLLM."""
    if config.policy.generation.runs_vllm:
        return vllm_of(policy, config.policy, tokenizer, config.loop.seed)
    if cluster is None:
        return policy.create_generation(config.policy.generation, seed=config.loop.seed)
    return DedicatedGeneration(cluster, config.policy, tokenizer, seed=config.loop.seed)


def make_policy(
    config: TrainMasterConfig,
    tokenizer: TokenizerType,
    resume: Resume,
    cluster: Cluster,
    steps: int,
    factory: Callable[..., PolicyInterface] | None = None,
) -> PolicyInterface:
    """The policy with the weights and optimizer of the checkpoint, or those of policy.model_name, for a run of so many steps.

    The reference model is built only when the KL weight is not 0.
    """
    runs_vllm = config.policy.generation.runs_vllm
    if (config.policy.backend == "hf" or runs_vllm) and (text := exactness_text(config)) is not None:
        print(f"note: {text}", file=sys.stderr, flush=True)
    if factory is None:
        one = _hf_policy if config.policy.backend == "hf" else lambda: Policy
        factory = one() if cluster.in_process else DistributedPolicy
    weights, optimizer = resume.model_paths("policy")
    policy = config.policy
    if engines_of(config):  # whose activations are in other processes
        policy = policy.model_copy(update={"kept_activations_gb": 0.0})
    if runs_vllm:  # whose log-probabilities are not those of training
        policy = policy.model_copy(update={"kept_activations_gb": 0.0, "reuse_generation_logprobs": "never"})
    return factory(
        cluster=cluster,
        config=policy,
        tokenizer=tokenizer,
        weights_path=weights,
        optimizer_path=optimizer,
        init_reference_model=config.loss_fn.reference_policy_kl_penalty != 0,
        total_steps=max(steps - config.loop.first_policy_step, 0) * config.loop.policy_epochs,
        seed=config.loop.seed,
    )


def _hf_policy() -> type[Policy]:
    """Imported where it is asked for: it imports transformers."""
    from nemo_rl_cpp.models.hf.trained import HfPolicy

    return HfPolicy


def make_value(
    config: PPOMasterConfig, tokenizer: TokenizerType, resume: Resume, cluster: Cluster, steps: int
) -> Value | DistributedValue | None:
    """PPO's critic with the weights and optimizer of the checkpoint, the weights of ppo.warm_start_value_checkpoint, or those of
    value.model_name; None for an estimator that needs no values."""
    if not config.has_critic:
        return None
    loop = config.ppo
    weights, optimizer = resume.model_paths("value")
    if weights is None and loop.warm_start_value_checkpoint is not None:
        weights = warm_start_weights(loop.warm_start_value_checkpoint)
        print(f"the critic begins with the weights of {weights}; its optimizer and schedule begin anew", flush=True)
    model = value_class(config.value) if cluster.in_process else DistributedValue
    return model(
        cluster=cluster, config=config.value, tokenizer=tokenizer, weights_path=weights, optimizer_path=optimizer, seed=loop.seed,
        total_steps=steps * loop.critic_epochs,
    )  # fmt: skip


def warm_start_weights(checkpoint: str) -> Path:
    """The folder of the critic's weights in a checkpoint step_N; ValueError where there are none."""
    weights = Path(checkpoint).expanduser() / "value" / "weights"
    if not weights.is_dir():
        raise ValueError(
            f"ppo.warm_start_value_checkpoint is {checkpoint}, but {weights} is not there: name a folder step_N that a PPO run with a "
            "critic has saved, or write null"
        )
    return weights


def resume_of(checkpoints: CheckpointManager | None, state: TrainState) -> Resume:
    """The checkpoint that a state was loaded from."""
    if checkpoints is None or not checkpoints.enabled or not state.step:
        return Resume(None, state)
    return Resume(checkpoints.checkpoint_dir / f"step_{state.step}", state)


def make_logger(config: TrainMasterConfig, state: TrainState) -> Logger:
    """Logs below logger.log_dir: into the folder exp_NNN of this very run, cut back to the checkpoint's step, or into the next
    new one. The folder is this run's until the logger's `finish`."""
    saves = config.checkpointing.enabled
    home = Path(config.checkpointing.checkpoint_dir)
    logger = None
    try:
        make_folder(Path(config.logger.log_dir), "logger.log_dir")
        folder = get_experiment_dir(config.logger.log_dir, {"log_dir": state.log_dir}, home / f"step_{state.step}")
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


def make_validator(config: TrainMasterConfig, generation: GenerationInterface, parts: Parts) -> Validator | None:
    """None without validation data."""
    if parts.val_loader is None:
        return None
    return Validator(
        generation, parts.val_loader, parts.tokenizer, parts.environments.validation or parts.environments.train, config.loop,
        config.policy, parts.logger, config.logger.num_val_samples_to_print,
    )  # fmt: skip


def make_collection(config: TrainMasterConfig, maker: RolloutMaker, state: TrainState) -> RolloutCollector:
    """In the step, or beside training where `async_grpo` or `async_ppo` is enabled."""
    beside = config.loop.beside_training
    if not beside.enabled:
        return SyncCollector(maker, state)
    maker.failures_left = beside.failures_allowed
    groups = config.loop.num_prompts_per_step, config.loop.num_generations_per_prompt
    return AsyncCollector(maker, state, beside.max_trajectory_age_steps, config.checkpointing.enabled, groups)


def length_penalty_of(
    config: TrainMasterConfig, tokenizer: TokenizerType
) -> Callable[[Rollouts], dict[str, float]] | None:
    """What `grpo.length_penalty` does to finished rollouts; None where it is not given."""
    penalty = config.grpo.length_penalty if isinstance(config, GRPOMasterConfig) else None
    return None if penalty is None else lambda rollouts: apply_length_penalty(rollouts, penalty, tokenizer)


def keep_bad_batches(parts: Parts) -> None:
    """A batch with a loss or gradient that is not finite goes to the folder `replay` of the run's logs."""
    for model in (parts.policy, parts.value):
        if model is not None:
            model.keep_bad_batches(Path(parts.logger.log_dir) / "replay")
