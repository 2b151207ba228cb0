"""Drawn batches, and the losses and advantages of TRL and verl on them, computed by their own code.

losses_against_peers.py compares ours with them. The functions after `draw` return (value, gradient or None)."""

import ast
import inspect
import site
import sys
import textwrap
from collections import defaultdict
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

site.addsitedir(sys.argv[1])
import trl.trainer.grpo_trainer as trl_code  # noqa: E402
from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo import core_algos as verl_code  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper as verl_weights  # noqa: E402
from verl.workers.config.actor import ActorConfig, PolicyLossConfig  # noqa: E402

LOW, HIGH, LENGTH = 0.2, 0.28 + 2**-13, 24.0
"""The clips of the ratio, which no drawn ratio equals (gradients at a tie differ), and the constant length."""


def draw(seed, dtype):
    """Return a batch: some of one token, with untrained responses, negative advantages, or ratios beyond e^5.

    Log-probabilities are multiples of 1/1024, so float32 holds them and their differences exactly."""
    rng = np.random.default_rng(seed)
    groups, members, S = (1, 2, 1) if seed == 0 else rng.integers((1, 2, 2), (4, 5, 12)).tolist()
    B = groups * members
    near = lambda v, gap: np.minimum(np.round((v + rng.normal(0, gap, (B, S))) * 1024), -1) / 1024  # noqa: E731
    gen = near(-1.5, 1.0)
    old = near(gen, 0.4)
    old[0] = gen[0]  # verl fails if it drops all responses
    x = near(old, 3.0 if seed % 5 == 2 else rng.choice([0.0, 0.05, 0.3]))
    lengths = rng.integers(1, S + 1, B) * (np.arange(B) * (seed % 4 == 1) == 0)
    tokens, rows = rng.normal(0, 1, (B, S)), np.repeat(rng.normal(0, 1, (B, 1)), S, 1)
    if seed % 7 == 3:
        tokens, rows = -np.abs(tokens), -np.abs(rows)
    rewards = rng.choice([0.0, 1.0], B) if seed % 2 else rng.normal(0, 1, B)
    rewards[:2] = 0, 1
    drawn = {"values": (B, S), "returns": (B, S), "predictions": (B, S), "greedy": B}
    data = {key: rng.normal(0, 1, shape) for key, shape in drawn.items()} | {
        "x": x, "old": old, "gen": gen, "ref": near(x, 0.3), "mask": np.arange(S) < lengths[:, None], "rows": rows,
        "tokens": tokens, "zeros": 0 * rows, "rewards": rewards, "entropies": rng.integers(0, 2048, (B, S)) / 1024,
        "squares": rng.uniform(0.5, 1, (B, S)),
    }  # fmt: skip
    return SimpleNamespace(
        **{key: torch.as_tensor(value, dtype=dtype) for key, value in data.items()},
        groups=torch.arange(groups).repeat_interleave(members),
    )


def trl_ratio(scope):
    """Return the importance ratios of the statement in TRL's trainer that computes them."""
    name = "vllm_importance_sampling_ratio"
    method = inspect.unwrap(trl_code.GRPOTrainer._generate_and_score_completions)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        assigned = [s.targets[0] for s in node.body if isinstance(s, ast.Assign)] if isinstance(node, ast.If) else []
        if name in map(ast.unparse, assigned):
            exec(compile(ast.Module([node], []), "trl", "exec"), scope := {**vars(trl_code), **scope})
            return scope[name]


