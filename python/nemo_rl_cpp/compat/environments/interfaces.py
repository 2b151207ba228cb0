"""What the rollout asks of an environment."""

from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn, MetadataT, checked_return
