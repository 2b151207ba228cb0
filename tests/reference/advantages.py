"""Slow float64 references of the advantage estimators, sample by sample, which import nothing of the package."""

import itertools
import math

import numpy as np
import torch
from reference.losses import calculate_kl


def group_baseline(groups, rewards, valid, leave_one_out, std_rewards=None):
    q_all = rewards if std_rewards is None else std_rewards
    base, std = np.zeros(len(rewards)), np.zeros(len(rewards))
    for i in range(len(rewards)):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        total = sum(valid[j] for j in members)
        if total <= 1:
            base[i] = rewards[i]
            continue
        k = total - (1 if leave_one_out else 0)
        others = [j for j in members if not (leave_one_out and j == i)]
        base[i] = math.fsum(rewards[j] * valid[j] for j in others) / k
        mean = math.fsum(q_all[j] * valid[j] for j in others) / k
        used = [q_all[j] for j in others if valid[j]]
        if sum(valid[j] for j in others) == k:
            variance = (
                0.0 if len(set(used)) < 2 else math.fsum(valid[j] * (q_all[j] - mean) ** 2 for j in others) / (k - 1)
            )
        else:
            square = math.fsum(q_all[j] ** 2 * valid[j] for j in others) / k
            variance = (square - mean**2) * (k / (k - 1)) if k != 1 else math.nan
        std[i] = math.sqrt(variance) if variance > 0 else 0.0
    return base, std


def grpo(rewards, baseline, std, normalize):
    out = rewards - baseline
    return np.array([a / (s + 1e-6) if normalize and s > 0 else a for a, s in zip(out, std, strict=True)])


def moments(values, mask):
    """Return (count, mean, sum of squared deviations) of the values with mask != 0."""
    picked = [(float(v), float(m)) for v, m in zip(np.ravel(values), np.ravel(mask), strict=True) if m]
    n = math.fsum(m for _, m in picked)
    if n == 0:
        return 0.0, 0.0, 0.0
    mean = math.fsum(v * m for v, m in picked) / n
    return n, mean, math.fsum(m * (v - mean) ** 2 for v, m in picked)


def whiten_biased(values, mask, zero_masked):
    n, mean, m2 = moments(values, mask)
    if n == 0:
        return np.zeros_like(values), True
    out = (values - mean) / math.sqrt(max(m2 / n, 1e-8))
    return (np.where(mask != 0, out, 0.0) if zero_masked else out), n <= 1


def whiten_unbiased(values, mask, eps=1e-8):
    """Return the whitened values, and whether there were too few.

    `eps` is what masked_mean adds to its count. It is 0 in float32, where rounding removes it."""
    n, mean, m2 = moments(values, mask)
    if n <= 1:
        return np.zeros_like(values), True
    shifted = mean * n / (n + eps)
    variance = (m2 + n * (mean - shifted) ** 2) / (n + eps) * n / (n - 1)
    return np.where(mask != 0, (values - shifted) / math.sqrt(variance + 1e-8), 0.0), False


def token_penalty(coef, kind, logprobs, reference, mask):
    out, kept = np.zeros(mask.shape), mask != 0
    out[kept] = (
        coef * calculate_kl(torch.tensor(logprobs[kept]), torch.tensor(reference[kept]), kind, 20.0, 10.0).numpy()
    )
    return out


def reinforce_plus_plus(advantages, mask, logprobs=None, reference=None, kl_coef=0.0, kl_type="k3"):
    tokens = np.repeat(np.asarray(advantages, np.float64)[:, None], mask.shape[1], 1)
    if logprobs is not None:
        tokens = tokens - token_penalty(kl_coef, kl_type, logprobs, reference, mask)
    return whiten_biased(tokens, mask, True)


def gae_pass(token_rewards, values, mask, gamma, lambdas):
    advantages = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        next_value = last = 0.0
        for t in range(mask.shape[1] - 1, -1, -1):
            if mask[b, t]:
                delta = token_rewards[b, t] + gamma * next_value - values[b, t]
                last = delta + gamma * lambdas[b] * last
                next_value = values[b, t]
            advantages[b, t] = last
    return advantages


