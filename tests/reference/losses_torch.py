"""The losses written with torch operations, so that autograd gives reference gradients. Imports nothing of the package."""

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
    """w k3(r) where w = exp(lp - constant): d/dlp = w (k3 - (e^r - 1)) = -w r, which autograd would take as a
    difference of two huge numbers. Written as value + slope (lp - sg(lp)) instead."""
    r, raw, w = r.detach(), raw.detach(), w.detach()
    k = w * (torch.special.expm1(r) - r)
    slope = torch.where(r == raw, -w * r, torch.zeros_like(r))
    k = k + slope * (lp - lp.detach())
    return k if out_clamp is None else k.clamp(-out_clamp, out_clamp)


def clipped_pg_loss(x, data, c, num_toks, num_seqs, num_positive_toks=None, largest=float("inf")):
    """The scalar loss, differentiable in x and data["curr_logprobs_unfiltered"]."""
    A, g, T = (data[k][:, 1:] for k in ("advantages", "generation_logprobs", "token_mask"))
    s = data["sample_mask"]
    M = T * s[:, None]
    # values at masked positions must not reach the graph, not even times 0
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

    if c["name"] != "clipped_pg":
        penalty = fill(data["kl_cov_penalty"][:, 1:]) if c["name"] == "kl_cov" else None
        C = named_term(c, x, p, g, A, T, length, penalty)
    elif c["force_on_policy_ratio"]:
        R = Rc = torch.exp(x - x.detach())
    elif c["disable_ppo_ratio"]:
        R = Rc = x
    else:
        log_ratio = x - p
        if c["sequence_level_importance_ratios"]:
            log_ratio = masked(log_ratio, T, length, dim=1)[:, None].expand_as(x)
        R = log_ratio.exp()
        Rc = R.clamp(1 - c["ratio_clip_min"], 1 + c["ratio_clip_max"])
    if c["name"] == "clipped_pg":
        C = -A * Rc.detach() * x if c["use_cispo"] else torch.max(-A * R, -A * Rc)
    if c["ratio_clip_c"] is not None and c["name"] == "clipped_pg":
        C = torch.where(A < 0, torch.min(C, -A * c["ratio_clip_c"]), C)

    if c["use_importance_sampling_correction"] and c["name"] != "vespo":
        C = C * importance_weights(c, p, g, T, M, length, largest)
    loss = reduce(C)
    beta = 0.0 if c["use_kl_in_reward"] else c["reference_policy_kl_penalty"]
    if beta:
        u = fill(data["curr_logprobs_unfiltered"]) if "curr_logprobs_unfiltered" in data else x
        ref = fill(data["reference_policy_logprobs"][:, 1:])
        w = torch.exp(u - (g if c["use_on_policy_kl_approximation"] else u.detach()))
        w = torch.where(w < largest, w, torch.zeros_like(w))
        k = calculate_kl(
            u, ref, c["reference_policy_kl_type"], c["kl_input_clamp_value"], c["kl_output_clamp_value"], w, True
        )
        loss = loss + beta * reduce(k)
    if c["positive_example_nll_weight"] > 0 and data.get("rewards") is not None:
        positive = M * (data["rewards"] > 0).to(M.dtype)[:, None]
        count = positive.sum() if num_positive_toks is None else num_positive_toks
        loss = loss + c["positive_example_nll_weight"] * masked(-x, positive, count)
    return loss


def named_term(c, x, p, g, A, T, length, penalty):
    """C of the losses that `name` chooses, [B, N]."""
    gap, ratio = x - p, torch.exp(x - p)
    if c["name"] == "nll":
        return -x
    if c["name"] == "kl_cov":
        return -A * ratio + penalty * gap.abs()
    if c["name"] == "sapo":
        tau = torch.where(A > 0, torch.full_like(A, c["sapo_temperature_pos"]), c["sapo_temperature_neg"])
        return -A * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if c["name"] == "dro":
        return -(A * x - c["dro_beta"] / 2 * gap**2)
    if c["name"] == "gmpo":
        sign = torch.sign(A)
        clipped = sign * torch.min(sign * gap, sign * gap.clamp(-c["ratio_clip_min"], c["ratio_clip_max"]))
        return -A * masked(clipped, T, length, dim=1).exp()[:, None]
    if c["name"] == "vespo":
        log_w = (gap.clamp(-20, 20) * T).sum(1)
        if c["use_importance_sampling_correction"]:
            log_w = log_w + ((p - g).clamp(math.log(1e-8), 20) * T).sum(1)
        log_w = log_w.clamp(math.log(1e-8), 20)[:, None]
        k = torch.where(A >= 0, torch.full_like(A, c["vespo_k_pos"]), c["vespo_k_neg"])
        lam = torch.where(A >= 0, torch.full_like(A, c["vespo_lambda_pos"]), c["vespo_lambda_neg"])
        return -A * torch.exp(lam * (1 - log_w.exp()) + k * log_w).detach() * x
    new, old = x.detach().exp(), p.exp()
    if c["name"] == "dppo_tv":
        kept = torch.where(A > 0, new - old <= c["ratio_clip_max"], old - new <= c["ratio_clip_min"])
    else:
        others, others_before = (1 - new).clamp(min=0), (1 - old).clamp(min=0)
        kl = old * (p - x.detach()) + others_before * torch.log((others_before + 1e-8) / (others + 1e-8))
        up, down = (kl <= c["ratio_clip_max"]) | (new <= old), (kl <= c["ratio_clip_min"]) | (new >= old)
        kept = torch.where(A > 0, up, down)
    capped = ratio if c["ratio_clip_c"] is None else ratio.clamp(max=c["ratio_clip_c"])
    return torch.where(kept, -A * capped.detach() * x, torch.zeros_like(x))


def importance_weights(c, p, g, T, M, length, largest):
    kind, hi = c["truncated_importance_sampling_type"], c["truncated_importance_sampling_ratio"]
    lo = c["truncated_importance_sampling_ratio_min"]
    if (kind or "")[:4] in ("seq-", "geo-") and kind != "seq-mask-tis":
        log_w = ((p - g) * T).sum(1)
        log_w = log_w / (length + EPS) if kind.startswith("geo") else log_w
        W = log_w.clamp(-20, 20).exp()[:, None].expand_as(p)
    elif c["sequence_level_importance_ratios"]:
        W = torch.exp(((p - g) * M).sum(1))[:, None].expand_as(p)
    else:
        W = torch.exp(p - g)
    W = torch.where(W < largest, W, torch.zeros_like(W)).detach()
    if kind in ("tis", "seq-tis", "geo-tis"):
        W = W.clamp(0.0 if lo is None else lo, hi)
    elif kind in ("icepop", "seq-icepop", "geo-icepop"):
        W = torch.where((W >= lo) & (W <= hi), W, torch.zeros_like(W))
    elif kind == "seq-mask-tis":
        mean = masked(p - g, T, length, dim=1).exp()
        W = W * ((mean >= lo) & (mean <= hi)).to(W.dtype)[:, None]
    return W


def mse_value_loss(v, data, scale, cliprange, num_toks):
    mask = data["token_mask"] * data["sample_mask"][:, None]
    error = (v - data["returns"]) ** 2
    if cliprange:
        clipped = torch.clamp(v, data["values"] - cliprange, data["values"] + cliprange)
        error = torch.max(error, (clipped - data["returns"]) ** 2)
    return 0.5 * scale * masked(error, mask, num_toks)
