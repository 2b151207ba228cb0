"""`nemo-rl-cpp chat` lets the user chat with a model or a checkpoint in the terminal."""

import argparse
import signal
import sys
from collections.abc import Sequence

from nemo_rl_cpp.command_line import add_engine_options, add_model_option, command_parser
from nemo_rl_cpp.generate import TextGenerator

_EXAMPLES = """examples:
  nemo-rl-cpp chat --model smollm2-135m-instruct
  nemo-rl-cpp chat --model results/grpo_arithmetic_smollm2 --system "Answer with a number." --temperature 0

Ctrl-C stops an answer, /reset begins a new conversation, Ctrl-D ends."""


def main(arguments: Sequence[str]) -> int:
    """Run an interactive chat until end of input (Ctrl-D)."""
    parser = command_parser("chat", "Talk to a model or to a checkpoint of a run.", _EXAMPLES)
    add_model_option(parser)
    parser.add_argument("--system", help="the system's message")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=42)
    add_engine_options(parser)
    known = parser.parse_args(arguments)
    generator = TextGenerator(known.model, precision=known.precision, num_threads=known.threads)
    if sys.stdin.isatty():
        import readline  # noqa: F401 - lines can be edited, and earlier ones called back

        print("Ctrl-C stops an answer, /reset begins a new conversation, Ctrl-D ends.")
    # Ctrl-C ends the response, not the program
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        talk(generator, known)
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def talk(generator: TextGenerator, known: argparse.Namespace) -> None:
    """Respond to each line of input, as a conversation with the earlier lines and responses."""
    begin = [] if known.system is None else [{"role": "system", "content": known.system}]
    messages, answers = list(begin), 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt, Ctrl-C drops the line, as in a shell
            print()
            continue
        if line == "/reset":
            messages = list(begin)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = write_answer(generator, known, asked, answers)
            except ValueError as error:  # the conversation is longer than the model's positions, for example
                print(f"({error}; /reset begins a new conversation)")
                continue
            messages, answers = [*asked, {"role": "assistant", "content": answer}], answers + 1


def write_answer(generator: TextGenerator, known: argparse.Namespace, asked: list[dict[str, str]], number: int) -> str:
    """Print a response while it is generated, and return it. Ctrl-C ends the response."""
    written: list[str] = []

    def show(piece: str) -> None:
        written.append(piece)
        print(piece, end="", flush=True)

    try:
        done = generator.generate(
            asked, max_new_tokens=known.max_new_tokens, temperature=known.temperature, top_p=known.top_p,
            seed=(known.seed + number) % 2**32, on_text=show,
        )  # fmt: skip
        print("" if done.finish_reason == "stop" else " [...]")
    except KeyboardInterrupt:
        print(" [stopped]")
    return "".join(written)
