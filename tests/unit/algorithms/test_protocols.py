import inspect

import pytest
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.config.logger import LOGGER_BACKENDS
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.loading import environment_class
from nemo_rl_cpp.loggers.folders import JsonlLogger
from nemo_rl_cpp.loggers.interface import LoggerInterface
from nemo_rl_cpp.models.generation.hf import HfGeneration
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.hf.trained import HfPolicy, HfValue
from nemo_rl_cpp.models.interfaces import GenerationInterface, PolicyInterface, ValueInterface
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.weight_sync import SharedWeights, WeightSynchronizer

NATIVE = {
    PolicyInterface: [HfPolicy, Policy],
    ValueInterface: [HfValue, Value],
    GenerationInterface: [HfGeneration, NativeGeneration],
    WeightSynchronizer: [SharedWeights],
    Environment: [environment_class(name) for name in ENV_REGISTRY],
    LoggerInterface: [JsonlLogger, *LOGGER_BACKENDS.values()],
}


def declared(protocol):
    """Return the public names that a Protocol declares or inherits."""
    names = {name for cls in protocol.__mro__ for name in [*vars(cls), *inspect.get_annotations(cls)]}
    return {name for name in names if not name.startswith("_")}


PAIRS = [(protocol, native) for protocol, natives in NATIVE.items() for native in natives]


@pytest.mark.parametrize(("protocol", "native"), PAIRS, ids=lambda cls: cls.__name__)
def test_classes_implement_every_method_of_their_typing_protocol_with_equal_parameters(protocol, native):
    for name in declared(protocol):
        own = next(vars(cls)[name] for cls in native.__mro__ if name in vars(cls))
        promised = inspect.getattr_static(protocol, name, None)
        is_default = protocol is LoggerInterface and not getattr(promised, "__isabstractmethod__", False)
        assert promised is None or own is not promised or is_default, f"{native.__name__} does not implement {name}"
        if inspect.isfunction(promised):
            parameters = inspect.signature(own).parameters
            missing = [
                each for each, parameter in inspect.signature(promised).parameters.items()
                if each not in parameters and parameter.kind is not parameter.VAR_KEYWORD
            ]  # fmt: skip
            assert not missing or any(p.kind is p.VAR_KEYWORD for p in parameters.values()), (name, missing)
            assert (promised.__doc__ or "").strip(), name
