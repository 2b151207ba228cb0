"""Puts solved examples before the question of each row of NeMo Gym, as earlier turns of its conversation. A small model needs them.

python examples/agents/nemo_gym_rows.py products.jsonl 3
"""

import json
import sys
from pathlib import Path


def with_examples(rows: list[dict], shots: int) -> list[dict]:
    """The rows behind the first `shots` ones, each with these as examples."""
    turns = []
    for row in rows[:shots]:
        turns += [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    return [
        row | {"responses_create_params": {"input": [*turns, {"role": "user", "content": row["question"]}]}}
        for row in rows[shots:]
    ]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    made = with_examples([json.loads(line) for line in path.read_text().splitlines()], int(sys.argv[2]))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
