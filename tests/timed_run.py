"""Trains random weights of a given shape on responses of the maximum length, and prints the seconds of a step, measured
and foretold after each step: python timed_run.py FOLDER '{"policy__precision": "bfloat16", ...}'."""

import json
import random
import statistics
import sys
from pathlib import Path

import nemo_rl_cpp
from nemo_rl_cpp.models.time_forecast import Lengths, TimeForecast

LENGTH, STEPS = 256, 4


def main(folder: str, given: str) -> None:
    keys = json.loads(given)
    shape = {"initializer_range": 0.02, "max_position_embeddings": 2 * LENGTH, "tie_word_embeddings": True}
    draw, train = random.Random(0), getattr(nemo_rl_cpp, f"train_{keys.pop('algorithm', 'grpo')}")
    prompts = ["".join(draw.choices("0123456789", k=LENGTH // 4 - 1)) for _ in range(16)]
    foretold: list[float] = []

    class Foretell(nemo_rl_cpp.Callback):
        def on_step(self, event):
            foretold.append(TimeForecast.of(event.run.config, Lengths(LENGTH // 4)).seconds(1, begins=False))

    def reward(completions, **columns):  # not all equal: equal rewards need no backward pass
        return [draw.random() for _ in completions]

    options = {"num_prompts_per_step": 2, "num_generations": 8} | keys.pop("batch", {})
    result = train(
        "tiny-random", prompts, reward, num_steps=STEPS, max_new_tokens=LENGTH * 3 // 4, max_length=LENGTH, log_dir=Path(folder), precision=keys.pop("precision", "bfloat16"),
        policy__hf_config_overrides=shape | keys.pop("shape"), logger__report=False, callbacks=Foretell(), **options, **keys,
    )  # fmt: skip
    seconds = [row["seconds"] for row in result.history[1:]]
    print(json.dumps({"measured": statistics.median(seconds), "foretold": statistics.median(foretold)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
