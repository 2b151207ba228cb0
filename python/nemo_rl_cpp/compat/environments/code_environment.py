"""Programs as responses: they run in a sandbox, against tests."""

from nemo_rl_cpp.config.env import CodeEnvConfig
from nemo_rl_cpp.environments.code_environment import CodeEnvironment, CodeEnvMetadata, extract_code
