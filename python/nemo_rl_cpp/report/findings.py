"""Rules that read a run's metric history and report findings in words, with the configuration key to change."""

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import NamedTuple

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.metrics import extremum
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.history import format_number as fmt

LEVELS = ("bad", "warn", "good", "info")
ERROR, NORM, REWARD = "train/token_mult_prob_error", "train/grad_norm", "train/reward"
CUT, LENGTH, PROMPT = "train/truncation_rate", "train/mean_gen_tokens_per_sample", "train/mean_prompt_length"
_NEARLY_ALL = 0.9


class Finding(NamedTuple):
    """A statement about a run, of a level in `LEVELS`; `advice` says what to do about it or why it matters."""

    level: str
    title: str
    advice: str
    metric: str


Found = tuple[str, str, str] | tuple[str, str, str, str] | None
"""The result of a rule: level, title and advice, and the metric unless `rule` names none; None: no finding."""
RULES: list[Callable[[MetricHistory], Finding | None]] = []


def rule(metric: str = "") -> Callable[[Callable[[MetricHistory], Found]], Callable[[MetricHistory], Finding | None]]:
    """Return a decorator for functions that look for one finding in a history. It adds the function to the rules that
    `find` applies. The findings are about `metric`, unless the function returns another metric."""

    def add(function: Callable[[MetricHistory], Found]) -> Callable[[MetricHistory], Finding | None]:
        @wraps(function)
        def apply(h: MetricHistory) -> Finding | None:
            found = function(h)
            return None if found is None else Finding(*(*found, metric)[:4])

        RULES.append(apply)
        return apply

    return add


