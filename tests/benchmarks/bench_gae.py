"""Generalized advantage estimation, compared with a Python loop that is vectorised over a [T, B] layout.

    uv run python tests/benchmarks/bench_gae.py [--threads 1] [--repeats 15] [--device cuda] [--json out.json]

The shape is [512, 4096], on a GPU [4096, 8192]. The limit is the memory traffic (values and mask read, advantages and
returns written) at the copy bandwidth of this run.
"""

import torch
from harness import alternate, begin, copy_bandwidth, tune_malloc
from nemo_rl_cpp import ops

GAMMA, LAMBDA = 0.99, 0.95


def peer(token_rewards, values, mask):
    """Return advantages and returns of [T, B] inputs. Each step of the loop is a few operations on contiguous rows."""
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    last, following = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for t in range(len(values) - 1, -1, -1):
        m, v = mask[t], values[t]
        step = token_rewards[t] + GAMMA * following - v + GAMMA * LAMBDA * last
        last = last + m * (step - last)
        following = following + m * (v - following)
        advantages[t] = last * m
        returns[t] = last + v
    return advantages, returns


def main():
    report = begin(__doc__)
    (B, S), on = (4096, 8192) if report.on_gpu else (512, 4096), {"device": report.args.device}
    torch.manual_seed(0)
    rewards, values = torch.randn(B, **on), torch.randn(B, S, **on)
    lengths = torch.randint(S // 2, S + 1, (B,), **on)
    mask = (torch.arange(S, **on)[None] < lengths[:, None]).float()
    token_rewards = torch.zeros(B, S, **on)
    token_rewards[torch.arange(B, **on), lengths - 1] = rewards
    layout = [t.t().contiguous() for t in (token_rewards, values, mask)]
    ours = lambda: ops.gae(rewards, values, mask, ops.GAEConfig(GAMMA, LAMBDA))  # noqa: E731
    mine, theirs = ours(), peer(*layout)
    torch.testing.assert_close(mine.advantages, theirs[0].t(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mine.returns, theirs[1].t(), rtol=1e-3, atol=1e-3)
    untuned = alternate({"loop": lambda: peer(*layout)}, 3, warmup=1)["loop"]
    fresh = alternate({"ours": ours}, report.args.repeats)["ours"]
    tune_malloc()
    times = alternate({"loop": lambda: peer(*layout)}, 3, warmup=1) | alternate({"ours": ours}, report.args.repeats)
    limit = 4 * values.nbytes / copy_bandwidth(report.args.device)
    what, seconds = f"GAE [{B}, {S}]", times["ours"].median
    report.add(what, "loop over [T, B]", untuned, ratio=untuned.median / fresh.median)
    report.add(what, "loop over [T, B], malloc tuned", times["loop"], ratio=times["loop"].median / seconds)
    report.add(what, "ours, fresh results", fresh, of_limit=limit / fresh.median)
    report.add(what, "ours, malloc tuned", times["ours"], of_limit=limit / seconds, limit_ms=limit * 1e3)
    report.finish()


if __name__ == "__main__":
    main()
