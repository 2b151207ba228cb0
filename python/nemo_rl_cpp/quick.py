"""GRPO from a notebook: a model, prompts and a reward function are enough.

import nemo_rl_cpp
result = nemo_rl_cpp.train_grpo("smollm2-135m-instruct", prompts=["3 + 4 = ", "1 + 9 = "], reward_funcs=my_function)
result.generate(["2 + 5 = "])
"""

import atexit
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.algorithms.run_data import RunData
from nemo_rl_cpp.argument_checks import folder_path, in_a_line, model_name, whole_number
from nemo_rl_cpp.config import GRPOMasterConfig, load_grpo_config
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.conversation import prompt_of, prompts_of, tools_of
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, ListDataset
from nemo_rl_cpp.data.interfaces import DatumSpec, Message, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.prompt_rendering import render_prompt
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.environments.group import Environments
from nemo_rl_cpp.environments.reward_environment import RewardFunction, RewardFunctionEnvironment
from nemo_rl_cpp.experience.rollouts import generate_responses
from nemo_rl_cpp.models.generation.native import NativeGeneration
from nemo_rl_cpp.models.policy.lm_policy import Policy
from nemo_rl_cpp.preflight import preflight
from nemo_rl_cpp.quick_keywords import dotted_key
from nemo_rl_cpp.quick_rows import rows_of

BASE_CONFIG = "grpo_notebook.yaml"
TASK = "notebook"
Prompt = str | Sequence[Mapping[str, object]]


