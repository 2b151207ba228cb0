"""Advantage estimators, computed with the native ops. `algorithms/algorithm.py` calls them in a training step. To add
an estimator, write a class and a line in `config/loop.py`, or call `register_estimator`.

compute_advantage(prompt_ids, rewards [B], mask [B, S], **inputs) returns advantages [B, S]; PPO's estimators return
(advantages, returns). If `offsets` [B + 1] is given, per-token values have the shape [T], without padding; training
runs use this form. Samples with equal rows of `prompt_ids` form a group, or samples with equal `group_id` [B] if it is
given. Estimators that whiten set `advantage/degenerate_whitening` in `last_metrics`: 1.0 if too few tokens were valid
to whiten."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp import ops
from nemo_rl_cpp.algorithms.custom_components import AdvantageEstimator, OwnEstimator
from nemo_rl_cpp.config.base import Section, Settings, as_model
from nemo_rl_cpp.config.distillation import DistillationLossConfig
from nemo_rl_cpp.config.loop import ADVANTAGE_ESTIMATORS, AdvEstimatorConfig, EstimatorEntry, GAEConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.dotted_names import PythonObjectRef, import_object, is_dotted


def _groups(prompt_ids: Tensor, group_id: Tensor | None) -> Tensor:
    return ops.group_ids_from_prompts(prompt_ids) if group_id is None else torch.as_tensor(group_id)


class _Estimator(AdvantageEstimator):
    """The base class of the estimators below. The constructor raises ConfigError for an unknown key of a section."""

    section: type[AdvEstimatorConfig | GAEConfig] = AdvEstimatorConfig

    def __init__(self, estimator_config: Settings, loss_config: Settings | None):
        self.config = as_model(estimator_config, self.section)
        if not isinstance(loss_config, Section):
            loss_config = {"reference_policy_kl_penalty": 0.0} | dict(loss_config or {})
        loss = as_model(loss_config, ClippedPGLossConfig)
        self.use_kl_in_reward = loss.use_kl_in_reward
        self.kl_coef = loss.reference_policy_kl_penalty
        self.kl_type = loss.reference_policy_kl_type
        self.last_metrics: dict[str, float] = {}

    def _whitened(self, result: ops.TokenAdvantages) -> Tensor:
        self.last_metrics = {"advantage/degenerate_whitening": float(result.degenerate)}
        return result.advantages

    def _for_kl(self, policy: Tensor | None, reference: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return (policy, reference), the log-probabilities for a KL penalty in the reward, or (None, None) if there is
        no such penalty or one of them is missing."""
        both = self.use_kl_in_reward and policy is not None and reference is not None
        return (policy, reference) if both else (None, None)


class _Samples(NamedTuple):
    """The samples of a batch, from which `_SampleEstimator._of_samples` computes one advantage per sample."""

    rewards: Tensor  # [B]
    groups: Tensor  # int64 [B], the group of each sample
    valid: Tensor  # [B]; the statistics of a group exclude samples with 0
    columns: Mapping[str, Tensor] | None  # further columns of the samples
    mask: Tensor  # [B, S], or [T] with `offsets`
    offsets: Tensor | None  # [B + 1]


class _SampleEstimator(_Estimator):
    """The base class of estimators that give all tokens of a sample the same advantage."""

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, repeated_batch: Mapping[str, Tensor] | None = None, *,
        valid_mask: Tensor | None = None, group_id: Tensor | None = None, offsets: Tensor | None = None, **inputs: object,
    ) -> Tensor:  # fmt: skip
        """Return each sample's advantage at all of its tokens, even masked ones: [B, S] like `mask`, an expanded view.
        With `offsets` [B + 1] return [T], the tokens of all samples one after the other; sample b begins at
        `offsets[b]`. Samples with equal `group_id` [B] (None: equal `prompt_ids` [B, P]) form a group, whose statistics
        exclude samples with valid_mask 0. `repeated_batch` has further columns of the samples."""
        groups = _groups(prompt_ids, group_id)
        valid = torch.ones(len(groups)) if valid_mask is None else valid_mask
        samples = _Samples(rewards, groups, valid, repeated_batch, mask, offsets)
        advantages = self._of_samples(samples)
        if offsets is None:
            return advantages.unsqueeze(-1).expand(mask.shape)
        return advantages.repeat_interleave(offsets.diff())

    @abstractmethod
    def _of_samples(self, samples: _Samples) -> Tensor:
        """Return the advantage of each sample, [B]."""


