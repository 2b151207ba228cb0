"""Evaluation: `python -m nemo_rl_cpp.run_eval --config FILE [--dry-run] [overrides]`."""

import sys

from nemo_rl_cpp.run_script import Script

main = Script("eval", "configs/evals/eval.yaml", "Evaluate a language model: pass@k or cons@k.").main

if __name__ == "__main__":
    sys.exit(main())
