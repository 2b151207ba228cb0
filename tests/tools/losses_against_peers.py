"""Compares the losses and advantages with those of TRL and verl, computed by their own code from the same drawn numbers.

    uv pip install --target DIR --no-deps trl verl omegaconf tensordict hydra-core codetiming pyvers cloudpickle \
        antlr4-python3-runtime==4.9.3
    python tests/tools/losses_against_peers.py DIR

DIR is searched after the environment's own packages, so both sides use the same torch. A row shows the largest
differences over 40 batches, in float64 and in float32: that of the value, relative to the larger of itself and the sum of
the gradient's absolute values (terms may cancel), and that of the gradient with respect to the log-probabilities,
relative to its largest element. The exit status is 1 if one is above 1e-6 (float64) or 1e-5 (float32). The last lines
name what has no counterpart or is defined otherwise."""

import sys
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import torch
from nemo_rl_cpp.algorithms import advantage_estimator as estimators
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, MseValueLossFn
from nemo_rl_cpp.algorithms.step import select_tokens
from peers import HIGH, LENGTH, LOW, draw, trl, verl, verl_advantages, verl_kl, verl_values

BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5}


def ours(b, A="tokens", leaf="x", **keys):
    own = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": LOW, "ratio_clip_max": HIGH, "ratio_clip_c": None}
    loss = ClippedPGLossConfig(**own | keys)
    chosen = SimpleNamespace(
        advantages=getattr(b, A).flatten(), old_logprobs=b.x.flatten(), entropies=b.entropies.flatten(), tokens={},
        is_valid=b.mask.flatten() != 0, num_tokens=b.mask.numel(),
    )  # fmt: skip
    select_tokens(chosen, loss, 0, 0)  # by the current policy, as the peers do
    penalty = chosen.tokens.get("kl_cov_penalty", b.mask.flatten())
    data = {
        "advantages": chosen.advantages.view(b.x.shape), "kl_cov_penalty": penalty.view(b.x.shape), "token_mask": b.mask,
        "prev_logprobs": b.old, "generation_logprobs": b.gen, "reference_policy_logprobs": b.ref,
    }  # fmt: skip
    data = {key: torch.cat([torch.zeros_like(b.x[:, :1]), value], 1) for key, value in data.items()}
    data |= {"sample_mask": torch.ones_like(b.rewards), "curr_entropies": b.entropies}
    result = ClippedPGLossFn(loss).native(b.x, data, float(len(b.x)), float(b.mask.sum()))
    return result.loss, result.grad_logprobs if leaf == "x" else result.grad_entropy


def our_values(b, **keys):
    data = {"returns": b.returns, "values": b.values, "token_mask": b.mask, "sample_mask": torch.ones_like(b.rewards)}
    result = MseValueLossFn(keys).native(b.predictions, data, float(len(b.x)), float(b.mask.sum()))
    return result.loss, result.grad_values


def advantages(b, estimator, **keys):
    given = {"logprobs_policy": b.old, "sum_pi_squared": b.squares, "group_id": b.groups}
    given |= {"values": b.values} if estimator.startswith("Gen") else {"repeated_batch": {"reward_baseline": b.greedy}}
    cls = getattr(estimators, estimator)
    result = cls(keys, None).compute_advantage(b.groups[:, None], b.rewards, b.mask, **given)
    n = b.mask.sum()
    if estimator.startswith("ReinforcePlusPlus"):  # NeMo RL divides by the biased standard deviation, verl by the other
        result = result * ((n - 1) / n).sqrt()
    return torch.cat([part * b.mask for part in (result if isinstance(result, tuple) else (result,))], 1), None


W, FROM = {"use_importance_sampling_correction": True}, {"truncated_importance_sampling_ratio_min": 0.5}
TIS, ICEPOP, SEQ_TIS, SEQ_ICEPOP, SEQ_MASK = (
    {**W, "truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": 2.0}
    for kind in ("tis", "icepop", "seq-tis", "seq-icepop", "seq-mask-tis")
)
CAP, DUAL, BY_ROW, MEAN = 1.5 + 2**-13, {"ratio_clip_c": 3.0}, {"A": "rows"}, {"loss_agg_mode": "seq-mean-token-mean"}
CAPPED = {"name": "cispo", "ratio_clip_min": 1.0, "ratio_clip_max": CAP - 1}
KL = {"reference_policy_kl_penalty": 0.3, "kl_output_clamp_value": 10.0}
WEIGHTED_KL = {**KL, "kl_output_clamp_value": None, "use_on_policy_kl_approximation": True, "bypass_mode": True}
CLIP_COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0}
KL_COV = {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.5}
REJECT = {
    "rollout_is": "token",
    "rollout_is_threshold": 1e30,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.5_2.0",
}
GRPO, RPP = {"estimator": "GRPOAdvantageEstimator"}, {"estimator": "ReinforcePlusPlusAdvantageEstimator"}
WHOLE, PLAIN = {"use_leave_one_out_baseline": False}, {"normalize_rewards": False}


