"""PPO: what is its own. The loop is `algorithms/loop.py`, the same as GRPO's; the critic is `algorithms/step.py`."""

from nemo_rl_cpp.algorithms.advantage_estimator import make_estimator
from nemo_rl_cpp.algorithms.advantages import TokenAdvantages
from nemo_rl_cpp.algorithms.loop import train_loop as ppo_train
from nemo_rl_cpp.algorithms.run import Algorithm
from nemo_rl_cpp.config.master import PPOMasterConfig
from nemo_rl_cpp.config.ppo import PPOConfig
from nemo_rl_cpp.rollouts.train_batch import spoken_by_assistant

MasterConfig = PPOMasterConfig


def make_advantages(config: PPOMasterConfig) -> TokenAdvantages:
    """By `ppo.adv_estimator.name`; ValueError for a name that PPO has no estimator for."""
    return TokenAdvantages(make_estimator("ppo", config.ppo.adv_estimator, config.loss_fn))


ALGORITHM = Algorithm(make_advantages=make_advantages, is_trained=spoken_by_assistant, needs_tokens=True)

__all__ = ["ALGORITHM", "MasterConfig", "PPOConfig", "make_advantages", "ppo_train"]
