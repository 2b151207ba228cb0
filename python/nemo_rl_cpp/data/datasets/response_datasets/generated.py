"""Generated data sets: arithmetic, reversing digits, reasoning-gym, coding tasks, and a number-guessing game."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

from nemo_rl_cpp.data.conversation import question_and_answer
from nemo_rl_cpp.data.datasets.files import ListDataset
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.interfaces import Row
from nemo_rl_cpp.data.random_order import Draws, is_held_out, permutation

Q = TypeVar("Q")  # a question
HELD_OUT = 0.15  # the fraction of all questions that belongs to validation


def held_out_count(size: float, rows: int) -> int:
    """Return the validation rows for `split_validation_size`: a count, or a fraction of `rows` (rounded, 0 or more)."""
    return size if isinstance(size, int) else max(1, round(size * rows)) if size else 0


class GeneratedDataset(RawDataset, ABC):
    """The base class of generated data sets. `split` is "train" or "validation". `val_dataset` has
    `split_validation_size` rows of the validation split; a fraction is relative to the number of training rows."""

    default_processor = "raw_completion_data_processor"
    eval_split = "validation"
    num_shots = 0

    def __init__(
        self, num_samples: int | None = None, split: str = "train", split_validation_size: float = 0, seed: int = 42, **kwargs: object
    ):  # fmt: skip
        if split not in ("train", "validation"):
            raise ValueError(f"data: split must be 'train' or 'validation' for {self.task_name}, got {split!r}")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"data: num_samples must be at least 1, got {num_samples}")
        self.dataset = ListDataset(self.rows(split == "validation", num_samples, seed))
        if split_validation_size:
            if split == "validation":
                raise ValueError("data: split_validation_size makes no sense with split: validation")
            held = held_out_count(split_validation_size, len(self.dataset))
            self.val_dataset = ListDataset(self.rows(True, held, seed))

    @abstractmethod
    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        """Return `num_samples` rows (None: all) of the training split, or of the validation split if `held_out`."""

    def row(self, prompt: str, answer: str | None, stop: str | None, **extra: object) -> Row:
        row: Row = {"messages": question_and_answer(prompt, answer), "task_name": self.task_name}
        if stop is not None:
            row["stop_strings"] = [stop]
        if extra:
            row["extra_env_info"] = extra
        return row

    def few_shot(
        self, questions: Sequence[Q], shown: Sequence[Q], held_out: bool, num_samples: int | None, seed: int, what: str
    ) -> Iterator[tuple[Q, list[Q]]]:
        """Yield (question, list of `num_shots` solved examples) for `num_samples` random entries of `questions`. The
        examples are different random entries of `shown`. For training (not `held_out`), `shown` must list the same
        questions in the same order, so that a question is not among its own examples. `what` is the noun for the
        questions in error messages."""
        for i, number in enumerate(self.pick(len(questions), num_samples, seed, what)):
            shots = Draws(seed, int(held_out), i).distinct(self.num_shots, len(shown), None if held_out else number)
            yield questions[number], [shown[s] for s in shots]

    @staticmethod
    def pick(available: int, num_samples: int | None, seed: int, what: str) -> list[int]:
        """Return `num_samples` (None: `available`) random indices below `available`; none repeats before all have
        occurred. Raise ValueError, with `what` (such as "numbers in the range"), if `available` is 0."""
        if available == 0:
            raise ValueError(f"data: there are no {what}: allow more different questions")
        count = available if num_samples is None else num_samples
        picked: list[int] = []
        while len(picked) < count:
            picked += permutation(available, seed, len(picked) // available)
        return picked[:count]


def _sides(questions: Sequence[Q], text: Callable[[Q], str]) -> dict[bool, list[Q]]:
    """Divide questions by a hash of their text: {False: training questions, True: validation questions}."""
    return {side: [q for q in questions if is_held_out(text(q), HELD_OUT) == side] for side in (False, True)}


class ArithmeticDataset(GeneratedDataset):
    """Sums as plain text: `num_shots` solved lines `a + b = c`, then `a + b = `, which the response completes.

    Numbers are from 1 to `max_number`. a + b and b + a belong to the same split. Without `num_samples`, every pair of
    the split occurs once. Tokenizers that split numbers into digits keep the space after "=" as a token, so the first
    sampled token is a digit."""

    task_name = "arithmetic"

    def __init__(self, max_number: int = 50, num_shots: int = 3, **kwargs: Any):
        if max_number < 4 or num_shots < 0:
            raise ValueError(f"data: arithmetic needs max_number >= 4, num_shots >= 0, not {max_number}, {num_shots}")
        self.num_shots = num_shots
        pairs = list(product(range(1, max_number + 1), repeat=2))
        self.pairs = _sides(pairs, lambda pair: f"arithmetic {min(pair)} {max(pair)}")
        super().__init__(**kwargs)

    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        sides = self.pairs[held_out], self.pairs[False]
        rows = []
        for (a, b), shots in self.few_shot(*sides, held_out, num_samples, seed, "pairs of numbers on this side"):
            lines = [f"{x} + {y} = {x + y}" for x, y in shots]
            rows.append(self.row("\n".join([*lines, f"{a} + {b} = "]), str(a + b), stop="\n"))
        return rows


class ReverseDigitsDataset(GeneratedDataset):
    """Prompts of `num_digits` digits and "="; the correct response is the digits in reverse order. A model with random
    weights and the 16-token character tokenizer learns the task in seconds. A response ends with the end token."""

    task_name = "reverse_digits"

    def __init__(self, num_digits: int = 3, **kwargs: Any):
        if not 1 <= num_digits <= 5:
            raise ValueError(f"data: num_digits must be 1 to 5, got {num_digits}")
        self.words = _sides([f"{n:0{num_digits}d}" for n in range(10**num_digits)], lambda word: f"reverse {word}")
        super().__init__(**kwargs)

    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        words = self.words[held_out]
        numbers = self.pick(len(words), num_samples, seed, "numbers on this side")
        return [self.row(words[n] + "=", words[n][::-1], stop=None) for n in numbers]


class ReasoningGymDataset(GeneratedDataset):
    """A task of the package `reasoning-gym` as plain text: `num_shots` solved questions, then one to answer, all
    different. `task` is the package's name of the task, with `task_options` ({"max_terms": 2}). The environment also
    gets the package's entry, because some tasks have several correct answers."""

    def __init__(
        self, task: str, task_options: dict[str, object] | None = None, num_shots: int = 3, num_samples: int = 1000, **kwargs: Any
    ):  # fmt: skip
        import reasoning_gym

        known = reasoning_gym.factory.DATASETS
        if task not in known:
            near = difflib.get_close_matches(task, known, n=3)
            raise ValueError(f"reasoning_gym has no task {task!r}" + (f"; near are {', '.join(near)}" if near else ""))
        if num_samples is None:
            raise ValueError("data: num_samples must be a number for reasoning_gym, whose tasks have no end")
        self.task_name = f"reasoning_gym-{task}"
        self.task, self.num_shots = task, num_shots
        self._options = dict(task_options or {})
        self._create = reasoning_gym.create_dataset
        super().__init__(num_samples, **kwargs)

    def _entries(self, held_out: bool, count: int, seed: int) -> list[dict[str, str | None]]:
        """Return up to `count` different questions of a split; fewer if the task has no more."""
        try:
            source = self._create(self.task, seed=seed, size=2**30, **self._options)
        except (TypeError, AssertionError, ValueError) as error:
            text = f"data: reasoning_gym refuses task_options {self._options} for {self.task!r}: {error}"
            raise ValueError(text) from error
        found: dict[str, dict[str, str | None]] = {}
        misses = 0
        for i in range(40 * count + 1000):
            entry = source[i]
            question = entry["question"]
            if question in found:
                misses += 1
                if misses > 200 + len(found):  # nearly all questions of the split have been found
                    break
            elif is_held_out(f"{self.task} {question}", HELD_OUT) == held_out:
                found[question] = dict(entry)
                misses = 0
                if len(found) == count:
                    break
        return list(found.values())

    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        questions = self._entries(held_out, num_samples or 1, seed)
        shown = questions if not held_out else self._entries(False, max(64, self.num_shots), seed)
        if self.num_shots and any(entry["answer"] is None for entry in shown):
            raise ValueError(f"data: the task {self.task!r} has no answers to show: set num_shots: 0")
        one_line = all(entry["answer"] is not None and "\n" not in entry["answer"] for entry in [*questions, *shown])
        stop = "\n" if one_line else "\n\nQuestion:"
        rows = []
        what = f"{self.task} questions on this side"
        for entry, shots in self.few_shot(questions, shown, held_out, num_samples, seed, what):
            parts = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
            prompt = "\n\n".join([*parts, f"Question: {entry['question']}\nAnswer:"])
            info = {"reasoning_gym_task": self.task, "reasoning_gym_entry": entry}
            rows.append(self.row(prompt, entry["answer"], stop, **info))
        return rows


_SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_TESTED = (-3, 0, 1, 5, 12)


def _functions() -> list[tuple[str, str]]:
    """Return (name, expression) of each Python function that a coding task may ask for."""
    single = [(f"{word}_{n}", f"x {sign} {n}") for word, sign in _SIGNS.items() for n in range(2, 21)]
    several = product(range(2, 10), ("plus", "minus"), range(2, 10))
    return single + [(f"times_{n}_{word}_{m}", f"x * {n} {_SIGNS[word]} {m}") for n, word, m in several]


class PythonFunctionsDataset(GeneratedDataset):
    """Coding tasks as plain text: `num_shots` complete functions, whose names describe them, then one to complete after
    `return`. The environment `code` gets the beginning (`code_prefix`), and asserts as `ground_truth`."""

    task_name = "python_functions"

    def __init__(self, num_shots: int = 3, **kwargs: Any):
        if num_shots < 0:
            raise ValueError(f"data: python_functions needs num_shots >= 0, got {num_shots}")
        self.num_shots = num_shots
        self.functions = _sides(_functions(), lambda function: f"python {function[0]}")
        super().__init__(**kwargs)

    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        sides = self.functions[held_out], self.functions[False]
        rows = []
        for (name, expression), shots in self.few_shot(*sides, held_out, num_samples, seed, "functions on this side"):
            examples = [f"def {shown}(x):\n    return {returned}\n" for shown, returned in shots]
            beginning = f"def {name}(x):\n    return"
            asserts = [f"assert {name}({x}) == {eval(expression, {'x': x})}" for x in _TESTED]
            prompt = "\n".join([*examples, beginning])
            rows.append(self.row(prompt, f" {expression}", "\n", ground_truth=asserts, code_prefix=beginning))
        return rows


class GuessNumberDataset(GeneratedDataset):
    """Games in which the policy guesses a secret number from `min_number` to `max_number`; the two limits replace
    `{low}` and `{high}` in the prompt. Training and validation have the same games. A secret number occurs again only
    after all others have occurred."""

    task_name = "guess_number"

    def __init__(
        self, min_number: int = 1, max_number: int = 7, stop_strings: list[str] | None = None,
        prompt: str = "I am thinking of a number from {low} to {high}.\nGuess:", **kwargs: Any,
    ):  # fmt: skip
        if not 0 <= min_number < max_number:
            raise ValueError(f"data: guess_number needs 0 <= min_number < max_number, not {min_number}, {max_number}")
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
