"""A run: what it is made of, what watches and keeps it, and what may be asked of it. `algorithms/build.py` makes one of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from nemo_rl_cpp.algorithms.advantages import AdvantageEstimator
from nemo_rl_cpp.algorithms.callbacks import Callbacks
from nemo_rl_cpp.algorithms.collector import RolloutCollector, RolloutMaker
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.loop import train_loop
from nemo_rl_cpp.algorithms.loss import LossFunction
from nemo_rl_cpp.algorithms.observe import run_to_end, validate_now
from nemo_rl_cpp.algorithms.step import Critic, NoCritic
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import ValidationResult, Validator
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.config.master import EvalMasterConfig, TrainMasterConfig
from nemo_rl_cpp.data.interfaces import Message, TokenizerType
from nemo_rl_cpp.data.token_bytes import bytes_of_token
from nemo_rl_cpp.distributed.cluster import Cluster, shut_down
from nemo_rl_cpp.environments.group import Environments
from nemo_rl_cpp.evals.report import EvalResult
from nemo_rl_cpp.interrupts import GRACE_SECONDS, GracefulStop
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.metrics.chrome_trace import ChromeTrace
from nemo_rl_cpp.metrics.memory import PhaseMemory
from nemo_rl_cpp.metrics.timer import TimeoutChecker, Timer
from nemo_rl_cpp.models.generation.interfaces import end_engine
from nemo_rl_cpp.models.interfaces import GenerationInterface, PolicyInterface, TrainedModelInterface
from nemo_rl_cpp.report import ReportWriter
from nemo_rl_cpp.report.alerts import Alerts
from nemo_rl_cpp.report.defaults import schema_defaults
from nemo_rl_cpp.report.progress import Progress
from nemo_rl_cpp.rollouts.batches import TrainBatch
from nemo_rl_cpp.rollouts.rollouts import PromptSource, RolloutRunner
from nemo_rl_cpp.user_code import serve
from nemo_rl_cpp.weight_sync import WeightSynchronizer


@dataclass
class RunServices:
    """What watches and keeps a run: shared by every algorithm, and each part may be left out.

    Attributes:
        stop: asked between steps whether the user wants the run to end.
        timeout: says once when the run must save and end.
        report: writes report.html; None: no page.
        history: one dictionary a step of this process: `step`, the metrics, `seconds` and rates.
        validations: one dictionary a validation of this process: `step` and its metrics.
        alerts: what is serious about the run so far, for the terminal.
        callbacks: the user's code that hears of steps, validations, checkpoints and the end.
    """

    logger: Logger | None
    checkpoints: CheckpointManager | None
    timer: Timer = field(default_factory=Timer)
    progress: Progress | None = None
    report: ReportWriter | None = None
    memory: PhaseMemory | None = None
    trace: ChromeTrace | None = None
    stop: GracefulStop = field(default_factory=GracefulStop)
    timeout: TimeoutChecker = field(default_factory=lambda: TimeoutChecker(None))
    history: list[Metrics] = field(default_factory=list)
    validations: list[Metrics] = field(default_factory=list)
    alerts: Alerts = field(default_factory=Alerts)
    callbacks: Callbacks = field(default_factory=Callbacks)

    def __post_init__(self) -> None:
        for observer in (self.progress, self.memory, self.trace):
            if observer is not None:
                self.timer.subscribe(observer)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written."""
        return self.checkpoints is not None and self.checkpoints.enabled


def make_services(
    config: TrainMasterConfig, logger: Logger | None, checkpoints: CheckpointManager | None, state: TrainState, tokenizer: TokenizerType
) -> RunServices:  # fmt: skip
    """What watches and keeps the run that the configuration describes."""
    report = trace = None
    steps = config.loop.max_num_steps
    if logger is not None and config.logger.chrome_trace:
        trace = ChromeTrace(Path(logger.log_dir) / f"trace_from_step_{state.step + 1}.json", config.title)
    if logger is not None and config.logger.report:
        report = ReportWriter(
            logger.log_dir, config, schema_defaults(config), total_steps=steps, title=config.title,
            token_bytes=bytes_of_token(tokenizer),
        )  # fmt: skip
    return RunServices(
        logger=logger,
        checkpoints=checkpoints,
        progress=Progress(steps, state.step),
        report=report,
        memory=PhaseMemory(),
        trace=trace,
        timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by, fit_last_save_time=True),
    )


