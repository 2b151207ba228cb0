"""Clipped policy-gradient loss with gradient and metrics, compared with torch eager and torch.compile.

    uv run python tests/benchmarks/bench_clipped_pg_loss.py [--threads 1] [--repeats 15] [--device cuda] [--json out.json]

The shape is [256, 2048], on a GPU [4096, 8192]. The peer computes the same loss and metrics with torch operations. The
limit is the larger of two times, both measured in this run: the memory traffic (seven arrays read, one written) at the
copy bandwidth, and the loss's exponentials by torch.exp."""

import torch
from harness import alternate, begin, copy_bandwidth, tune_malloc
from nemo_rl_cpp import ops

EXPONENTIALS = 4  # per token: the ratio, e^|prev - generation|, e^(curr - generation), and one for the KL


def make(B, S, device):
    torch.manual_seed(0)
    gen = -torch.rand(B, S, device=device) * 3
    near = lambda x, scale: x + scale * torch.randn_like(x)  # noqa: E731
    lengths = torch.randint(S // 2, S, (B, 1), device=device)
    prev = near(gen, 0.01)
    data = {
        "generation_logprobs": gen, "prev_logprobs": prev, "reference_policy_logprobs": near(prev, 0.1),
        "advantages": torch.randn(B, 1, device=device).expand(B, S).contiguous(),
        "token_mask": (torch.arange(S, device=device)[None] < lengths).float(), "sample_mask": torch.ones(B, device=device),
    }  # fmt: skip
    return near(prev, 0.05)[:, 1:].contiguous(), data


def peer(x, gen, prev, ref, adv, token_mask, sample_mask):
    """Return (loss, metrics) of PPO's clipped loss with a k3 KL term."""
    mask = token_mask * sample_mask[:, None]
    count = mask.sum() + 1e-8
    mean = lambda v: (v * mask).sum() / count  # noqa: E731
    ratio = torch.exp(x - prev)
    clamped = ratio.clamp(0.8, 1.2)
    r = (ref - x).clamp(-20, 20)
    kl = (torch.exp(x - x.detach()) * (torch.exp(r) - 1 - r)).clamp(-10, 10)
    loss = mean(torch.max(-adv * ratio, -adv * clamped)) + 0.01 * mean(kl)
    with torch.no_grad():
        gap = prev - gen
        valid = mask != 0
        mid = torch.log(0.5 * (torch.exp(prev) + torch.exp(gen)))
        js = 0.5 * (torch.exp(prev - mid) - (prev - mid) - 1) + 0.5 * (torch.exp(gen - mid) - (gen - mid) - 1)
        infinity = torch.full_like(ratio, torch.inf)
        metrics = [
            mean(ratio.detach()), mean(clamped.detach()), torch.where(valid, ratio, infinity).min(), torch.where(valid, ratio, -infinity).max(),
            torch.where(valid, clamped, infinity).min(), torch.where(valid, clamped, -infinity).max(), mean(kl.detach()),
            mean(torch.exp(gap.abs())), mean(torch.exp(gap) - gap - 1), mean(torch.exp(-gap) + gap - 1), mean(js),
            mean(torch.exp(gap)), sample_mask.sum(), -mean(torch.exp(x - gen) * x),
        ]  # fmt: skip
    return loss, metrics


def step_of(function, x, tensors):
    leaf = x.clone().requires_grad_()

    def run():
        loss, _ = function(leaf, *tensors)
        return torch.autograd.grad(loss, leaf)

    return run


def main():
    report = begin(__doc__)
    B, S = (4096, 8192) if report.on_gpu else (256, 2048)
    x, data = make(B, S, report.args.device)
    config = ops.ClippedPGConfig(kl_penalty=0.01)
    keys = ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages", "token_mask")
    tensors = [*(data[k][:, 1:] for k in keys), data["sample_mask"]]
    inputs = ops.ClippedPGInputs(**data)
    ours = lambda: ops.clipped_pg_loss(x, inputs, config=config)  # noqa: E731
    eager = step_of(peer, x, tensors)
    torch.testing.assert_close(ours().grad_logprobs, eager()[0], rtol=1e-4, atol=1e-9)
    untuned = alternate({"eager": eager}, report.args.repeats)["eager"]
    tune_malloc()
    scratch = torch.empty_like(x)
    sides = {
        "torch eager, malloc tuned": eager,
        "torch.compile": step_of(torch.compile(peer), x, tensors),
        "ours": ours,
    }
    times = alternate(sides | {"exp": lambda: torch.exp(x, out=scratch)}, report.args.repeats)
    traffic = 8 * x.nbytes / copy_bandwidth(report.args.device)
    limit = max(traffic, EXPONENTIALS * times.pop("exp").median)
    report.compare(f"loss + gradient + metrics [{B}, {S}]", {"torch eager": untuned} | times, limit=limit)
    report.finish()


if __name__ == "__main__":
    main()
