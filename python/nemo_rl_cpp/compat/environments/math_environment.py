"""Mathematics and multiple choice: one response, right or wrong."""

from nemo_rl_cpp.config.env import MathEnvConfig
from nemo_rl_cpp.environments.math_environment import BaseMathEnvironment, MathEnvironment, MathEnvironmentMetadata
from nemo_rl_cpp.environments.verifiers import (
    EnglishMultichoiceVerifyWorker,
    HFVerifyWorker,
    MultilingualMultichoiceVerifyWorker,
)
