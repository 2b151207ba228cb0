"""GRPO and PPO from a notebook: a model, prompts and a reward function are enough.

import nemo_rl_cpp
result = nemo_rl_cpp.train_grpo("smollm2-135m-instruct", prompts=["3 + 4 = ", "1 + 9 = "], reward_funcs=my_function)
result.generate(["2 + 5 = "])
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.callbacks import Callback, Callbacks, checked_callbacks
from nemo_rl_cpp.algorithms.parts import RunData
from nemo_rl_cpp.api.components import component_keys, lora_keys, reward_environment
from nemo_rl_cpp.api.keywords import Function, dotted_keys
from nemo_rl_cpp.api.prompting import TASK, dataset_of
from nemo_rl_cpp.api.result import TrainResult
from nemo_rl_cpp.api.rows import rows_of
from nemo_rl_cpp.argument_checks import folder_path, in_a_line, model_name, whole_number
from nemo_rl_cpp.checks import preflight
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.interfaces import Row, TokenizerType
from nemo_rl_cpp.dotted_names import search_for_modules
from nemo_rl_cpp.environments.loading import Environments
from nemo_rl_cpp.environments.reward_environment import RewardFunction, RewardFunctionEnvironment

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.custom_components import Estimator, Loss

Rewards = RewardFunction | str | Sequence[RewardFunction | str] | Mapping[str, RewardFunction | str]


def train_grpo(
    model: str | Path = "smollm2-135m-instruct",
    prompts: object = None,
    reward_funcs: Rewards | None = None,
    num_steps: int = 20,
    *,
    dataset: object = None,
    validation: object = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    loss_fn: "Loss" = None,
    adv_estimator: "Estimator" = None,
    lora: bool | int | Mapping[str, object] | None = None,
    callbacks: Callback | Iterable[Callback] | None = None,
    num_prompts_per_step: int = 8,
    num_generations: int = 8,
    max_new_tokens: int = 32,
    max_length: int = 256,
    learning_rate: float = 1e-5,
    temperature: float = 1.0,
    stop_strings: str | Sequence[str] | None = None,
    precision: str = "float32",
    seed: int = 42,
    log_dir: str | Path = "logs",
    checkpoint_dir: str | Path | None = None,
    resume: bool | str | None = None,
    **overrides: object,
) -> TrainResult:
    """Trains `model` with GRPO on `prompts` (or `dataset`, the same thing) so that `reward_funcs` pay more.

    A prompt is a text, continued as it is; or a conversation (a list of {"role", "content"}), which goes through the chat
    template; or a row {"prompt": either, ...} whose other columns reach the reward functions as keywords. `prompts` are
    these in a list or any iterable; or a data frame, a `datasets.Dataset`, a mapping of columns, or the path of a data file
    (.jsonl, .json, .csv, .parquet), with a column `prompt`. One text or one conversation is one prompt.

    A reward function is called with `prompts`, `completions` and those columns, all lists of one entry a completion, and
    returns as many numbers: `def reward(completions, answer): return [float(c.strip() == a) for c, a in zip(completions,
    answer)]`. Several, in a list or as {"name": function}, are added up, times `reward_weights` where given; each is logged as
    `rewards/<name>`.

    `loss_fn` and `adv_estimator`: a function, an object or a class of yours, its dotted name, or a mapping of keys of that section
    of the configuration; for `adv_estimator` also a name such as "gdpo". `callbacks`: objects of `nemo_rl_cpp.Callback`.

    `lora`: True, a rank such as 16, or keys of `lora_cfg` such as {"dim": 16, "target_modules": ["q_proj", "v_proj"]}: adapters are
    trained and the weights stay frozen, which takes about half of the memory (docs/lora.md).

    `validation` prompts are answered before and after training. Without `checkpoint_dir` nothing is saved (see
    `TrainResult.save`); with one, calling again goes on where the run was, unless `resume` is False ("never": refuse a folder
    with checkpoints); True ("must") refuses a folder without. A step takes `num_prompts_per_step` prompts, or
    all where there are fewer. Further keywords are keys of the configuration: `use_dynamic_sampling=True` of the section
    grpo, `loss_fn__reference_policy_kl_penalty=0.01` of another one. Every value arrives there as it is given.

    Raises ValueError for a mistake in these, before the model is loaded.
    """
    return _train_call(_GRPO, dict(locals()))


def train_ppo(
    model: str | Path = "smollm2-135m-instruct",
    prompts: object = None,
    reward_funcs: Rewards | None = None,
    num_steps: int = 20,
    *,
    dataset: object = None,
    validation: object = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    loss_fn: "Loss" = None,
    adv_estimator: "Estimator" = None,
    lora: bool | int | Mapping[str, object] | None = None,
    callbacks: Callback | Iterable[Callback] | None = None,
    num_prompts_per_step: int = 8,
    num_generations: int = 8,
    max_new_tokens: int = 32,
    max_length: int = 256,
    learning_rate: float = 1e-5,
    critic_learning_rate: float | None = None,
    temperature: float = 1.0,
    stop_strings: str | Sequence[str] | None = None,
    precision: str = "float32",
    seed: int = 42,
    log_dir: str | Path = "logs",
    checkpoint_dir: str | Path | None = None,
    resume: bool | str | None = None,
    **overrides: object,
) -> TrainResult:
    """Trains `model` with PPO and a critic of the same size. Arguments are those of `train_grpo`; further keywords are keys of the
    section ppo (`ppo_epochs=2`), or `section__key`. `critic_learning_rate` None: three times `learning_rate`. `lora` is for policy and
    critic.

    Raises ValueError for a mistake, before the model is loaded.
    """
    return _train_call(_PPO, dict(locals()))


@dataclass(frozen=True)
class _Kind:
    """What is different between the functions: the name, the algorithm, the file it starts from and its loader."""

    name: str
    algorithm: str
    base: str
    load: Callable[..., Any]

    @property
    def function(self) -> Function:
        names = inspect.signature(globals()[self.name]).parameters
        return Function(self.name, [name for name in names if name != "overrides"], self.algorithm)

    def default(self, argument: str) -> object:
        return inspect.signature(globals()[self.name]).parameters[argument].default


_GRPO = _Kind("train_grpo", "grpo", "grpo_notebook.yaml", load_grpo_config)
_PPO = _Kind("train_ppo", "ppo", "ppo_notebook.yaml", load_ppo_config)

_KEYS = {  # argument -> key; {} is the section of the algorithm
    "model": "policy.model_name", "precision": "policy.precision", "max_length": "policy.max_total_sequence_length",
    "learning_rate": "policy.optimizer.kwargs.lr", "max_new_tokens": "policy.generation.max_new_tokens",
    "temperature": "policy.generation.temperature", "stop_strings": "policy.generation.stop_strings",
    "num_prompts_per_step": "{}.num_prompts_per_step", "num_generations": "{}.num_generations_per_prompt", "num_steps": "{}.max_num_steps",
    "seed": "{}.seed", "critic_learning_rate": "value.optimizer.kwargs.lr",
}  # fmt: skip
_RESUME = {True: "must", False: "never", None: "auto", "must": "must", "never": "never", "auto": "auto"}


def _train_call(kind: _Kind, arguments: dict[str, Any]) -> TrainResult:
    """One call of a function of this module: everything is checked, then trained."""
    own = dotted_keys(arguments["overrides"], kind.function)
    rows, val_rows = _rows(arguments)
    search_for_modules(Path.cwd())
    loss, estimator = (component_keys(arguments[name], name, kind.algorithm) for name in ("loss_fn", "adv_estimator"))
    callbacks = checked_callbacks(arguments["callbacks"])
    components = loss.keys | estimator.keys
    adapters = lora_keys(arguments["lora"], ("policy", "value") if kind.algorithm == "ppo" else ("policy",))
    given, folders = _given(kind, arguments) | components | adapters, _folders(arguments)
    _check_twice(kind, arguments, folders | given, own)
    _check_checkpointing(arguments, own)
    environment, weights = _rewards(arguments, given | own)
    environment.check_columns({key for row in [*rows, *(val_rows or ())] for key in row if key != "prompt"})
    given |= weights
    config = _config(kind, given | own, len(rows), val_rows is not None, folders)
    loss.check(config), estimator.check(config)
    _preflight(config)
    return _train(config, rows, val_rows, environment, callbacks)


def _rows(arguments: Mapping[str, Any]) -> tuple[list[Row], list[Row] | None]:
    prompts, dataset, validation = (arguments[name] for name in ("prompts", "dataset", "validation"))
    if prompts is not None and dataset is not None:
        raise ValueError("prompts and dataset are the same thing: give one of them")
    rows = rows_of(prompts, "prompts") if dataset is None else rows_of(dataset, "dataset")
    return rows, rows_of(validation, "validation") if validation is not None else None


def _rewards(
    arguments: Mapping[str, Any], keys: Mapping[str, tuple[str, object]]
) -> tuple[RewardFunctionEnvironment, dict[str, tuple[str, object]]]:
    """The environment of the reward functions, and the keys that follow from their weights: with gdpo the estimator weighs
    them. `keys`: what else was given. ValueError for weights given twice."""
    gdpo, weights = keys.get("grpo.adv_estimator.name", ("", None))[1] == "gdpo", arguments["reward_weights"]
    environment = reward_environment(arguments["reward_funcs"], weights, gdpo)
    if not gdpo or weights is None:
        return environment, {}
    key = "grpo.adv_estimator.reward_weights"
    if keys.get(key, ("", None))[1] is not None:
        other = "its key of adv_estimator" if keys[key][0] == "adv_estimator" else keys[key][0]
        raise ValueError(f"reward_weights and {other} are the same thing: give one of them")
    return environment, {key: ("reward_weights", environment.weights_by_name)}


def _check_twice(
    kind: _Kind, arguments: Mapping[str, Any], given: Mapping[str, tuple[str, object]], own: Mapping[str, tuple[str, object]]
) -> None:  # fmt: skip
    """ValueError for a key that an argument gives and a keyword, too. `checkpointing__enabled=True` beside checkpoint_dir says
    nothing else."""
    for key in given:
        name = given[key][0]
        if key in own and _is_given(kind, arguments, name) and (key, own[key][1]) != ("checkpointing.enabled", True):
            raise ValueError(f"{name} and {own[key][0]} are the same thing: give one of them")


def _check_checkpointing(arguments: Mapping[str, Any], own: Mapping[str, tuple[str, object]]) -> None:
    """ValueError for keys about checkpoints of a call that saves none. Of push_to_hub the configuration's own rule speaks."""
    if arguments["checkpoint_dir"] is not None or "checkpointing.enabled" in own:
        return
    idle = [
        name
        for key, (name, _) in own.items()
        if key.startswith("checkpointing.") and key != "checkpointing.push_to_hub"
    ]
    if idle:
        raise ValueError(
            f"{' and '.join(idle)} would have no effect, since nothing is saved without checkpoint_dir: give checkpoint_dir, the folder of "
            "the checkpoints"
        )


