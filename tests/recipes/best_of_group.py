"""An advantage estimator that gives an advantage only to the best responses of a group.

Selected by `grpo.adv_estimator.name=best_of_group`."""

import torch
from nemo_rl_cpp.algorithms.advantage_estimator import register_estimator
from nemo_rl_cpp.config.base import Positive, Section, key


class BestOfGroupKeys(Section):
    """The additional keys of `grpo.adv_estimator`."""

    num_best: Positive = key(1, "best_of_group: responses of each group that count")


class BestOfGroup:
    """Advantage 1 for the tokens of the `num_best` responses with the highest rewards in each group, otherwise 0."""

    def __init__(self, settings, loss):
        self.num_best = settings.num_best
        self.last_metrics = {}

    def compute_advantage(self, prompt_ids, rewards, mask, group_id, **batch):
        advantages = torch.zeros_like(rewards)
        for group in group_id.unique():
            rows = (group_id == group).nonzero()[:, 0]
            advantages[rows[rewards[rows].topk(min(self.num_best, len(rows))).indices]] = 1.0
        self.last_metrics = {"advantage/counted": float(advantages.mean())}
        return advantages[:, None] * mask


register_estimator("best_of_group", BestOfGroup, BestOfGroupKeys)
