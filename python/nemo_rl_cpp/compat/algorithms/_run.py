"""NeMo RL's `setup` and `train` in terms of a run: what GRPO's and PPO's adapters share."""

from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_cpp.algorithms.build import Parts, assemble, build_run, make_parts, make_validator
from nemo_rl_cpp.algorithms.run_data import RunData
from nemo_rl_cpp.compat.models.policy.lm_policy import Policy
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.environments.group import Environments


def main(config: TrainMasterConfig) -> None:
    """A whole run: data, environments, models, engine, training (resumed where it was), summary."""
    with build_run(config) as run:
        run.train()


def environments(train: Mapping[str, Any] | None, validation: Mapping[str, Any] | None) -> Environments:
    """The caller's environments, which go on after the run."""
    return Environments(train or {}, validation or {}, owned=False)


def parts_of(
    config: TrainMasterConfig, tokenizer: Any, dataset: Any, val_dataset: Any, processor: Any, policy_factory: Callable[..., Any] | None
) -> Parts:  # fmt: skip
    """What NeMo RL's `setup` makes: everything but the environments."""
    refuse_processor(processor)
    if policy_factory is None and not config.cluster.has_workers:
        policy_factory = Policy
    return make_parts(config, tokenizer, RunData(dataset, val_dataset, environments({}, {})), policy_factory)


def require_beside_training(config: TrainMasterConfig, max_trajectory_age_steps: int | None = None) -> None:
    """ValueError unless the configuration has rollouts beside training, of this age where one is given."""
    section, beside = f"{config.algorithm}.async_{config.algorithm}", config.loop.beside_training
    if not beside.enabled:
        raise ValueError(
            f"async_{config.algorithm}_train needs {section}.enabled=true, which is false: set it, or call {config.algorithm}_train"
        )
    if max_trajectory_age_steps not in (None, beside.max_trajectory_age_steps):
        raise ValueError(
            f"max_trajectory_age_steps is {max_trajectory_age_steps}, but {section}.max_trajectory_age_steps is "
            f"{beside.max_trajectory_age_steps}: make them equal"
        )


def refuse_processor(processor: Any) -> None:
    if processor is not None:
        raise ValueError("processor: images and sound are not supported, only text")


def train(config: TrainMasterConfig, parts: Parts) -> None:
    """Trains to the end; the environments go on."""
    assemble(config, parts).train()


def validate(config: TrainMasterConfig, parts: Parts, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, timings) of one validation, see `Validator.run`; empty ones, with a message, without a loader."""
    validator = make_validator(config, parts.generation, parts)
    if validator is None:
        print("no validation data: nothing is validated")
        return {}, {}
    metrics, timings = validator.run(step)
    return metrics, timings


def nothing_but(**given: Any) -> Parts:
    """`Parts` of which only these are there."""
    return Parts(**dict.fromkeys(Parts.__dataclass_fields__) | given)
