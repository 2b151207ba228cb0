"""The commands that print text of a model or a checkpoint: `generate` and `chat`."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from nemo_rl_cpp.command_line import add_engine_options, add_model_option, command_parser
from nemo_rl_cpp.generate import GeneratedText, TextGenerator, sampling

_EXAMPLES = """examples:
  nemo-rl-cpp generate --model results/grpo/step_10 "12 + 30 ="
  nemo-rl-cpp generate --model smollm2-135m-instruct --chat "Why is the sky blue?"
  echo "12 + 30 =" | nemo-rl-cpp generate --model results/grpo --greedy"""


def generate(arguments: Sequence[str]) -> int:
    """Generate text and print it token by token, then print its length and speed on standard error."""
    parser = command_parser("generate", "Write text with a model or a checkpoint of a run.", _EXAMPLES)
    parser.add_argument(
        "prompt", nargs="?", help="text to continue; without it, standard input up to its last line break"
    )
    add_model_option(parser)
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    parser.add_argument("--system", help="with --chat: the system's message")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end behind this text (repeatable)")
    add_engine_options(parser)
    known = parser.parse_args(arguments)
    start = time.perf_counter()
    first: list[float] = []

    def show(piece: str) -> None:
        if not first:
            first.append(time.perf_counter())
        print(piece, end="", flush=True)

    if known.system is not None and not known.chat:
        raise ValueError("--system goes with --chat")
    rule = sampling(  # checked before the model is loaded
        known.max_new_tokens, known.temperature, known.top_p, known.seed, known.top_k, known.greedy, known.stop
    )
    prompt = sys.stdin.read().removesuffix("\n") if known.prompt is None else known.prompt  # echo writes a line break
    messages = [{"role": "system", "content": known.system}] if known.system is not None else []
    generator = TextGenerator(
        known.model, precision=known.precision, quantization=known.quantization, num_threads=known.threads, device=known.device
    )  # fmt: skip
    asked = [*messages, {"role": "user", "content": prompt}] if known.chat else prompt
    done = generator.generate(asked, **rule, on_text=show)
    print()
    print(f"[{_what_it_took(done, first[0] - start if first else None, time.perf_counter() - start)}]", file=sys.stderr)
    return 0


def _what_it_took(done: GeneratedText, first: float | None, seconds: float) -> str:
    parts = [f"{len(done.token_ids)} tokens, ended by {done.finish_reason}"]
    if first is not None:
        parts.append(f"first text after {first:.2f} s")
        if len(done.token_ids) > 1:
            parts.append(f"then {(len(done.token_ids) - 1) / (seconds - first):.0f} tokens/s")
    return ", ".join(parts)


_CHAT_EXAMPLES = """examples:
  nemo-rl-cpp chat --model smollm2-135m-instruct
  nemo-rl-cpp chat --model results/grpo_arithmetic_smollm2 --system "Answer with a number." --temperature 0

Ctrl-C stops an answer, /reset begins a new conversation, Ctrl-D ends."""


def chat(arguments: Sequence[str]) -> int:
    """Run an interactive chat until end of input (Ctrl-D)."""
    parser = command_parser("chat", "Talk to a model or to a checkpoint of a run.", _CHAT_EXAMPLES)
    add_model_option(parser)
    parser.add_argument("--system", help="the system's message")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=42)
    add_engine_options(parser)
    known = parser.parse_args(arguments)
    sampling(known.max_new_tokens, known.temperature, known.top_p, known.seed)  # checked before the model is loaded
    generator = TextGenerator(
        known.model, precision=known.precision, quantization=known.quantization, num_threads=known.threads, device=known.device
    )  # fmt: skip
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
    """Run a chat: respond to each line of standard input, until it ends, with all earlier messages as context."""
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
    """Print the model's response to the messages `asked` while it is generated, and return its text. Ctrl-C ends the
    response. `number`, how many responses preceded it, is added to the seed."""
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
