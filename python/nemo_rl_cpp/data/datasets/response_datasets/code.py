"""A generated data set of programs to write: one-line functions with tests."""

from typing import Any

from nemo_rl_cpp.data.datasets.response_datasets.generated import HELD_OUT, GeneratedDataset
from nemo_rl_cpp.data.interfaces import Row
from nemo_rl_cpp.data.random_order import Draws, is_held_out

_SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_TESTED = (-3, 0, 1, 5, 12)


def _functions() -> list[tuple[str, str]]:
    """(name, expression) of all functions."""
    single = [(f"{word}_{n}", f"x {sign} {n}") for word, sign in _SIGNS.items() for n in range(2, 21)]
    pairs = [
        (f"times_{n}_{word}_{m}", f"x * {n} {_SIGNS[word]} {m}")
        for n in range(2, 10)
        for word in ("plus", "minus")
        for m in range(2, 10)
    ]
    return single + pairs


class PythonFunctionsDataset(GeneratedDataset):
    """Functions whose name says what they do, as raw text: `num_shots` whole ones, then one up to `return`.

    The environment `code` gets the beginning of the program (`code_prefix`) and asserts as `ground_truth`.
    """

    task_name = "python_functions"

    def __init__(self, num_shots: int = 3, **kwargs: Any):
        if num_shots < 0:
            raise ValueError(f"data: python_functions needs num_shots >= 0, got {num_shots}")
        self.num_shots = num_shots
        self.functions = {
            side: [f for f in _functions() if is_held_out(f"python {f[0]}", HELD_OUT) == side] for side in (False, True)
        }
        super().__init__(**kwargs)

    def rows(self, held_out: bool, num_samples: int | None, seed: int) -> list[Row]:
        questions, shown = self.functions[held_out], self.functions[False]
        rows = []
        for i, number in enumerate(self.pick(len(questions), num_samples, seed, "functions on this side")):
            name, expression = questions[number]
            shots = Draws(seed, int(held_out), i).distinct(self.num_shots, len(shown), None if held_out else number)
            examples = [f"def {shown[s][0]}(x):\n    return {shown[s][1]}\n" for s in shots]
            beginning = f"def {name}(x):\n    return"
            asserts = [f"assert {name}({x}) == {eval(expression, {'x': x})}" for x in _TESTED]
            prompt = "\n".join([*examples, beginning])
            rows.append(self.row(prompt, f" {expression}", "\n", ground_truth=asserts, code_prefix=beginning))
        return rows
