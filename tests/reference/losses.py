"""Slow float64 references of the losses, token by token in plain Python; they import nothing of the package.

Positions whose mask is 0 are skipped, never multiplied by 0. Gradients are in losses_torch.py.
"""

import math

import numpy as np

EPS = 1e-8


def kl_value(kind, r):
    if kind == "k1":
        return -r
    if kind == "k2":
        return r * r / 2
    if abs(r) < 1e-3:  # the direct form loses its digits here
        return r * r / 2 + r**3 / 6 + r**4 / 24 + r**5 / 120
    return math.exp(r) - 1 - r


def clamp(v, lo, hi):
    return min(max(v, lo), hi)


def kl(kind, logprob, ref, in_clamp, out_clamp, weight=1.0):
    r = ref - logprob
    if in_clamp is not None:
        r = clamp(r, -in_clamp, in_clamp)
    v = weight * kl_value(kind, r)
    return v if out_clamp is None else clamp(v, -out_clamp, out_clamp)


def safe_exp(v):
    try:
        return math.exp(v)
    except OverflowError:
        return math.inf


def finite_exp(v, largest=math.inf):
    """e^v, 0 where the type that holds it (largest number `largest`) overflows."""
    e = safe_exp(v)
    return e if math.isfinite(e) and e < largest else 0.0


def js(p, g):
    top = max(p, g)
    m = top + math.log(0.5 * math.exp(p - top) + 0.5 * math.exp(g - top))
    return 0.5 * (kl_value("k3", p - m) + kl_value("k3", g - m))


class Sums(dict):
    def add(self, name, value):
        self[name] = self.get(name, 0.0) + value


def row_ratio(c, x, p, g, a, tm):
    """exp(mean log ratio) of a row for GSPO and GMPO, the log of the product of its ratios for VESPO."""
    valid = [t for t in range(len(x)) if tm[t]]
    if c["name"] == "vespo":
        total = sum(clamp(x[t] - p[t], -20, 20) * tm[t] for t in valid)
        if c["use_importance_sampling_correction"]:
            total += sum(clamp(p[t] - g[t], math.log(1e-8), 20) * tm[t] for t in valid)
        return total
    gap = lambda t: gmpo_log_ratio(c, x[t] - p[t], a[t]) if c["name"] == "gmpo" else x[t] - p[t]  # noqa: E731
    return math.exp(sum(gap(t) * tm[t] for t in valid) / (tm.sum() + EPS))


def row_divisor(c, length):
    """What a sequence-level loss divides a row's sum by (verl's loss_agg_mode)."""
    return {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": c["loss_scale_factor"]}.get(
        c["loss_agg_mode"], length
    )


def gmpo_log_ratio(c, d, a):
    """What a token adds to GMPO's log ratio: clipped where the advantage gains from it (arXiv 2507.20673, eq. 4)."""
    sign = float(a > 0) - float(a < 0)
    return sign * min(sign * d, sign * clamp(d, -c["ratio_clip_min"], c["ratio_clip_max"]))


def vespo_weight(c, log_w, a):
    """phi(w) = e^(lambda (1 - w)) w^k by the sign of the advantage (arXiv 2602.10693)."""
    log_w = clamp(log_w, math.log(1e-8), 20.0)
    side = "pos" if a >= 0 else "neg"
    return math.exp(c[f"vespo_lambda_{side}"] * (1 - math.exp(log_w)) + c[f"vespo_k_{side}"] * log_w)


def named_term(c, x, p, a, row, penalty):
    """(R, C) of one token of the losses that `name` chooses. `row`: GMPO's ratio, VESPO's log weight; `penalty`: KL-Cov's."""
    ratio = safe_exp(x - p)
    if c["name"] == "sapo":  # arXiv 2511.20347, eq. 5
        tau = c["sapo_temperature_pos"] if a > 0 else c["sapo_temperature_neg"]
        return ratio, -a * 4 / tau / (1 + safe_exp(-tau * (ratio - 1)))
    if c["name"] == "dro":
        return ratio, -(a * x - c["dro_beta"] / 2 * (x - p) ** 2)
    if c["name"] == "kl_cov":  # arXiv 2505.22617, eq. 12; KL at the chosen tokens, as verl's kl_cov
        return ratio, (-a * ratio if a else 0.0) + (penalty * abs(x - p) if penalty else 0.0)
    if c["name"] == "gmpo":
        return row, (-a * row if a else 0.0)
    if c["name"] == "vespo":
        return ratio, -a * vespo_weight(c, row, a) * x
    new, old = math.exp(x), math.exp(p)  # DPPO, arXiv 2602.04879
    if c["name"] == "dppo_tv":
        kept = new - old <= c["ratio_clip_max"] if a > 0 else old - new <= c["ratio_clip_min"]
    else:
        others, others_before = max(1 - new, 0), max(1 - old, 0)
        kl = old * (p - x) + others_before * math.log((others_before + 1e-8) / (others + 1e-8))
        kept = kl <= c["ratio_clip_max"] or new <= old if a > 0 else kl <= c["ratio_clip_min"] or new >= old
    capped = ratio if c["ratio_clip_c"] is None else min(ratio, c["ratio_clip_c"])
    return ratio, (-a * capped * x if kept else 0.0)


