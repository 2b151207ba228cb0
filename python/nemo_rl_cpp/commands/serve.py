"""`nemo-rl-cpp serve` serves a model or a checkpoint over HTTP, with the routes of OpenAI and vLLM."""

import os
from collections.abc import Sequence

from nemo_rl_cpp.command_line import add_engine_options, add_model_option, at_least, command_parser, positive
from nemo_rl_cpp.serving import check_installed

KEY_VARIABLE = "NEMO_RL_CPP_API_KEY"
_OF_OPENAI = {"max_queue": 1024, "request_timeout": 600.0, "seed": 42}
"""Options that only the OpenAI routes have -> default."""
_EXAMPLES = """examples:
  nemo-rl-cpp serve --model smollm2-135m-instruct
  nemo-rl-cpp serve --model results/grpo_arithmetic_smollm2 --port 8080 --api-key secret
  nemo-rl-cpp serve --model smollm2-135m-instruct --tinker results/tinker"""


def main(arguments: Sequence[str]) -> int:
    """Serve the model until Ctrl-C or SIGTERM, and return the exit status."""
    parser = command_parser("serve", "Serve a model or a checkpoint over HTTP, as OpenAI and vLLM do.", _EXAMPLES)
    add_model_option(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="another name of the model for clients")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=at_least(0, 65535), default=8000, help="0: a free one, which is printed")
    parser.add_argument("--api-key", help=f"bearer token of requests (default: the variable {KEY_VARIABLE}, or none)")
    add_engine_options(parser)
    parser.add_argument("--seed", type=at_least(0), help="of requests that name a rollout and no seed (default: 42)")
    longest = "longest sequence (default: what the model and the cache allow)"
    parser.add_argument("--max-model-len", type=at_least(2), help=longest)
    parser.add_argument("--kv-cache-gb", type=positive, help="GB of KV cache (default: half of what is free, up to 4)")
    parser.add_argument("--max-batch-size", type=at_least(1), default=64, help="answers at the same time (default: 64)")
    most = "answers under way or waiting; more are refused, 503 (default: 1024)"
    parser.add_argument("--max-queue", type=at_least(1), help=most)
    parser.add_argument("--max-body-mb", type=positive, default=8.0, help="size of a request")
    parser.add_argument("--request-timeout", type=positive, metavar="S", help="seconds for an answer (default: 600)")
    parser.add_argument("--tinker", metavar="FOLDER", help="serve Tinker's API, and keep its checkpoints here")
    known = parser.parse_args(arguments)
    for option in ("api-key", "served-model-name"):
        given = getattr(known, option.replace("-", "_"))
        if given is not None and not given.strip():  # an unset shell variable, for instance
            parser.error(f"--{option} is empty: give one, or leave it out")
    for option, default in _OF_OPENAI.items():
        if known.tinker is not None and getattr(known, option) is not None:
            parser.error(f"--{option.replace('_', '-')} does not apply to --tinker: leave it out")
        setattr(known, option, default if getattr(known, option) is None else getattr(known, option))
    if known.tinker is not None:
        if known.device != "cpu":
            parser.error(
                f"--device {known.device} does not apply to --tinker, whose models are on the CPU: leave it out"
            )
        check_installed("serve --tinker", "tinker")
        from nemo_rl_cpp.tinker.app import serve_tinker

        return serve_tinker(known, known.api_key or os.environ.get(KEY_VARIABLE) or None)
    check_installed("nemo-rl-cpp serve")
    from nemo_rl_cpp.serving.command import serve

    return serve(known, known.api_key or os.environ.get(KEY_VARIABLE) or None)
