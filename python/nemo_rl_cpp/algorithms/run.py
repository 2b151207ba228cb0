"""A run: what it is made of, and what may be asked of it. `algorithms/build.py` makes one of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_rl_cpp.algorithms.collection import Collection, RolloutMaker
from nemo_rl_cpp.algorithms.critic import Critic, NoCritic
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.ending import run_to_end
from nemo_rl_cpp.algorithms.loop import train_loop
from nemo_rl_cpp.algorithms.observe import validate_now
from nemo_rl_cpp.algorithms.services import RunServices
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import ValidationResult, Validator
from nemo_rl_cpp.config.master import EvalMasterConfig, TrainMasterConfig
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster, shut_down
from nemo_rl_cpp.environments.group import Environments
from nemo_rl_cpp.experience.batches import TrainBatch
from nemo_rl_cpp.experience.prompt_source import PromptSource
from nemo_rl_cpp.experience.rollout_runner import RolloutRunner
from nemo_rl_cpp.interrupts import GRACE_SECONDS
from nemo_rl_cpp.models.generation.interfaces import end_engine
from nemo_rl_cpp.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_cpp.models.policy.interfaces import TrainedModelInterface
from nemo_rl_cpp.weight_sync.interfaces import WeightSynchronizer

if TYPE_CHECKING:
    from types import TracebackType

    from nemo_rl_cpp.algorithms.advantages import AdvantageEstimator
    from nemo_rl_cpp.algorithms.loss.interfaces import LossFunction
    from nemo_rl_cpp.algorithms.step_metrics import Metrics
    from nemo_rl_cpp.data.interfaces import Message, TokenizerType
    from nemo_rl_cpp.evals.report import EvalResult


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
    collection: Collection
    advantages: Advantages
    loss_fn: LossFunction
    validator: Validator | None
    services: RunServices
    cluster: RayVirtualCluster | None = None
    engine_cluster: RayVirtualCluster | None = None

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
        return validate_now(self)

    def evaluate(self, config: EvalMasterConfig) -> EvalResult:
        """Evaluates the present weights as the configuration of an evaluation says (`load_eval_config`): its data, environment,
        sampling and metric. Model, tokenizer and the longest sequence are this run's. Raises ConfigError."""
        from nemo_rl_cpp.evals.eval import evaluate_policy

        longest = self.config.policy.generation.effective_max_model_len(self.config.policy.max_total_sequence_length)
        return evaluate_policy(self.policy, self.tokenizer, config, longest)

    def close(self, patience: float | None = None) -> None:
        """Ends the environments', the cluster's and the engine's processes and gives logs and checkpoint folder free; may be called again. An environment that
        does not answer for `patience` seconds is left behind; None: waits."""
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
