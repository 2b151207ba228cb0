"""Re-export the environment that checks answers to mathematics."""

from nemo_rl_cpp.environments.math_environment import MathEnvironment
