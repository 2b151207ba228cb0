"""Train a model on math problems with GRPO, DAPO or ProRLv2.

uv run examples/run_grpo_math.py --config configs/grpo_arithmetic_smollm2.yaml [overrides]"""

import sys

from nemo_rl_cpp.run_grpo_math import main

if __name__ == "__main__":
    sys.exit(main())
