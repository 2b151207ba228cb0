"""GRPO, DAPO and ProRLv2: `python -m nemo_rl_cpp.run_grpo_math --config FILE [--dry-run] [overrides]`."""

import sys

from nemo_rl_cpp.run_script import Script

main = Script("grpo", "configs/grpo_math_1B.yaml", "Train a language model with GRPO, DAPO or ProRLv2.").main

if __name__ == "__main__":
    sys.exit(main())
