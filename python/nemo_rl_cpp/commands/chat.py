"""`nemo-rl-cpp chat`: a conversation with a model or a checkpoint, in the terminal."""

import argparse
import signal
import sys
from collections.abc import Sequence

from nemo_rl_cpp.command_line import add_engine_options, add_model_option, command_parser
from nemo_rl_cpp.generate import TextGenerator

_EXAMPLES = """examples:
  nemo-rl-cpp chat --model smollm2-135m-instruct
  nemo-rl-cpp chat --model results/grpo_arithmetic_smollm2 --system "Answer with a number." --temperature 0

Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists the commands."""
HELP = """/help          these lines
/reset         begin a new conversation
/system TEXT   begin a new one with this system message (without TEXT: with none)
/retry         another answer to the last message
/history       what was said so far
/exit          end (as Ctrl-D)"""


def main(arguments: Sequence[str]) -> int:
    """Talk until the input ends."""
    parser = command_parser("chat", "Talk to a model or to a checkpoint of a run.", _EXAMPLES)
    add_model_option(parser)
    parser.add_argument("--system", help="the system's message")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=42)
    add_engine_options(parser)
    return _talk(parser.parse_args(arguments))


def _talk(arguments: argparse.Namespace) -> int:
    generator = TextGenerator(arguments.model, precision=arguments.precision, num_threads=arguments.threads)
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - lines can be edited, and earlier ones called back

        print("Ctrl-C stops an answer, Ctrl-D ends; /help lists the commands.")
    # Ctrl-C ends an answer here, not the program
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Conversation(generator, arguments).run("> " if terminal else "")
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


class Conversation:
    """Messages in turn, the commands between them, and the answers."""

    def __init__(self, generator: TextGenerator, arguments: argparse.Namespace) -> None:
        self._generator = generator
        self._arguments = arguments
        self._answers = 0
        self.messages: list[dict[str, str]] = []
        self._begin(arguments.system)

    def run(self, prompt: str) -> None:
        """Read lines until Ctrl-D or /exit."""
        while True:
            try:
                line = input(prompt)
            except EOFError:
                if prompt:
                    print()
                return
            except KeyboardInterrupt:  # at the prompt it drops the line, as in a shell
                print()
                continue
            if line.strip() == "/exit":
                return
            self.take(line)

    def take(self, line: str) -> None:
        """Take one line: a command, or a message to answer."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return
        if not word.startswith("/"):
            self._ask(line)
        elif word == "/help":
            print(HELP)
        elif word == "/reset":
            self._begin(self._system())
            print("(a new conversation)")
        elif word == "/system":
            self._begin(rest.strip() or None)
            print("(a new conversation)")
        elif word == "/history":
            print("\n".join(f"{message['role']}: {message['content']}" for message in self.messages) or "(nothing yet)")
        elif word == "/retry":
            self._retry()
        else:
            print(f"{word} is no command: {', '.join(row.split()[0] for row in HELP.splitlines())}")

    def _system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None

    def _begin(self, system: str | None) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _retry(self) -> None:
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            print("(nothing was asked yet)")
            return
        self._ask(self.messages.pop()["content"])

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        written: list[str] = []

        def show(piece: str) -> None:
            written.append(piece)
            print(piece, end="", flush=True)

        arguments = self._arguments
        self._answers += 1
        try:
            self._make_room()
            done = self._generator.generate(
                self.messages, max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature,
                top_p=arguments.top_p, seed=(arguments.seed + self._answers - 1) % 2**32, on_text=show,
            )  # fmt: skip
            print("" if done.finish_reason == "stop" else " [...]")
        except KeyboardInterrupt:
            print(" [stopped]")
        except ValueError as error:
            self.messages.pop()
            if not any(message["role"] == "user" for message in self.messages):
                raise  # the model takes no messages at all
            print(f"({error})")
            return
        self.messages.append({"role": "assistant", "content": "".join(written)})

    def _make_room(self) -> None:
        """Forget the oldest exchanges if the model's positions do not hold all of them and an answer."""
        limit, dropped = self._generator.max_length, 0
        start = 1 if self._system() is not None else 0
        while limit and len(self.messages) - start > 2:
            if self._generator.count_tokens(self.messages) + self._arguments.max_new_tokens <= limit:
                break
            del self.messages[start : start + 2]
            dropped += 1
        if dropped:
            print(
                f"(the oldest {'exchange' if dropped == 1 else f'{dropped} exchanges'} left the model's {limit} positions)"
            )
