"""Trains random weights of a given shape for two steps on sequences of the maximum length, and prints the peak of the
process's memory and its forecast in bytes: python measured_run.py FOLDER '{"policy__precision": "bfloat16", ...}'."""

import json
import random
import sys
from pathlib import Path

import nemo_rl_cpp
from nemo_rl_cpp.metrics import memory
from nemo_rl_cpp.models.memory import forecast

LENGTH = 256


def main(folder: str, given: str) -> None:
    keys = json.loads(given)
    shape = {"initializer_range": 0.02, "max_position_embeddings": 2 * LENGTH, "tie_word_embeddings": True}
    draw = random.Random(0)
    memory.reset_peak_rss = lambda: False  # the metrics of a run measure phases
    prompts = ["".join(draw.choices("0123456789", k=LENGTH // 2)) for _ in range(8)]

    def reward(completions, **columns):  # not all equal: equal rewards need no backward pass
        return [draw.random() for _ in completions]

    options = {"num_prompts_per_step": 2, "num_generations": 4, "num_steps": 2} | {
        name: keys.pop(name) for name in ("num_prompts_per_step", "num_generations") if name in keys
    }
    result = nemo_rl_cpp.train_grpo(
        "tiny-random", prompts, reward, max_new_tokens=LENGTH // 2, max_length=LENGTH, log_dir=Path(folder), precision=keys.pop("precision", "bfloat16"),
        policy__hf_config_overrides=shape | keys.pop("shape"), logger__report=False, data__max_input_seq_length=LENGTH // 2 + 1, **options, **keys,
    )  # fmt: skip
    exact = all(row["token_mult_prob_error"] == 1 for row in result.history)
    phases = {phase.name: phase.total for phase in forecast(result.config)}
    told = {"peak": memory.peak_rss_bytes(), "forecast": max(phases.values()), "phases": phases, "exact": exact}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