class Advantages(Protocol):
    """The stage of a step that turns rewards into advantages."""

    metrics: dict[str, float]
    estimator: AdvantageEstimator

    def add(self, batch: TrainBatch) -> None:
        """`advantages` of the batch, and `returns` where a critic learns from them."""


@dataclass(frozen=True)
class Algorithm:
    """What is an algorithm's own, beside the sections of its configuration.

    Attributes:
        make_advantages: the stage `Advantages` of a configuration.
        is_trained: which messages of a conversation the policy is trained on.
        needs_tokens: whether a step without a single token to train on ends the run. PPO would go on to shrink both models
            by weight decay, epoch after epoch; a step of GRPO has one update, and the report says that it taught nothing.
    """

    make_advantages: Callable[[TrainMasterConfig], Advantages]
    is_trained: Callable[[Message], bool]
    needs_tokens: bool


@dataclass
class TrainingRun:
    """The components of a training run. A mode is another component here, never another loop.

    Attributes:
        config: checked; `config.loop` is its section `grpo` or `ppo`.
        state: the counters that a resumed run goes on from.
        environments: what scores the answers, for training and for validation.
        critic: values for the advantages and their training (`Critic`, or `NoCritic`).
        maker: what makes the rollouts of a step; its components are the run's `generation`, `refit`, `prompts`, `rollouts` and `sampler`.
        collection: lets it make them, in the step or beside the training of earlier ones.
        validator: None when there is nothing to validate on.
        cluster: the workers of policy, critic and engine, which `close` ends.
        engine_cluster: the workers of engines with weights of their own, likewise; None where there are none.
    """

    config: TrainMasterConfig
    state: TrainState
    algorithm: Algorithm
    tokenizer: TokenizerType
    environments: Environments
    policy: PolicyInterface
    critic: Critic | NoCritic
    maker: RolloutMaker
    collection: RolloutCollector
    advantages: Advantages
    loss_fn: LossFunction
    validator: Validator | None
    services: RunServices
    cluster: Cluster | None = None
    engine_cluster: Cluster | None = None

    @property
    def generation(self) -> GenerationInterface:
        """The engine."""
        return self.maker.generation

    @property
    def refit(self) -> WeightSynchronizer:
        """Brings the policy's weights to the engine."""
        return self.maker.refit

    @property
    def prompts(self) -> PromptSource:
        """The next prompts, each G times."""
        return self.maker.prompts

    @property
    def rollouts(self) -> RolloutRunner:
        """Lets the engine answer them and the environments score the answers."""
        return self.maker.rollouts

    @property
    def sampler(self) -> GroupSampler:
        """Collects rollouts until there are enough to train on."""
        return self.maker.sampler

    @property
    def models(self) -> dict[str, TrainedModelInterface]:
        """What a checkpoint saves, by the name of its folder."""
        return {"policy": self.policy} | self.critic.models

    @property
    def history(self) -> list[Metrics]:
        """One dictionary a step of this process: `step`, its metrics, `seconds` and rates."""
        return self.services.history

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run's logs; None where nothing is logged."""
        return None if self.services.logger is None else Path(self.services.logger.log_dir)

    def train(self) -> None:
        """Trains to the end that the configuration or the user sets; then the report, the logs and a summary are complete."""
        run_to_end(self, train_loop)

    def validate(self) -> ValidationResult:
        """Validates the present weights. ValueError without validation data."""
        if self.validator is None:
            raise ValueError("there is no validation data: set data.validation")
        return serve(partial(validate_now, self))

    def evaluate(self, config: EvalMasterConfig) -> EvalResult:
        """Evaluates the present weights as the configuration of an evaluation says (`load_eval_config`): its data, environment,
        sampling and metric. Model, tokenizer and the longest sequence are this run's. Raises ConfigError."""
        from nemo_rl_cpp.evals.eval import evaluate_policy

        longest = self.config.policy.generation.effective_max_model_len(self.config.policy.max_total_sequence_length)
        return evaluate_policy(self.policy, self.tokenizer, config, longest)

    def close(self, patience: float | None = None) -> None:
        """End the processes of environments, workers and engine, and unlock the log and checkpoint folders. May be called again.

        An environment that does not answer within `patience` seconds is abandoned; None waits for it.
        """
        self.collection.close()
        self.environments.close(patience)
        shut_down(self.engine_cluster, self.cluster)
        end_engine(self.generation)
        if self.services.logger is not None:
            self.services.logger.finish()
        if self.services.checkpoints is not None:
            self.services.checkpoints.shutdown()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended_by_user = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
        self.close(GRACE_SECONDS if ended_by_user else None)
