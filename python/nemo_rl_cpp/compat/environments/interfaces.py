"""Re-export the contract of an environment."""

from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn
