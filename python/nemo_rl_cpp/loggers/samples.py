"""Output of a few conversations of a batch, with their rewards, in the terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

_ROLE_COLORS = {"system": "magenta", "user": "blue", "assistant": "green", "environment": "yellow"}


def choose_samples(rewards: Sequence[float], num_samples: int) -> list[int]:
    """Return the indices of `num_samples` samples: half with the highest rewards, half with the lowest. If
    `num_samples` is odd, one is from the middle. If there are at most `num_samples` samples, return all indices in
    order."""
    if len(rewards) <= num_samples:
        return list(range(len(rewards)))
    ranked = sorted(range(len(rewards)), key=lambda index: rewards[index], reverse=True)
    half = num_samples // 2
    middle = [ranked[len(ranked) // 2]] if num_samples % 2 else []
    return ranked[:half] + middle + (ranked[-half:] if half else [])


def print_message_log_samples(
    message_logs: Sequence[Sequence[object]],
    rewards: Sequence[float],
    num_samples: int = 5,
    step: int = 0,
    console: Console | None = None,
) -> None:
    """Print the distribution of the rewards, and up to `num_samples` conversations.

    Args:
        message_logs: a list of messages (`role`, `content`) per sample.
        rewards: a number per sample. Raise ValueError if there are not as many as message logs.
    """
    if len(message_logs) != len(rewards):
        raise ValueError(f"{len(message_logs)} message logs but {len(rewards)} rewards: one reward a log is expected")
    if not message_logs or num_samples <= 0:
        return
    values = [float(reward) for reward in rewards]
    console = console or Console()
    console.print(Panel(_reward_bars(values), title=f"Rewards of step {step}", border_style="cyan"))
    for number, index in enumerate(choose_samples(values, num_samples), start=1):
        body = [
            Text.assemble(
                (f"{message['role'].upper()}: ", f"bold {_ROLE_COLORS.get(message['role'], 'white')}"),
                str(message["content"]),
            )
            for message in message_logs[index]
            if isinstance(message, dict) and "role" in message and "content" in message
        ]
        title = f"Sample {number} | Reward: {values[index]:.4f} | row {index}"
        console.print(
            Panel(Group(*body) if body else Text("(no text)"), title=title, border_style=_color(values[index]))
        )


def _reward_bars(values: list[float]) -> Text:
    counts = Counter(values)
    text = Text(
        f"{len(values)} samples, mean {sum(values) / len(values):.4g}, "
        f"lowest {min(values):.4g}, highest {max(values):.4g}\n"
    )
    # many different rewards (length penalties, mixed scores) would fill the screen
    shown = sorted(counts, reverse=True)[:12]
    for reward in shown:
        bar = "█" * max(1, round(24 * counts[reward] / max(counts.values())))
        text.append(f"{reward:>9.4g} {bar} {counts[reward]}\n", style=_color(reward))
    if len(counts) > len(shown):
        text.append(f"          and {len(counts) - len(shown)} lower values\n")
    text.rstrip()
    return text


def _color(reward: float) -> str:
    return "green" if reward > 0.5 else "white" if reward > 0 else "red" if reward < 0 else "yellow"
