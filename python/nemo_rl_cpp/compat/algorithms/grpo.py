"""Re-export what the GRPO, DAPO and ProRLv2 guides name. `grpo_train` takes a run: `with build_run(config) as run: grpo_train(run)`."""

from nemo_rl_cpp.algorithms.advantage_estimator import ReinforcePlusPlusAdvantageEstimator
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.loop import train_loop as grpo_train
from nemo_rl_cpp.algorithms.reward_functions import scale_rewards
from nemo_rl_cpp.config.master import GRPOMasterConfig as MasterConfig
