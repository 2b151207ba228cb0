"""What the numbers of a run say, in plain words: rules that are pure functions of the metric history."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from nemo_rl_cpp.report.findings_causes import (
    cause_of_no_signal,
    compares_groups,
    context_advice,
    context_is_full,
    cut_costs_nothing,
)
from nemo_rl_cpp.report.history import MetricHistory, validation_word
from nemo_rl_cpp.report.numbers import format_number as fmt

LEVELS = ("bad", "warn", "good", "info")
ERROR, NORM, REWARD, ACCURACY = (
    "train/token_mult_prob_error",
    "train/grad_norm",
    "train/reward",
    "validation/accuracy",
)


class Finding(NamedTuple):
    """One statement: `level` is bad, warn, good or info; `title` the statement, `advice` what to do about it or why."""

    level: str
    title: str
    advice: str
    metric: str


Rule = Callable[[MetricHistory], Finding | None]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a function to the rules that `find` applies."""
    RULES.append(function)
    return function


def percent(share: float) -> str:
    """A share between 0 and 1 as text: `71 %`."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def count(number: float, noun: str) -> str:
    """A number with its noun: `1 step`, `3 steps`."""
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def find(history: MetricHistory) -> list[Finding]:
    """Return every finding that applies, the worst first."""
    found = [finding for rule in RULES if (finding := rule(history)) is not None]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


# ---- the health of a run: exactness, gradients, memory, verifiers


@rule
def exactness(h: MetricHistory) -> Finding | None:
    """Whether trainer and generator give the same probabilities, in the steps whose samples the present weights made."""
    stale = dict(zip(*h.curve("train/stale_samples")))
    values = [value for step, value in zip(*h.curve(ERROR).finite()) if not stale.get(step)]
    if not values:
        return None
    if all(value == 1.0 for value in values):
        return Finding(
            "good",
            "token_mult_prob_error is exactly 1.0: trainer and generator agree bit for bit",
            f"In all {len(values)} steps the trained probabilities are the sampled ones.",
            ERROR,
        )
    worst = max(values)
    if worst > 1.05:
        return Finding(
            "bad",
            f"Trainer and generator disagree: token_mult_prob_error reached {fmt(worst)}",
            "Above 1.05 the training signal is suspect: compare weights, precision and sampling parameters of the two.",
            ERROR,
        )
    differing = sum(value != 1.0 for value in values)
    return Finding(
        "info",
        f"Trainer and generator differ slightly in {differing} of {len(values)} steps: "
        f"token_mult_prob_error up to {worst:.6g}",
        "Rounding differs between the two. loss_fn.use_importance_sampling_correction=true corrects for it.",
        ERROR,
    )


@rule
def not_finite(h: MetricHistory) -> Finding | None:
    """Metrics of training that were nan or infinite."""
    for name in h.names("train/"):
        curve = h.curve(name)
        if name.endswith(("_min", "_max")):
            continue  # extrema over no token are infinite by definition
        broken = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
        if broken:
            return Finding(
                "bad",
                f"{name} was not finite in {count(len(broken), 'step')}, first in step {broken[0]}",
                "Look at the samples of that step, and lower the learning rate.",
                name,
            )
    return None


@rule
def gradient_spikes(h: MetricHistory) -> Finding | None:
    """Gradient norms far above their usual size."""
    curve = h.curve(NORM).finite()
    if len(curve.values) < 10:
        return None
    usual = statistics.median(curve.values)
    spikes = [step for step, value in zip(curve.steps, curve.values, strict=True) if usual > 0 and value > 8 * usual]
    if not spikes:
        return None
    where = ", ".join(map(str, spikes[:5])) + (", ..." if len(spikes) > 5 else "")
    return Finding(
        "warn",
        f"The gradient norm spiked in {count(len(spikes), 'step')} ({where}): up to {fmt(max(curve.values))}, "
        f"usually {fmt(usual)}",
        "policy.max_grad_norm limits their effect; look at the samples of these steps.",
        NORM,
    )


@rule
def vanishing_gradient(h: MetricHistory) -> Finding | None:
    """The gradient is 0."""
    values = h.curve(NORM).finite().values[-10:]
    if len(values) < 3 or any(value != 0 for value in values):
        return None
    return Finding(
        "bad",
        f"The gradient was 0 in the last {len(values)} steps",
        cause_of_no_signal(h) or "Nothing is learned: all advantages are 0, or every sample is masked.",
        NORM,
    )


@rule
def verifier_timeouts(h: MetricHistory) -> Finding | None:
    """Answers whose verifier was stopped at its deadline."""
    names = [name for name in h.names() if "timeout" in name and not name.startswith("timing/")]
    # with several environments the plain name is the sum of the others
    names = ["train/verifier_timeouts"] if "train/verifier_timeouts" in names else names
    number = h.total(*names)
    if number <= 0:
        return None
    return Finding(
        "warn",
        f"{count(number, 'answer')} could not be verified within their deadline and scored as failed",
        "Look for hostile or enormous answers among the samples, or raise the deadline of the environment.",
        names[0],
    )


@rule
def unmatchable_truths(h: MetricHistory) -> Finding | None:
    """Answers that scored 0 because no answer can match their truth."""
    names = [name for name in h.names() if name.endswith("verifier_unmatchable_truths")]
    number = h.total(*names)
    if number <= 0:
        return None
    return Finding(
        "bad",
        f"{count(number, 'answer')} scored 0 because nothing can match their truth, right answers too",
        "Mend these rows of the data: a truth is a number or an expression (of GSM8K's answers what follows ####), in multiple choice "
        "the letter. `nemo-rl-cpp check` names the first row.",
        names[0],
    )


@rule
def memory_growth(h: MetricHistory) -> Finding | None:
    """Resident memory grows all through the run."""
    name = "memory/rss_gb"
    values = h.curve(name).finite().values
    if len(values) < 20:
        return None
    quarter = len(values) // 4
    means = [statistics.fmean(values[i * quarter : (i + 1) * quarter]) for i in range(4)]
    # the first quarter is warm-up: only growth after it counts
    if not all(a < b for a, b in zip(means, means[1:], strict=False)) or means[3] < 1.15 * means[1]:
        return None
    return Finding(
        "warn",
        f"Memory keeps growing: {fmt(means[1])} to {fmt(means[3])} GiB after the warm-up",
        "Something is kept from step to step; the run may end for lack of memory.",
        name,
    )


@rule
def logprob_mismatch(h: MetricHistory) -> Finding | None:
    """Tokens whose probability in training was not the sampled one, bit for bit."""
    names = [name for name in h.names("train/") if name.endswith("mismatched_tokens")]
    number = h.total(*names[:1])
    if number <= 0:
        return None
    return Finding(
        "warn",
        f"Training gave {count(number, 'token')} another probability than generation did",
        "policy.reuse_generation_logprobs=auto computes the log-probabilities again then; the weights, the precision "
        "or the arithmetic of the two differ.",
        names[0],
    )


# ---- learning: reward, validation, exploration, usefulness of the batches


@rule
def reward_trend(h: MetricHistory) -> Finding | None:
    """Whether the training reward rose, fell or stayed, beyond the noise between steps."""
    trend = h.trend(REWARD)
    if trend is None:
        return None
    span = f"from {fmt(trend.first)} to {fmt(trend.last)} (means of the first and the last {trend.stretch} steps)"
    if trend.sigmas > 3:
        return Finding("good", f"The reward rose {span}", "The policy is learning from its rewards.", REWARD)
    if trend.sigmas < -3:
        return Finding(
            "bad",
            f"The reward fell {span}",
            "Look at the learning rate, the KL weight and the samples with the highest rewards.",
            REWARD,
        )
    advice = (
        "The change is within the noise between steps: more steps, a higher learning rate or an easier task would "
        "show whether the policy learns."
    )
    return Finding("warn", f"The reward has not clearly moved: {span}", advice, REWARD)


@rule
def validation_trend(h: MetricHistory) -> Finding | None:
    """The validation at first, now and at its best."""
    curve = h.curve(ACCURACY).finite()
    if len(curve.values) < 2:
        return None
    first, last, best = curve.values[0], curve.values[-1], max(curve.values)
    at = curve.steps[curve.values.index(best)]
    name = f"Validation {validation_word(h)}"
    text = f"from {fmt(first)} (step {curve.steps[0]}) to {fmt(last)} (step {curve.steps[-1]})"
    note = f"The best was {fmt(best)} at step {at}."
    if last > first:
        if _intervals_meet(h, curve.steps[0], curve.steps[-1]):
            return Finding("info", f"{name} rose {text}", f"{note} The 95 % intervals of the two overlap.", ACCURACY)
        return Finding("good", f"{name} rose {text}", note, ACCURACY)
    level = "warn" if last < first else "info"
    word = "fell" if last < first else "is unchanged"
    return Finding(level, f"{name} {word} {text}", f"The best was {fmt(best)} at step {at}.", ACCURACY)


def _intervals_meet(h: MetricHistory, first: int, last: int) -> bool:
    """Whether the intervals of two validations overlap; False where they are not known."""
    low, high = (dict(zip(*h.curve(f"{ACCURACY}_ci95_{end}").finite(), strict=True)) for end in ("low", "high"))
    return first in high and last in low and low[last] <= high[first]


@rule
def past_its_best(h: MetricHistory) -> Finding | None:
    """The training reward still rises while validation has dropped well below its best."""
    curve, trend = h.curve(ACCURACY).finite(), h.trend(REWARD)
    if len(curve.values) < 3 or trend is None or trend.sigmas <= 0:
        return None
    best, last = max(curve.values), curve.values[-1]
    if best > curve.values[0] and last < best - max(0.05, 0.25 * (best - curve.values[0])):
        at = curve.steps[curve.values.index(best)]
        return Finding(
            "warn",
            f"Validation {validation_word(h)} is {fmt(last)}, down from {fmt(best)} at step {at}, while the reward rises",
            f"The policy may be fitting its training prompts or its verifier: the checkpoint of step {at} "
            "is the one to keep.",
            ACCURACY,
        )
    return None


@rule
def equal_rewards(h: MetricHistory) -> Finding | None:
    """The share of prompt groups whose rewards are all equal: they teach nothing, where groups are compared."""
    if not compares_groups(h):
        return None
    share = h.recent("train/groups/pct_equal")
    if share is None:
        mixed = h.recent("train/baseline_reward/pct_mixed")
        share = None if mixed is None else 100 - mixed
    if share is None or share < 40:
        return None
    level = "bad" if share >= 90 else "warn"
    best = h.recent("train/groups/pct_equal_best", "train/baseline_reward/pct_1") or 0.0
    worst = h.recent("train/groups/pct_equal_worst", "train/baseline_reward/pct_0") or 0.0
    if level == "bad" and (cause := cause_of_no_signal(h)) is not None:
        return Finding(level, f"{percent(share / 100)} of groups had equal rewards", cause, "train/groups/pct_equal")
    if best > 2 * worst:
        why = f"{percent(best / 100)} had the best reward throughout: the task is too easy. Use harder prompts."
    elif worst > 2 * best:
        why = f"{percent(worst / 100)} had the worst reward throughout: the task is too hard. Use easier prompts first."
    else:
        why = "Some prompts are too easy and others too hard."
    why += " grpo.use_dynamic_sampling=true replaces such groups by others, at the price of more generation."
    return Finding(level, f"{percent(share / 100)} of groups had equal rewards", why, "train/groups/pct_equal")


@rule
def no_signal(h: MetricHistory) -> Finding | None:
    """Steps in which every advantage was 0."""
    low, high = h.curve("train/advantages/min"), h.curve("train/advantages/max")
    silent = sum(a == 0 == b for a, b in zip(low.values, high.values, strict=False))
    if silent == 0:
        return None
    level = "bad" if silent * 2 > len(low.values) else "warn"
    cause = cause_of_no_signal(h) if level == "bad" else None
    if compares_groups(h):
        why = "All rewards within each group were equal. More generations per prompt or other prompts would help."
    else:
        why = "No response was better or worse than expected: look at the rewards of the samples."
    return Finding(
        level,
        f"{silent} of {len(low.values)} steps had no learning signal: every advantage was 0",
        cause or why,
        "train/advantages/max",
    )


@rule
def prompts_cut(h: MetricHistory) -> Finding | None:
    """Prompts that are longer than the limit are cut and train nothing."""
    share = h.recent("train/cut_prompts_rate")
    if not share:
        return None
    limit = h.setting("data.max_input_seq_length")
    return Finding(
        "bad" if share > 0.5 else "warn",
        f"{percent(share)} of prompts were too long: they were cut and train nothing",
        cause_of_no_signal(h)
        if share >= 0.9
        else f"Raise data.max_input_seq_length{f' (it is {limit})' if limit else ''}, or leave such prompts out of the data.",
        "train/cut_prompts_rate",
    )


@rule
def truncation(h: MetricHistory) -> Finding | None:
    """Many responses end at the length limit."""
    rate = h.recent("train/truncation_rate")
    if rate is None or rate < 0.2:
        return None
    level = "bad" if rate > 0.6 else "warn"
    if context_is_full(h):
        return Finding(
            level,
            f"{percent(rate)} of responses were cut off at the end of the context",
            context_advice(h),
            "train/truncation_rate",
        )
    if cut_costs_nothing(h):
        return Finding(
            "info",
            f"{percent(rate)} of responses end at the length limit, and are rewarded as well as the others",
            "That is right where answers fill policy.generation.max_new_tokens; raise it where they need more.",
            "train/truncation_rate",
        )
    if (h.recent("train/reward_of_truncated") or 0) > 0:
        level = "warn"  # they earn something: whether their ends are missed does not show
    return Finding(
        level,
        f"{percent(rate)} of responses were cut off at the length limit",
        "Raise policy.generation.max_new_tokens, add stop strings, or shape the reward "
        "(grpo.reward_shaping, grpo.overlong_filtering).",
        "train/truncation_rate",
    )


@rule
def entropy(h: MetricHistory) -> Finding | None:
    """The policy has become nearly deterministic, or drifts towards noise."""
    name, trend = "train/approx_entropy", h.trend("train/approx_entropy")
    if trend is None or trend.first <= 0:
        return None
    span = f"from {fmt(trend.first)} to {fmt(trend.last)}"
    if trend.last <= min(0.25 * trend.first, 0.2):
        advice = (
            "The policy hardly explores any more. If the reward still has room, lower the learning rate, raise "
            "loss_fn.ratio_clip_max (clip higher) or the KL weight."
        )
        return Finding("warn", f"The entropy collapsed {span}", advice, name)
    if trend.last >= max(3 * trend.first, 1.0) and trend.sigmas >= 3:
        advice = "The policy is becoming random: lower the learning rate or raise the KL weight."
        return Finding("warn", f"The entropy grew {span}", advice, name)
    return None


@rule
def kl_drift(h: MetricHistory) -> Finding | None:
    """The policy is far from its reference."""
    kl = h.recent("train/kl_penalty")
    if kl is None or kl < 0.5:
        return None
    return Finding(
        "warn",
        f"The policy is far from its reference: KL {fmt(kl)} per token",
        "Raise loss_fn.reference_policy_kl_penalty or lower the learning rate if the text degrades.",
        "train/kl_penalty",
    )


@rule
def value_quality(h: MetricHistory) -> Finding | None:
    """PPO: the critic explains nothing of the returns."""
    name = next((n for n in ("train/critic/explained_var", "train/explained_var") if h.curve(n).values), None)
    explained = h.recent(name) if name else None
    if explained is None or explained >= 0:
        return None
    return Finding(
        "warn",
        f"The value model explains nothing: explained variance {fmt(explained)}",
        "Its predictions are worse than the mean return: train it longer before the policy "
        "(ppo.policy_training_start_step), or raise its learning rate.",
        name,
    )


@rule
def sampling_cost(h: MetricHistory) -> Finding | None:
    """Dynamic sampling generates several batches a step."""
    name = "train/dynamic_sampling_num_gen_batches"
    count = h.recent(name)
    if count is None or count < 3 or math.isnan(count):
        return None
    return Finding(
        "warn",
        f"Dynamic sampling needed {fmt(count)} generation batches a step",
        "Few groups have differing rewards: choose prompts nearer to the policy's ability, or raise "
        "grpo.batch_multiplier to generate them in one go.",
        name,
    )
