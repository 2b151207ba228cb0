"""Re-export what the PPO guide names. `ppo_train` takes a run: `with build_run(config) as run: ppo_train(run)`."""

from nemo_rl_cpp.algorithms.loop import train_loop as ppo_train
from nemo_rl_cpp.config.master import PPOMasterConfig as MasterConfig
