"""Re-export the environment that runs programs."""

from nemo_rl_cpp.environments.code_environment import CodeEnvironment