def _baseline(samples: _Samples, leave_one_out: bool = False) -> ops.GroupBaseline:
    return ops.group_baseline(samples.rewards, samples.groups, valid_mask=samples.valid, leave_one_out=leave_one_out)


class GRPOAdvantageEstimator(_SampleEstimator):
    """GRPO: the reward minus the group's baseline, divided by the group's standard deviation if normalize_rewards."""

    def _of_samples(self, samples: _Samples) -> Tensor:
        stats = _baseline(samples, self.config.use_leave_one_out_baseline)
        return ops.grpo_advantages(samples.rewards, stats.baseline, stats.std, normalize=self.config.normalize_rewards)


class GDPOAdvantageEstimator(GRPOAdvantageEstimator):
    """GDPO (arXiv:2601.05242): GRPO on each reward component `reward/<name>`. The weighted sum of the components'
    advantages is whitened over the valid samples; others get 0. The key `reward_weights` has one weight per component,
    in the order of the sorted names. If it is None, the weights are those in `part_weights`, {component name: weight},
    which the run copies from its reward functions; a component that is not in there has weight 1."""

    part_weights: Mapping[str, float] = MappingProxyType({})

    def _of_samples(self, samples: _Samples) -> Tensor:
        keys = sorted(key for key in samples.columns.keys() if str(key).startswith("reward/"))
        if len(keys) < 2:
            raise ValueError(
                f"gdpo needs at least two reward components (reward/<name>); this batch has {keys}. "
                "Set grpo.adv_estimator.name to grpo for a single reward"
            )
        weights = self.config.reward_weights
        if weights is None:
            weights = [self.part_weights.get(key.removeprefix("reward/"), 1.0) for key in keys]
        if len(weights) != len(keys):
            raise ValueError(
                f"grpo.adv_estimator.reward_weights has {len(weights)} entries for {len(keys)} reward components {keys}; "
                "expected one each, in that order"
            )
        grpo = super()._of_samples
        parts = torch.stack([grpo(samples._replace(rewards=samples.columns[key])) for key in keys])
        valid, advantages = samples.valid != 0, torch.zeros_like(parts[0])
        advantages[valid] = ops.gdpo_advantages(parts[:, valid], torch.tensor(weights, dtype=torch.float64))
        return advantages


def _sums_of_groups(groups: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of `values` [B] over each group, float64, and the index of each sample's group in these sums."""
    _, group = torch.unique(groups, return_inverse=True)
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, values.to(torch.float64))
    return sums, group


class OPOAdvantageEstimator(_SampleEstimator):
    """OPO (arXiv:2505.23585): the reward minus sum_i(length_i reward_i) / sum_i(length_i) over the group, which
    minimises the variance if all tokens have equally large gradients. Lengths count trained tokens."""

    def _of_samples(self, samples: _Samples) -> Tensor:
        rows = (samples.mask != 0).double()
        if samples.offsets is not None:
            rows = rows.split(samples.offsets.diff().tolist())
        lengths = torch.stack([row.sum() for row in rows]) * samples.valid
        rewards = samples.rewards.double()
        total, group = _sums_of_groups(samples.groups, lengths)
        weighted, _ = _sums_of_groups(samples.groups, lengths * rewards)
        baseline = torch.where(total[group] > 0, (weighted / total)[group], rewards)
        return (samples.rewards - baseline).to(samples.rewards.dtype)


class BestOfGroupAdvantageEstimator(_SampleEstimator):
    """verl's grpo_passk (arXiv:2503.19595): the best response of a group gets its reward minus the second-best (0 in a
    tie), divided by the group's standard deviation if normalize_rewards; all others get 0."""

    def _of_samples(self, samples: _Samples) -> Tensor:
        rewards, std = samples.rewards, _baseline(samples).std
        advantages = torch.zeros_like(rewards)
        for group in torch.unique(samples.groups):
            rows = ((samples.groups == group) & (samples.valid != 0)).nonzero().flatten()
            if len(rows) < 2:
                continue
            best, second = rewards[rows].sort(descending=True, stable=True).values[:2]
            row = rows[rewards[rows].argmax()]
            advantages[row] = (best - second) / (std[row] + 1e-6 if self.config.normalize_rewards else 1.0)
        return advantages