def policy_term(c, x, p, a, seq_ratio, penalty=0.0):
    """(R, clamped R, C) of one token."""
    if c["name"] == "nll":
        return x, x, -x
    if c["name"] not in ("clipped_pg", "clip_cov"):
        r, loss = named_term(c, x, p, a, seq_ratio, penalty)
        return r, r, loss
    lo, hi = 1 - c["ratio_clip_min"], 1 + c["ratio_clip_max"]
    if c["force_on_policy_ratio"]:
        r = rc = 1.0
    elif c["disable_ppo_ratio"]:
        r = rc = x
    else:
        r = seq_ratio if c["sequence_level_importance_ratios"] else safe_exp(x - p)
        rc = clamp(r, lo, hi)
    if c["use_cispo"]:
        return r, rc, -a * rc * x
    loss = max(-a * r, -a * rc)
    if c["ratio_clip_c"] is not None and a < 0:
        loss = min(loss, -a * c["ratio_clip_c"])
    return r, rc, loss


def truncate(c, w):
    """(weight, out of bounds) under tis and icepop."""
    hi, lo, kind = (c["truncated_importance_sampling_ratio"], c["truncated_importance_sampling_ratio_min"],
                    c["truncated_importance_sampling_type"])  # fmt: skip
    if kind in ("tis", "seq-tis", "geo-tis"):
        lo = 0.0 if lo is None else lo
        return clamp(w, lo, hi), float(w > hi or w < lo)
    if kind in ("icepop", "seq-icepop", "geo-icepop"):
        kept = lo <= w <= hi
        return (w if kept else 0.0), float(not kept)
    return w, 0.0


def clipped_pg_loss(x, data, c, num_toks, num_seqs, num_positive_toks=None, largest=math.inf):
    """(loss, metrics). x [B, N]; data arrays [B, N + 1] as the real loss takes them; c: the complete configuration.
    `largest`: an importance weight beyond it counts as overflowed, that is 0.
    """
    x = np.asarray(x, np.float64)
    B, N = x.shape
    shift = {
        k: np.asarray(v, np.float64)[:, 1:] for k, v in data.items() if np.ndim(v) == 2 and np.shape(v)[1] == N + 1
    }
    A, g, T = shift["advantages"], shift["generation_logprobs"], shift["token_mask"]
    p = x if c["force_on_policy_ratio"] else shift["prev_logprobs"]
    s = np.asarray(data["sample_mask"], np.float64)
    u = np.asarray(data.get("curr_logprobs_unfiltered", x), np.float64)
    beta = 0.0 if c["use_kl_in_reward"] else c["reference_policy_kl_penalty"]
    kind, gspo, seq_mask = c["reference_policy_kl_type"], c["sequence_level_importance_ratios"], False
    seq_mask = c["truncated_importance_sampling_type"] == "seq-mask-tis"
    level = {"seq": "sequence", "geo": "geometric"}.get((c["truncated_importance_sampling_type"] or "")[:3], "token")
    level = "token" if seq_mask else level
    penalties = shift.get("kl_cov_penalty", np.zeros_like(x))
    S = Sums()
    ratios, clamped = [], []
    positive = 0.0
    for b in range(B):
        length = T[b].sum() + EPS
        by_row = (gspo or c["name"] == "vespo") and s[b]
        seq_ratio = row_ratio(c, x[b], p[b], g[b], A[b], T[b]) if by_row else 1.0
        row_w = (
            finite_exp(sum((p[b, t] - g[b, t]) * T[b, t] * s[b] for t in range(N) if T[b, t] * s[b]), largest)
            if gspo
            else 1.0
        )
        if level != "token":  # verl's rollout correction: the logarithm is held in [-20, 20]
            log_w = sum((p[b, t] - g[b, t]) * T[b, t] for t in range(N) if T[b, t] * s[b])
            row_w = math.exp(clamp(log_w / length if level == "geometric" else log_w, -20, 20))
        kept = 1.0
        if seq_mask and s[b]:
            mean = math.exp(sum((p[b, t] - g[b, t]) * T[b, t] for t in range(N) if T[b, t]) / length)
            kept = float(
                c["truncated_importance_sampling_ratio_min"] <= mean <= c["truncated_importance_sampling_ratio"]
            )
            S.add("oob", (1 - kept) * s[b])
        actor = k_sum = 0.0
        for t in range(N):
            m = T[b, t] * s[b]
            if m == 0:
                continue
            r, rc, loss = policy_term(c, x[b, t], p[b, t], A[b, t], seq_ratio, penalties[b, t])
            w, oob = truncate(c, row_w if gspo or level != "token" else finite_exp(p[b, t] - g[b, t], largest))
            w *= kept
            actor += T[b, t] * loss * (w if c["use_importance_sampling_correction"] and c["name"] != "vespo" else 1.0)
            if beta:
                ref = shift["reference_policy_logprobs"][b, t]
                iw = finite_exp(u[b, t] - g[b, t], largest) if c["use_on_policy_kl_approximation"] else 1.0
                k_sum += T[b, t] * kl(kind, u[b, t], ref, c["kl_input_clamp_value"], c["kl_output_clamp_value"], iw)
            ratios.append(r)
            clamped.append(rc)
            S.add("probs_ratio", r * m)
            S.add("probs_ratio_clamped", rc * m)
            S.add("token_mult_prob_error", safe_exp(abs(g[b, t] - p[b, t]) * m) * m)
            S.add("gen_kl_error", kl(kind, g[b, t], p[b, t], None, None) * m)
            S.add("policy_kl_error", kl(kind, p[b, t], g[b, t], None, None) * m)
            S.add("js_divergence_error", js(p[b, t], g[b, t]) * m)
            S.add("approx_entropy", -safe_exp(x[b, t] - g[b, t]) * x[b, t] * m)
            S.add("weights", w * m)
            if not seq_mask:
                S.add("oob", oob * m)
            if c["positive_example_nll_weight"] > 0 and data.get("rewards") is not None and data["rewards"][b] > 0:
                S.add("nll", -x[b, t] * m)
                positive += m
        if gspo or level != "token":
            S.add("row_weights", truncate(c, row_w)[0] * s[b])
        outer = 1.0 if c["token_level_loss"] else 1.0 / row_divisor(c, length)
        S.add("actor", actor * s[b] * outer)
        S.add("kl", k_sum * s[b] * outer)
    return finish(
        c, S, beta, ratios, clamped, s, num_toks, num_seqs, positive if num_positive_toks is None else num_positive_toks
    )


