"""Insert solved examples before the question of each row of NeMo Gym's data, as earlier turns of its conversation, because
a small model needs them.

python examples/agents/nemo_gym_rows.py products.jsonl 3"""

import json
import sys
from pathlib import Path


def with_examples(rows: list[dict], shots: int) -> list[dict]:
    """Return all rows after the first `shots`, each with the first `shots` rows as solved examples."""
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
