"""The losses and their metrics as float64 torch operations, so that autograd gives reference gradients.

Imports nothing of the package."""

import math

import torch

EPS = 1e-8


def masked(v, mask, norm, dim=None):
    v = torch.where(mask != 0, v, torch.zeros_like(v))
    total = (v * mask).sum() if dim is None else (v * mask).sum(dim)
    return total / (norm + EPS)


def calculate_kl(lp, ref, kind, in_clamp, out_clamp, w=None, score_weight=False):
    raw = ref - lp
    r = raw
    if in_clamp is not None:
        r = raw.clamp(-in_clamp, in_clamp)
        if w is not None:
            w = torch.where(r != raw, w.detach(), w)
    if kind == "k3" and score_weight and (r.abs() > 8).any():
        return large_k3(r, raw, w, lp, out_clamp)
    k = {"k1": lambda: -r, "k2": lambda: r**2 / 2, "k3": lambda: torch.special.expm1(r) - r}[kind]()
    if w is not None:
        k = k * w
    return k if out_clamp is None else k.clamp(-out_clamp, out_clamp)


def large_k3(r, raw, w, lp, out_clamp):
    """Return w k3(r) with w = exp(lp - constant), and with the gradient d/dlp = w (k3 - (e^r - 1)) = -w r.

    Autograd would compute this gradient as a difference of two huge numbers. So the value is written as value + slope
    (lp - sg(lp))."""
    r, raw, w = r.detach(), raw.detach(), w.detach()
    k = w * (torch.special.expm1(r) - r)
    slope = torch.where(r == raw, -w * r, torch.zeros_like(r))
    k = k + slope * (lp - lp.detach())
    return k if out_clamp is None else k.clamp(-out_clamp, out_clamp)


def clipped_pg_loss(x, data, c, num_toks, num_seqs, num_positive_toks=None, largest=float("inf")):
    """Return (loss, metrics).

    `x` is [B, N]. The tensors of `data` are [B, N + 1], and their first column has no prediction. `c` is the complete
    configuration. The loss is differentiable in x and data["curr_logprobs_unfiltered"]. An importance weight that is
    not below `largest` counts as an overflow, and becomes 0."""
    A, g, T = (data[k][:, 1:] for k in ("advantages", "generation_logprobs", "token_mask"))
    s = data["sample_mask"]
    M = T * s[:, None]
    # values at masked positions must not enter the graph, not even times 0
    fill = lambda v: torch.where(M != 0, v, torch.zeros_like(v))  # noqa: E731
    x, g, A = fill(x), fill(g), fill(A)
    p = x.detach() if c["force_on_policy_ratio"] else fill(data["prev_logprobs"][:, 1:])
    length = T.sum(1)

    def reduce(v):
        if c["token_level_loss"]:
            return masked(v, M, num_toks)
        rows = masked(v, T, length, dim=1)
        if c["loss_agg_mode"] in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
            divisor = c["loss_scale_factor"] if c["loss_agg_mode"].endswith("norm") else 1.0
            rows = (torch.where(T != 0, v, torch.zeros_like(v)) * T).sum(1) / divisor
        return masked(rows, s, num_seqs)

    penalty = fill(data["kl_cov_penalty"][:, 1:]) if c["name"] == "kl_cov" else None
    R, Rc, C = (
        clipped_term(c, x, p, A, T, length)
        if c["name"] == "clipped_pg"
        else named_term(c, x, p, g, A, T, length, penalty)
    )
    W, out_of_bounds = importance_weights(c, p, g, T, M, length, largest)
    if c["use_importance_sampling_correction"] and c["name"] != "vespo":
        C = C * W
    loss, kl = reduce(C), torch.zeros(())
    beta = 0.0 if c["use_kl_in_reward"] else c["reference_policy_kl_penalty"]
    if beta:
        u = fill(data["curr_logprobs_unfiltered"]) if "curr_logprobs_unfiltered" in data else x
        ref = fill(data["reference_policy_logprobs"][:, 1:])
        w = torch.exp(u - (g if c["use_on_policy_kl_approximation"] else u.detach()))
        w = torch.where(w < largest, w, torch.zeros_like(w))
        clamps = c["kl_input_clamp_value"], c["kl_output_clamp_value"]
        kl = reduce(calculate_kl(u, ref, c["reference_policy_kl_type"], *clamps, w, True))
        loss = loss + beta * kl
    nll = torch.zeros(())
    if c["positive_example_nll_weight"] > 0 and data.get("rewards") is not None:
        positive = M * (data["rewards"] > 0).to(M.dtype)[:, None]
        nll = masked(-x, positive, positive.sum() if num_positive_toks is None else num_positive_toks)
        loss = loss + c["positive_example_nll_weight"] * nll
    mean = lambda v: float(masked(v.detach(), M, num_toks))  # noqa: E731
    by_row = c["sequence_level_importance_ratios"] or of_whole_rows(c)
    row_weights = W[:, 0] if W.shape[1] else torch.ones_like(s)
    metrics = {
        "loss": float(loss.detach()), "kl_penalty": float(kl.detach()), "positive_nll_loss": float(nll.detach()),
        "num_valid_samples": float(s.sum()), "probs_ratio": mean(R), "probs_ratio_clamped": mean(Rc),
        "sampling_importance_ratio": float(masked(row_weights, s, num_seqs)) if by_row else mean(W),
        **between_policies(c["reference_policy_kl_type"], x.detach(), p, g, mean),
    }  # fmt: skip
    for name, ratio in (("probs_ratio", R.detach()[M != 0]), ("probs_ratio_clamped", Rc.detach()[M != 0])):
        metrics[f"{name}_min"] = float(ratio.min()) if len(ratio) else math.inf
        metrics[f"{name}_max"] = float(ratio.max()) if len(ratio) else -math.inf
    if c["truncated_importance_sampling_type"] == "seq-mask-tis":
        metrics["is_oob_ratio"] = float(masked(out_of_bounds, s, num_seqs))
    elif c["truncated_importance_sampling_type"] is not None:
        metrics["is_oob_ratio"] = mean(out_of_bounds)
    return loss, metrics


