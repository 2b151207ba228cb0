"""Train with GRPO or PPO from a notebook: a model, prompts and a reward function are enough.

import nemo_rl_cpp
result = nemo_rl_cpp.train_grpo("smollm2-135m-instruct", prompts=["3 + 4 = ", "1 + 9 = "], reward_funcs=my_function)
result.generate(["2 + 5 = "])"""

import inspect
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.callbacks import Callback, Callbacks, checked_callbacks
from nemo_rl_cpp.algorithms.parts import RunData
from nemo_rl_cpp.api.arguments import (
    ARGUMENT_KEYS,
    TASK,
    Keys,
    component_keys,
    dataset_of,
    dotted_keys,
    lora_keys,
    rewards_of_call,
    rows_of,
)
from nemo_rl_cpp.api.model import TextWriter
from nemo_rl_cpp.argument_checks import folder_path, in_a_line, model_name, whole_number
from nemo_rl_cpp.checks import preflight
from nemo_rl_cpp.config.loader import LOADERS
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.interfaces import Row, TokenizerType
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.dotted_names import search_for_modules
from nemo_rl_cpp.environments.loading import Environments, RewardFunction
from nemo_rl_cpp.models.budget import within_budget
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.hub_upload import push_to_hub, write_card
from nemo_rl_cpp.models.policy.lm_policy import Policy

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.custom_components import Estimator, Loss


@dataclass(repr=False)
class TrainResult(TextWriter):
    """The result of `train_grpo` and `train_ppo`. It prints as one line; a notebook shows the report.

    Attributes:
        history: one dictionary per step: `step`, `reward`, `loss`, `seconds`, all other metrics, and
            `rewards/<function>` if there are several rewards.
        validations: one dictionary per validation: `step`, `accuracy` and more; empty without validation prompts.
        policy, tokenizer, config: the trained `Policy`, its tokenizer and the run's configuration.
        log_dir: the folder with metrics.jsonl, rollouts and report.html."""

    history: list[dict[str, float]]
    validations: list[dict[str, float]]
    policy: Policy
    tokenizer: Tokenizer
    config: TrainMasterConfig
    log_dir: Path
    generation: NativeGeneration = field(repr=False)
    _step: int = field(repr=False)

    limit_name = "max_length of the training"

    def save(self, folder: str | Path) -> Path:
        """Save the policy as a Hugging Face folder with a model card, and return the folder."""
        folder = folder_path(folder, "folder")
        self.policy.save_checkpoint(str(folder))
        write_card(folder, self.config, self._step)
        return folder

    def push_to_hub(self, repo_id: str, *, private: bool = True, client: object = None) -> str:
        """Upload the policy to the Hub (see `nemo_rl_cpp.push_to_hub`), and return its address."""
        with tempfile.TemporaryDirectory(prefix="nemo_rl_cpp_") as folder:
            message = f"{self.config.title}, {self._step} steps, by nemo_rl_cpp"
            return push_to_hub(self.save(folder), repo_id, private=private, message=message, client=client)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [row["reward"] for row in self.history]

    def __repr__(self) -> str:
        learnt = f", reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}" if self.history else ""
        steps = f"{len(self.history)} step{'s' if len(self.history) != 1 else ''}"
        return f"TrainResult({self.config.policy.model_name!r}, {steps}{learnt}, log_dir={str(self.log_dir)!r})"

    def _repr_html_(self) -> str:
        """Return the run's report as HTML for a notebook, or one line if there is no report."""
        report = self.log_dir / "report.html"
        if report.is_file():
            page = escape(report.read_text(encoding="utf-8"), quote=True)
            return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'
        return f"<p>{escape(repr(self))}</p>"


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
    """Train `model` with GRPO on `prompts` (or its alias `dataset`) to increase the rewards of `reward_funcs`.

    A prompt is a text, which the model continues; a conversation (a list of {"role", "content"}), rendered by the chat
    template; or a row {"prompt": either, ...} whose other columns are passed to the reward functions as keywords.
    `prompts` is a list or any iterable of prompts; a single text or conversation; or rows with a column `prompt`: a
    data frame, a data set (of `datasets` or torch), a mapping of columns, or the path of a data file (.jsonl, .json,
    .csv, .parquet).

    A reward function is called with `prompts`, `completions` and those columns, all lists with an entry per completion,
    and returns one number per completion: `def reward(completions, answer): return [float(c.strip() == a) for c, a in
    zip(completions, answer)]`. Several functions, in a list or as {"name": function}, are summed, weighted by
    `reward_weights` if given; each is logged as `rewards/<name>`.

    `loss_fn` and `adv_estimator` are your function, object or class, its dotted name, or a mapping of keys of the
    configuration section with the argument's name; `adv_estimator` may also be a name such as "gdpo". `callbacks` are
    `nemo_rl_cpp.Callback` objects.

    With `lora`, adapters are trained on frozen weights, which takes about half of the memory (docs/lora.md). It is
    True, a rank such as 16, or keys of `lora_cfg` such as {"dim": 16, "target_modules": ["q_proj", "v_proj"]}.

    `validation` prompts are evaluated before and after training. Without `checkpoint_dir` nothing is saved (see
    `TrainResult.save`). With it, a second call resumes the run. If `resume` is False ("never"), a folder with
    checkpoints is an error; if True ("must"), a folder without checkpoints is. A step uses `num_prompts_per_step`
    prompts, or all if there are fewer. Further keywords are configuration keys: `use_dynamic_sampling=True` of the
    section grpo, or `loss_fn__reference_policy_kl_penalty=0.01` of another section. Raise ValueError for invalid
    arguments, before the model is loaded."""
    return _train_call("grpo", dict(locals()))


