"""Generation compared with transformers `generate`, paired in one run.

    uv run python tests/benchmarks/bench_generation.py [--batches 1 16 64] [--precision bfloat16 float32] [--repeats 3]
        [--threads 2]

Prompts are distinct and have about 40 tokens; 64 new tokens are sampled at temperature 1. With --until_stop a response
ends at its first full stop or line break, as responses in reinforcement learning end at their stop strings, or after 64
tokens. The rate then counts the tokens up to that end.
"""

import statistics
import time
from collections.abc import Sequence

import torch
from harness import Report, Times, begin, smollm2

PROMPT, NEW = 40, 64


def prompts(batch: int, vocab: int) -> torch.Tensor:
    return torch.randint(100, vocab - 100, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))


def stop_ids(folder: str) -> list[int]:
    """Return every token that contains a full stop or a line break."""
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
        out = generation.generate({"input_ids": ids, "input_lengths": torch.full((len(ids),), PROMPT)})
        return int(out["generation_lengths"].sum())

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
        return int((ends.cumsum(1) - ends == 0).sum())  # tokens up to the first end in each row

    return run


def measure(report: Report, what: str, sides: dict, ids: torch.Tensor) -> None:
    """Run both sides in turn. A rate counts the tokens up to the end of each response."""
    seconds, rates = {name: [] for name in sides}, {name: [] for name in sides}
    for turn in range(report.args.repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            tokens = run(ids)
            taken = time.perf_counter() - start
            if turn:  # turn 0 is a warm-up
                seconds[name].append(taken)
                rates[name].append(tokens / taken)
    for name, own in rates.items():
        ratio = statistics.median(ours / rate for ours, rate in zip(rates["ours"], own, strict=True))
        report.add(what, name, Times.of(seconds[name]), tokens_a_second=statistics.median(own), ratio=ratio)


def main() -> None:
    report = begin(__doc__, 3, batches=[1, 16, 64], precision=["bfloat16", "float32"], until_stop=False)
    folder = smollm2()
    stops = stop_ids(folder) if report.args.until_stop else []
    for precision in report.args.precision:
        sides = {"ours": ours(folder, precision, stops), "transformers": transformers(folder, precision, stops)}
        for batch in report.args.batches:
            measure(report, f"{precision}, batch {batch}", sides, prompts(batch, 49152))
    report.finish()


if __name__ == "__main__":
    main()
