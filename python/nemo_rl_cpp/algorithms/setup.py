"""From a configuration to the components of a training loop: one small builder a component.

The order matters in two places: environments start their worker processes before this process computes on several
threads, and the checkpoint to resume from is known before the model is loaded.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl_cpp.algorithms.checkpointing import Resume, find_resume
from nemo_rl_cpp.algorithms.components import RunServices
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.length_penalty import apply_length_penalty
from nemo_rl_cpp.algorithms.reward_functions import shaping_warning
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.utils import set_seed
from nemo_rl_cpp.algorithms.validation import Validator
from nemo_rl_cpp.data.dataloader import MultipleDataloaderWrapper, StatefulDataLoader
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.data.utils import setup_response_data
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster, check_device
from nemo_rl_cpp.experience.prompt_source import PromptSource
from nemo_rl_cpp.experience.rollout_runner import RolloutRunner
from nemo_rl_cpp.models.model_folder import TINY_RANDOM
from nemo_rl_cpp.utils.checkpoint import CheckpointManager
from nemo_rl_cpp.utils.chrome_trace import ChromeTrace
from nemo_rl_cpp.utils.folder_lock import FolderError, make_folder
from nemo_rl_cpp.utils.interrupts import GRACE_SECONDS, GracefulStop
from nemo_rl_cpp.utils.logger import Logger, get_experiment_dir
from nemo_rl_cpp.utils.memory import PhaseMemory
from nemo_rl_cpp.utils.progress import Progress
from nemo_rl_cpp.utils.report import ReportWriter
from nemo_rl_cpp.utils.report.defaults import schema_defaults
from nemo_rl_cpp.utils.timer import TimeoutChecker
from nemo_rl_cpp.weight_sync.factory import create_weight_synchronizer


class RunData(NamedTuple):
    """Data sets and environments by task name, for training and for validation."""

    train: AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]
    validation: AllTaskProcessedDataset | None
    task_to_env: dict[str, Any]
    val_task_to_env: dict[str, Any]


def make_tokenizer(policy: Any) -> Any:
    """The tokenizer of the section `policy.tokenizer`; tiny-random has a character tokenizer of its own."""
    if policy.model_name == TINY_RANDOM and policy.tokenizer.name in (None, TINY_RANDOM):
        from nemo_rl_cpp.data.template_choice import choose_template
        from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = choose_template(
            policy.tokenizer.chat_template, tokenizer.chat_template, "policy.tokenizer.chat_template"
        )
        return tokenizer
    from nemo_rl_cpp.data.tokenizer import get_tokenizer

    return get_tokenizer(policy.tokenizer)


def make_data(config: Any, tokenizer: Any) -> RunData:
    """Data sets and environments of the sections `data` and `env`; starts the environments' processes."""
    limit = config.policy.max_total_sequence_length
    return RunData(*setup_response_data(tokenizer, config.data, config.env, max_total_sequence_length=limit))


@contextmanager
def run_data(config: Any, seed: int) -> Iterator[tuple[Any, RunData]]:
    """Tokenizer and data of a run; its environments end with the block. Where the user has ended the run at once, an
    environment that hangs is waited for no longer than `GRACE_SECONDS`."""
    set_seed(seed)
    data, patience = None, None
    try:
        tokenizer = make_tokenizer(config.policy)
        data = make_data(config, tokenizer)
        yield tokenizer, data
    except (KeyboardInterrupt, SystemExit):
        patience = GRACE_SECONDS
        raise
    finally:
        if data is not None:
            shutdown_environments(data.task_to_env, data.val_task_to_env, patience)


def make_dataloader(data_config: Any, dataset: Any, num_prompts: int, seed: int) -> Any:
    """The training loader, `num_prompts` prompts at a time; with several data sets in a dictionary, one loader each."""

    def one(rows: Any, batch_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            rows,
            batch_size,
            shuffle=data_config.shuffle,
            drop_last=True,
            seed=seed,
            num_workers=data_config.num_workers,
        )

    if not isinstance(dataset, dict):
        return one(dataset, num_prompts)
    each = data_config.num_prompts_per_dataloader or num_prompts
    return MultipleDataloaderWrapper(
        num_prompts, data_config, {name: one(rows, each) for name, rows in dataset.items()}
    )


def make_val_dataloader(dataset: Any, loop: Any) -> StatefulDataLoader | None:
    """The validation loader in the data's own order; None without data. `loop`: the section `grpo` or `ppo`."""
    if dataset is None:
        return None
    sizes = [size for size in (loop.val_batch_size, loop.max_val_samples, len(dataset)) if size is not None]
    return StatefulDataLoader(dataset, min(sizes))


