"""Generalized advantage estimation, [512, 4096], against a Python loop vectorised over a [T, B] layout.

    uv run python tests/benchmarks/bench_gae.py [--threads 1] [--repeats 15] [--json out.json]

The limit is the traffic (values and mask read, advantages and returns written) at the copy bandwidth of this run.
"""

import torch
from harness import alternate, begin, copy_bandwidth, tune_malloc

from nemo_rl_cpp import ops

B, S, GAMMA, LAMBDA = 512, 4096, 0.99, 0.95


def peer(token_rewards, values, mask):
    """Advantages and returns from [T, B] inputs: each step of the loop is a few operations on contiguous rows."""
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    last, following = torch.zeros(values.shape[1]), torch.zeros(values.shape[1])
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
    random = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(B, generator=random), torch.randn(B, S, generator=random)
    lengths = torch.randint(S // 2, S + 1, (B,), generator=random)
    mask = (torch.arange(S)[None] < lengths[:, None]).float()
    token_rewards = torch.zeros(B, S)
    token_rewards[torch.arange(B), lengths - 1] = rewards
    layout = [t.t().contiguous() for t in (token_rewards, values, mask)]
    ours = lambda: ops.gae(rewards, values, mask, gamma=GAMMA, gae_lambda=LAMBDA)  # noqa: E731
    mine, theirs = ours(), peer(*layout)
    torch.testing.assert_close(mine.advantages, theirs[0].t(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mine.returns, theirs[1].t(), rtol=1e-3, atol=1e-3)
    untuned = alternate({"loop": lambda: peer(*layout)}, 3, warmup=1)["loop"]
    fresh = alternate({"ours": ours}, report.args.repeats)["ours"]
    tune_malloc()
    times = alternate({"loop": lambda: peer(*layout)}, 3, warmup=1) | alternate({"ours": ours}, report.args.repeats)
    limit = 4 * values.nbytes / copy_bandwidth()
    what, seconds = f"GAE [{B}, {S}]", times["ours"].median
    report.add(what, "loop over [T, B]", untuned, ratio=untuned.median / fresh.median)
    report.add(what, "loop over [T, B], malloc tuned", times["loop"], ratio=times["loop"].median / seconds)
    report.add(what, "ours, fresh results", fresh, of_limit=limit / fresh.median)
    report.add(what, "ours, malloc tuned", times["ours"], of_limit=limit / seconds, limit_ms=limit * 1e3)
    report.finish()


if __name__ == "__main__":
    main()
