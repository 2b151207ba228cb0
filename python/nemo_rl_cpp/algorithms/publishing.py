"""What a run tells others of its model: the facts of the model card, and the upload to the hub at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.own_components import OwnEstimator, OwnLoss
from nemo_rl_cpp.algorithms.validation import mean_word
from nemo_rl_cpp.checkpoints.model_card import CardFacts
from nemo_rl_cpp.config.data import environments_of_training
from nemo_rl_cpp.models.hub_upload import push_to_hub

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.run import TrainingRun


def card_facts(run: TrainingRun) -> CardFacts:
    """Of the present step."""
    services, results = run.services, {}
    if services.history:
        results["reward, last step"] = services.history[-1]["reward"]
    if services.validations and services.validations[-1]["step"] == run.state.step:
        last = services.validations[-1]
        results[f"validation {mean_word(last)}"] = last["accuracy"]
    own = {"loss_fn": run.loss_fn, "adv_estimator": run.advantages.estimator}
    components = {what: each.name for what, each in own.items() if isinstance(each, (OwnLoss, OwnEstimator))}
    return CardFacts(run.state.step, _rewards(run), results, components)


def _rewards(run: TrainingRun) -> list[str]:
    """The names of environments; of reward functions their own, with their weights."""
    found: list[str] = []
    used = environments_of_training(run.config.data)
    section = (
        run.config.env.get("reward_functions") if used == {"reward_functions"} else None
    )  # else it may be another task's
    for task, environment in run.environments.train.items():
        described = getattr(getattr(environment, "_instance", environment), "described", None)
        if isinstance(described, list):
            found += described
            continue
        functions = section.get("functions") if isinstance(section, Mapping) else None
        given = [functions] if isinstance(functions, str) else functions
        found += list(given) if isinstance(given, list) else [task]
    return list(dict.fromkeys(found))


def publish(run: TrainingRun) -> dict[str, str]:
    """Uploads the last checkpoint where `checkpointing.push_to_hub` names a repository; the row of the summary. A failure is told
    there and loses nothing."""
    config = run.config.checkpointing
    repository, private = config.push_to_hub, config.hub_private
    if repository is None or not run.services.saves or not run.state.step:
        return {}
    folder = run.services.checkpoints.checkpoint_dir / f"step_{run.state.step}"
    try:
        return {"hub": push_to_hub(folder, repository, private=private)}
    except ValueError as error:
        return {"hub": f"not uploaded: {error}"}
    except KeyboardInterrupt:  # the run is over and saved: only the upload is given up
        return {
            "hub": f"not uploaded: the upload to {repository} was interrupted; nemo_rl_cpp.push_to_hub does it again"
        }