def prompts_per_round(loop: Any) -> int:
    """Prompts drawn at a time: num_prompts_per_step, times batch_multiplier with dynamic sampling."""
    return (
        int(loop.num_prompts_per_step * loop.batch_multiplier)
        if loop.use_dynamic_sampling
        else loop.num_prompts_per_step
    )


def make_cluster(config: Any) -> RayVirtualCluster:
    """One device, whatever sizes the configuration was written for (`config/fold.py`). ValueError where `cluster.device` asks for a GPU that cannot be used."""
    use_gpus = check_device(config.cluster.device) == "cuda"
    return RayVirtualCluster([1], use_gpus=use_gpus, name="train_cluster")


def make_policy(
    config: Any, tokenizer: Any, resume: Resume, cluster: Any, loop: Any, policy_factory: Any = None
) -> Any:
    """The policy with the weights and optimizer of the checkpoint, or those of policy.model_name.

    The reference model is built only when the KL weight is not 0.
    """
    if policy_factory is None:
        from nemo_rl_cpp.models.policy.lm_policy import Policy as policy_factory
    weights, optimizer = resume.model_paths("policy")
    return policy_factory(
        cluster=cluster,
        config=config.policy,
        tokenizer=tokenizer,
        weights_path=weights,
        optimizer_path=optimizer,
        init_optimizer=True,
        init_reference_model=config.loss_fn.reference_policy_kl_penalty != 0,
        total_steps=train_calls(loop),
        seed=loop.seed,
    )


def make_value(config: Any, tokenizer: Any, resume: Resume, cluster: Any, loop: Any) -> Any:
    """PPO's critic with the weights and optimizer of the checkpoint, the weights of ppo.warm_start_value_checkpoint, or those of
    value.model_name."""
    from nemo_rl_cpp.models.value.lm_value import Value

    weights, optimizer = resume.model_paths("value")
    if weights is None and loop.warm_start_value_checkpoint is not None:
        weights = warm_start_weights(loop.warm_start_value_checkpoint)
        print(f"the critic begins with the weights of {weights}; its optimizer and schedule begin anew", flush=True)
    return Value(
        cluster,
        config.value,
        tokenizer,
        weights_path=weights,
        optimizer_path=optimizer,
        seed=loop.seed,
        total_steps=loop.max_num_steps * (loop.critic_ppo_epochs or loop.ppo_epochs),
    )


def warm_start_weights(checkpoint: str) -> Path:
    """The folder of the critic's weights in a checkpoint step_N; ValueError where there are none."""
    weights = Path(checkpoint).expanduser() / "value" / "weights"
    if not weights.is_dir():
        raise ValueError(
            f"ppo.warm_start_value_checkpoint is {checkpoint}, but {weights} is not there: name a folder step_N that a PPO run with a "
            "critic has saved, or write null"
        )
    return weights


def train_calls(loop: Any) -> int:
    """`train` calls of the policy in a whole run, of which each is one step of the learning-rate schedule."""
    return loop.max_num_steps * getattr(loop, "ppo_epochs", 1)


def make_checkpoints(config: Any) -> CheckpointManager:
    """Saves nothing and finds nothing when checkpointing.enabled is false."""
    return CheckpointManager(config.checkpointing)


def resume_of(checkpoints: CheckpointManager | None, state: TrainState) -> Resume:
    """The checkpoint that a state was loaded from."""
    if checkpoints is None or not checkpoints.enabled or not state.step:
        return Resume(None, state)
    return Resume(checkpoints.checkpoint_dir / f"step_{state.step}", state)


def make_logger(config: Any, state: TrainState) -> Logger:
    """Logs below logger.log_dir: into the folder exp_NNN of this very run, cut back to the checkpoint's step, or into the next
    new one. The folder is this run's until the logger's `finish`."""
    saves = config.checkpointing.enabled
    home = Path(config.checkpointing.checkpoint_dir)
    try:
        make_folder(Path(config.logger.log_dir), "logger.log_dir")
        folder = get_experiment_dir(config.logger.log_dir, {"log_dir": state.log_dir}, home / f"step_{state.step}")
        logger = Logger({**config.logger.model_dump(), "log_dir": folder})
        logger.claim(home if saves else None)
        if state.log_dir is not None:
            logger.truncate_after(state.step)
    except OSError as error:
        raise FolderError(
            f"logger.log_dir={config.logger.log_dir}: the logs cannot be written there ({error.strerror or error})"
        ) from error
    state.log_dir = folder
    logger.log_hyperparams(config)
    return logger