class PassAtKAdvantageEstimator(_SampleEstimator):
    """Pass@k training (arXiv:2508.10751): the mean advantage of a response over all sets of `pass_k` responses of its
    group. A set gets reward 1 if any of its responses is correct (reward above 0).

    With N responses, W of them wrong, and p = 1 - C(W, k) / C(N, k), a correct response gets (1 - p) / sd and a wrong
    response (1 - p - C(W - 1, k - 1) / C(N - 1, k - 1)) / sd, where sd = sqrt(p (1 - p))."""

    def _of_samples(self, samples: _Samples) -> Tensor:
        is_right = samples.rewards > 0
        totals, group = _sums_of_groups(samples.groups, samples.valid)
        rights, _ = _sums_of_groups(samples.groups, samples.valid * is_right)
        pairs = [self._of_group(int(n), int(n - c)) for n, c in zip(totals.tolist(), rights.tolist(), strict=True)]
        return torch.tensor(pairs, dtype=samples.rewards.dtype)[group, (~is_right).long()]

    def _of_group(self, total: int, wrong: int) -> tuple[float, float]:
        """Return the advantages of a correct and of a wrong response in a group of `total` with `wrong` wrong ones."""
        k = min(self.config.pass_k, total)
        passed = 1.0 - math.comb(wrong, k) / math.comb(total, k)
        sd = math.sqrt(passed * (1.0 - passed))
        if sd == 0.0:  # also in a group without valid responses
            return 0.0, 0.0
        lost = math.comb(wrong - 1, k - 1) / math.comb(total - 1, k - 1) if wrong else 0.0
        return (1.0 - passed) / sd, (1.0 - passed - lost) / sd


class MaxRLAdvantageEstimator(_SampleEstimator):
    """Maximum-likelihood RL (arXiv:2602.02710): (reward - mean) / mean over the group, or 0 if the mean is not
    positive. For rewards of 0 and 1 the policy gradient is then that of log(success rate)."""

    def _of_samples(self, samples: _Samples) -> Tensor:
        rewards, mean = samples.rewards, _baseline(samples).baseline
        return torch.where(mean > 0, (rewards - mean) / (mean + 1e-6), 0.0).to(rewards.dtype)


class ReMaxAdvantageEstimator(_SampleEstimator):
    """ReMax (arXiv:2310.10505): the reward minus the reward of the greedy response to the same prompt, which
    `repeated_batch["reward_baseline"]` [B] holds."""

    def _of_samples(self, samples: _Samples) -> Tensor:
        return samples.rewards - samples.columns["reward_baseline"].to(samples.rewards.dtype)


class OptimalTokenBaselineAdvantageEstimator(_Estimator):
    """The baseline that minimises the variance at each token (verl's optimal_token_baseline). The t-th trained token of
    response j gets the advantage

        A_jt = reward_j - sum_i(W_it reward_i) / sum_i W_it
        W_it = sum over s <= t of (1 - 2 p_is + sum_v p_isv^2)

    where i runs over the responses of j's group that have a t-th trained token, p_isv is the policy's probability of
    vocabulary item v at the s-th trained token of response i, and p_is that of the sampled token. W_it is the squared
    norm of the gradient of the log-probability of response i's first t trained tokens with respect to the logits. If no
    other response has a t-th trained token, A_jt is 0."""

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, logprobs_policy: Tensor, sum_pi_squared: Tensor,
        valid_mask: Tensor | None = None, group_id: Tensor | None = None, offsets: Tensor | None = None, **kwargs: object,
    ) -> Tensor:  # fmt: skip
        """Return advantages in the shape of `mask`, 0 at masked positions. `sum_pi_squared`: the sum of the policy's
        squared probabilities over the vocabulary at each token. Baselines exclude samples with valid_mask 0."""
        groups = _groups(prompt_ids, group_id)
        voting = torch.ones_like(rewards) if valid_mask is None else valid_mask
        energy = 1 - 2 * logprobs_policy.double().exp() + sum_pi_squared.double()
        lengths = [mask.shape[1]] * len(mask) if offsets is None else offsets.diff().tolist()
        advantages = torch.zeros(mask.numel(), dtype=torch.float64)
        places = [own.nonzero().flatten() for own in (mask != 0).flatten().split(lengths)]
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        for group in torch.unique(groups):
            rows = (groups == group).nonzero().flatten().tolist()
            depth = max(len(places[row]) for row in rows)
            weights, rewarded = torch.zeros(2, depth, dtype=torch.float64)
            for row in rows:
                own = energy.flatten()[starts[row] + places[row]].cumsum(0) * float(voting[row] != 0)
                weights[: len(own)] += own
                rewarded[: len(own)] += own * float(rewards[row])
            for row in rows:
                n = len(places[row])
                known = weights[:n] > 0
                baseline = torch.where(known, rewarded[:n] / torch.where(known, weights[:n], 1.0), float(rewards[row]))
                advantages[starts[row] + places[row]] = float(rewards[row]) - baseline
        return advantages.to(rewards.dtype).view(mask.shape)


