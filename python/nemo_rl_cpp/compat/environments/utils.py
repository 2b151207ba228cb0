"""Re-export the registry of environments."""

from nemo_rl_cpp.environments.utils import create_env, register_env
