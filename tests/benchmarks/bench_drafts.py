"""Seconds of generation with and without drafts (csrc/generation/drafts.h), which give the same tokens.

    uv run python tests/benchmarks/bench_drafts.py [--repeats 5] [--texts 1 2 4 8] [--temperature 0.3 1.0] [--json out.json]

SmolLM2-135M-Instruct answers each prompt with `texts` responses of up to 200 tokens. The sides alternate in one run; a
ratio is the time without drafts divided by the time with them, its median over the repetitions."""

import time

import nemo_rl_cpp
import torch
from harness import Times, begin, spread

TASKS = {
    "explain": [
        "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell? Explain.",
        "List the first ten prime numbers, and explain for each why it is prime.",
        "Write a Python class Stack with push, pop and peek, and a test for each method.",
    ],
    "edit": [
        "Correct the grammar of this text: He go to school every days and he like to plays football with him friends"
        " after the school was finish. Then he go home and eat the dinner with him family.",
        "Print this program with the names x and y replaced by width and height:\n\ndef area(x, y):\n    return x * y\n\n"
        "def circumference(x, y):\n    return 2 * (x + y)\n\ndef is_square(x, y):\n    return x == y\n",
    ],
}


def main() -> None:
    report = begin(__doc__, 5, texts=[1, 2, 4, 8], temperature=[0.3, 1.0])
    model = nemo_rl_cpp.Model("smollm2-135m-instruct", precision="bfloat16")
    for task, questions in TASKS.items():
        chats = [[{"role": "user", "content": question}] for question in questions]
        texts = [
            model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
        ]
        prompts = [model.tokenizer(text)["input_ids"] for text in texts]
        for temperature in report.args.temperature:
            for count in report.args.texts:
                seconds: dict[str, list[float]] = {"without drafts": [], "ours": []}
                for _ in range(report.args.repeats):
                    tokens = []
                    for side, times in seconds.items():
                        engine = nemo_rl_cpp.Engine(model, max_new_tokens=200, temperature=temperature)
                        if side != "ours":
                            engine._native._runner.draft_rows = 0
                        begun = time.perf_counter()
                        tokens.append([engine.sample([prompt], n=count).tokens["input_ids"] for prompt in prompts])
                        times.append(time.perf_counter() - begun)
                    assert all(map(torch.equal, *tokens)), "drafts changed a token"
                metrics = engine._native.get_logger_metrics()
                ratio, low, high = spread([a / b for a, b in zip(*seconds.values(), strict=True)])
                shares = dict(
                    tokens_per_step=metrics["decode_tokens"] / metrics["steps"] / metrics["mean_batch_size"],
                    accepted=metrics["accepted_draft_tokens"] / max(metrics["draft_tokens"], 1),
                )
                what = f"{task}, {count} texts, temperature {temperature}"
                report.add(what, "ours", Times.of(seconds["ours"]), ratio=ratio, low=low, high=high, **shares)
    report.finish()


if __name__ == "__main__":
    main()
