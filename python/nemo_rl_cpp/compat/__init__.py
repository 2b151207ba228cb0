"""NeMo RL's names for the environments, data processors, data sets, estimators and losses that its guides use. They
have the guides' import paths: in code that imports them, replace `nemo_rl` by `nemo_rl_cpp.compat`.
docs/porting-from-nemo-rl.md explains how to port the rest. No other part of the package imports this one.

NeMo RL's modules are entries of `_MODULES`. Importing this package registers them in `sys.modules`; each of their names
is imported when it is first used."""

import sys
from importlib import import_module
from types import ModuleType

_LOSS_PARTS = dict.fromkeys(("LossFunction", "LossInputType", "LossType"), "algorithms.loss")
_LOSSES = dict.fromkeys(("ClippedPGLossFn", "MseValueLossFn"), "algorithms.loss")
_LOSSES |= dict.fromkeys(("ClippedPGLossConfig", "MseValueLossConfig"), "config.loss")
_ESTIMATORS = ("GDPO", "GRPO", "Generalized", "RawReward", "ReinforcePlusPlus")

# module of NeMo RL -> its names -> our module; `module:name` where our name differs
_MODULES = {
    "algorithms": {},
    "algorithms.advantage_estimator": {
        f"{name}AdvantageEstimator": "algorithms.advantage_estimator" for name in _ESTIMATORS
    },
    "algorithms.grpo": {
        "DynamicSamplingExhausted": "algorithms.dynamic_sampling",
        "MasterConfig": "config.master:GRPOMasterConfig",
        "ReinforcePlusPlusAdvantageEstimator": "algorithms.advantage_estimator",
        "grpo_train": "algorithms.loop:train_loop",
        "scale_rewards": "algorithms.reward_functions",
    },
    "algorithms.interfaces": _LOSS_PARTS,
    "algorithms.loss": _LOSS_PARTS | _LOSSES,
    "algorithms.loss.interfaces": _LOSS_PARTS,
    "algorithms.loss.loss_functions": _LOSSES,
    "algorithms.loss_functions": _LOSSES,
    "algorithms.ppo": {"MasterConfig": "config.master:PPOMasterConfig", "ppo_train": "algorithms.loop:train_loop"},
    "algorithms.reward_functions": {"apply_reward_shaping": "algorithms.reward_functions"},
    "data": {},
    "data.datasets": {
        "AllTaskProcessedDataset": "data.datasets.processed_dataset",
        "extract_necessary_env_names": "data.datasets",
        "load_response_dataset": "data.datasets.response_datasets",
    },
    "data.datasets.raw_dataset": {"RawDataset": "data.datasets.processed_dataset"},
    "data.datasets.response_datasets": {"ResponseDataset": "data.datasets.response_datasets.response_dataset"},
    "data.interfaces": dict.fromkeys(
        ("DatumSpec", "LLMMessageLogType", "TaskDataProcessFnCallable", "TaskDataSpec"), "data.interfaces"
    ),
    "data.processors": dict.fromkeys(
        ("PROCESSOR_REGISTRY", "math_data_processor", "math_hf_data_processor", "register_processor"), "data.processors"
    ),
    "distributed": {},
    "distributed.batched_data_dict": {"BatchedDataDict": "distributed.ragged_batch"},
    "distributed.virtual_cluster": {"RayVirtualCluster": "distributed.cluster:Cluster"},
    "distributed.worker_groups": {"RayWorkerGroup": "distributed.cluster:WorkerGroup"},
    "environments": {},
    "environments.code_environment": {"CodeEnvironment": "environments.code_environment"},
    "environments.interfaces": {
        "EnvironmentInterface": "environments.interfaces",
        "EnvironmentReturn": "environments.interfaces",
    },
    "environments.math_environment": {"MathEnvironment": "environments.math_environment"},
    "environments.utils": {"create_env": "environments.loading", "register_env": "environments.loading"},
    "models": {},
    "models.interfaces": {"PolicyInterface": "models.interfaces", "ValueInterface": "models.interfaces"},
}


class _Module(ModuleType):
    """A replacement for a module of NeMo RL, which imports each of its names when the name is first used."""

    __path__: list[str] = []  # marks a package; its submodules are all registered

    def __getattr__(self, name: str) -> object:
        source = _MODULES[self.__name__.removeprefix(f"{__name__}.")].get(name)
        if source is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, _, ours = source.partition(":")
        value = getattr(import_module(f"nemo_rl_cpp.{module}"), ours or name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted(_MODULES[self.__name__.removeprefix(f"{__name__}.")])


for _path in _MODULES:
    _parent, _, _name = f"{__name__}.{_path}".rpartition(".")
    sys.modules[f"{__name__}.{_path}"] = _Module(f"{__name__}.{_path}")
    setattr(sys.modules[_parent], _name, sys.modules[f"{__name__}.{_path}"])