def _given(kind: _Kind, arguments: Mapping[str, Any]) -> dict[str, tuple[str, object]]:
    """key of the configuration -> (argument, value)."""
    values = dict(arguments, model=model_name(arguments["model"]))
    if (
        kind.algorithm == "ppo"
        and values["critic_learning_rate"] is None
        and isinstance(values["learning_rate"], float)
    ):
        values["critic_learning_rate"] = 3 * values["learning_rate"]
    return {
        key.format(kind.algorithm): (name, values[name])
        for name, key in _KEYS.items()
        if name in values and (name != "critic_learning_rate" or values[name] is not None)
    }


def _is_given(kind: _Kind, arguments: Mapping[str, Any], name: str) -> bool:
    """Whether an argument is another than its default."""
    return arguments[name] is not kind.default(name)


def _folders(arguments: Mapping[str, Any]) -> dict[str, tuple[str, object]]:
    """The keys that follow from log_dir, checkpoint_dir and resume."""
    logs = folder_path(arguments["log_dir"], "log_dir")
    given, resume = arguments["checkpoint_dir"], arguments["resume"]
    checkpoints = folder_path(given, "checkpoint_dir") if given is not None else None
    if not isinstance(resume, (bool, str, type(None))) or resume not in _RESUME:
        raise ValueError(
            f"resume is {in_a_line(resume)}: give True (go on with the run in checkpoint_dir), False (begin a new one) or None (either)"
        )
    if resume and resume not in ("auto", "never") and checkpoints is None:
        raise ValueError(
            f"resume is {resume!r}, but there is no checkpoint_dir: give the folder of the run to go on with"
        )
    return {
        "logger.log_dir": ("log_dir", logs),
        "checkpointing.enabled": ("checkpoint_dir", checkpoints is not None),
        "checkpointing.checkpoint_dir": ("checkpoint_dir", checkpoints or logs / "checkpoints"),
        "checkpointing.resume": ("resume", _RESUME[resume]),
    }


