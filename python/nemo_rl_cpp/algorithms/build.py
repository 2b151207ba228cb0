"""The components of a training run (`TrainingRun`), and their construction from a configuration (`build_run`).

The order of construction matters in two places. Environments start their worker processes before this process computes
on several threads. The checkpoint to resume from is chosen before the model is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nemo_rl_cpp.algorithms import parts
from nemo_rl_cpp.algorithms.algorithm import ALGORITHMS, Advantages, Algorithm
from nemo_rl_cpp.algorithms.callbacks import Callbacks
from nemo_rl_cpp.algorithms.checkpointing import Saver, open_checkpoints, publish
from nemo_rl_cpp.algorithms.collector import RolloutCollector
from nemo_rl_cpp.algorithms.custom_components import make_loss
from nemo_rl_cpp.algorithms.hooks import OUT_OF_TIME, Ending, Hook, StepLog, Terminal, Validation, summary
from nemo_rl_cpp.algorithms.loop import train_loop
from nemo_rl_cpp.algorithms.loss import LossFunction
from nemo_rl_cpp.algorithms.step import Critic, NoCritic
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.step_time import LONG_RUN, time_text
from nemo_rl_cpp.algorithms.teachers import NoTeacher, Teachers
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import ValidationResult
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.checks import has_time_forecast
from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.config.master import EvalMasterConfig, TrainMasterConfig, checked, master_of
from nemo_rl_cpp.data.dataloader import load_dataloader_state
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster, shut_down
from nemo_rl_cpp.environments.loading import Environments
from nemo_rl_cpp.errors import in_user_code, one_sentence, tracebacks_go_to
from nemo_rl_cpp.evals.eval import evaluate_policy
from nemo_rl_cpp.evals.results import EvalResult
from nemo_rl_cpp.interrupts import GRACE_SECONDS, GracefulStop
from nemo_rl_cpp.loggers.backends import check_trackers
from nemo_rl_cpp.metrics.memory import startup_objects_frozen
from nemo_rl_cpp.metrics.timer import TimeoutChecker, Timer
from nemo_rl_cpp.models.budget import within_budget
from nemo_rl_cpp.models.generation.interfaces import end_engine
from nemo_rl_cpp.models.generation.vllm.vllm_generation import check_vllm
from nemo_rl_cpp.models.interfaces import PolicyInterface, TrainedModelInterface
from nemo_rl_cpp.report import ReportWriter
from nemo_rl_cpp.report.findings import Alerts
from nemo_rl_cpp.report.progress import Progress
from nemo_rl_cpp.serving.generation import listener_of, serve_policy
from nemo_rl_cpp.stages import are_shown, stage
from nemo_rl_cpp.user_code import serve


@dataclass
class TrainingRun(AbstractContextManager["TrainingRun"]):
    """The components of a training run, such as policy, rollout collector and loggers. A feature that the configuration
    enables is a different component; the training loop stays the same."""

    config: TrainMasterConfig  # validated; `config.loop` is the section of its algorithm, such as `grpo` or `ppo`
    state: TrainState  # the counters from which a resumed run continues
    algorithm: Algorithm
    tokenizer: TokenizerType
    environments: Environments  # score the responses, in training and in validation
    policy: PolicyInterface
    critic: Critic | NoCritic  # computes values for the advantages and is trained, or does nothing
    teachers: Teachers | NoTeacher  # compute log-probabilities of the sampled tokens, or do nothing
    collector: RolloutCollector  # generates and scores a step's rollouts, during the step or while earlier steps train
    advantages: Advantages
    loss_fn: LossFunction
    cluster: Cluster  # the workers of policy, critic and engine
    engine_cluster: Cluster | None  # the workers of engines with a separate copy of the weights; None without such
    timer: Timer
    log: StepLog  # writes the metrics of steps to the loggers, and keeps them for `history`
    terminal: Terminal
    report: ReportWriter | None  # writes report.html
    checkpoints: CheckpointManager
    validation: Validation | None  # None without validation data
    callbacks: Callbacks
    resources: ExitStack = field(default_factory=ExitStack)  # processes, folder locks and the engine, for `close`
    stop: GracefulStop = field(
        default_factory=GracefulStop
    )  # reports whether the user has requested the end of the run
    before_training: list[Hook] = field(default_factory=list)  # called before the first step
    after_step: list[Hook] = field(
        default_factory=list
    )  # called after each step, in this order (`algorithms/hooks.py`)

    @property
    def models(self) -> dict[str, TrainedModelInterface]:
        """The trained models, keyed by the name of their checkpoint folder."""
        return {"policy": self.policy} | ({"value": self.critic.model} if isinstance(self.critic, Critic) else {})

    @property
    def history(self) -> list[Metrics]:
        """One dictionary per step that this process ran: `step`, its metrics, `seconds` and rates."""
        return self.log.history

    @property
    def validations(self) -> list[Metrics]:
        """One dictionary per validation that this process ran: `step` and its metrics."""
        return self.log.validations

    @property
    def log_dir(self) -> Path:
        return Path(self.log.logger.log_dir)

    def train(self) -> None:
        """Train until the configuration or the user ends the run; then finish the report and the logs, and print a
        summary.

        An exception is recorded in the report and raised again; one of user code names function, file and line
        (`errors.in_user_code`). A run that did not fail is "interrupted", "stopped in time" (by
        `checkpoint_must_save_by`) or "finished"."""
        began, first = time.monotonic(), self.state.step
        status, message, published = "failed", "", {}
        tracebacks_go_to(self.log_dir)
        if self.report is not None:
            self.report.update("running", force=True)
        try:
            with self.stop, startup_objects_frozen():
                serve(partial(train_loop, self))
            status = "stopped in time" if self.state.stop_reason == OUT_OF_TIME else "finished"
            status = "interrupted" if self.stop.requested else status
            if status == "finished":  # other runs are expected to be resumed, so their models are not uploaded
                saved = self.checkpoints.enabled and self.state.step
                folder = self.checkpoints.checkpoint_dir / f"step_{self.state.step}"
                published = publish(self.config.checkpointing, folder if saved else None)
            self.callbacks.end(status)
        except KeyboardInterrupt:
            status, message = "interrupted", "stopped at once, in the middle of a step"
            raise
        except BaseException as error:
            told = in_user_code(error)
            message = one_sentence(told or error)
            if status == "failed":  # otherwise the callbacks' on_end raised the error
                self.callbacks.end(status)
            status = "failed"
            if told is None:
                raise
            raise told from error
        finally:
            if self.report is not None:
                self.report.update(status, message, force=True)
            self.log.logger.finish()
            self.checkpoints.shutdown()
            ended = status + (", but nothing was learned" if self.terminal.alerts.learned_nothing else "")
            rows = summary(self, first, time.monotonic() - began) | published
            self.terminal.progress.finish(rows, title=f"{self.config.title}: {ended}")

    def validate(self) -> ValidationResult:
        """Validate the current weights and return the result. Raise ValueError if there is no validation data."""
        if self.validation is None:
            raise ValueError("there is no validation data: set data.validation")
        return serve(partial(self.validation.run, self.state))

    def evaluate(self, config: EvalMasterConfig) -> EvalResult:
        """Evaluate the current weights by `config` (see `load_eval_config`), with this run's model, tokenizer and
        maximum length, and return the result. Raise ConfigError if the configuration has mistakes."""
        longest = self.config.policy.generation.effective_max_model_len(self.config.policy.max_total_sequence_length)
        return evaluate_policy(self.policy, self.tokenizer, config, longest)

    def close(self) -> None:
        """End the processes of environments, workers and engine, and unlock the log and checkpoint folders."""
        self.resources.close()

    def __exit__(self, *raised: object) -> None:
        self.resources.__exit__(*raised)


def build_run(
    config: TrainMasterConfig | Mapping[str, object],
    *,
    data: Callable[[TrainMasterConfig, TokenizerType], parts.RunData] = parts.make_data,
    policy_factory: Callable[..., PolicyInterface] | None = None,
    callbacks: Callbacks | None = None,
) -> TrainingRun:
    """Build all components of a run from a configuration: data, environments, policy, critic, engine and logs.

    The configuration is validated like a file's, checkpointing.checkpoint_dir is locked until the run is closed, and
    the run resumes from its newest complete checkpoint, if checkpointing.resume allows it. `data` (configuration,
    tokenizer) -> `RunData` replaces the configured data sets and environments, `policy_factory` the class `Policy` or
    `DistributedPolicy`; `callbacks` are called after steps, validations and checkpoints and at the end. Raise
    ConfigError, ResumeError (another run's checkpoint) or FolderError (another run's lock), all ValueErrors, before a
    model is loaded."""
    config = within_budget(checked(config, master_of(config)))
    loop, algorithm = config.loop, ALGORITHMS[config.algorithm]
    parts.set_seed(loop.seed)
    stage("preparing tokenizer, data and environments")
    tokenizer = parts.make_tokenizer(config.policy)
    with ExitStack() as resources:  # released in reverse order: if a later part fails, or by `TrainingRun.close`
        made = data(config, tokenizer)
        # wait without limit for environments to end, but not if the user ended the run
        resources.push(lambda kind, error, trace: made.environments.close(
            GRACE_SECONDS if isinstance(error, (KeyboardInterrupt, SystemExit)) else None
        ))  # fmt: skip
        checkpoints = CheckpointManager(config.checkpointing)
        resources.callback(checkpoints.shutdown)
        resume = open_checkpoints(checkpoints, config)
        state = resume.state
        state.max_num_steps, state.max_num_epochs = loop.max_num_steps, loop.max_num_epochs
        loader = parts.make_dataloader(config.data, made.train, loop.prompts_per_round, loop.seed, config.algorithm)
        if resume.path is not None:
            load_dataloader_state(loader, resume.path)
        if config.policy.generation.runs_vllm:
            check_vllm(config.policy, config.cluster.device)  # before a model is loaded
        check_trackers(config.logger)
        cluster, engine_cluster = parts.make_cluster(config), parts.make_engine_cluster(config)
        resources.callback(shut_down, engine_cluster, cluster)
        listener = listener_of(config.policy)
        if listener is not None:
            resources.callback(listener.close)
            if engine_cluster is not None:  # the engine's worker will listen there
                listener.close()
        steps = parts.planned_steps(loop, loader)
        if are_shown() and has_time_forecast(config):  # measured before the model takes memory
            stage(time_text(config, steps - state.step, least=LONG_RUN))
        stage("loading the model")
        policy = parts.make_policy(config, tokenizer, resume, cluster, steps, policy_factory)
        generation = parts.make_generation(config, policy, tokenizer, engine_cluster)
        resources.callback(end_engine, generation)
        teachers = parts.make_teachers(config, policy, tokenizer)
        critic = parts.make_critic(config, tokenizer, resume, cluster, steps)
        loss_fn, advantages = make_loss(config.loss_fn, config.candidates), algorithm.make_advantages(config)
        logger = parts.make_logger(config, state)
        resources.callback(logger.finish)
        if config.policy.generation.expose_http_server and engine_cluster is None:
            generation = serve_policy(policy, generation, config.policy, lambda: state.step, loop.seed, listener)
            resources.callback(end_engine, generation)
        collector = parts.make_collector(config, policy, generation, tokenizer, loader, made.environments, state)
        resources.callback(collector.close)
        resume.load_rollouts(collector)
        timer = Timer()
        run = TrainingRun(
            config=config, state=state, algorithm=algorithm, tokenizer=tokenizer, environments=made.environments,
            policy=policy, critic=critic, teachers=teachers, collector=collector, advantages=advantages, loss_fn=loss_fn, cluster=cluster,
            engine_cluster=engine_cluster, timer=timer, log=parts.make_log(config, logger, timer, policy),
            terminal=Terminal(Progress(steps, state.step, has_rollouts=algorithm.has_rollouts), Alerts(to_plain(config))),
            report=parts.make_report(config, logger, tokenizer), checkpoints=checkpoints,
            validation=parts.make_validation(config, policy, loss_fn, tokenizer, made, collector, logger, timer),
            callbacks=callbacks or Callbacks(),
        )  # fmt: skip
        connect_hooks(run)
        run.resources = resources.pop_all()
    return run


def connect_hooks(run: TrainingRun) -> None:
    """Set the hooks that the run calls before training and after each step.

    The order of the hooks keeps a killed run consistent: metrics are on disk before their checkpoint appears, and a
    resumed run removes what was logged after its checkpoint. Times are logged last, because saving takes time."""
    config, log, terminal, validation = run.config, run.log, run.terminal, run.validation
    ending = Ending(run.stop, TimeoutChecker(config.checkpointing.checkpoint_must_save_by), config.loop)
    saver = Saver(
        run.checkpoints, config, run.models, run.collector, validation and validation.validator, run.environments.train,
        log.logger, run.timer, terminal,
    )  # fmt: skip
    for model in run.models.values():
        model.keep_bad_batches(run.log_dir / "replay")
    run.checkpoints.facts["run"] = log.logger.ledger.run
    run.stop.saves = run.checkpoints.enabled
    run.callbacks.run = run
    run.timer.subscribe(terminal.progress)
    run.timer.subscribe(log.memory)
    run.before_training = [
        lambda result: ending.timeout.mark_iteration(),
        *([validation.at_start] if validation else []),
        lambda result: ending.decide(result) if result.step else None,  # a resumed run may begin with a validation
        log.validation,
        terminal.validation,
        saver.check_metric_names,
        run.callbacks.after_validation,
    ]
    run.after_step = [
        ending.look,
        log.metrics,  # before hooks that wait for rollouts of later steps, which may raise an error
        run.callbacks.after_step,
        *([validation.after_step] if validation else []),
        ending.decide,
        log.validation,
        terminal.validation,
        run.callbacks.after_validation,
        saver.after_step,
        run.callbacks.after_checkpoint,
        log.times,
        terminal.step,
        *([lambda result: run.report.update()] if run.report else []),
    ]
