"""Peak memory of an engine that generates with one adapter, and with several over the same base model.

    uv run python tests/benchmarks/bench_adapters.py [--shapes smollm2 gemma3] [--precision bfloat16 q4_0] [--adapters 8]
        [--dim 8] [--new 16]

Each adapter has one request in the batch: a prompt of 64 tokens and --new sampled tokens. Each number of adapters runs
in a process of its own; its peak includes Python and torch, and is also given without what it had before it loaded the
model."""

import argparse
import json

import torch
from harness import load_decoder, peak_mb
from shapes import SHAPES, random_model
from sides import choices, in_new_process, options

PROMPT, QUANTISED = 64, ("q8_0", "q4_0", "nf4")


def side(folder: str, precision: str, count: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return (peak MB, peak MB without what was in memory before the model) of this process."""
    from nemo_rl_cpp._native import C
    from nemo_rl_cpp.config.lora import LayerKinds
    from nemo_rl_cpp.models.model_sizes import ModelSizes

    torch.set_num_threads(arguments.threads)
    before = peak_mb()
    is_quantised = precision in QUANTISED
    base, native = load_decoder(
        folder, "bfloat16" if is_quantised else precision, False, precision if is_quantised else None
    )
    layers, models = LayerKinds.of(ModelSizes.of(native)), []
    targets = [f"{module}.weight" for module in layers.modules() if ".experts." not in module]
    for seed in range(count):
        models.append(base.base())
        models[-1].adapt(arguments.dim, 4.0 * arguments.dim, targets, merge=False)
        draw = torch.Generator().manual_seed(seed)
        models[-1].masters.copy_(torch.randn(models[-1].masters.shape, generator=draw) * 0.01)
        models[-1].masters_changed()
    engine = C.ResidentEngine(
        C.NativeModelRunner(base), max_batch_size=count, prefill_chunk_tokens=PROMPT, max_model_len=PROMPT + arguments.new,
        max_cache_bytes=1 << 28, token_bytes=[],
    )  # fmt: skip
    rule = C.SamplingRule(temperature=1.0, top_p=1.0, top_k=0, greedy=False)
    for seed, model in enumerate(models):
        prompt = torch.randint(16, 4096, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
        engine.submit(prompt, rule=rule, max_new_tokens=arguments.new, stop_token_ids=[], stop_strings=[], samples=1, seed=5,
                      stream=0, draw_id=seed, first_sample=0, adapted=model)  # fmt: skip
    while engine.has_work:
        engine.step()
    return peak_mb(), peak_mb() - before


def main() -> None:
    arguments = options(
        __doc__, shapes=choices(("smollm2", *SHAPES), "smollm2", "gemma3"), precision=choices(("bfloat16", *QUANTISED), "bfloat16", "q4_0"),
        adapters=8, dim=8, new=16, threads=2,
    )  # fmt: skip
    for shape in arguments.shapes:
        with random_model(shape) as folder:
            for precision in arguments.precision:
                one, model = in_new_process(side, folder, precision, 1, arguments)
                several, models = in_new_process(side, folder, precision, arguments.adapters, arguments)
                print(json.dumps({
                    "shape": shape, "precision": precision, "adapters": arguments.adapters, "dim": arguments.dim,
                    "peak_mb_of_one": round(one), "peak_mb": round(several), "memory": round(several / one, 3),
                    "memory_without_python": round(models / model, 3),
                }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
