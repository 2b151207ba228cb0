"""Trains a model on math problems with GRPO, DAPO or ProRLv2.

uv run examples/run_grpo_math.py --config configs/grpo_arithmetic_smollm2.yaml [overrides]
"""

import sys

from nemo_rl_cpp.command import run

if __name__ == "__main__":
    sys.exit(run("run_grpo_math"))
