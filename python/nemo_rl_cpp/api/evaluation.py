"""Evaluate a model on prompts with reward functions: `nemo_rl_cpp.evaluate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from nemo_rl_cpp.api.arguments import dataset_of, reward_environment, rows_of
from nemo_rl_cpp.api.model import DEFAULT_NEW_TOKENS, LoadedModel, eval_config, load
from nemo_rl_cpp.api.training import TrainResult
from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line
from nemo_rl_cpp.config.master import EvalMasterConfig
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.environments.loading import RewardFunction
from nemo_rl_cpp.evals.eval import measure
from nemo_rl_cpp.evals.results import Interval, metric_name

_SHOWN = 20  # samples shown in a notebook


@dataclass(repr=False)
class Evaluation:
    """The result of `evaluate`. It prints as one line, and displays as a table in a notebook.

    Attributes:
        score: pass@k, the fraction of prompts solved by at least one of k responses. A response is correct if its
            reward is 1.
        interval: the 95 % confidence interval of the score, if the prompts are a random sample.
        mean_reward: the mean reward over all responses.
        metrics: metrics of rollouts and rewards: `truncation_rate`, `rewards/<function>`, ...
        samples: one dictionary per response: `prompt`, `response`, `reward`, `truncated`, and the row's other columns
            under `extra_env_info`."""

    metric: str
    score: float
    interval: Interval
    mean_reward: float
    prompts: int
    metrics: dict[str, float]
    samples: list[dict[str, object]] = field(repr=False)

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Evaluation({self.metric} {self.score:.3f}, 95 % interval {low:.3f} to {high:.3f}, mean reward {self.mean_reward:.3f}, "
            f"{self.prompts} prompts, {len(self.samples)} answers)"
        )

    def _repr_html_(self) -> str:
        """Return the one-line summary and the first responses as HTML."""
        rows = "".join(
            f"<tr><td>{escape(str(sample['prompt']))}</td><td>{escape(str(sample['response']))}</td><td>{sample['reward']:.3g}</td></tr>"
            for sample in self.samples[:_SHOWN]
        )
        return f"<p>{escape(repr(self))}</p><table><tr><th>prompt</th><th>answer</th><th>reward</th></tr>{rows}</table>"


def evaluate(
    model: str | Path | LoadedModel | TrainResult,
    prompts: object = None,
    reward_funcs: RewardFunction
    | str
    | Sequence[RewardFunction | str]
    | Mapping[str, RewardFunction | str]
    | None = None,
    *,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    n: int = 1,
    k: int = 1,
    seed: int = 42,
    **options: object,
) -> Evaluation:
    """Generate `n` responses to each prompt, score them with reward functions, and return an `Evaluation`.

    `model` is any model that `load` accepts, a `LoadedModel`, or the result of a training. `prompts`, `reward_funcs`
    and `reward_weights` are as in `train_grpo`. pass@k is an unbiased estimate from n >= k responses. `options` are
    temperature (0: greedy, only for n=1), top_p, top_k, max_new_tokens (256, or the training's), stop_strings (or the
    training's) and precision. Raise ValueError for invalid arguments, before a model is loaded."""
    rows = rows_of(prompts, "prompts")
    environment = reward_environment(reward_funcs, reward_weights, False)
    environment.check_columns(rows[0].keys() - {"prompt"})
    given = {"n": n, "k": k, "seed": seed, "max_new_tokens": DEFAULT_NEW_TOKENS}
    if isinstance(model, TrainResult):
        training = model.config.policy.generation
        given |= {"max_new_tokens": training.max_new_tokens, "stop_strings": training.stop_strings}
    config = _config(model, given | options)
    if not isinstance(model, (LoadedModel, TrainResult)):
        model = load(model, precision=options.get("precision"))  # type: ignore[arg-type]
    engine = model.generation
    limit = engine.max_model_len
    dataset = dataset_of(rows, model.tokenizer, limit, limit_name="the longest sequence of the model")
    loader = StatefulDataLoader(dataset, len(dataset))
    config.generation.vllm_cfg.max_model_len = limit
    usual = engine.config, engine.seed
    engine.config, engine.seed = config.generation, config.eval.seed
    try:
        found, samples = measure(engine, loader, environment, config)
    finally:
        engine.config, engine.seed = usual
    name = metric_name(config.eval)
    return Evaluation(name, found.score, found.interval, found.mean_reward, found.prompts, found.metrics, samples)


_KEYS = {
    "n": "eval.num_tests_per_prompt",
    "k": "eval.k_value",
    "seed": "eval.seed",
    "precision": "generation.vllm_cfg.precision",
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "top_k": "generation.top_k",
    "max_new_tokens": "generation.max_new_tokens",
    "stop_strings": "generation.stop_strings",
}


def _config(model: object, given: dict[str, object]) -> EvalMasterConfig:
    unknown = next((name for name in given if name not in _KEYS), None)
    if unknown is not None:
        takes = f"evaluate takes {', '.join(_KEYS)}, prompts, reward_funcs and reward_weights"
        hint = did_you_mean(unknown, [*_KEYS, "prompts", "reward_funcs", "reward_weights"], takes)
        raise ValueError(f"{unknown} is unknown; {hint}")
    if isinstance(given["n"], int) and given["n"] > 1 and not given.get("temperature"):
        raise ValueError(f"n={given['n']} greedy answers to a prompt would be equal: give temperature=1.0, or n=1")
    if isinstance(model, (LoadedModel, TrainResult)):
        if "precision" in given:
            raise ValueError(f"precision is {in_a_line(given['precision'])}, but the model is loaded: leave it out")
    elif not isinstance(model, (str, Path)):
        forms = "a folder, a model's name, what nemo_rl_cpp.load gave, or the result of a training"
        raise ValueError(f"model is {in_a_line(model)}: give {forms}")
    name = str(model) if isinstance(model, (str, Path)) else "loaded"
    keys = {_KEYS[key]: (key, value) for key, value in given.items()}
    return eval_config({"generation.model_name": ("model", name)} | keys)
