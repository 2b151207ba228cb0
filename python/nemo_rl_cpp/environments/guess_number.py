"""A game: the model guesses a number and the environment replies "higher" or "lower", until the guess is correct or
none is left. It is the smallest useful multi-turn task; halving the range with each guess always wins."""

import re
from typing import NamedTuple, NotRequired, TypedDict

import torch

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import GuessNumberEnvConfig as GuessNumberConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn

_GUESS = re.compile(r"[0-9]{1,9}")


class GuessNumberMetadata(TypedDict):
    """The state of a game: the number to guess, and the number of guesses so far."""

    secret: int
    guesses: NotRequired[int]


class _Turn(NamedTuple):
    guess: str | None
    observation: str
    reward: float
    ended: bool


class GuessNumberEnv(EnvironmentInterface[GuessNumberMetadata]):
    """An environment that gives reward 1 for the correct number within `max_guesses` guesses. A guess is the first
    number in a message; a message without one ends the game. Metrics of ended games: `solved`, `invalid_guess`,
    `guesses_per_game`."""

    def __init__(self, cfg: GuessNumberConfig | None = None) -> None:
        cfg = as_model(cfg or {}, GuessNumberConfig, "env.guess_number")
        self.max_guesses = cfg.max_guesses
        self.higher = cfg.higher
        self.lower = cfg.lower
        self.stop_strings = cfg.stop_strings

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GuessNumberMetadata]
    ) -> EnvironmentReturn[GuessNumberMetadata]:
        turns = [self._turn(log[-1]["content"], info) for log, info in zip(message_log_batch, metadata)]
        answers, hints, rewards, ended = (list(column) for column in zip(*turns))
        states = [{**info, "guesses": info.get("guesses", 0) + 1} for info in metadata]
        for guess, reward, state, over in zip(answers, rewards, states, ended):
            if over:
                self._means.add("solved", reward)
                self._means.add("invalid_guess", guess is None)
                self._means.add("guesses_per_game", state["guesses"])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": hint} for hint in hints],
            metadata=states,
            next_stop_strings=[self.stop_strings] * len(metadata),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.tensor(ended),
            answers=answers,
        )

    def _turn(self, said: str, info: GuessNumberMetadata) -> _Turn:
        found = _GUESS.search(said)
        if found is None:
            return _Turn(None, "", 0.0, True)
        guess, secret = int(found[0]), int(info["secret"])
        if guess == secret:
            return _Turn(found[0], "", 1.0, True)
        if info.get("guesses", 0) + 1 >= self.max_guesses:
            return _Turn(found[0], "", 0.0, True)
        return _Turn(found[0], self.higher if secret > guess else self.lower, 0.0, False)
