"""What a training loop is made of. A mode is another component here, never another loop."""

from dataclasses import dataclass, field
from typing import Any

from nemo_rl_cpp.algorithms.validation import Validator
from nemo_rl_cpp.experience.prompt_source import PromptSource
from nemo_rl_cpp.experience.rollout_runner import RolloutRunner
from nemo_rl_cpp.utils.checkpoint import CheckpointManager
from nemo_rl_cpp.utils.chrome_trace import ChromeTrace
from nemo_rl_cpp.utils.interrupts import GracefulStop
from nemo_rl_cpp.utils.logger import Logger
from nemo_rl_cpp.utils.memory import PhaseMemory
from nemo_rl_cpp.utils.progress import Progress
from nemo_rl_cpp.utils.report import ReportWriter
from nemo_rl_cpp.utils.report.alerts import Alerts
from nemo_rl_cpp.utils.timer import TimeoutChecker, Timer


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
    history: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    alerts: Alerts = field(default_factory=Alerts)

    def __post_init__(self) -> None:
        for observer in (self.progress, self.memory, self.trace):
            if observer is not None:
                self.timer.subscribe(observer)


@dataclass
class TrainingComponents:
    """What GRPO and PPO share.

    Attributes:
        refit: brings the policy's weights to the engine (`WeightSynchronizer`).
        prompts: the next prompts, each G times.
        rollouts: lets the engine answer them and the environments score the answers.
        sampler: collects rollouts until there are enough to train on (`GroupSampler`).
        advantage_estimator: rewards to advantages.
        validator: None when there is nothing to validate on.
    """

    policy: Any
    generation: Any
    tokenizer: Any
    refit: Any
    prompts: PromptSource
    rollouts: RolloutRunner
    sampler: Any
    advantage_estimator: Any
    loss_fn: Any
    validator: Validator | None
    run: RunServices

    @property
    def models(self) -> dict[str, Any]:
        """What a checkpoint saves, by the name of its folder."""
        return {"policy": self.policy}


@dataclass
class GRPOComponents(TrainingComponents):
    """The components of `grpo_loop`."""


@dataclass
class PPOComponents(TrainingComponents):
    """The components of `ppo_loop`.

    Attributes:
        critic: values for the advantages and their training (`Critic`, or `NoCritic`).
    """

    critic: Any

    @property
    def models(self) -> dict[str, Any]:
        return {"policy": self.policy} | self.critic.models