class ReinforcePlusPlusAdvantageEstimator(_Estimator):
    """REINFORCE++ (arXiv:2501.03262): the reward, minus the group's mean if minus_baseline, and minus the token's KL
    penalty if use_kl_in_reward. The result is whitened over all valid tokens of the batch; masked positions get 0."""

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None, valid_mask: Tensor | None = None, group_id: Tensor | None = None,
        offsets: Tensor | None = None, **kwargs: object,
    ) -> Tensor:  # fmt: skip
        advantages = rewards
        if self.config.minus_baseline:
            groups = _groups(prompt_ids, group_id)
            mean = ops.group_baseline(rewards, groups, valid_mask=valid_mask, leave_one_out=False).baseline
            advantages = rewards - mean
        policy, reference = self._for_kl(logprobs_policy, logprobs_reference)
        return self._whitened(ops.reinforce_plus_plus(
            advantages, mask, logprobs=policy, reference_logprobs=reference, kl_coef=self.kl_coef, kl_type=self.kl_type,
            offsets=offsets,
        ))  # fmt: skip


class RawRewardAdvantageEstimator(_Estimator):
    """The reward itself as the advantage of every token, whitened over the valid tokens if normalize_advantages. The
    returns, which would train a critic, are None."""

    section = GAEConfig

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, offsets: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, None]:
        result = ops.raw_reward(rewards, mask, normalize=self.config.normalize_advantages, offsets=offsets)
        return self._whitened(result), None


class GeneralizedAdvantageEstimator(_Estimator):
    """GAE (arXiv:1506.02438), whitened if normalize_advantages. The recursion skips masked tokens. As in VAPO, lambda
    may differ between policy and critic, and the policy's may depend on the length of the response."""

    section = GAEConfig

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, values: Tensor, reference_logprobs: Tensor | None = None,
        logprobs: Tensor | None = None, offsets: Tensor | None = None, **kwargs: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (advantages, returns) in the shape of `mask`: [B, S], or [T] with `offsets`. `values` holds at token t
        the critic's value of the state before this token."""
        logprobs, reference = self._for_kl(logprobs, reference_logprobs) if self.kl_coef > 0 else (None, None)
        given = self.config
        config = ops.GAEConfig(
            gamma=given.gae_gamma,
            gae_lambda=given.gae_lambda if given.gae_lambda_policy is None else given.gae_lambda_policy,
            gae_lambda_value=given.gae_lambda if given.gae_lambda_value is None else given.gae_lambda_value,
            length_adaptive_alpha=given.length_adaptive_alpha,
            kl_coef=0.0 if logprobs is None else self.kl_coef,
            kl_type=self.kl_type,
            normalize=given.normalize_advantages,
        )
        result = ops.gae(
            rewards, values, mask, config, logprobs=logprobs, reference_logprobs=reference, offsets=offsets
        )
        return self._whitened(result), result.returns


