"""PPO: `python -m nemo_rl_cpp.run_ppo --config FILE [--dry-run] [overrides]`."""

import sys

from nemo_rl_cpp.run_script import Script

main = Script("ppo", "configs/ppo_math_1B_megatron.yaml", "Train a language model with PPO.").main

if __name__ == "__main__":
    sys.exit(main())