def between_policies(kind, x, p, g, mean):
    """Return the metrics that compare the current, the old and the generating policy."""
    middle = torch.logaddexp(p, g) - math.log(2)
    k3 = lambda r: torch.special.expm1(r) - r  # noqa: E731
    return {
        "token_mult_prob_error": mean((g - p).abs().exp()), "gen_kl_error": mean(calculate_kl(g, p, kind, None, None)),
        "policy_kl_error": mean(calculate_kl(p, g, kind, None, None)), "approx_entropy": mean(-torch.exp(x - g) * x),
        "js_divergence_error": mean(0.5 * (k3(p - middle) + k3(g - middle))),
    }  # fmt: skip


def clipped_term(c, x, p, A, T, length):
    """Return (ratio R, clamped ratio, loss term C) of the clipped loss, each [B, N]."""
    if c["force_on_policy_ratio"]:
        R = Rc = torch.exp(x - x.detach())
    elif c["disable_ppo_ratio"]:
        R = Rc = x
    else:
        log_ratio = x - p
        if c["sequence_level_importance_ratios"]:
            log_ratio = masked(log_ratio, T, length, dim=1)[:, None].expand_as(x)
        R = log_ratio.exp()
        Rc = R.clamp(1 - c["ratio_clip_min"], 1 + c["ratio_clip_max"])
    C = -A * Rc.detach() * x if c["use_cispo"] else torch.max(-A * R, -A * Rc)
    if c["ratio_clip_c"] is not None:
        C = torch.where(A < 0, torch.min(C, -A * c["ratio_clip_c"]), C)
    return R, Rc, C