def trained(b):
    b.mask[:, 0] = 1


# (our side, its keys, the peer's side, its settings, and where needed a note and a change of the batch)
# fmt: off
ROWS = [
    *((ours, {"name": n, **BY_ROW}, trl, {"loss_type": n, **BY_ROW}) for n in ("grpo", "bnpo", "dapo")),
    (ours, {"name": "dr_grpo", "loss_scale_factor": LENGTH}, trl, {"loss_type": "dr_grpo"}),
    (ours, {"name": "dapo", **DUAL}, trl, {"loss_type": "dapo", "delta": 3.0}),
    (ours, {"name": "gspo", **BY_ROW}, trl, {"loss_type": "grpo", "level": "sequence", **BY_ROW}),
    (ours, {"name": "luspo", **BY_ROW}, trl, {"loss_type": "luspo", "level": "sequence", **BY_ROW}),
    (ours, CAPPED, trl, {"loss_type": "cispo", "epsilon_high": CAP}),
    (ours, {"name": "sapo", **MEAN}, trl, {"loss_type": "sapo"}),
    (ours, {"name": "vespo"}, trl, {"loss_type": "vespo"}),
    (ours, {"name": "vespo", **W}, trl, {"loss_type": "vespo", "ratio": "token_truncate", "bounds": (None, float("inf"))}),
    *((ours, {"name": "dapo", **kind, **FROM}, trl, {"loss_type": "dapo", "ratio": ratio}) for kind, ratio in (
        (TIS, "token_truncate"), (ICEPOP, "token_mask"), (SEQ_TIS, "sequence_truncate"), (SEQ_ICEPOP, "sequence_mask"))),
    (ours, {"name": "dapo", "entropy_coef": 0.1, "leaf": "entropies"}, trl,
     {"loss_type": "dapo", "entropy_coef": 0.1, "_entropy_bonus_enabled": True, "leaf": "entropies"}, "gradient of the entropies"),
    (ours, {"name": "dapo", "top_entropy_quantile": 0.3}, trl, {"loss_type": "dapo", "top_entropy_quantile": 0.3}),
    (ours, WEIGHTED_KL, trl, {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True, "old": "gen"}),
    *((ours, {**DUAL, "loss_agg_mode": mode}, verl, {"name": "vanilla", "mode": mode})
      for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")),
    (ours, {**DUAL, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": LENGTH}, verl,
     {"name": "vanilla", "mode": "seq-mean-token-sum-norm"}),
    (ours, {"name": "gspo", **BY_ROW}, verl, {"name": "gspo", "mode": "seq-mean-token-mean", **BY_ROW}),
    (ours, {"name": "gmpo", **BY_ROW}, verl, {"name": "geo_mean", **BY_ROW}),
    (ours, {"name": "sapo", **MEAN}, verl, {"name": "sapo"}),
    *((ours, {"name": n}, verl, {"name": n}) for n in ("gpg", "cispo")),
    (ours, {"name": "dro", "dro_beta": 0.3}, verl, {"name": "dro", "policy": {"dro_beta": 0.3}}),
    (ours, {"name": "dppo_tv", **DUAL}, verl, {"name": "dppo_tv"}),
    (ours, {"name": "dppo_kl", **DUAL, "ratio_clip_min": 0.02, "ratio_clip_max": 0.03}, verl,
     {"name": "dppo_kl", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}),
    (ours, {"name": "clip_cov", **CLIP_COV}, verl, {"name": "clip_cov", "policy": CLIP_COV},
     "at x = prev, as verl never draws a token whose ratio is clipped", lambda b: vars(b).update(x=b.old)),
    (ours, {"name": "kl_cov", **KL_COV}, verl, {"name": "kl_cov", "policy": KL_COV}, "both select by x, ours in training by prev"),
    (ours, {**DUAL, "bypass_mode": True}, verl, {"name": "bypass_mode", "old": "gen", "correction": {"loss_type": "ppo_clip", "rollout_is": None}}),
    (ours, CAPPED | {"bypass_mode": True}, verl, {"name": "bypass_mode", "old": "gen", "correction":
     {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": CAP}}),
    *((ours, {**DUAL, **kind}, verl, {"name": "vanilla", "weights": {"rollout_is": level, "rollout_is_threshold": bounds}})
      for kind, level, bounds in ((TIS, "token", 2.0), (ICEPOP | FROM, "token", "0.5_2.0"), (SEQ_TIS, "sequence", 2.0),
                                  (SEQ_ICEPOP | FROM, "sequence", "0.5_2.0"))),
    (ours, {**DUAL, **SEQ_MASK, **FROM}, verl, {"name": "vanilla", "weights": REJECT}, "verl bounds 1 / W (0.5_2.0: the same); in training it divides by the tokens kept"),
    (ours, KL | {"A": "zeros"}, verl_kl, {"kind": "k3+"}),
    (our_values, {"cliprange": 0.2}, verl_values, {"cliprange": 0.2}),
    (advantages, GRPO | WHOLE, verl_advantages, {"name": "grpo"}),
    (advantages, GRPO | WHOLE | PLAIN, verl_advantages, {"name": "grpo", "norm_adv_by_std_in_grpo": False}),
    *((advantages, GRPO | PLAIN, verl_advantages, {"name": name}) for name in ("rloo", "rloo_vectorized")),
    *((advantages, RPP | {"minus_baseline": baseline}, verl_advantages, {"name": name}, "ours times sqrt((n - 1) / n)", trained)
      for name, baseline in (("reinforce_plus_plus", False), ("reinforce_plus_plus_baseline", True))),
    *((advantages, {"estimator": f"{cls}AdvantageEstimator"}, verl_advantages, {"name": name})
      for cls, name in (("BestOfGroup", "grpo_passk"), ("ReMax", "remax"))),
    (advantages, {"estimator": "OPOAdvantageEstimator"}, verl_advantages, {"name": "opo"}, "verl's is nan in a group without trained tokens", trained),
    *((advantages, {"estimator": "OptimalTokenBaselineAdvantageEstimator"}, verl_advantages, {"name": name}, "handle_zero_tail=False", trained)
      for name in ("optimal_token_baseline", "tir_optimal_token_baseline")),
    (advantages, {"estimator": "GeneralizedAdvantageEstimator"}, verl_advantages, {"name": "gae", "returns": True}, "verl's fails if only one token is trained", trained),
]
# fmt: on
OTHERS = """\
defined otherwise:
  KL k3 (r = ref - x): gradient of TRL's beta and verl's k3 is 1 - e^r, ours is -r, as verl's k3+
  KL k1, k2: gradient of verl's k1+ and k2 is -r, ours 1 - r and r^2/2 - r
  gspo with an A per token: gradient of verl's token has its own A, ours the mean of the sequence's
  advantages gdpo: verl whitens over tokens; TRL adds 1e-4 to each standard deviation, in grpo too (ours and verl 1e-6)
  advantages optimal_token_baseline past the second-longest response: A = r with verl's handle_zero_tail, ours 0
  advantages in a group of one response: verl's A = r, ours 0
no counterpart:
  nll (the peers take it from the logits), geo-tis, geo-icepop, positive_example_nll_weight, score_centering_k
  advantages pass_at_k, max_rl, opd, raw_reward; verl's advantage gpg and mode token-sum"""


def compare(mine, theirs, change, dtype):
    """Return the largest differences [of the value, of the gradient], as the docstring of this file defines them."""
    found = []
    for seed in range(40):
        change(b := draw(seed, dtype))
        (value, grad), (wanted, slope) = mine(b), theirs(b)
        if slope is None:  # advantages
            grad = slope = torch.ones(1)
        terms = slope.double().abs().sum().clamp(min=1e-12)
        by_value = (value.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=terms)
        by_grad = (grad.double() - slope.double()).abs().max() / slope.double().abs().max().clamp(min=1e-12)
        found.append((float(by_value), float(by_grad)))
    return np.max(found, axis=0)  # nan if one is


def main():
    print(f"TRL {version('trl')}, verl {version('verl')}, torch {torch.__version__}")
    print("        value, gradient in float64; in float32")
    failed = False
    for mine, keys, theirs, settings, *more in ROWS:
        note, change = [*more, *("", lambda b: None)[len(more) :]]
        found = [compare(partial(mine, **keys), partial(theirs, **settings), change, dtype) for dtype in BOUNDS]
        equal = all((pair <= bound).all() for pair, bound in zip(found, BOUNDS.values(), strict=True))
        failed |= not equal
        sides = (
            " ".join([side.__name__, *(f"{k}={v}" for k, v in of.items())])
            for side, of in ((mine, keys), (theirs, settings))
        )
        numbers = " ".join(f"{v:.0e}" for v in np.concatenate(found))
        print("equal  " if equal else "DIFFERS", numbers, " | ".join([*sides, note]), flush=True)
    print(OTHERS)
    sys.exit(failed)


if __name__ == "__main__":
    main()