def _config(
    kind: _Kind, given: dict[str, tuple[str, object]], num_rows: int, validates: bool, folders: dict[str, tuple[str, object]]
) -> TrainMasterConfig:  # fmt: skip
    """The configuration of a call. `given` and `folders`: key -> (argument, value)."""
    section = kind.algorithm
    prompts, generations = (
        _count(given[f"{section}.num_{what}"][1]) for what in ("prompts_per_step", "generations_per_prompt")
    )
    if prompts is not None and prompts > num_rows:
        print(f"num_prompts_per_step is {num_rows}, as there are no more prompts, not {prompts}", file=sys.stderr)
        prompts = num_rows
        given[f"{section}.num_prompts_per_step"] = ("num_prompts_per_step", prompts)
    values: dict[str, object] = {f"{section}.val_at_start": validates, f"{section}.val_at_end": validates}
    if prompts is not None and generations is not None:
        values["policy.train_global_batch_size"] = prompts * generations
    named = folders | given
    values |= {key: value for key, (_, value) in named.items()}
    return kind.load(kind.base, values=values, places={key: f"argument {name}" for key, (name, _) in named.items()})


def _count(value: object) -> int | None:
    """The number, or None for what the configuration's checks will refuse."""
    try:
        return whole_number("", value, 1)
    except ValueError:
        return None