def named_term(c, x, p, g, A, T, length, penalty):
    """Return (ratio R, R again, loss term C) of the loss that `name` selects, each [B, N]."""
    gap, ratio = x - p, torch.exp(x - p)
    if c["name"] == "nll":
        return x, x, -x
    if c["name"] == "kl_cov":  # arXiv 2505.22617, eq. 12; KL at the chosen tokens, as verl's kl_cov
        return ratio, ratio, -A * ratio + penalty * gap.abs()
    if c["name"] == "sapo":  # arXiv 2511.20347, eq. 5
        tau = torch.where(A > 0, torch.full_like(A, c["sapo_temperature_pos"]), c["sapo_temperature_neg"])
        # unlike torch.sigmoid's gradient, this form's does not round to 0 if the gate is nearly open
        return ratio, ratio, -A * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    if c["name"] == "dro":
        return ratio, ratio, -(A * x - c["dro_beta"] / 2 * gap**2)
    if c["name"] == "gmpo":  # clips log ratios only in the direction of the advantage (arXiv 2507.20673, eq. 4)
        sign = torch.sign(A)
        clipped = sign * torch.min(sign * gap, sign * gap.clamp(-c["ratio_clip_min"], c["ratio_clip_max"]))
        row = masked(clipped, T, length, dim=1).exp()[:, None].expand_as(x)
        return row, row, -A * row
    if c["name"] == "vespo":  # phi(w) = e^(lambda (1 - w)) w^k by the sign of the advantage (arXiv 2602.10693)
        log_w = (gap.clamp(-20, 20) * T).sum(1)
        if c["use_importance_sampling_correction"]:
            log_w = log_w + ((p - g).clamp(math.log(1e-8), 20) * T).sum(1)
        log_w = log_w.clamp(math.log(1e-8), 20)[:, None]
        k = torch.where(A >= 0, torch.full_like(A, c["vespo_k_pos"]), c["vespo_k_neg"])
        lam = torch.where(A >= 0, torch.full_like(A, c["vespo_lambda_pos"]), c["vespo_lambda_neg"])
        return ratio, ratio, -A * torch.exp(lam * (1 - log_w.exp()) + k * log_w).detach() * x
    new, old = x.detach().exp(), p.exp()  # DPPO, arXiv 2602.04879
    if c["name"] == "dppo_tv":
        kept = torch.where(A > 0, new - old <= c["ratio_clip_max"], old - new <= c["ratio_clip_min"])
    else:
        others, others_before = (1 - new).clamp(min=0), (1 - old).clamp(min=0)
        kl = old * (p - x.detach()) + others_before * torch.log((others_before + 1e-8) / (others + 1e-8))
        up, down = (kl <= c["ratio_clip_max"]) | (new <= old), (kl <= c["ratio_clip_min"]) | (new >= old)
        kept = torch.where(A > 0, up, down)
    capped = ratio if c["ratio_clip_c"] is None else ratio.clamp(max=c["ratio_clip_c"])
    return ratio, ratio, torch.where(kept, -A * capped.detach() * x, torch.zeros_like(x))


def of_whole_rows(c):
    """Return whether the truncation weights whole sequences, as in verl's rollout correction. seq-mask-tis does not."""
    kind = c["truncated_importance_sampling_type"] or ""
    return kind.startswith(("seq-", "geo-")) and kind != "seq-mask-tis"


def importance_weights(c, p, g, T, M, length, largest):
    """Return (weights [B, N], mask of weights out of bounds: [B, N], or [B] with seq-mask-tis)."""
    kind, hi = c["truncated_importance_sampling_type"], c["truncated_importance_sampling_ratio"]
    lo = c["truncated_importance_sampling_ratio_min"]
    if of_whole_rows(c):
        log_w = ((p - g) * T).sum(1)
        log_w = log_w / (length + EPS) if kind.startswith("geo") else log_w
        W = log_w.clamp(-20, 20).exp()[:, None].expand_as(p)
    elif c["sequence_level_importance_ratios"]:
        W = torch.exp(((p - g) * M).sum(1))[:, None].expand_as(p)
    else:
        W = torch.exp(p - g)
    W = torch.where(W < largest, W, torch.zeros_like(W)).detach()
    if kind is None:
        return W, None
    if kind == "seq-mask-tis":
        mean = masked(p - g, T, length, dim=1).exp()
        kept = ((mean >= lo) & (mean <= hi)).to(W.dtype)
        return W * kept[:, None], 1 - kept
    lo = 0.0 if lo is None else lo
    kept = (W >= lo) & (W <= hi)
    return (W.clamp(lo, hi) if kind.endswith("tis") else W * kept), (~kept).to(W.dtype)


def mse_value_loss(v, data, scale, cliprange, num_toks):
    """Return (loss, metrics). v, returns and values are [B, S], and the mask is not shifted."""
    mask = data["token_mask"] * data["sample_mask"][:, None]
    fill = lambda t: torch.where(mask != 0, t, torch.zeros_like(t))  # noqa: E731
    v, returns, old = fill(v), fill(data["returns"]), fill(data["values"])
    error, clipfrac = (v - returns) ** 2, torch.zeros_like(v)
    if cliprange:
        clipped = (torch.clamp(v, old - cliprange, old + cliprange) - returns) ** 2
        clipfrac, error = (clipped > error).to(v.dtype), torch.max(error, clipped)
    loss = 0.5 * scale * masked(error, mask, num_toks)
    means = {"vf_clipfrac": clipfrac, "returns_mean": returns, "values_mean": v, "returns_sq_mean": returns**2}
    means["residual_sq_mean"] = (returns - v) ** 2
    metrics = {name: float(masked(value.detach(), mask, num_toks)) for name, value in means.items()}
    seen = v.detach()[mask != 0]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 0.0)
    return loss, metrics | {
        "loss": float(loss.detach()), "values_min": low, "values_max": high, "num_valid_samples": len(v),
    }  # fmt: skip
