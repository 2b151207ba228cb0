"""A generated data set of games. Each row is the start of one game."""

from typing import Any

from nemo_rl_cpp.data.datasets.response_datasets.generated import GeneratedDataset
from nemo_rl_cpp.data.interfaces import Row


class GuessNumberDataset(GeneratedDataset):
    """Games of guessing a number from `min_number` to `max_number`: `prompt` as raw text, the same for every number.

    `{low}` and `{high}` in the prompt stand for the two ends of the range. Every number comes once before any comes
    twice. Training and validation have the same games: there is nothing to hold out where the prompt says nothing of the secret.
    """

    task_name = "guess_number"

    def __init__(
        self,
        min_number: int = 1,
        max_number: int = 7,
        prompt: str = "I am thinking of a number from {low} to {high}.\nGuess:",
        stop_strings: list[str] | None = None,
        **kwargs: Any,
    ):
        if not 0 <= min_number < max_number:
            raise ValueError(
                f"data: guess_number needs 0 <= min_number < max_number, got {min_number} and {max_number}"
            )
        self.secrets = range(min_number, max_number + 1)
        self.prompt = prompt.replace("{low}", str(min_number)).replace("{high}", str(max_number))
        self.stop_strings = stop_strings
        super().__init__(**kwargs)

    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        rows = []
        for number in self.pick(len(self.secrets), num_samples, seed, "numbers in the range"):
            row = self.row(self.prompt, str(self.secrets[number]), None, secret=self.secrets[number])
            rows.append(row | ({"stop_strings": list(self.stop_strings)} if self.stop_strings else {}))
        return rows
