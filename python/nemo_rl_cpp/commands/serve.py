"""`nemo-rl-cpp serve`: a model or a checkpoint behind HTTP."""

from collections.abc import Sequence

from nemo_rl_cpp.command_line import command_parser

_EXAMPLES = """examples:
  nemo-rl-cpp serve --model smollm2-135m-instruct
  nemo-rl-cpp serve --model results/grpo_arithmetic_smollm2 --port 8080 --api-key secret"""


def main(arguments: Sequence[str]) -> int:
    """Serve until it is stopped."""
    from nemo_rl_cpp.serving.command import add_arguments, run

    parser = command_parser("serve", "Serve a model or a checkpoint over HTTP, as OpenAI and vLLM do.", _EXAMPLES)
    add_arguments(parser)
    return run(parser.parse_args(arguments))
