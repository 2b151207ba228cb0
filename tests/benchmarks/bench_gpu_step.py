"""Training steps and decode steps on a GPU, with random bfloat16 weights of Qwen3-0.6B's shape.

    uv run python tests/benchmarks/bench_gpu_step.py [--only training decode] [--samples 16] [--length 1024]
        [--sequences 256]

Training is one step on `samples` x `length` tokens in one micro-batch: forward, loss, backward, clipping, AdamW. The
peer is transformers with sdpa and fused AdamW, and computes its logits in checkpointed chunks. `mfu` is 6 x parameters
x tokens per second, divided by the speed of torch's product of 8,192 x 8,192 x 8,192 in the same run.

The time of decode steps is a generation of 160 new tokens minus one of 32, with prompts of 128 tokens; the peer has a
static cache. `of_limit` is the time to read the weights and the KV cache of such a step at the bandwidth of a copy.
With --shape small and --device cpu everything runs on a laptop, to test this program."""

import sys
from functools import partial
from types import SimpleNamespace

import torch
from bench_training_step import chunked_loss, our_step
from harness import Report, alternate, begin, copy_bandwidth
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
from nemo_rl_cpp.models.hf_config import native_config
from nemo_rl_cpp.models.weights import initialize_weights
from sides import choice, choices
from training_samples import PeerBatch, Samples

QWEN3 = dict(model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, max_position_embeddings=40960)  # fmt: skip
SMALL = QWEN3 | dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
PROMPT, SHORT, LONG = 128, 32, 160


def our_model(config: dict, trainable: bool, device: str):
    model = C.DecoderModel(native_config(config), torch.bfloat16, trainable, device)
    initialize_weights(model, 0)
    return model


def their_model(config: dict, dtype: torch.dtype, device: str):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM._from_config(
        Qwen3Config(**{k: v for k, v in config.items() if k != "model_type"}), dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(device)


def their_step(config: dict, device: str):
    model = their_model(config, torch.float32, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)

    def run(batch: PeerBatch):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = chunked_loss(model, batch) / batch.trained.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def product_flops(device: str, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / alternate({"product": lambda: a @ b}, 5)["product"].median


def training(report: Report, config: dict) -> None:
    device, tokens = report.args.device, report.args.samples * report.args.length
    ids = torch.randint(
        0, config["vocab_size"], (report.args.samples, report.args.length), generator=torch.Generator().manual_seed(0)
    )
    model = our_model(config, True, device)
    parameters = model.compute.numel()
    samples = Samples.whole(ids)
    batch = PeerBatch(ids.to(device), samples.trained.to(device), {})
    ours, theirs = our_step(model, tokens), their_step(config, device)
    times = alternate({"ours": lambda: ours(samples), "transformers": lambda: theirs(batch)}, report.args.repeats)
    peak = product_flops(device, 8192 if report.on_gpu else 512)
    for name, time in times.items():
        rate = tokens / time.median
        report.add(f"training step, {tokens} tokens", name, time, tokens_a_second=rate, mfu=6 * parameters * rate / peak,
                   ratio=time.median / times["ours"].median)  # fmt: skip


def our_generation(model, new: int, enforce_eager: bool):
    config = {"max_new_tokens": new, "stop_token_ids": [], "vllm_cfg": {"enforce_eager": enforce_eager}}
    engine = NativeGeneration(
        native_runner(model, config), config, SimpleNamespace(pad_token_id=0, eos_token_id=1, all_special_ids=[0, 1])
    )
    return lambda ids: engine.generate({"input_ids": ids, "input_lengths": torch.full((len(ids),), PROMPT)})


def their_generation(model, new: int, device: str):
    settings = dict(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0
    )
    settings |= {"cache_implementation": "static"}

    def run(ids):
        ids = ids.to(device)
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    return run


def decode(report: Report, config: dict) -> None:
    device, B = report.args.device, report.args.sequences
    ids = torch.randint(2, config["vocab_size"], (B, PROMPT), generator=torch.Generator().manual_seed(0))
    model, peer = our_model(config, False, device), their_model(config, torch.bfloat16, device).eval()
    engines = {"ours": partial(our_generation, model, enforce_eager=False), "ours, enforce_eager": partial(our_generation, model, enforce_eager=True),
               "transformers": partial(their_generation, peer, device=device)}  # fmt: skip
    runs = {(name, new): partial(make(new=new), ids) for name, make in engines.items() for new in (SHORT, LONG)}
    times = alternate(runs, report.args.repeats, warmup=1)
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    cached = B * (PROMPT + (SHORT + LONG) / 2) * per_token
    limit = 2 * (model.compute.numel() + cached) / copy_bandwidth(device)
    steps = {name: times[name, LONG].minus(times[name, SHORT], LONG - SHORT) for name in engines}
    for name, step in steps.items():
        report.add(f"decode step, {B} sequences", name, step, tokens_a_second=B / step.median, of_limit=limit / step.median,
                   ratio=step.median / steps["ours"].median)  # fmt: skip


def main() -> None:
    parts = {"training": training, "decode": decode}
    report = begin(
        __doc__, 5, "cuda", only=choices(parts), samples=16, length=1024, sequences=256, shape=choice("qwen3-0.6b", "small")
    )  # fmt: skip
    for name in report.args.only:
        parts[name](report, SMALL if report.args.shape == "small" else QWEN3)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
