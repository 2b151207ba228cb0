"""Trains a model on what a teacher says of the answers that the model has sampled.

uv run examples/run_distillation.py --config configs/distillation_arithmetic_smollm2.yaml [overrides]
"""

import sys

from nemo_rl_cpp.run_distillation import main

if __name__ == "__main__":
    sys.exit(main())
