"""Train a model towards a teacher's probabilities of the responses that the model samples (on-policy distillation).

uv run examples/run_distillation.py --config configs/distillation_arithmetic_smollm2.yaml [overrides]"""

import sys

from nemo_rl_cpp.run_distillation import main

if __name__ == "__main__":
    sys.exit(main())