_DEFAULTS = {name: p.default for name, p in inspect.signature(train_grpo).parameters.items() if name != "overrides"}


def train_ppo(
    model: str | Path = "smollm2-135m-instruct",
    prompts: object = None,
    reward_funcs: Rewards | None = None,
    num_steps: int = 20,
    *,
    critic_learning_rate: float | None = None,
    **options: Any,
) -> TrainResult:
    """Train `model` with PPO and a critic of the same size. `options` are the other arguments of `train_grpo`, with the
    same meaning, and configuration keys: those of the section ppo (`ppo_epochs=2`), or `section__key`. If
    `critic_learning_rate` is None, it is three times `learning_rate`. `lora` applies to policy and critic. Raise
    ValueError for invalid arguments, before the model is loaded."""
    given = {name: options.pop(name) for name in _DEFAULTS if name in options}
    first = {"model": model, "prompts": prompts, "reward_funcs": reward_funcs, "num_steps": num_steps}
    more = {"critic_learning_rate": critic_learning_rate, "overrides": options}
    return _train_call("ppo", _DEFAULTS | given | first | more)


_RESUME = {True: "must", False: "never", None: "auto", "must": "must", "never": "never", "auto": "auto"}


def _train_call(algorithm: str, arguments: dict[str, Any]) -> TrainResult:
    names = [name for name in arguments if name != "overrides"]
    own = dotted_keys(arguments["overrides"], algorithm, names)
    rows, val_rows = _rows(arguments)
    search_for_modules(Path.cwd())
    loss, estimator = (component_keys(arguments[name], name, algorithm) for name in ("loss_fn", "adv_estimator"))
    callbacks = checked_callbacks(arguments["callbacks"])
    given = _folders(arguments) | _given(algorithm, arguments)
    given |= loss.keys | estimator.keys | lora_keys(arguments["lora"], algorithm)
    for key in given.keys() & own.keys():
        name = given[key][0]
        if arguments[name] is not _DEFAULTS.get(name) and (key, own[key][1]) != ("checkpointing.enabled", True):
            raise ValueError(f"{name} and {own[key][0]} are the same thing: give one of them")
    given |= own
    environment, weights = rewards_of_call(arguments["reward_funcs"], arguments["reward_weights"], given)
    for each in (rows, val_rows or rows):
        environment.check_columns(each[0].keys() - {"prompt"})
    config = _config(algorithm, given | weights, len(rows), val_rows is not None)
    loss.check(config), estimator.check(config)
    _preflight(config)
    return _train(config, rows, val_rows, environment, callbacks)


