"""Reward functions in plain Python numbers, one sample at a time; written from the formulas alone."""

import math


def scaled(reward, source_min, source_max, target_min, target_max):
    """Linear map of [source_min, source_max] to [target_min, target_max], after clamping."""
    clamped = min(max(reward, source_min), source_max)
    return target_min + (clamped - source_min) / (source_max - source_min) * (target_max - target_min)


def overlong(reward, length, buffer, penalty, longest):
    """DAPO (arXiv:2503.14476, equation 13) without its floor: the penalty grows from longest - buffer on."""
    beyond = length - (longest - buffer)
    return reward if beyond <= 0 else reward - beyond / buffer * penalty


def stop_properly(reward, truncated, coef):
    """ProRLv2: the reward of a sample that did not end by itself is multiplied."""
    return reward * coef if truncated else reward


def shaped(reward, length, truncated, *, buffer=None, penalty=None, longest=None, coef=None, compose=False):
    if coef is not None:
        reward = stop_properly(reward, truncated, coef)
        if not compose:
            return reward
    return overlong(reward, length, buffer, penalty, longest)


def sequence_error(prev, generation, mask):
    """Mean over the trained tokens of exp(|prev - generation|); 0 without one."""
    terms = [math.exp(abs(p - g)) for p, g, m in zip(prev, generation, mask, strict=True) if m]
    return sum(terms) / len(terms) if terms else 0.0
