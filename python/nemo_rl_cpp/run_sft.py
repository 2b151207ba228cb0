"""Run supervised fine-tuning: `python -m nemo_rl_cpp.run_sft --config FILE [--dry-run] [overrides]`."""

import sys
from functools import partial

from nemo_rl_cpp import cli

main = partial(cli.main, command="train", kind="sft")

if __name__ == "__main__":
    sys.exit(main())
