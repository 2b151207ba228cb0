"""Re-export the registry of environments."""

from nemo_rl_cpp.environments.loading import create_env, register_env
