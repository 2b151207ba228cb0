"""Generation against transformers `generate`, paired in one run: distinct prompts of ~40 tokens, 64 new tokens, temperature 1.

    uv run python tests/benchmarks/bench_generation.py [--batches 1 16 64] [--precision bfloat16 float32] [--rounds 3] [--threads 2]

With --until-stop a text ends at its first full stop or line break, as answers in reinforcement learning end at theirs, after 64
tokens at most; a rate then counts the tokens up to that end.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence

import torch

PROMPT, NEW = 40, 64


def prompts(batch: int, vocab: int) -> torch.Tensor:
    return torch.randint(100, vocab - 100, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))


def stop_ids(folder: str) -> list[int]:
    """Every token with a full stop or a line break in it."""
    from nemo_rl_cpp.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(folder)
    return [i for i in range(49152) if set(".\n") & set(tokenizer.decode([i]))]


def ours(folder: str, precision: str, stops: Sequence[int] = (), new: int = NEW):
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.tokenizer import Tokenizer
    from nemo_rl_cpp.models.policy.lm_policy import Policy

    config = PolicyConfig(model_name=folder, precision=precision, max_total_sequence_length=PROMPT + NEW,
                          generation={"max_new_tokens": new, "stop_token_ids": list(stops)})  # fmt: skip
    config.fill_defaults()
    generation = Policy(None, config, Tokenizer.from_pretrained(folder), init_reference_model=False).create_generation()

    def run(ids) -> int:
        return int(
            generation.generate({"input_ids": ids, "input_lengths": torch.full((len(ids),), PROMPT)})[
                "generation_lengths"
            ].sum()
        )

    return run


def transformers(folder: str, precision: str, stops: Sequence[int] = ()):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW, pad_token_id=0)
    settings |= {"eos_token_id": list(stops)} if stops else {"min_new_tokens": NEW}

    stop_tokens = torch.tensor(list(stops), dtype=torch.long)

    def run(ids) -> int:
        with torch.inference_mode():
            new = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, PROMPT:]
        ends = torch.isin(new, stop_tokens).long()
        return int((ends.cumsum(1) - ends == 0).sum())  # up to a row's first end

    return run


def tokens_per_second(run, ids) -> float:
    start = time.perf_counter()
    tokens = run(ids)
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--until-stop", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from nemo_rl_cpp.hub.sources import resolve_model

    folder = str(resolve_model("smollm2-135m-instruct"))
    stops = stop_ids(folder) if arguments.until_stop else []
    rows = []
    for precision in arguments.precision:
        sides = {"ours": ours(folder, precision, stops), "transformers": transformers(folder, precision, stops)}
        for batch in arguments.batches:
            ids = prompts(batch, 49152)
            rates = {name: [] for name in sides}
            for round_ in range(arguments.rounds + 1):
                for name, run in sides.items():
                    rate = tokens_per_second(run, ids)
                    if round_:  # the first is a warm-up
                        rates[name].append(rate)
            ratios = [a / b for a, b in zip(rates["ours"], rates["transformers"], strict=True)]
            row = {"precision": precision, "batch": batch, "until_stop": arguments.until_stop, "ours_tok_s": round(statistics.median(rates["ours"])),
                   "transformers_tok_s": round(statistics.median(rates["transformers"])), "ratio": round(statistics.median(ratios), 2),
                   "ratio_min": round(min(ratios), 2), "ratio_max": round(max(ratios), 2)}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    print(
        json.dumps(
            {
                "machine": platform.processor() or platform.machine(),
                "threads": arguments.threads,
                "torch": torch.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
