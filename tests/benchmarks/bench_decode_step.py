"""A decode step of the engine, compared with its matrix products alone, and these with the fastest products of torch.

    uv run python tests/benchmarks/bench_decode_step.py [--batches 1 16 64] [--precision bfloat16 float32] [--threads 2]

The time of a step is the mean of the last 48 of 64 new tokens, for all sequences: a generation of 64 tokens minus one
of 16, with prompts of 40 tokens. The products are those of all layers and of the LM head, on the model's weights,
packed if decode steps read them packed (policy.generation.packed_weights), with nothing else in between. `of_step` is
their share of a step.

`exactness` is the time of a step divided by that of the same step with torch's products (oneDNN for bfloat16, MKL for
float32), whose sums depend on the batch and on the number of threads. It is below 1 if our products are faster. The
sides take turns in one run.
"""

import sys
from functools import partial

import torch
from harness import NEW, PROMPT, Report, alternate, begin, load_decoder, native_generation, smollm2
from nemo_rl_cpp._native import C

SHORT = 16


def step_weights(folder: str, precision: str) -> list[list[torch.Tensor]]:
    """Return qkv, o, gate_up and down of each layer, and the LM head, as the engine reads them.

    q, k and v are adjacent, and so are gate and up.
    """
    model, config = load_decoder(folder, precision, False)
    offsets, hidden = {name: offset for name, _, offset in model.layout}, config["hidden_size"]
    attention, keys = config["num_heads"] * config["head_dim"], config["num_kv_heads"] * config["head_dim"]

    def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
        return model.compute[offsets[f"{name}.weight"] :][: rows * columns].view(rows, columns)

    def layer(name: str) -> list[torch.Tensor]:
        return [matrix(f"{name}.self_attn.q_proj", attention + 2 * keys, hidden), matrix(f"{name}.self_attn.o_proj", hidden, attention),
                matrix(f"{name}.mlp.gate_proj", 2 * config["intermediate_size"], hidden),
                matrix(f"{name}.mlp.down_proj", hidden, config["intermediate_size"])]  # fmt: skip

    return [
        *(layer(f"model.layers.{i}") for i in range(len(config["layers"]))),
        [matrix("model.embed_tokens", config["vocab_size"], hidden)],
    ]


def our_products(weights: list[list[torch.Tensor]], batch: int):
    *layers, (head,) = weights
    dtype, (qkv, o, _gate_up, down) = head.dtype, layers[0]
    hidden, attn = torch.randn(batch, qkv.shape[1]).to(dtype), torch.randn(batch, o.shape[1]).to(dtype)
    y, act, logits = (
        torch.empty(batch, len(qkv), dtype=dtype),
        torch.empty(batch, down.shape[1], dtype=dtype),
        torch.empty(batch, len(head)),
    )
    out, packed = torch.zeros_like(hidden), C.PackedWeights()
    if batch <= packed.most_rows():
        for layer in weights:
            for i, w in enumerate(layer):
                packed.pack(w, i == 2)

    def run() -> None:
        for qkv, o, gate_up, down in layers:
            C.linear_forward(hidden, qkv, None, y, False, packed)
            C.linear_forward(attn, o, None, out, False, packed)
            C.linear_swiglu(hidden, gate_up, None, None, act, packed)
            C.linear_forward(act, down, None, out, False, packed)
        C.linear_forward(hidden, head, None, logits, False, packed)

    return run


def torch_products(weights: list[list[torch.Tensor]], batch: int):
    sides = [
        (torch.randn(batch, w.shape[1]).to(w.dtype), w.t(), torch.empty(batch, len(w), dtype=w.dtype))
        for layer in weights
        for w in layer
    ]

    def run() -> None:
        for x, w, y in sides:
            torch.mm(x, w, out=y)

    return run


def measure(report: Report, what: str, generations: dict, weights: list[list[torch.Tensor]], batch: int) -> None:
    ids = torch.randint(100, 49052, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    sides = {name: partial(run, ids) for name, run in generations.items()}
    sides |= {"ours": our_products(weights, batch), "torch": torch_products(weights, batch)}
    times = alternate(sides, report.args.repeats, warmup=1)
    step = times["long"].minus(times["short"], NEW - SHORT)
    products, peer = times["ours"], times["torch"]
    report.add(what, "decode step", step, tokens_a_second=batch / step.median)
    report.add(what, "products, ours", products, of_step=products.median / step.median)
    report.add(what, "products, torch", peer, exactness=step.median / (step.median - products.median + peer.median))


def main() -> None:
    report = begin(__doc__, 7, batches=[1, 16, 64], precision=["bfloat16", "float32"])
    folder = smollm2()
    for precision in report.args.precision:
        generations = {
            name: native_generation(folder, precision, new) for name, new in (("short", SHORT), ("long", NEW))
        }
        weights = step_weights(folder, precision)
        for batch in report.args.batches:
            measure(report, f"{precision}, batch {batch}", generations, weights, batch)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