@dataclass(repr=False)
class TrainResult:
    """What `train_grpo` returns.

    Attributes:
        history: one dictionary a step: `step`, `reward`, `loss` and all other metrics, `seconds`.
        validations: one dictionary a validation: `step`, `accuracy` and more; empty without validation prompts.
        policy, tokenizer, config: the trained `Policy`, its tokenizer and the configuration that was used.
        log_dir: folder with metrics.jsonl, rollouts and report.html.
    """

    history: list[dict[str, float]]
    validations: list[dict[str, float]]
    policy: Policy
    tokenizer: Tokenizer
    config: GRPOMasterConfig
    log_dir: Path
    _generation: NativeGeneration = field(repr=False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        greedy: bool | None = None,
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> list[str]:
        """The policy's answers to texts (continued as they are) or conversations (through the chat template).

        Greedy, unless `greedy` is False (sampled as in training) or `temperature` is above 0. `max_new_tokens` None: as in
        training. Raises ValueError for a mistake in these, and for a prompt that leaves no room to answer.
        """
        if not isinstance(greedy, (bool, type(None))):
            raise ValueError(f"greedy must be True or False, not {in_a_line(greedy)}")
        if greedy and temperature:
            raise ValueError(
                f"greedy=True takes no temperature, but temperature is {in_a_line(temperature)}: leave one of them out"
            )
        several = prompts_of(prompts)
        if not several:
            return []
        options = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        settings = self._generation.config.model_copy()
        for name, value in options.items():
            if value is not None:
                setattr(settings, name, value)  # checked as the key of a configuration
        if greedy is None:
            greedy = not temperature
        usual, self._generation.config = self._generation.config, settings
        try:
            return self._answers(several, greedy)
        finally:
            self._generation.config = usual

    def _answers(self, prompts: Sequence[Prompt], greedy: bool) -> list[str]:
        logs = [[_prompt_message(prompt, self.tokenizer)] for prompt in prompts]
        batch = BatchedDataDict(message_log=logs, stop_strings=[None] * len(logs))
        lengths = torch.tensor([len(log[0]["token_ids"]) for log in logs])
        limit = self._generation.max_model_len
        if limit and int(lengths.max()) >= limit:
            raise ValueError(
                f"prompt {int(lengths.argmax())} has {int(lengths.max())} tokens, which leaves no room to answer within {limit} "
                "(max_length of the training)"
            )
        ids = torch.full((len(logs), int(lengths.max())), self.tokenizer.pad_token_id)
        for row, log in enumerate(logs):
            ids[row, : lengths[row]] = log[0]["token_ids"]
        inputs = BatchedDataDict(
            input_ids=ids, input_lengths=lengths, draw_ids=torch.arange(len(logs)),
            sample_index=torch.zeros(len(logs), dtype=torch.int64), stream=["eval"] * len(logs),
        )  # fmt: skip
        self._generation.prepare_for_generation()
        batch, _, _ = generate_responses(self._generation, inputs, batch, self.tokenizer, lengths, greedy=greedy)
        self._generation.finish_generation()
        return [log[-1]["content"] for log in batch["message_log"]]

    def save(self, folder: str | Path) -> Path:
        """Writes the policy as a Hugging Face folder."""
        folder = folder_path(folder, "folder")
        self.policy.save_checkpoint(str(folder))
        return folder

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [row["reward"] for row in self.history]

    def __repr__(self) -> str:
        learnt = f", reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}" if self.history else ""
        steps = f"{len(self.history)} step{'s' if len(self.history) != 1 else ''}"
        return f"TrainResult({self.config.policy.model_name!r}, {steps}{learnt}, log_dir={str(self.log_dir)!r})"

    def _repr_html_(self) -> str:
        """The run's report inside a notebook."""
        report = self.log_dir / "report.html"
        if report.is_file():
            page = escape(report.read_text(encoding="utf-8"), quote=True)
            return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'
        return f"<p>{escape(repr(self))}</p>"


def train_grpo(
    model: str | Path = "smollm2-135m-instruct",
    prompts: object = None,
    reward_funcs: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
    num_steps: int = 20,
    *,
    dataset: object = None,
    validation: object = None,
    reward_weights: Sequence[float] | None = None,
    num_prompts_per_step: int = 8,
    num_generations: int = 8,
    max_new_tokens: int = 32,
    max_length: int = 256,
    learning_rate: float = 1e-5,
    temperature: float = 1.0,
    stop_strings: str | Sequence[str] | None = None,
    precision: str = "float32",
    seed: int = 42,
    log_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    **overrides: object,
) -> TrainResult:
    """Trains `model` with GRPO on `prompts` (or `dataset`, the same thing) so that `reward_funcs` pay more.

    A prompt is a text, continued as it is; or a conversation (a list of {"role", "content"}), which goes through the chat
    template; or a row {"prompt": either, ...} whose other columns reach the reward functions as keywords. `prompts` are
    these in a list or any iterable; or a data frame, a `datasets.Dataset`, a mapping of columns, or the path of a data file
    (.jsonl, .json, .csv, .parquet), with a column `prompt`. One text or one conversation is one prompt.

    A reward function is called with `prompts`, `completions` and those columns, all lists of one entry a completion, and
    returns as many numbers: `def reward(completions, answer): return [float(c.strip() == a) for c, a in zip(completions,
    answer)]`. Several are added up, times `reward_weights` where given.

    Without `log_dir` the logs are in a temporary folder, which goes when this process ends.
    `validation` prompts are answered before and after training. Without `checkpoint_dir` nothing is saved (see
    `TrainResult.save`); with one, calling again goes on where the run was. A step takes `num_prompts_per_step` prompts, or
    all where there are fewer. Further keywords are keys of the configuration: `use_dynamic_sampling=True` of the section
    grpo, `loss_fn__reference_policy_kl_penalty=0.01` of another one. Every value arrives there as it is given.

    Raises ValueError for a mistake in these, before the model is loaded.
    """
    own = {dotted_key(name): (name, value) for name, value in overrides.items()}
    if prompts is not None and dataset is not None:
        raise ValueError("prompts and dataset are the same thing: give one of them")
    rows = rows_of(prompts, "prompts") if dataset is None else rows_of(dataset, "dataset")
    if reward_funcs is None:
        raise ValueError(
            "reward_funcs is missing: give a function of (completions, **columns) that returns one number each"
        )
    environment = RewardFunctionEnvironment(reward_funcs, reward_weights)
    val_rows = rows_of(validation, "validation") if validation is not None else None
    checkpoints = folder_path(checkpoint_dir, "checkpoint_dir") if checkpoint_dir is not None else None
    given = {
        "policy.model_name": ("model", model_name(model)),
        "policy.precision": ("precision", precision),
        "policy.max_total_sequence_length": ("max_length", max_length),
        "policy.optimizer.kwargs.lr": ("learning_rate", learning_rate),
        "policy.generation.max_new_tokens": ("max_new_tokens", max_new_tokens),
        "policy.generation.temperature": ("temperature", temperature),
        "policy.generation.stop_strings": ("stop_strings", stop_strings),
        "grpo.num_prompts_per_step": ("num_prompts_per_step", num_prompts_per_step),
        "grpo.num_generations_per_prompt": ("num_generations", num_generations),
        "grpo.max_num_steps": ("num_steps", num_steps),
        "grpo.seed": ("seed", seed),
    }
    twice = next((key for key in given.keys() & own if given[key][1] is not _DEFAULTS[given[key][0]]), None)
    if twice is not None:
        raise ValueError(f"{given[twice][0]} and {own[twice][0]} are the same thing: give one of them")
    with _log_folder(log_dir) as logs:
        config = _config(given | own, len(rows), val_rows is not None, logs, checkpoints)
        _preflight(config)
    return _train(config, rows, val_rows, environment)


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(train_grpo).parameters.items()}