def gae(rewards, values, mask, gamma, lam, lam_value=None, lam_policy=None, alpha=0.0, logprobs=None, reference=None,
        kl_coef=0.0, kl_type="k3", normalize=False, eps=1e-8):  # fmt: skip
    """Return (advantages, returns, whether the whitening was degenerate)."""
    B = mask.shape[0]
    token_rewards = np.zeros(mask.shape)
    if logprobs is not None:
        token_rewards -= token_penalty(kl_coef, kl_type, logprobs, reference, mask)
    for b in range(B):
        valid = np.flatnonzero(mask[b])
        if len(valid):
            token_rewards[b, valid[-1]] += rewards[b]
    policy = [lam if lam_policy is None else lam_policy] * B
    if alpha > 0:
        policy = [min(max(1 - 1 / max(alpha * mask[b].sum(), 1.0), 0.0), 1.0) for b in range(B)]
    value = [lam if lam_value is None else lam_value] * B
    if lam_value is None and lam_policy is None and not alpha > 0:
        value = policy
    returns = gae_pass(token_rewards, values, mask, gamma, value) + values
    advantages = gae_pass(token_rewards, values, mask, gamma, policy)
    degenerate = False
    if normalize:
        advantages, degenerate = whiten_unbiased(advantages, mask, eps)
    return np.where(mask != 0, advantages, 0.0), returns, degenerate


def opo(groups, rewards, lengths, valid):
    out = np.zeros(len(rewards))
    for i in range(len(rewards)):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        total = math.fsum(lengths[j] for j in members)
        baseline = math.fsum(lengths[j] * rewards[j] for j in members) / total if total else rewards[i]
        out[i] = rewards[i] - baseline
    return out


def best_of_group(groups, rewards, valid, normalize):
    """Return the advantages of verl's grpo_passk."""
    out = np.zeros(len(rewards))
    for group in set(groups):
        members = [j for j in range(len(rewards)) if groups[j] == group and valid[j]]
        if len(members) < 2:
            continue
        best = max(members, key=lambda j: (rewards[j], -j))
        gap = rewards[best] - max(rewards[j] for j in members if j != best)
        spread = np.std([rewards[j] for j in members], ddof=1)
        out[best] = gap / (spread + 1e-6) if normalize else gap
    return out


def pass_at_k(groups, rewards, valid, k):
    """Return the advantages of pass@k by enumerating every set of k responses.

    A set's reward is 1 if one of its responses is correct. A response gets the mean of its sets' advantages."""
    out = np.zeros(len(rewards))
    for i in range(len(rewards)):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        if i not in members:
            continue
        sets = list(itertools.combinations(members, min(k, len(members))))
        of_sets = [float(any(rewards[j] > 0 for j in chosen)) for chosen in sets]
        mean, spread = np.mean(of_sets), np.std(of_sets)
        own = [(r - mean) / spread if spread else 0.0 for r, chosen in zip(of_sets, sets, strict=True) if i in chosen]
        out[i] = np.mean(own)
    return out


def opd(teacher, student, mask, kl_type="reverse", weight=0.5, cap=10.0, alpha=1.0, centre=False, outcome=None):
    """Return the advantages [B, S] of a distillation, token by token. `outcome` [B, S] is added unchanged."""
    out, valid = np.zeros(mask.shape), [(b, t) for b, t in np.argwhere(mask != 0) if math.isfinite(student[b, t])]
    for b, t in valid:
        p, q = math.exp(student[b, t]), math.exp(teacher[b, t])
        ratio = (alpha * q + (1 - alpha) * p) / p
        forward, reverse = min(ratio, cap) - 1, math.log(ratio)
        out[b, t] = {
            "reverse": reverse,
            "forward": forward,
            "mixed": weight * forward + (1 - weight) * reverse,
            "jensen": 0.5 * math.log((1 + ratio) / 2),
        }[kl_type]
    if centre and valid:
        mean = math.fsum(out[place] for place in map(tuple, valid)) / len(valid)
        for place in map(tuple, valid):
            out[place] -= mean
    if outcome is not None:
        for b, t in valid:
            out[b, t] += outcome[b, t]
    return out
