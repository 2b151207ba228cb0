"""Reinforcement-learning post-training of language models with a C++/CUDA core.

Importing the package imports almost nothing: torch and the native core are loaded when a name that needs them is first
used, so a configuration can be checked without torch. The import also limits how long torch's threads spin while they
wait (`threads.bound_spinning`), unless torch is already loaded.

    nemo_rl_cpp.train_grpo          train a model with GRPO from a notebook; train_ppo does the same with PPO
    nemo_rl_cpp.load                load a model or a checkpoint for generation; nemo_rl_cpp.evaluate scores a model
    nemo_rl_cpp.Callback            base class of user code that a run calls after steps, validations and checkpoints
    nemo_rl_cpp.ServiceClient       Tinker's training and sampling clients in this process
    nemo_rl_cpp.load_grpo_config    load and validate a configuration
    nemo_rl_cpp.build_run           build a run: `with build_run(config) as run: run.train()`
    nemo_rl_cpp.write_report        write report.html for a log folder"""

from __future__ import annotations

from importlib import import_module

from nemo_rl_cpp.threads import bound_spinning

TYPE_CHECKING = False  # importing typing takes milliseconds, during which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AdvantageEstimator": "algorithms.custom_components",
    "BatchedDataDict": "distributed.ragged_batch",
    "Callback": "algorithms.callbacks",
    "CheckpointManager": "checkpoints.manager",
    "ClippedPGLossFn": "algorithms.loss",
    "EnvironmentInterface": "environments.interfaces",
    "Engine": "api.primitives",
    "Evaluation": "api.evaluation",
    "GRPOMasterConfig": "config",
    "LoadedModel": "api.model",
    "Logger": "loggers.logger",
    "LossFunction": "algorithms.loss",
    "MathEnvironment": "environments.math_environment",
    "Model": "api.primitives",
    "Policy": "models.policy.lm_policy",
    "RawDataset": "data.datasets",
    "RewardFunctionEnvironment": "environments.reward_environment",
    "RunEvent": "algorithms.callbacks",
    "SamplingClient": "tinker.clients",
    "ServiceClient": "tinker.clients",
    "Tokenizer": "data.tokenizer",
    "TextGenerator": "generate",
    "TrainResult": "api.training",
    "Trainer": "api.primitives",
    "TrainingClient": "tinker.clients",
    "TrainingRun": "algorithms.build",
    "build_run": "algorithms.build",
    "evaluate": "api.evaluation",
    "load": "api.model",
    "load_grpo_config": "config",
    "load_ppo_config": "config",
    "push_to_hub": "models.hub_upload",
    "resolve_model": "hub.sources",
    "train_grpo": "api.training",
    "train_ppo": "api.training",
    "write_report": "report",
}

__all__ = ["__version__", *_EXPORTS]

bound_spinning()


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
