"""Findings about the health of a run: exactness, gradients, time, memory, verifiers."""

import math
import statistics

from nemo_rl_cpp.report.finding import Finding, count, percent, rule
from nemo_rl_cpp.report.findings_causes import cause_of_no_signal
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.numbers import format_number as fmt

ERROR = "train/token_mult_prob_error"
NORM = "train/grad_norm"
STEP_TIME = "timing/train/total_step_time"
# stages that come after a step and are not part of its total_step_time
BETWEEN_STEPS = ("checkpointing", "validation")


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
def masked_sequences(h: MetricHistory) -> Finding | None:
    """Sequences left out because trainer and generator disagreed on them."""
    name = "train/num_masked_seqs_by_logprob_error"
    number = h.total(name)
    if number <= 0:
        return None
    return Finding(
        "warn",
        f"Left out: {count(number, 'sequence')} whose log-probabilities differed too much",
        "grpo.seq_logprob_error_threshold masks them; the cause is a difference between generator and trainer.",
        name,
    )


@rule
def stale_samples(h: MetricHistory) -> Finding | None:
    """Samples of an older policy version were trained on."""
    name = "train/stale_samples"
    number = h.total(name)
    if number <= 0:
        return None
    return Finding(
        "info",
        f"{count(number, 'sample')} came from an older version of the policy",
        "async_grpo and async_ppo generate beside training, and dynamic_sampling_keep_surplus=true keeps surplus groups for the "
        "next step; exactness is claimed for current samples only.",
        name,
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
def where_time_goes(h: MetricHistory) -> Finding | None:
    """The stage that takes most of the time."""
    shares = stage_shares(h)
    if not shares:
        return None
    label, share = max(shares.items(), key=lambda item: item[1])
    if share < 0.5:
        return None
    return Finding(
        "info", f"The stage {label} takes {percent(share)} of the time of a step", "", f"timing/train/{label}"
    )


@rule
def unexplained_time(h: MetricHistory) -> Finding | None:
    """Much of a step belongs to no named stage."""
    share = h.recent("timing/train/accounted_share")
    if share is None or share > 0.9:
        return None
    return Finding(
        "warn",
        f"{percent(1 - share)} of a step's time belongs to no named stage",
        "The machine may be busy with something else, or a stage lacks its timer.",
        "timing/train/accounted_share",
    )


@rule
def slowing_down(h: MetricHistory) -> Finding | None:
    """Steps take longer and longer though the number of tokens does not grow."""
    time, tokens = h.trend(STEP_TIME, at_least=10), h.trend("train/total_num_tokens", at_least=10)
    if time is None or time.first <= 0 or time.last < 1.5 * time.first or time.sigmas < 4:
        return None
    if tokens is not None and tokens.first > 0 and tokens.last / tokens.first > 0.8 * time.last / time.first:
        return None
    return Finding(
        "warn",
        f"Steps became slower: {fmt(time.first)} s to {fmt(time.last)} s, for about the same number of tokens",
        "The machine may be shared or hot, or memory may be short.",
        STEP_TIME,
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


def stage_shares(h: MetricHistory) -> dict[str, float]:
    """The share of each outermost stage in the time of all steps and of what lies between them, largest first.

    Stages within stages (with a `/`) and sums are left out, except that a group known only by its total
    (`prepare_for_generation/total`) counts as one.
    """
    seconds: dict[str, float] = {}
    for name in h.names("timing/train/"):
        label = name.removeprefix("timing/train/").removesuffix("/total")
        if label in ("total_step_time", "accounted_share") or "/" in label or "tokens_per_sec" in label:
            continue
        seconds[label] = h.total(name)
    total = h.total(STEP_TIME) + math.fsum(seconds.get(label, 0.0) for label in BETWEEN_STEPS)
    if total <= 0:
        return {}
    return dict(sorted(((k, v / total) for k, v in seconds.items()), key=lambda item: -item[1]))
