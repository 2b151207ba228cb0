"""Write the log folder of a synthetic run in the format of a real one."""

import math
import random

from nemo_rl_cpp.config.logger import LoggerConfig
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.report.history import MetricHistory

CONFIG = {
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 8, "max_num_steps": 60, "seed": 42},
    "policy": {"model_name": "SmolLM2-135M-Instruct", "optimizer": {"kwargs": {"lr": 2e-5, "betas": [0.9, 0.999]}}},
    "loss_fn": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0},
}


def history_of(**metrics):
    """Return a history from lists of values at steps 1, 2, ...; `__` in a name means `/`."""
    history = MetricHistory()
    for name, values in metrics.items():
        for step, value in enumerate(values, start=1):
            history.add({"step": step, name.replace("__", "/"): value})
    return history


def write_run(log_dir, steps=60, seed=0, tensorboard=False):
    """Log `steps` steps into `log_dir`."""
    rng = random.Random(seed)
    logger = Logger(LoggerConfig(log_dir=str(log_dir), tensorboard_enabled=tensorboard))
    logger.log_hyperparams(CONFIG)
    for step in range(1, steps + 1):
        log_step(logger, step, rng)
        if step % 10 == 0 or step == 1:
            accuracy = 0.12 + 0.5 * (1 - math.exp(-step / 30))
            validation = {"accuracy": accuracy, "avg_length": 12.0, "right_or_wrong": 1.0, "num_samples": 100}
            validation |= {"accuracy_ci95_low": accuracy - 0.08, "accuracy_ci95_high": accuracy + 0.08}
            logger.log_metrics(validation, step, prefix="validation")
            logger.log_metrics({"total_validation_time": 1.5}, step, prefix="timing/validation")
    logger.finish()


def log_step(logger, step, rng):
    """Log the metrics and rollouts of one step."""
    reward = 0.15 + 0.5 * (1 - math.exp(-step / 25)) + rng.gauss(0, 0.03)
    equal = 30 + 45 * (1 - math.exp(-step / 40)) + rng.gauss(0, 4)
    times = {
        "generation": 1.9 + rng.random() * 0.3, "policy_training": 1.2 + rng.random() * 0.2, "reward_calculation": 0.12,
        "data_processing": 0.02, "advantage_calculation": 0.001,
    }  # fmt: skip
    total = sum(times.values()) + 0.03
    train = {
        "reward": reward, "loss": -0.01 + rng.gauss(0, 0.01), "grad_norm": abs(rng.gauss(0.8, 0.15)) * (12 if step == 33 else 1),
        "approx_entropy": 0.3 + 0.9 * math.exp(-step / 20), "token_mult_prob_error": 1.0, "lr": 2e-5 * min(step / 10, 1.0),
        "mean_gen_tokens_per_sample": 20 - 8 * (1 - math.exp(-step / 20)) + rng.random(), "max_gen_tokens_per_sample": 48,
        "truncation_rate": 0.28 * math.exp(-step / 15), "groups/pct_equal": equal, "groups/pct_equal_best": equal * 0.8,
        "groups/pct_equal_worst": equal * 0.2, "total_num_tokens": 2600, "probs_ratio": 1.0, "probs_ratio_min": 0.9,
        "probs_ratio_max": 1.15, "advantages/min": -1.5, "advantages/max": 1.9,
    }  # fmt: skip
    timing = {"total_step_time": total, "accounted_share": 1 - 0.03 / total, **times}
    speed = {"tokens_per_sec": 2600 / total, "generation_tokens_per_sec": 2600 / times["generation"]}
    peaks = {"generation": 1.9, "policy_training": 2.6 + 0.01 * rng.random(), "run": 2.63}
    memory = {f"peak_rss_gb/{phase}": peak for phase, peak in peaks.items()} | {"rss_gb": 1.7}
    logger.log_metrics(train, step, prefix="train")
    logger.log_metrics(timing, step, prefix="timing/train")
    logger.log_metrics(speed, step, prefix="performance")
    logger.log_metrics(memory, step, prefix="memory", step_finished=True)
    groups = [(rng.randrange(100), rng.randrange(100)) for _ in range(4)]
    rows = [_answer(groups[index // 4], index, reward, rng) for index in range(16)]
    logger.log_batched_dict_as_jsonl(
        {name: [row[name] for row in rows] for name in rows[0]}, f"train_data_step{step}.jsonl"
    )


def messages(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def token_bytes(token):
    """Return the bytes of a token. Each token of this run is one byte."""
    return bytes([token])


def _answer(numbers, index, chance, rng):
    """Return a row of the rollout file, in which each character of the response is a token."""
    right = rng.random() < chance
    answer = f" {sum(numbers) if right else sum(numbers) + rng.choice((-10, -1, 1, 10))}"
    if index == 5:
        answer += " and so on"
    prompt = f"3 + 4 = 7\n12 + 30 = 42\n{numbers[0]} + {numbers[1]} ="
    tokens, count = [*prompt.encode(), *answer.encode()], len(answer.encode())
    before = [0.0] * (len(tokens) - count)
    logprobs = [-rng.random() * 4 for _ in range(count)]
    return {
        "content": messages(prompt, answer), "rewards": float(right), "input_lengths": len(tokens), "truncated": index == 5,
        "token_ids": tokens, "token_loss_mask": [*[0] * len(before), *[1] * count],
        "advantages": [1.0 if right else -0.5] * len(tokens), "generation_logprobs": [*before, *logprobs],
        "prev_logprobs": [*before, *(value + 0.01 * (index == 3) for value in logprobs)], "group_id": index // 4,
        "ground_truth": str(sum(numbers)),
    }  # fmt: skip
