"""Train a model on math problems with PPO.

uv run examples/run_ppo.py --config configs/ppo_math_1B_megatron.yaml [overrides]"""

import sys

from nemo_rl_cpp.run_ppo import main

if __name__ == "__main__":
    sys.exit(main())
