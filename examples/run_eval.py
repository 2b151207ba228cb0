"""Evaluate a model by pass@k or cons@k.

uv run examples/run_eval.py --config configs/evals/arithmetic_smollm2.yaml [overrides]"""

import sys

from nemo_rl_cpp.run_eval import main

if __name__ == "__main__":
    sys.exit(main())