def _rows(arguments: Mapping[str, Any]) -> tuple[list[Row], list[Row] | None]:
    prompts, dataset, validation = (arguments[name] for name in ("prompts", "dataset", "validation"))
    if prompts is not None and dataset is not None:
        raise ValueError("prompts and dataset are the same thing: give one of them")
    rows = rows_of(prompts, "prompts") if dataset is None else rows_of(dataset, "dataset")
    return rows, rows_of(validation, "validation") if validation is not None else None


def _given(algorithm: str, arguments: Mapping[str, Any]) -> Keys:
    values = dict(arguments, model=model_name(arguments["model"]))
    rate = values["learning_rate"]
    if algorithm == "ppo" and values["critic_learning_rate"] is None and isinstance(rate, Real):
        values["critic_learning_rate"] = 3 * rate
    if values.get("critic_learning_rate") is None:
        values.pop("critic_learning_rate", None)
    return {key.format(algorithm): (name, values[name]) for name, key in ARGUMENT_KEYS.items() if name in values}


def _folders(arguments: Mapping[str, Any]) -> Keys:
    logs = folder_path(arguments["log_dir"], "log_dir")
    given, resume = arguments["checkpoint_dir"], arguments["resume"]
    checkpoints = folder_path(given, "checkpoint_dir") if given is not None else None
    if not isinstance(resume, (bool, str, type(None))) or resume not in _RESUME:
        forms = "True (go on with the run in checkpoint_dir), False (begin a new one) or None (either)"
        raise ValueError(f"resume is {in_a_line(resume)}: give {forms}")
    if _RESUME[resume] == "must" and checkpoints is None:
        raise ValueError(f"resume is {resume!r}, but there is no checkpoint_dir: give the folder of the run")
    return {
        "logger.log_dir": ("log_dir", logs),
        "checkpointing.enabled": ("checkpoint_dir", checkpoints is not None),
        "checkpointing.checkpoint_dir": ("checkpoint_dir", checkpoints or logs / "checkpoints"),
        "checkpointing.resume": ("resume", _RESUME[resume]),
    }


def _config(section: str, given: Keys, num_rows: int, validates: bool) -> TrainMasterConfig:
    """Build a training configuration from `given`, with at most `num_rows` prompts per step. Errors name arguments."""
    values: dict[str, object] = {f"{section}.val_at_start": validates, f"{section}.val_at_end": validates}
    name, prompts = given[f"{section}.num_prompts_per_step"]
    try:
        asked = whole_number("", prompts, 1)
        if asked > num_rows:
            print(f"num_prompts_per_step is {num_rows}, as there are no more prompts, not {asked}", file=sys.stderr)
            given[f"{section}.num_prompts_per_step"] = (name, num_rows)
        generations = whole_number("", given[f"{section}.num_generations_per_prompt"][1], 1)
        values["policy.train_global_batch_size"] = min(asked, num_rows) * generations
    except ValueError:
        pass  # the configuration rejects it with its own message
    values |= {key: value for key, (_, value) in given.items()}
    places = {key: f"argument {name}" for key, (name, _) in given.items()}
    return within_budget(LOADERS[section](f"{section}_notebook.yaml", values=values, places=places))


def _preflight(config: TrainMasterConfig) -> None:
    """Run the checks that the command line makes before a run, except those of data and reward functions, which the
    caller has passed. Raise ValueError if the run cannot succeed."""
    if config.cluster.has_workers:
        why = f"train_{config.algorithm} trains in this process; use the run scripts for several processes"
        raise ValueError(f"cluster.executor is {config.cluster.executor_text}: {why}")
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
    engine = run.collector.generation
    return TrainResult(
        run.history,
        run.validations,
        run.policy,
        run.tokenizer,
        config,
        run.log_dir,
        getattr(engine, "inner", engine),  # without the HTTP server of expose_http_server
        run.state.step,
    )
