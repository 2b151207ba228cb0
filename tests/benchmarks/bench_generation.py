"""Generation against transformers `generate`, paired in one run: distinct prompts of ~40 tokens, 64 new tokens, temperature 1.

    uv run python tests/benchmarks/bench_generation.py [--batches 1 16 64] [--precision bfloat16 float32] [--rounds 3] [--threads 2]
"""

import argparse
import json
import platform
import statistics
import time

import torch

PROMPT, NEW = 40, 64


def prompts(batch: int, vocab: int) -> torch.Tensor:
    return torch.randint(100, vocab - 100, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))


def ours(folder: str, precision: str):
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.tokenizer import Tokenizer
    from nemo_rl_cpp.models.policy.lm_policy import Policy

    config = PolicyConfig(model_name=folder, precision=precision, max_total_sequence_length=PROMPT + NEW,
                          generation={"max_new_tokens": NEW, "stop_token_ids": []})  # fmt: skip
    config.fill_defaults()
    generation = Policy(None, config, Tokenizer.from_pretrained(folder), init_reference_model=False).create_generation()
    return lambda ids: generation.generate({"input_ids": ids, "input_lengths": torch.full((len(ids),), PROMPT)})


def transformers(folder: str, precision: str):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()
    settings = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)

    def run(ids):
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    return run


def seconds(run, ids) -> float:
    start = time.perf_counter()
    run(ids)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from nemo_rl_cpp.models.sources import resolve_model

    folder = str(resolve_model("smollm2-135m-instruct"))
    rows = []
    for precision in arguments.precision:
        sides = {"ours": ours(folder, precision), "transformers": transformers(folder, precision)}
        for batch in arguments.batches:
            ids = prompts(batch, 49152)
            times = {name: [] for name in sides}
            for round_ in range(arguments.rounds + 1):
                for name, run in sides.items():
                    elapsed = seconds(run, ids)
                    if round_:  # the first is a warm-up
                        times[name].append(elapsed)
            rate = {name: batch * NEW / statistics.median(t) for name, t in times.items()}
            ratios = [b / a for a, b in zip(times["ours"], times["transformers"], strict=True)]
            row = {"precision": precision, "batch": batch, "ours_tok_s": round(rate["ours"]), "transformers_tok_s": round(rate["transformers"]),
                   "ratio": round(statistics.median(ratios), 2), "ratio_min": round(min(ratios), 2), "ratio_max": round(max(ratios), 2)}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    print(json.dumps({"machine": platform.processor() or platform.machine(), "threads": arguments.threads, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