@contextmanager
def _log_folder(given: str | Path | None) -> Iterator[Path]:
    """`log_dir`, or a temporary folder that stays only where the call has no mistake."""
    if given is not None:
        yield folder_path(given, "log_dir")
        return
    made = _temporary_folder()
    try:
        yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _temporary_folder() -> Path:
    """A folder that goes when this process ends; a forked child leaves it alone."""
    folder, owner = Path(tempfile.mkdtemp(prefix="nemo_rl_cpp_")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _config(
    given: dict[str, tuple[str, object]], num_rows: int, validates: bool, logs: Path, checkpoints: Path | None
) -> GRPOMasterConfig:
    """The configuration of a call. `given`: key -> (argument, value)."""
    prompts, generations = (
        _count(given[f"grpo.num_{what}"][1]) for what in ("prompts_per_step", "generations_per_prompt")
    )
    if prompts is not None and prompts > num_rows:
        print(f"num_prompts_per_step is {num_rows}, as there are no more prompts, not {prompts}", file=sys.stderr)
        prompts = num_rows
        given["grpo.num_prompts_per_step"] = ("num_prompts_per_step", prompts)
    values: dict[str, object] = {
        "grpo.val_at_start": validates,
        "grpo.val_at_end": validates,
        "logger.log_dir": logs,
        "checkpointing.enabled": checkpoints is not None,
        "checkpointing.checkpoint_dir": checkpoints or logs / "checkpoints",
    }
    if prompts is not None and generations is not None:
        values["policy.train_global_batch_size"] = prompts * generations
    values |= {key: value for key, (_, value) in given.items()}
    return load_grpo_config(
        BASE_CONFIG, values=values, places={key: f"argument {name}" for key, (name, _) in given.items()}
    )


def _count(value: object) -> int | None:
    """The number, or None for what the configuration's checks will refuse."""
    try:
        return whole_number("", value, 1)
    except ValueError:
        return None


def _preflight(config: GRPOMasterConfig) -> None:
    """What the run scripts ask before they start; ValueError for what cannot succeed. The data and reward functions come from
    the caller, so findings about those sections are none of this run's."""
    findings = [finding for finding in preflight(config) if finding.key.partition(".")[0] not in ("data", "env")]
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors:
        raise ValueError("\n".join(errors))
    for finding in findings:
        print(f"warning: {finding}", file=sys.stderr)


def _train(
    config: GRPOMasterConfig, rows: list[Row], val_rows: list[Row] | None, environment: RewardFunctionEnvironment
) -> TrainResult:
    def data(config: TrainMasterConfig, tokenizer: TokenizerType) -> RunData:
        limit, spec = config.policy.max_total_sequence_length, TaskDataSpec(TASK)
        _check_room(rows, "prompt", tokenizer, limit)
        _check_room(val_rows or [], "validation prompt", tokenizer, limit)
        train, validation = (
            None if some is None else AllTaskProcessedDataset(ListDataset(some), tokenizer, spec, _processor, max_seq_length=limit)
            for some in (rows, val_rows)
        )  # fmt: skip
        return RunData(train, validation, Environments({TASK: environment}, owned=False))

    with build_run(config, data=data) as run:
        run.train()
    services = run.services
    return TrainResult(
        services.history, services.validations, run.policy, run.tokenizer, config, Path(services.logger.log_dir), run.generation
    )  # fmt: skip


class Rows:
    """Stands in grpo_notebook.yaml for the rows that `train_grpo` was given."""

    def __init__(self, **kwargs: object) -> None:
        raise ValueError(
            f"{BASE_CONFIG} has no data of its own: call nemo_rl_cpp.train_grpo(prompts=...), or set data.train"
        )


def _processor(
    row: Row, spec: TaskDataSpec, tokenizer: TokenizerType, max_seq_length: int | None, idx: int
) -> DatumSpec:
    message = _prompt_message(prompt_of(row["prompt"], f"prompt {idx}"), tokenizer, tools_of(row))
    length = len(message["token_ids"])
    columns = {key: value for key, value in row.items() if key != "prompt"}
    return DatumSpec(
        message_log=[message], length=length, extra_env_info=columns, loss_multiplier=1.0, idx=idx, task_name=TASK
    )


def _check_room(rows: list[Row], name: str, tokenizer: TokenizerType, limit: int) -> None:
    """ValueError for the first prompt that the template refuses or that leaves no room to answer, before a model is loaded."""
    for i, row in enumerate(rows):
        prompt = prompt_of(row["prompt"], f"{name} {i}")
        if isinstance(prompt, str) and len(prompt.encode()) < limit // 2:  # a token is a byte at least, but for BOS
            continue
        try:
            length = len(_prompt_message(prompt, tokenizer, tools_of(row))["token_ids"])
        except ValueError as error:
            raise ValueError(f"{name} {i}: {error}") from error
        if length >= limit:
            raise ValueError(
                f"{name} {i} has {length} tokens, which leaves no room to answer within max_length={limit}"
            )


def _prompt_message(prompt: Prompt, tokenizer: TokenizerType, tools: list[dict[str, object]] | None = None) -> Message:
    messages = None if isinstance(prompt, str) else list(prompt)
    text = prompt if messages is None else render_prompt(tokenizer, messages, tools=tools)
    ids = torch.tensor(prompt_ids(tokenizer, text, messages), dtype=torch.int64)
    return {"role": "user", "content": text, "token_ids": ids}