def finish(c, S, beta, ratios, clamped, s, num_toks, num_seqs, num_positive):
    toks, seqs = num_toks + EPS, num_seqs + EPS
    outer = toks if c["token_level_loss"] else seqs
    nll = S.get("nll", 0.0) / (num_positive + EPS)
    loss = S.get("actor", 0.0) / outer + beta * S.get("kl", 0.0) / outer + c["positive_example_nll_weight"] * nll
    kind = c["truncated_importance_sampling_type"] or ""
    by_row = c["sequence_level_importance_ratios"] or (kind[:4] in ("seq-", "geo-") and kind != "seq-mask-tis")
    metrics = {
        "loss": loss,
        "probs_ratio_min": min(ratios, default=math.inf),
        "probs_ratio_max": max(ratios, default=-math.inf),
        "probs_ratio_clamped_min": min(clamped, default=math.inf),
        "probs_ratio_clamped_max": max(clamped, default=-math.inf),
        "kl_penalty": S.get("kl", 0.0) / outer if beta else 0.0,
        "sampling_importance_ratio": S.get("row_weights", 0.0) / seqs if by_row else S.get("weights", 0.0) / toks,
        "num_valid_samples": float(s.sum()),
        "positive_nll_loss": nll,
    }
    for name in ("probs_ratio", "probs_ratio_clamped", "token_mult_prob_error", "gen_kl_error", "policy_kl_error",
                 "js_divergence_error", "approx_entropy"):  # fmt: skip
        metrics[name] = S.get(name, 0.0) / toks
    if c["truncated_importance_sampling_type"] is not None:
        by_row = c["truncated_importance_sampling_type"] == "seq-mask-tis"
        metrics["is_oob_ratio"] = S.get("oob", 0.0) / (seqs if by_row else toks)
    return loss, metrics


def mse_value_loss(v, data, scale, cliprange, num_toks):
    """(loss, metrics). v, returns and values [B, S], the mask unshifted."""
    v, ret, old = (np.asarray(a, np.float64) for a in (v, data["returns"], data["values"]))
    mask = np.asarray(data["token_mask"], np.float64) * np.asarray(data["sample_mask"], np.float64)[:, None]
    S = Sums()
    seen = []
    for m, y, r, o in zip(mask.ravel(), v.ravel(), ret.ravel(), old.ravel(), strict=True):
        if m == 0:
            continue
        error = (y - r) ** 2
        if cliprange:
            clipped = (clamp(y, o - cliprange, o + cliprange) - r) ** 2
            S.add("vf_clipfrac", m * (clipped > error))
            error = max(error, clipped)
        S.add("loss", 0.5 * scale * error * m)
        for name, value in (
            ("returns_mean", r),
            ("values_mean", y),
            ("returns_sq_mean", r * r),
            ("residual_sq_mean", (r - y) ** 2),
        ):
            S.add(name, value * m)
        seen.append(y)
    names = ("loss", "vf_clipfrac", "returns_mean", "values_mean", "returns_sq_mean", "residual_sq_mean")
    metrics = {name: S.get(name, 0.0) / (num_toks + EPS) for name in names}
    metrics |= {
        "values_min": min(seen, default=0.0),
        "values_max": max(seen, default=0.0),
        "num_valid_samples": v.shape[0],
    }
    return metrics["loss"], metrics
