"""Random and hostile inputs for the loss tests.

Log-probabilities are multiples of 1/1024. So float32 represents them and their differences exactly, and the tests
compare the losses, not the rounding of the inputs."""

import numpy as np

NAMED = ("sapo", "dppo_tv", "dppo_kl", "dro", "gmpo", "vespo", "kl_cov", "nll")
BY_ROW = {"token_level_loss": False, "sequence_level_importance_ratios": True}
LOSSES = {
    "clipped_pg": {},
    "on_policy": {"force_on_policy_ratio": True},
    "grpo": {"token_level_loss": False},
    "dapo": {"token_level_loss": True},
    "bnpo": {"token_level_loss": True},
    "dr_grpo": {"token_level_loss": False, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 24.0},
    "gpg": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True, "token_level_loss": True},
    "gspo": BY_ROW,
    "luspo": BY_ROW | {"loss_agg_mode": "seq-mean-token-sum"},
    "clip_cov": {},
    **{name: {} for name in NAMED},
    "gmpo": BY_ROW,
    "vespo": {"token_level_loss": True},
}
"""Name of a loss -> the keys that it fixes; the other keys are random."""
OF_TOKENS = ["tis", "icepop", "seq-mask-tis", "seq-tis", "seq-icepop", "geo-tis", "geo-icepop"]
DEFAULTS = {
    "name": "clipped_pg", "loss_agg_mode": None, "loss_scale_factor": None, "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "dro_beta": 0.1, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "disable_ppo_ratio": False, "token_level_loss": True,
    "sequence_level_importance_ratios": False, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01, "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0, "use_kl_in_reward": False, "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None, "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None, "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False, "use_cispo": False, "positive_example_nll_weight": 0.0,
}  # fmt: skip


