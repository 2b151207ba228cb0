"""Why nothing can be learned from a run's samples: what the advice of several findings rests on."""

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.numbers import format_number as fmt

_NEARLY_ALL = 0.9


def _loop(h: MetricHistory) -> str:
    """The section of the training loop."""
    return "ppo" if h.setting("ppo.num_prompts_per_step") is not None else "grpo"


def compares_groups(h: MetricHistory) -> bool:
    """Whether responses to one prompt are compared with one another: not where a critic judges each by itself, nor where
    there is one response a prompt and the estimator needs no more."""
    if _loop(h) == "ppo":
        return False
    return h.setting("grpo.num_generations_per_prompt") != 1 or _groups_of_one(h) is not None


def cause_of_no_signal(h: MetricHistory) -> str | None:
    """What leaves (nearly) all samples without a learning signal, and the key to change; None where the metrics do not say."""
    for cause in (_groups_of_one, _prompts_cut, _context_full, _masked_for_length, _answers_cut, _constant_reward):
        if (found := cause(h)) is not None:
            return found
    return None


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
    share = h.recent("train/cut_prompts_rate")
    if share is None or share < _NEARLY_ALL:
        return None
    limit = h.setting("data.max_input_seq_length")
    longest = h.recent("train/mean_prompt_length")
    given = f" (they have {fmt(longest)} on average)" if longest is not None else ""
    return (
        f"{'All' if share == 1 else 'Nearly all'} prompts have data.max_input_seq_length{f' = {limit}' if limit else ''} tokens or more{given}: "
        "they are cut and train nothing. Raise data.max_input_seq_length (and policy.max_total_sequence_length), or shorten the prompts."
    )


def context_is_full(h: MetricHistory) -> bool:
    """Whether responses end because prompt and response fill the context, before they have max_new_tokens."""
    rate, mean = h.recent("train/truncation_rate"), h.recent("train/mean_gen_tokens_per_sample")
    wanted, prompt = as_number(h.setting("policy.generation.max_new_tokens")), h.recent("train/mean_prompt_length")
    limit = as_number(h.setting("policy.max_total_sequence_length"))
    if None in (rate, mean, wanted, prompt, limit) or rate < 0.2:
        return False
    return mean < 0.9 * wanted and prompt + mean > 0.8 * limit


def _context_full(h: MetricHistory) -> str | None:
    return context_advice(h) if context_is_full(h) and (h.recent("train/truncation_rate") or 0) >= _NEARLY_ALL else None


def context_advice(h: MetricHistory) -> str:
    """What to do where `context_is_full`."""
    limit, mean = h.setting("policy.max_total_sequence_length"), h.recent("train/mean_gen_tokens_per_sample")
    prompt, wanted = h.recent("train/mean_prompt_length"), h.setting("policy.generation.max_new_tokens")
    return (
        f"Prompts of {fmt(prompt or 0)} tokens leave {fmt(mean or 0)} of policy.max_total_sequence_length = {limit} for a response "
        f"(policy.generation.max_new_tokens is {wanted}): raise policy.max_total_sequence_length, or shorten the prompts."
    )


def _masked_for_length(h: MetricHistory) -> str | None:
    rate, name = h.recent("train/truncation_rate"), _loop(h)
    if rate is None or rate < _NEARLY_ALL or not h.setting(f"{name}.overlong_filtering"):
        return None
    return (
        f"{name}.overlong_filtering masks every response that was cut off, and nearly all were: raise "
        "policy.generation.max_new_tokens, or set it to false."
    )


def cut_costs_nothing(h: MetricHistory) -> bool:
    """Whether responses that were cut off are rewarded as well as all, as where answers fill exactly their length. Steps in
    which all were cut compare nothing: where there are no others, a reward that rises says it."""
    cut, every, rate = (
        dict(zip(*h.curve(name).finite(), strict=True))
        for name in ("train/reward_of_truncated", "train/reward", "train/truncation_rate")
    )
    steps = [step for step in cut if rate.get(step, 1.0) < 0.97 and step in every]
    if steps:
        reward = sum(cut[step] for step in steps)
        return reward > 0 and reward >= 0.9 * sum(every[step] for step in steps)
    trend = h.trend("train/reward")
    return bool(cut) and trend is not None and trend.sigmas > 3


def _answers_cut(h: MetricHistory) -> str | None:
    rate, reward = h.recent("train/truncation_rate"), h.curve("train/reward").finite().values
    if rate is None or rate < _NEARLY_ALL or not reward or max(reward) > 0:
        return None
    return (
        "Nearly all responses were cut off before they ended, and none was rewarded: raise policy.generation.max_new_tokens, or "
        "add stop strings. A tokenizer that is not the model's own gives such text too: look at the samples."
    )


def _constant_reward(h: MetricHistory) -> str | None:
    equal = h.recent("train/groups/pct_equal")
    rewards = h.curve("train/accuracy", "train/reward").finite().values
    if equal is None or equal < 100 or len(rewards) < 3 or len(set(rewards)) > 1:
        return None
    return (
        f"Every response of every step had the same reward, {fmt(rewards[0])}. Either the reward function gives one number to "
        "everything (call it with a right and a wrong answer), or the task is out of reach: look at the samples."
    )
