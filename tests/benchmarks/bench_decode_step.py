"""A decode step of the engine, compared with its matrix products alone, and these with the fastest products of torch.

    uv run python tests/benchmarks/bench_decode_step.py [--batches 1 16 64] [--precision bfloat16 float32] [--threads 2]
        [--shape smollm2|qwen3.5|olmoe|gemma3|gemma4|llama3]

The model is SmolLM2-135M, or with `--shape` one with random weights (shapes.py). The time of a step is the mean of the
last 48 of 64 new tokens, for all sequences: a generation of 64 tokens minus one of 16, with prompts of 40 tokens. The
products are those of all layers and of the LM head, on the model's weights, packed if decode steps read them packed
(policy.generation.packed_weights), with nothing else in between. `of_step` is their share of a step.

`exactness` is the time of a step divided by that of the same step with torch's products (oneDNN for bfloat16, MKL for
float32), whose sums depend on the batch and on the number of threads. It is below 1 if our products are faster. The
sides take turns in one run.
"""

import json
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import NEW, PROMPT, Report, alternate, begin, load_decoder, native_generation
from nemo_rl_cpp._native import C
from shapes import SHAPES, random_model
from sides import choice
from training_samples import IDS

SHORT = 16
SAME_INPUT = ("k_proj", "v_proj", "up_proj", "in_proj_z", "in_proj_b", "in_proj_a")
"""Matrices that are read in one product with those before them."""


def matrices(model, head: str) -> dict[str, torch.Tensor]:
    """Return the matrices that a step reads, by the name of the first of those that are multiplied together."""
    found, start, rows = {}, {}, {}
    for name, shape, offset in model.layout:
        name, part = name.removesuffix(".weight"), name.split(".")[-2]
        if len(shape) != 2 or part == "conv1d" or ("layers" not in name and name != head):
            continue
        if part not in SAME_INPUT:
            first = name
            start[first], rows[first] = offset, 0
        rows[first] += shape[0]
        found[first] = model.compute[start[first] :][: rows[first] * shape[1]].view(rows[first], shape[1])
    return found


@dataclass
class Product:
    """Rows of x times a matrix; `gated`: the gate and up matrices, whose activation the engine fuses."""

    x: torch.Tensor
    w: torch.Tensor
    gated: bool
    sums: bool  # the result is float32

    def result(self, precision: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(len(self.x), len(self.w), dtype=precision or self.w.dtype)


def step_products(folder: str, precision: str, batch: int) -> list[Product]:
    """Return the products of a step with `batch` tokens, in order, on the weights as the engine reads them.

    A token's experts are random.
    """
    model, config = load_decoder(folder, precision, False)
    head = "lm_head" if any(name.startswith("lm_head") for name, *_ in model.layout) else "model.embed_tokens"
    settings = json.loads((Path(folder) / "config.json").read_text())
    experts, draw, products = settings.get("num_experts", 0), random.Random(batch), []
    for name, w in sorted(matrices(model, head).items(), key=lambda item: item[0] == head):
        count = batch
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            if name.endswith(".experts.0.gate_proj"):
                chosen = Counter(
                    e for _ in range(batch) for e in draw.sample(range(experts), settings["num_experts_per_tok"])
                )
            count = chosen[int(expert[1])]
        if count > 0:
            gated = name.endswith("gate_proj") and config["activation"] == "silu"
            x = torch.randn(count, w.shape[1]).to(w.dtype)
            products.append(Product(x, w, gated, name == head or name.endswith("mlp.gate")))
    return products


def our_products(products: list[Product]):
    packed = C.PackedWeights()
    if max(len(p.x) for p in products) <= packed.most_rows():
        for p in products:
            packed.pack(p.w, p.gated)
    results = [
        p.x.new_empty(len(p.x), len(p.w) // 2) if p.gated else p.result(torch.float32 if p.sums else None)
        for p in products
    ]

    def run() -> None:
        for p, y in zip(products, results, strict=True):
            if p.gated:
                C.linear_swiglu(p.x, p.w, None, None, y, packed)
            else:
                C.linear_forward(p.x, p.w, None, y, False, packed)

    return run


def torch_products(products: list[Product]):
    sides = [(p.x, p.w.t(), p.result()) for p in products]

    def run() -> None:
        for x, w, y in sides:
            torch.mm(x, w, out=y)

    return run


def measure(report: Report, what: str, generations: dict, products: list[Product], batch: int) -> None:
    ids = torch.randint(IDS.start, IDS.stop, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    sides = {name: partial(run, ids) for name, run in generations.items()}
    sides |= {"ours": our_products(products), "torch": torch_products(products)}
    times = alternate(sides, report.args.repeats, warmup=1)
    step = times["long"].minus(times["short"], NEW - SHORT)
    products, peer = times["ours"], times["torch"]
    report.add(what, "decode step", step, tokens_a_second=batch / step.median)
    report.add(what, "products, ours", products, of_step=products.median / step.median)
    report.add(what, "products, torch", peer, exactness=step.median / (step.median - products.median + peer.median))


def main() -> None:
    report = begin(__doc__, 7, batches=[1, 16, 64], precision=["bfloat16", "float32"], shape=choice("smollm2", *SHAPES))
    with random_model(report.args.shape) as folder:
        for precision in report.args.precision:
            generations = {
                name: native_generation(folder, precision, new) for name, new in (("short", SHORT), ("long", NEW))
            }
            for batch in report.args.batches:
                products = step_products(folder, precision, batch)
                measure(report, f"{report.args.shape}, {precision}, batch {batch}", generations, products, batch)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