def config(rng, name=None):
    """Return a complete, consistent configuration of the loss `name` (None: of a random loss), with random values for
    the other keys.

    Its `name` is clipped_pg for losses that are clipped_pg with particular keys."""
    name = str(rng.choice(list(LOSSES))) if name is None else name
    fixed = LOSSES[name]
    c = DEFAULTS | fixed | {"name": name if name in NAMED else "clipped_pg"}
    if "token_level_loss" not in fixed:
        c["token_level_loss"] = bool(rng.random() < 0.5)
    if name == "on_policy" and not c["token_level_loss"]:
        c["sequence_level_importance_ratios"] = bool(rng.random() < 0.3)
    c["sapo_temperature_pos"], c["sapo_temperature_neg"] = float(rng.choice([0.5, 1.0])), float(rng.choice([1.05, 2.0]))
    c["dro_beta"] = float(rng.choice([0.05, 0.5]))
    c["vespo_k_pos"], c["vespo_lambda_neg"] = float(rng.choice([1.0, 2.0])), float(rng.choice([1.0, 2.0]))
    # bounds lie between the multiples of 1/1024, because torch versions differ in clamp's gradient at a bound
    clip_max = float(rng.choice([0.2, 0.28, 0.5 + 2**-13]))
    c["ratio_clip_min"], c["ratio_clip_max"] = float(rng.choice([0.1, 0.2, 0.27])), clip_max
    if not c["token_level_loss"] and "loss_agg_mode" not in fixed and rng.random() < 0.5:
        c["loss_agg_mode"] = str(rng.choice(["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]))
        c["loss_scale_factor"] = 24.0 if c["loss_agg_mode"].endswith("norm") else None
    if name != "cispo" and c["name"] in ("clipped_pg", "dppo_tv", "dppo_kl") and rng.random() < 0.4:
        c["ratio_clip_c"] = float(rng.choice([1.5, 3.0, 10.0]))
    c["reference_policy_kl_penalty"] = float(rng.choice([0.0, 0.01, 0.3]))
    c["reference_policy_kl_type"] = str(rng.choice(["k1", "k2", "k3"]))
    c["kl_input_clamp_value"] = (None, 0.5 + 2**-13, 20.0 + 2**-13)[rng.integers(3)]
    c["kl_output_clamp_value"] = (None, 0.3, 10.0 + 2**-13)[rng.integers(3)]
    c["use_kl_in_reward"] = bool(rng.random() < 0.1)
    c["use_on_policy_kl_approximation"] = bool(rng.random() < 0.4)
    # not a simple fraction of the KL's weight: if two terms cancelled, only their rounding error would be left
    c["positive_example_nll_weight"] = float(rng.choice([0.0, 0.0973]))
    if c["name"] != "nll" and rng.random() < 0.6:
        c["use_importance_sampling_correction"] = True
        kinds = (
            [None]
            if c["name"] == "vespo"
            else [None, "tis", "icepop"]
            if c["sequence_level_importance_ratios"]
            else [None, *OF_TOKENS]
        )
        kind = kinds[rng.integers(len(kinds))]
        c["truncated_importance_sampling_type"] = kind
        if kind is not None:
            c["truncated_importance_sampling_ratio"] = float(rng.choice([1.05, 2.0, 5.0]))
            low = float(rng.choice([0.5, 0.97]))
            c["truncated_importance_sampling_ratio_min"] = (
                None if kind.endswith("tis") and kind != "seq-mask-tis" and rng.random() < 0.5 else low
            )
    return c


def logprobs(rng, shape, spread):
    return np.round(-np.abs(rng.normal(1.0, spread, shape)) * 1024) / 1024


def batch(rng, max_rows=5, max_len=40):
    """Return (x [B, S-1], data).

    Lengths are ragged, some rows and sometimes all are masked, and log-probabilities differ hugely or not at all."""
    B, S = int(rng.integers(1, max_rows + 1)), int(rng.integers(1, max_len))
    gap = float(rng.choice([0.0, 0.05, 0.3, 3.0, 12.0]))
    near = lambda v, scale: v + np.round(rng.normal(0, scale, v.shape) * 1024) / 1024  # noqa: E731
    gen = logprobs(rng, (B, S), float(rng.choice([0.3, 2.0])))
    prev = near(gen, min(gap, 1.0))
    curr = near(prev, gap)
    ref = near(curr, min(gap * 3, 12.0))
    lengths = rng.integers(0, S + 1, B)
    mask = (np.arange(S)[None, :] < lengths[:, None]) & (rng.random((B, S)) < 0.9)
    sample = (rng.random(B) < 0.8).astype(np.float64)
    kind = rng.random()
    if kind < 0.05:
        mask[:] = False
    elif kind < 0.1:
        sample[:] = 0
    advantages = np.repeat(rng.normal(0, 1, (B, 1)), S, 1) if rng.random() < 0.5 else rng.normal(0, 1, (B, S))
    if rng.random() < 0.1:
        advantages[:] = 0.0
    data = {
        "advantages": np.float32(advantages).astype(np.float64), "prev_logprobs": prev, "generation_logprobs": gen,
        "reference_policy_logprobs": ref, "token_mask": mask.astype(np.float64), "sample_mask": sample,
        "rewards": rng.choice([-1.0, 0.0, 1.0], B), "kl_cov_penalty": 0.5 * (rng.random((B, S)) < 0.2),
    }  # fmt: skip
    x = curr[:, 1:].copy()
    if rng.random() < 0.3:
        data["curr_logprobs_unfiltered"] = near(x, 0.2)
    if rng.random() < 0.3:  # values at masked positions must not matter
        hide = ~(mask * (sample[:, None] != 0)).astype(bool)
        of_policies = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        for key in ("advantages", *of_policies, "kl_cov_penalty"):
            data[key][hide] = rng.choice([1e6, -1e6, np.nan, -np.inf])
        x[hide[:, 1:]] = rng.choice([1e6, np.nan, -np.inf])
    return x, data


def counts(data):
    toks = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    return toks, float(data["sample_mask"].sum())
