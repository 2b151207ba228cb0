"""The critic as the training loop sees it: it values the batch before the advantages, and learns from the returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.step_metrics import training_metrics
from nemo_rl_cpp.experience.batches import TrainBatch
from nemo_rl_cpp.models.value.interfaces import ValueInterface
from nemo_rl_cpp.telemetry.timer import Timer

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.loss.interfaces import LossFunction
    from nemo_rl_cpp.models.policy.interfaces import TrainingResult


class Critic:
    """A value model and its loss."""

    def __init__(self, model: ValueInterface, loss_fn: LossFunction) -> None:
        self.model, self.loss_fn = model, loss_fn

    @property
    def models(self) -> dict[str, ValueInterface]:
        """What a checkpoint saves, by the name of its folder."""
        return {"value": self.model}

    def add_values(self, batch: TrainBatch, timer: Timer) -> None:
        """`values` of the batch: of the state before each token."""
        with timer("value_inference"):
            self.model.prepare_for_inference()
            batch.values = self.model.get_values(batch, timer=timer)["values"]
            self.model.finish_inference()

    def train(self, batch: TrainBatch, timer: Timer) -> dict[str, float]:
        """One pass over the batch, towards its `returns`; the metrics `critic/*`."""
        with timer("value_training"):
            self.model.prepare_for_training()
            result = self.model.train(batch, self.loss_fn, timer=timer)
            self.model.finish_training()
        return critic_metrics(result)


class NoCritic:
    """GRPO, and PPO on raw rewards: nothing is valued and nothing trained."""

    models: dict[str, ValueInterface] = {}

    def add_values(self, batch: TrainBatch, timer: Timer) -> None:
        """Nothing."""

    def train(self, batch: TrainBatch, timer: Timer) -> dict[str, float]:
        """Nothing."""
        return {}


def critic_metrics(value_results: TrainingResult) -> dict[str, float]:
    """The metrics of one `Value.train` call under `critic/`, and the explained variance of the returns R by the values V,
    both of the training forward:

        critic/explained_var = 1 - Var(R - V) / max(Var(R), 1e-8)

    over the valid tokens, from their means and mean squares.
    """
    metrics = training_metrics(value_results)
    returns, values = metrics.get("returns_mean", 0.0), metrics.get("values_mean", 0.0)
    residual_variance = metrics.get("residual_sq_mean", 0.0) - (returns - values) ** 2
    variance = metrics.get("returns_sq_mean", 0.0) - returns**2
    metrics["explained_var"] = 1.0 - residual_variance / max(variance, 1e-8)
    return {f"critic/{name}": value for name, value in metrics.items()}