def make_services(
    config: Any, loop: Any, state: TrainState, logger: Logger | None, checkpoints: CheckpointManager | None, title: str,
    progress_mode: str | None = None,
) -> RunServices:  # fmt: skip
    """What watches and keeps the run."""
    report = trace = None
    if logger is not None and config.logger.chrome_trace:
        trace = ChromeTrace(Path(logger.log_dir) / f"trace_from_step_{state.step + 1}.json", title)
    if logger is not None and config.logger.report:
        report = ReportWriter(
            logger.log_dir, config, schema_defaults(config), total_steps=loop.max_num_steps, title=title
        )
    return RunServices(
        logger=logger,
        checkpoints=checkpoints,
        progress=Progress(loop.max_num_steps, state.step, progress_mode),
        report=report,
        memory=PhaseMemory(),
        trace=trace,
        stop=GracefulStop(),
        timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by, fit_last_save_time=True),
    )


def make_validator(
    config: Any, loop: Any, generation: Any, loader: Any, tokenizer: Any, task_to_env: Any, logger: Any
) -> Validator | None:
    """None without validation data."""
    if loader is None:
        return None
    return Validator(
        generation,
        loader,
        tokenizer,
        task_to_env or {},
        loop,
        config.policy,
        logger,
        config.logger.num_val_samples_to_print,
    )


def shared_components(
    config: Any, loop: Any, policy: Any, generation: Any, loader: Any, val_loader: Any, tokenizer: Any, task_to_env: dict[str, Any],
    val_task_to_env: dict[str, Any] | None, logger: Any, checkpoints: Any, state: TrainState, title: str,
) -> dict[str, Any]:  # fmt: skip
    """The fields of `TrainingComponents` that every algorithm makes in the same way; the state gets the limits of the
    configuration. `loop`: the section `grpo` or `ppo`. `generation` None: an engine on the policy's own weights."""
    limited(state, loop)
    if warning := shaping_warning(loop.reward_shaping):
        print(warning, flush=True)
    keep_bad_batches(policy, logger)
    if logger is not None and checkpoints is not None:
        checkpoints.facts["run"] = logger.run_id
    engine = config.policy.generation
    generation = generation or policy.create_generation(engine, seed=loop.seed)
    return {
        "policy": policy,
        "generation": generation,
        "tokenizer": tokenizer,
        "refit": create_weight_synchronizer(policy, generation, "native", colocated=True),
        "prompts": PromptSource(loader, loop.num_generations_per_prompt, state),
        "rollouts": RolloutRunner(
            generation,
            tokenizer,
            task_to_env,
            config.policy.max_total_sequence_length,
            loop.max_rollout_turns,
            length_penalty_of(loop, tokenizer),
        ),
        "sampler": GroupSampler.from_config(loop),
        "validator": make_validator(
            config, loop, generation, val_loader, tokenizer, val_task_to_env or task_to_env, logger
        ),
        "run": make_services(config, loop, state, logger, checkpoints, title),
    }


def length_penalty_of(loop: Any, tokenizer: Any) -> Callable[[Any], dict[str, float]] | None:
    """What `grpo.length_penalty` does to finished rollouts; None where it is not given."""
    penalty = getattr(loop, "length_penalty", None)
    return None if penalty is None else lambda rollouts: apply_length_penalty(rollouts, penalty, tokenizer)


def keep_bad_batches(model: Any, logger: Any) -> None:
    """A batch with a loss or gradient that is not finite goes to the folder `replay` of the run's logs."""
    if model is not None and logger is not None:
        model.replay_dir = Path(logger.log_dir) / "replay"


def limited(state: TrainState, loop: Any) -> TrainState:
    """The state with the limits of the configuration."""
    state.max_num_steps, state.max_num_epochs = loop.max_num_steps, loop.max_num_epochs
    return state


def shutdown_environments(
    task_to_env: dict[str, Any] | None, val_task_to_env: dict[str, Any] | None, patience: float | None = None
) -> None:
    """Ends the processes of all environments, each once; one that does not answer for `patience` seconds is left behind."""
    from nemo_rl_cpp.distributed.futures import get
    from nemo_rl_cpp.environments.remote import call_remote

    environments = {id(env): env for group in (task_to_env, val_task_to_env) for env in (group or {}).values()}
    for environment in environments.values():
        if hasattr(environment, "shutdown"):
            try:
                get(call_remote(environment, "shutdown"), patience)
            except TimeoutError:
                print("an environment hangs and is left behind", file=sys.stderr)


__all__ = [
    "RunData", "find_resume", "keep_bad_batches", "limited", "make_checkpoints", "make_cluster", "make_data", "make_dataloader", "make_logger",
    "make_policy", "make_services", "make_tokenizer", "make_val_dataloader", "make_validator", "make_value", "prompts_per_round",
    "resume_of", "run_data", "shared_components", "shutdown_environments", "train_calls", "warm_start_weights",
]  # fmt: skip