def _preflight(config: TrainMasterConfig) -> None:
    """What the run scripts ask before they start; ValueError for what cannot succeed. The data and reward functions come from
    the caller, so findings about those sections are none of this run's."""
    if config.cluster.has_workers:
        raise ValueError(
            f"cluster.executor is {config.cluster.executor_text}: train_{config.algorithm} trains in this process, whose result goes on generating; "
            "use the run scripts for several processes"
        )
    findings = [finding for finding in preflight(config) if finding.key.partition(".")[0] not in ("data", "env")]
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError("\n".join(errors))
    for finding in findings:
        print(f"warning: {finding}", file=sys.stderr)


def _train(
    config: TrainMasterConfig, rows: list[Row], val_rows: list[Row] | None, environment: Any, callbacks: Callbacks
) -> TrainResult:
    def data(config: TrainMasterConfig, tokenizer: TokenizerType) -> RunData:
        limit = config.policy.max_total_sequence_length
        train = dataset_of(rows, tokenizer, limit)
        validation = None if val_rows is None else dataset_of(val_rows, tokenizer, limit, "validation prompt")
        return RunData(train, validation, Environments({TASK: environment}, owned=False))

    with build_run(config, data=data, callbacks=callbacks) as run:
        run.train()
    return TrainResult(
        run.history, run.validations, run.policy, run.tokenizer, config, run.log_dir, run.generation, run.card_facts()
    )  # fmt: skip