def find(history: MetricHistory) -> list[Finding]:
    """Apply all rules and return their findings, most serious first."""
    found = [finding for rule in RULES if (finding := rule(history)) is not None]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def percent(share: float) -> str:
    """Return a fraction between 0 and 1 as text, such as `71 %`."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def count(number: float, noun: str) -> str:
    """Return a number with its noun, such as `1 step` or `3 steps`."""
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


# ---- causes of a missing learning signal


def cause_of_no_signal(h: MetricHistory) -> str | None:
    """Return why (almost) no sample has a learning signal, with the configuration key to change; None: unknown."""
    for cause in (_groups_of_one, _prompts_cut, _cut_off, _constant_reward):
        if (found := cause(h)) is not None:
            return found
    return None


def _loop(h: MetricHistory) -> str:
    for name, key in (("ppo", "num_prompts_per_step"), ("distillation", "max_num_steps"), ("sft", "max_num_steps")):
        if h.setting(f"{name}.{key}") is not None:
            return name
    return "grpo"


def _groups_of_one(h: MetricHistory) -> str | None:
    if _loop(h) != "grpo" or h.setting("grpo.num_generations_per_prompt") != 1:
        return None
    if h.setting("grpo.adv_estimator.name", "grpo") not in ("grpo", "gdpo"):
        return None
    return (
        "grpo.num_generations_per_prompt is 1: a response is compared with the others to its prompt, and there are none. "
        "Set it to 2 or more (8 and 16 are usual)."
    )


def _prompts_cut(h: MetricHistory) -> str | None:
    share, limit = h.recent("train/cut_prompts_rate"), h.setting("data.max_input_seq_length")
    if share is None or share < _NEARLY_ALL:
        return None
    longest = h.recent(PROMPT)
    given = f" (they have {fmt(longest)} on average)" if longest is not None else ""
    return (
        f"{'All' if share == 1 else 'Nearly all'} prompts have data.max_input_seq_length{f' = {limit}' if limit else ''} "
        f"tokens or more{given}: they are cut and train nothing. Raise data.max_input_seq_length (and "
        "policy.max_total_sequence_length), or shorten the prompts."
    )


def _context_is_full(h: MetricHistory) -> bool:
    """Return whether responses end because the context is full before they reach max_new_tokens."""
    rate, mean, prompt = h.recent(CUT), h.recent(LENGTH), h.recent(PROMPT)
    wanted = as_number(h.setting("policy.generation.max_new_tokens"))
    limit = as_number(h.setting("policy.max_total_sequence_length"))
    if None in (rate, mean, wanted, prompt, limit) or rate < 0.2:
        return False
    return mean < 0.9 * wanted and prompt + mean > 0.8 * limit


def _context_advice(h: MetricHistory) -> str:
    limit, wanted = h.setting("policy.max_total_sequence_length"), h.setting("policy.generation.max_new_tokens")
    return (
        f"Prompts of {fmt(h.recent(PROMPT) or 0)} tokens leave {fmt(h.recent(LENGTH) or 0)} of "
        f"policy.max_total_sequence_length = {limit} for a response (policy.generation.max_new_tokens is {wanted}): raise "
        "policy.max_total_sequence_length, or shorten the prompts."
    )


def _cut_off(h: MetricHistory) -> str | None:
    rate, name, reward = h.recent(CUT), _loop(h), h.values(REWARD)
    if rate is None or rate < _NEARLY_ALL:
        return None
    if _context_is_full(h):
        return _context_advice(h)
    if h.setting(f"{name}.overlong_filtering"):
        return (
            f"{name}.overlong_filtering masks every response that was cut off, and nearly all were: raise "
            "policy.generation.max_new_tokens, or set it to false."
        )
    if reward and max(reward) <= 0:
        return (
            "Nearly all responses were cut off before they ended, and none was rewarded: raise "
            "policy.generation.max_new_tokens, or add stop strings. A tokenizer that is not the model's own gives such text "
            "too: look at the samples."
        )
    return None


def _constant_reward(h: MetricHistory) -> str | None:
    equal = h.recent("train/groups/pct_equal")
    rewards = h.values("train/accuracy", REWARD)
    if equal is None or equal < 100 or len(rewards) < 3 or len(set(rewards)) > 1:
        return None
    return (
        f"Every response of every step had the same reward, {fmt(rewards[0])}. Either the reward function gives one number to "
        "everything (call it with a right and a wrong answer), or the task is out of reach: look at the samples."
    )


# ---- the health of a run: exactness, gradients, memory, verifiers


@rule(ERROR)
def exactness(h: MetricHistory) -> Found:
    """Report how much the probabilities of trainer and generation engine differ, in steps without stale samples."""
    stale = dict(zip(*h.curve("train/stale_samples")))
    values = [value for step, value in h.by_step(ERROR).items() if not stale.get(step)]
    if not values:
        return None
    worst, differing = max(values), sum(value != 1.0 for value in values)
    if not differing:
        title = "token_mult_prob_error is exactly 1.0: trainer and generator agree bit for bit"
        return "good", title, f"In all {len(values)} steps the trained probabilities are the sampled ones."
    if worst > 1.05:
        title = f"Trainer and generator disagree: token_mult_prob_error reached {fmt(worst)}"
        advice = "Above 1.05 the training signal is suspect: compare weights, precision and sampling of the two."
        return "bad", title, advice
    steps = f"{differing} of {len(values)} steps"
    title = f"Trainer and generator differ slightly in {steps}: token_mult_prob_error up to {worst:.6g}"
    advice = "Rounding differs between the two. loss_fn.use_importance_sampling_correction=true corrects for it."
    return "info", title, advice


@rule()
def not_finite(h: MetricHistory) -> Found:
    for name in h.names("train/"):
        if extremum(name):
            continue  # an extremum over zero tokens is infinite
        broken = [step for step, value in zip(*h.curve(name)) if not math.isfinite(value)]
        if broken:
            title = f"{name} was not finite in {count(len(broken), 'step')}, first in step {broken[0]}"
            return "bad", title, "Look at the samples of that step, and lower the learning rate.", name
    return None


@rule(NORM)
def vanishing_gradient(h: MetricHistory) -> Found:
    values = h.values(NORM)[-10:]
    if len(values) < 3 or any(value != 0 for value in values):
        return None
    advice = cause_of_no_signal(h) or "Nothing is learned: all advantages are 0, or every sample is masked."
    return "bad", f"The gradient was 0 in the last {len(values)} steps", advice


@rule()
def verifier_timeouts(h: MetricHistory) -> Found:
    names = [name for name in h.names() if "timeout" in name and not name.startswith("timing/")]
    # with several environments, the name without a task is the sum over tasks
    names = ["train/verifier_timeouts"] if "train/verifier_timeouts" in names else names
    number = h.total(*names)
    if number <= 0:
        return None
    title = f"{count(number, 'answer')} could not be verified within their deadline and scored as failed"
    advice = "Look for hostile or enormous answers among the samples, or raise the deadline of the environment."
    return "warn", title, advice, names[0]


@rule()
def unmatchable_truths(h: MetricHistory) -> Found:
    names = [name for name in h.names() if name.endswith("verifier_unmatchable_truths")]
    number = h.total(*names)
    if number <= 0:
        return None
    title = f"{count(number, 'answer')} scored 0 because nothing can match their truth, right answers too"
    advice = (
        "Mend these rows of the data: a truth is a number or an expression (of GSM8K's answers what follows ####), in "
        "multiple choice the letter. `nemo-rl-cpp check` names the first row."
    )
    return "bad", title, advice, names[0]


# ---- learning: reward, validation, exploration, usefulness of the batches


@rule(REWARD)
def reward_trend(h: MetricHistory) -> Found:
    """Report whether the reward rose or fell by more than the noise between steps. If it did neither, report this, too,
    but not in a distillation."""
    trend = h.trend(REWARD)
    if trend is None:
        return None
    span = f"from {fmt(trend.first)} to {fmt(trend.last)} (means of the first and the last {trend.stretch} steps)"
    if trend.sigmas > 3:
        return "good", f"The reward rose {span}", "The policy is learning from its rewards."
    if trend.sigmas < -3:
        advice = "Look at the learning rate, the KL weight and the samples with the highest rewards."
        return "bad", f"The reward fell {span}", advice
    if _loop(h) == "distillation":  # it does not learn from rewards
        return None
    advice = (
        "The change is within the noise between steps: more steps, a higher learning rate or an easier task would "
        "show whether the policy learns."
    )
    return "warn", f"The reward has not clearly moved: {span}", advice


@rule("train/groups/pct_equal")
def equal_rewards(h: MetricHistory) -> Found:
    """Report the share of prompt groups whose rewards are all equal, unless the advantages do not compare groups: with
    a critic, a teacher, or an estimator for one response per prompt."""
    if _loop(h) != "grpo" or h.setting("grpo.adv_estimator.name") == "opd":
        return None
    if h.setting("grpo.num_generations_per_prompt") == 1 and _groups_of_one(h) is None:
        return None
    share = h.recent("train/groups/pct_equal")
    if share is None and (mixed := h.recent("train/baseline_reward/pct_mixed")) is not None:
        share = 100 - mixed
    if share is None or share < 40:
        return None
    level, title = "bad" if share >= 90 else "warn", f"{percent(share / 100)} of groups had equal rewards"
    if level == "bad" and (cause := cause_of_no_signal(h)) is not None:
        return level, title, cause
    best = h.recent("train/groups/pct_equal_best", "train/baseline_reward/pct_1") or 0.0
    worst = h.recent("train/groups/pct_equal_worst", "train/baseline_reward/pct_0") or 0.0
    why = "Some prompts are too easy and others too hard."
    if best > 2 * worst:
        why = f"{percent(best / 100)} had the best reward throughout: the task is too easy. Use harder prompts."
    elif worst > 2 * best:
        why = f"{percent(worst / 100)} had the worst reward throughout: the task is too hard. Use easier prompts first."
    sampling = "Dynamic sampling" if h.setting("grpo.use_dynamic_sampling") else "grpo.use_dynamic_sampling=true"
    why += f" {sampling} replaces such groups by others, at the price of more generation."
    return level, title, why


@rule("train/cut_prompts_rate")
def prompts_cut(h: MetricHistory) -> Found:
    """Report that prompts longer than the limit were truncated."""
    share, limit = h.recent("train/cut_prompts_rate"), h.setting("data.max_input_seq_length")
    if not share:
        return None
    key = f"data.max_input_seq_length{f' (it is {limit})' if limit else ''}"
    advice = cause_of_no_signal(h) if share >= _NEARLY_ALL else f"Raise {key}, or leave such prompts out of the data."
    title = f"{percent(share)} of prompts were too long: they were cut and train nothing"
    return "bad" if share > 0.5 else "warn", title, advice


def _cut_costs_nothing(h: MetricHistory) -> bool:
    """Return whether the mean reward of truncated responses is about that of all responses. If nearly all responses are
    truncated, return whether the reward rises."""
    cut, every, rate = (h.by_step(name) for name in ("train/reward_of_truncated", REWARD, CUT))
    steps = [step for step in cut if rate.get(step, 1.0) < 0.97 and step in every]
    if steps:
        reward = sum(cut[step] for step in steps)
        return reward > 0 and reward >= 0.9 * sum(every[step] for step in steps)
    trend = h.trend(REWARD)
    return bool(cut) and trend is not None and trend.sigmas > 3


@rule(CUT)
def truncation(h: MetricHistory) -> Found:
    rate = h.recent(CUT)
    if rate is None or rate < 0.2:
        return None
    level = "bad" if rate > 0.6 else "warn"
    if _context_is_full(h):
        return level, f"{percent(rate)} of responses were cut off at the end of the context", _context_advice(h)
    if _cut_costs_nothing(h):
        title = f"{percent(rate)} of responses end at the length limit, and are rewarded as well as the others"
        advice = "That is right where answers fill policy.generation.max_new_tokens; raise it where they need more."
        return "info", title, advice
    if (h.recent("train/reward_of_truncated") or 0) > 0:
        level = "warn"  # truncated responses earn rewards, so their endings may not matter
    keys = [f"{_loop(h)}.{key}" for key in ("reward_shaping.enabled", "overlong_filtering")]
    unused = ", ".join(key for key in keys if not h.setting(key))
    advice = "Raise policy.generation.max_new_tokens, or add stop strings"
    advice += f", or shape the reward ({unused})." if unused else "."
    return level, f"{percent(rate)} of responses were cut off at the length limit", advice


@rule("train/approx_entropy")
def entropy(h: MetricHistory) -> Found:
    trend = h.trend("train/approx_entropy")
    if trend is None or trend.first <= 0:
        return None
    span = f"from {fmt(trend.first)} to {fmt(trend.last)}"
    if trend.last <= min(0.25 * trend.first, 0.2):
        advice = (
            "The policy hardly explores any more. If the reward still has room, lower the learning rate, raise "
            "loss_fn.ratio_clip_max (clip higher) or the KL weight."
        )
        return "warn", f"The entropy collapsed {span}", advice
    if trend.last >= max(3 * trend.first, 1.0) and trend.sigmas >= 3:
        advice = "The policy is becoming random: lower the learning rate or raise the KL weight."
        return "warn", f"The entropy grew {span}", advice
    return None


@rule("train/kl_penalty")
def kl_drift(h: MetricHistory) -> Found:
    kl = h.recent("train/kl_penalty")
    if kl is None or kl < 0.5:
        return None
    advice = "Raise loss_fn.reference_policy_kl_penalty or lower the learning rate if the text degrades."
    return "warn", f"The policy is far from its reference: KL {fmt(kl)} per token", advice


@rule("train/critic/explained_var")
def value_quality(h: MetricHistory) -> Found:
    explained = h.recent("train/critic/explained_var")
    if explained is None or explained >= 0:
        return None
    advice = (
        "Its predictions are worse than the mean return: train it longer before the policy "
        "(ppo.policy_training_start_step), or raise its learning rate."
    )
    return "warn", f"The value model explains nothing: explained variance {fmt(explained)}", advice


# ---- in the terminal


class Alerts:
    """Warnings for the terminal, which the rules find in the metrics of this process's steps. The rules are applied
    after the third step, and then whenever the number of steps has grown by a twentieth, so that they take almost no
    time in long runs."""

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        """Watch the metrics of a run. `settings` is the run's configuration, a plain mapping (see `MetricHistory`)."""
        self.history = MetricHistory(settings=settings)
        self._steps = 0
        self._next = 3  # a single small batch is too noisy
        self._told: set[str] = set()

    def add(self, step: int, metrics: Mapping[str, object], prefix: str) -> None:
        """Add the metrics of a step to the history, each as `prefix/name`."""
        self.history.add({"step": step} | {f"{prefix}/{name}": value for name, value in metrics.items()})

    def step(self, step: int, metrics: Mapping[str, object]) -> list[str]:
        """Add the metrics of a step, and return a line for each serious finding that is new."""
        self.add(step, metrics, "train")
        self._steps += 1
        if self._steps < self._next:
            return []
        self._next = self._steps + max(1, self._steps // 20)
        new = [finding for finding in self.serious() if finding.metric not in self._told]
        self._told |= {finding.metric for finding in new}
        return [f"serious: {finding.title}. {finding.advice}" for finding in new]

    def serious(self) -> list[Finding]:
        """Return the serious findings. Of those with the same advice (the same cause) return only the first."""
        found = [finding for finding in find(self.history) if finding.level == "bad"]
        return list({finding.advice: finding for finding in reversed(found)}.values())[::-1]

    @property
    def learned_nothing(self) -> bool:
        """Return whether all gradients in this process were 0, so that at most weight decay has changed the policy."""
        norms = self.history.curve(NORM).values
        return bool(norms) and all(norm == 0 for norm in norms)

    def table(self) -> dict[str, str]:
        """Return the serious findings as rows for the table at the end of a run."""
        return {
            f"serious {number}" if number > 1 else "serious": f"{finding.title}. {finding.advice}"
            for number, finding in enumerate(self.serious(), start=1)
        }
