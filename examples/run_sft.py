"""Train a model on the responses in a data file (supervised fine-tuning).

uv run examples/run_sft.py --config configs/sft_arithmetic_smollm2.yaml [overrides]"""

import sys

from nemo_rl_cpp.run_sft import main

if __name__ == "__main__":
    sys.exit(main())
