"""`nemo-rl-cpp train`: the run script of the configuration's kind."""

from collections.abc import Sequence

from nemo_rl_cpp.command_line import OneLineParser


def main(arguments: Sequence[str]) -> int:
    """Trains; see `run_grpo_math` and `run_ppo`."""
    from nemo_rl_cpp import run_grpo_math, run_ppo
    from nemo_rl_cpp.config import ConfigError
    from nemo_rl_cpp.config.loader import kind_of
    from nemo_rl_cpp.config.run import print_mistakes

    parser = OneLineParser(add_help=False)
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(arguments)
    try:
        kind = kind_of(known.config) if known.config is not None else "grpo"
    except ConfigError as error:
        print_mistakes(error)
        return 2
    return (run_ppo if kind == "ppo" else run_grpo_math).main(arguments)
