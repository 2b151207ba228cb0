"""The contracts of policy, value model and generation in one place."""

from nemo_rl_cpp.compat.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
)
from nemo_rl_cpp.compat.models.policy.interfaces import (
    ColocatablePolicyInterface,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
)
from nemo_rl_cpp.models.interfaces import ValueInterface, ValueOutputSpec