class OPDAdvantageEstimator(_Estimator):
    """On-policy distillation: the policy gradient of a divergence D between student p and teacher q, estimated from the
    tokens that the student sampled. Masked positions get 0. With g = log q - log p of a token the advantage is

        reverse KL      g
        forward KL      min(e^g, max_teacher_ratio) - 1
        Jensen-Shannon  (log(1 + e^g) - log 2) / 2

    and for a `mixed` divergence the weighted sum of the first two. In every case E_p[advantage d(log p)] = -dD
    (subtracting a constant does not change it). MOPD (arXiv:2601.02780) is the reverse KL plus
    `outcome_advantage_weight` times the advantage that GRPO, or in a PPO run GAE (whitened if normalize_advantages),
    computes from the rewards. The critic learns from the rewards alone. TROPD replaces q with alpha q + (1 - alpha) p,
    where alpha is `proximal_teacher_alpha`, so the reverse KL's advantage is at least log(1 - alpha)."""

    def __init__(self, estimator_config: Settings, loss_config: Settings | None):
        self._in_ppo = isinstance(estimator_config, GAEConfig)
        self.section = GAEConfig if self._in_ppo else AdvEstimatorConfig
        super().__init__(estimator_config, loss_config)
        self.divergence, self.mixed_kl_weight, self.max_ratio = "reverse", 0.0, 0.0
        if isinstance(loss_config, DistillationLossConfig):
            self.divergence, self.mixed_kl_weight = loss_config.kl_type, loss_config.mixed_kl_weight
            self.max_ratio = loss_config.max_teacher_ratio
        of_rewards = GeneralizedAdvantageEstimator if self._in_ppo else GRPOAdvantageEstimator
        weight = self.config.outcome_advantage_weight
        self._outcome = of_rewards(self.config, loss_config) if weight > 0 else None

    def _of_divergence(self, gap: Tensor) -> Tensor:
        alpha = self.config.proximal_teacher_alpha
        if alpha < 1:
            gap = torch.logaddexp(gap + math.log(alpha), torch.full_like(gap, math.log1p(-alpha)))
        if self.divergence == "reverse":
            return gap
        if self.divergence == "jensen":
            return 0.5 * (torch.nn.functional.softplus(gap) - math.log(2.0))
        forward = gap.clamp(max=math.log(self.max_ratio)).expm1()
        weight = 1.0 if self.divergence == "forward" else self.mixed_kl_weight
        return weight * forward + (1.0 - weight) * gap

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, teacher_logprobs: Tensor, prev_logprobs: Tensor,
        offsets: Tensor | None = None, **of_rewards: object,
    ) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return advantages in the shape of `mask`, or in a PPO run (advantages, returns or None). Masked tokens get 0,
        and so do tokens that the student's top-k or top-p filter removes (log-probability -inf). `of_rewards`: further
        inputs of the estimator that computes advantages from `rewards`."""
        valid = (mask != 0) & torch.isfinite(prev_logprobs)
        gap = torch.where(valid, teacher_logprobs - prev_logprobs, 0.0).detach()
        advantages = self._of_divergence(gap)
        if self.config.subtract_global_baseline and valid.any():
            advantages = advantages - advantages[valid].mean()
        returns, metrics = None, {}
        if self._outcome is not None:
            outcome = self._outcome.compute_advantage(prompt_ids, rewards, mask, offsets=offsets, **of_rewards)
            outcome, returns = outcome if self._in_ppo else (outcome, None)
            advantages = advantages + self.config.outcome_advantage_weight * outcome
            metrics = self._outcome.last_metrics
        advantages = torch.where(valid, advantages, 0.0)
        gaps, kept = gap[valid], advantages[valid]
        self.last_metrics = metrics | {
            "on_policy_distillation/teacher_student_logprob_gap_mean": gaps.mean().item() if gaps.numel() else 0.0,
            "on_policy_distillation/adv_mean": kept.mean().item() if kept.numel() else 0.0,
            "on_policy_distillation/adv_std": kept.std().item() if kept.numel() > 1 else 0.0,
        }
        return (advantages, returns) if self._in_ppo else advantages


def make_estimator(
    algorithm: str, settings: AdvEstimatorConfig | GAEConfig, loss: ClippedPGLossConfig
) -> AdvantageEstimator:
    """Return the advantage estimator that `settings`, the section `<algorithm>.adv_estimator`, selects. Raise ValueError
    if it is the user's and cannot be imported or used."""
    name = settings.name
    if isinstance(name, PythonObjectRef):
        return OwnEstimator(name.component, algorithm, settings, loss)
    if is_dotted(name):
        return OwnEstimator(import_object(name, "advantage estimator"), algorithm, settings, loss, name)
    return ADVANTAGE_ESTIMATORS[name](settings, loss)


def register_estimator(
    name: str,
    cls: Callable[[AdvEstimatorConfig, ClippedPGLossConfig], AdvantageEstimator],
    keys: type[Section] | None = None,
    algorithm: str = "grpo",
) -> None:
    """Register a custom estimator for the key `<algorithm>.adv_estimator.name`. `cls` is called with the sections
    `adv_estimator` and `loss_fn`. The fields of `keys`, a pydantic model, become keys of `adv_estimator` unless it has
    them. Raise ValueError if the name is taken."""
    section = GAEConfig if algorithm == "ppo" else AdvEstimatorConfig
    fields = {} if keys is None else keys.model_fields
    ADVANTAGE_ESTIMATORS.add(name, EstimatorEntry(cls, (algorithm,)), section, fields)
