"""Words of the report that depend on the run: a mean of right and wrong is an accuracy, any other mean a reward."""

from nemo_rl_cpp.report.history import MetricHistory


def validation_word(*histories: MetricHistory) -> str:
    """`accuracy` where every reward of every validation was 0 or 1, else `reward`.

    A validation says so itself (`validation/right_or_wrong`). Logs of older runs do not: there a mean that is no whole number of
    right answers, or that differs from the environment's share of exactly right ones, is a reward.
    """
    return "accuracy" if all(_right_or_wrong(history) for history in histories) else "reward"


def _right_or_wrong(history: MetricHistory) -> bool:
    said = history.curve("validation/right_or_wrong").finite().values
    if said:
        return all(value == 1 for value in said)
    means, exact = (
        dict(zip(*history.curve(f"validation/{name}").finite(), strict=True)) for name in ("accuracy", "exactly_right")
    )
    if any(not 0 <= mean <= 1 or abs(exact.get(step, mean) - mean) > 1e-5 for step, mean in means.items()):
        return False
    if history.curve("validation/pass_k").values:  # several answers a prompt, whose number is not logged
        return True
    counts = dict(zip(*history.curve("validation/num_samples").finite(), strict=True))
    return all(
        abs(mean * counts[step] - round(mean * counts[step])) < 1e-3 for step, mean in means.items() if step in counts
    )