def trl(b, loss_type, A="tokens", leaf="x", level="token", ratio=None, bounds=(0.5, 2.0), old="old", **settings):
    leaves = {"x": b.x.clone().requires_grad_(), "entropies": b.entropies.clone().requires_grad_()}
    own = {field.name: field.default for field in fields(trl_code.GRPOConfig)} | {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon_low": LOW, "epsilon_high": HIGH,
        "use_vllm": ratio is not None, "vllm_importance_sampling_mode": ratio, "steps_per_generation": 1,
        "vllm_importance_sampling_clip_min": bounds[0], "vllm_importance_sampling_clip_max": bounds[1],
        "current_gradient_accumulation_steps": 1, "use_adaptive_entropy": False, "_entropy_bonus_enabled": False,
        "max_completion_length": LENGTH, "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
    } | settings  # fmt: skip
    trainer, itself = SimpleNamespace(**own | {"args": SimpleNamespace(**own)}), lambda v, **_: v
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    of_ranks = {"num_processes": 1, "sync_gradients": False}
    of_ranks |= dict.fromkeys(("gather", "reduce", "pad_across_processes"), itself)
    trainer.accelerator = SimpleNamespace(**of_ranks)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (*leaves.values(), None)
    trainer.get_gamma_weights = trl_code.GRPOTrainer.get_gamma_weights
    trainer.get_high_entropy_mask = partial(trl_code.GRPOTrainer.get_high_entropy_mask, trainer)
    ids = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), torch.zeros_like(b.mask))
    inputs = ids | {"completion_mask": b.mask, "old_per_token_logps": getattr(b, old), "ref_per_token_logps": b.ref}
    inputs |= {"num_items_in_batch": b.mask.sum(), "advantages": getattr(b, A)[:, 0] if A == "rows" else getattr(b, A)}
    if ratio is not None:
        scope = inputs | {"self": trainer, "sampling_per_token_logps": b.gen, "tool_mask": None}
        inputs["importance_sampling_ratio"] = trl_ratio(scope)
    loss = trl_code.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, leaves[leaf])[0]


def counts(b):
    return {"batch_num_tokens": b.mask.sum(), "global_batch_size": len(b.x), "loss_scale_factor": LENGTH}


def verl(b, name, mode="token-mean", A="tokens", old="old", weights=None, correction=None, policy=None, **settings):
    x, mask, ratio = b.x.clone().requires_grad_(), b.mask, None
    policy = (policy or {}) | ({"rollout_correction": RolloutCorrectionConfig(**correction)} if correction else {})
    own = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "policy_loss": PolicyLossConfig(**policy)} | settings
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **own)
    config.global_batch_info.update(counts(b))
    if weights:
        computed = verl_weights.compute_rollout_correction_and_rejection_mask(b.old, b.gen, b.mask, **weights)
        ratio, mask = computed[0].batch["rollout_is_weights"], computed[1]
    loss, _ = verl_code.get_policy_loss_fn(name)(getattr(b, old), x, getattr(b, A), mask, mode, config, ratio)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def verl_kl(b, kind):
    x = b.x.clone().requires_grad_()
    loss = 0.3 * verl_code.agg_loss(verl_code.kl_penalty(x, b.ref, kind), b.mask, "token-mean", **counts(b))
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def verl_values(b, cliprange):
    v = b.predictions.clone().requires_grad_()
    loss, _ = verl_code.compute_value_loss(v, b.returns, b.values, b.mask, cliprange, **counts(b))
    return loss.detach(), torch.autograd.grad(loss, v)[0]


def verl_advantages(b, name, returns=False, **config):
    last = (b.mask.sum(1, keepdim=True).long() - 1).clamp(min=0)
    inputs = {
        "token_level_rewards": torch.zeros_like(b.x).scatter_(1, last, b.rewards[:, None]), "response_mask": b.mask,
        "index": b.groups.numpy(), "config": AlgoConfig(gamma=1.0, **config), "reward_baselines": b.greedy, "gamma": 1.0,
        "old_log_probs": b.old, "sum_pi_squared": b.squares, "values": b.values, "lam": 0.95, "handle_zero_tail": False,
    } | config  # fmt: skip
    estimator = verl_code.get_adv_estimator_fn(name)
    taken = inputs.keys() & inspect.signature(estimator).parameters.keys()
    both = estimator(**{key: inputs[key] for key in taken})
    return torch.cat([part * b.mask for part in both[: 1 + returns]], 1), None
