"""GRPO from a notebook: a model, prompts and a reward function are enough.

    import nemo_rl_cpp
    result = nemo_rl_cpp.train_grpo("smollm2-135m-instruct", prompts=["3 + 4 = ", "1 + 9 = "], reward_funcs=my_function)
    result.generate(["2 + 5 = "])
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from nemo_rl_cpp.algorithms import grpo
from nemo_rl_cpp.algorithms import setup as build
from nemo_rl_cpp.algorithms.run import run_to_end
from nemo_rl_cpp.config import GRPOMasterConfig, load_grpo_config
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, ListDataset
from nemo_rl_cpp.data.interfaces import DatumSpec, TaskDataSpec
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.experience.rollouts import generate_responses

BASE_CONFIG = "grpo_notebook.yaml"
TASK = "notebook"
Prompt = str | Sequence[Mapping[str, str]]


@dataclass
class TrainResult:
    """What `train_grpo` returns.

    Attributes:
        history: one dictionary a step: `step`, `reward`, `loss` and all other metrics, `seconds`.
        validations: one dictionary a validation: `step`, `accuracy` and more; empty without validation prompts.
        policy, tokenizer, config: the trained `Policy`, its tokenizer and the configuration that was used.
        log_dir: folder with metrics.jsonl, rollouts and report.html.
    """

    history: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    policy: Any
    tokenizer: Any
    config: GRPOMasterConfig
    log_dir: Path
    _generation: Any = field(repr=False)

    def generate(self, prompts: Prompt | Sequence[Prompt], greedy: bool = True) -> list[str]:
        """The policy's answers to texts (continued as they are) or conversations (through the chat template)."""
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        if several and isinstance(several[0], Mapping):
            several = [several]  # one conversation
        logs = [[_prompt_message(prompt, self.tokenizer)] for prompt in several]
        batch = BatchedDataDict(message_log=logs, stop_strings=[None] * len(logs))
        lengths = torch.tensor([len(log[0]["token_ids"]) for log in logs])
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
        self.policy.save_checkpoint(str(folder))
        return Path(folder)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [row["reward"] for row in self.history]

    def _repr_html_(self) -> str:
        """The run's report inside a notebook."""
        report = self.log_dir / "report.html"
        if report.is_file():
            page = escape(report.read_text(encoding="utf-8"), quote=True)
            return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'
        return f"<p>{len(self.history)} steps, reward {self.rewards[0]:.3f} to {self.rewards[-1]:.3f}</p>" if self.history else "<p>no steps</p>"


def train_grpo(
    model: str = "smollm2-135m-instruct",
    prompts: Iterable[Prompt | Mapping[str, Any]] | None = None,
    reward_funcs: Callable[..., Any] | str | Sequence[Any] | None = None,
    num_steps: int = 20,
    *,
    dataset: Iterable[Prompt | Mapping[str, Any]] | None = None,
    validation: Iterable[Prompt | Mapping[str, Any]] | None = None,
    num_prompts_per_step: int = 8,
    num_generations: int = 8,
    max_new_tokens: int = 32,
    max_length: int = 256,
    learning_rate: float = 1e-5,
    temperature: float = 1.0,
    stop_strings: Sequence[str] | None = None,
    precision: str = "float32",
    seed: int = 42,
    log_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    **overrides: Any,
) -> TrainResult:
    """Trains `model` with GRPO on `prompts` (or `dataset`, the same thing) so that `reward_funcs` pay more.

    A prompt is a text, continued as it is; or a conversation (a list of {"role", "content"}), which goes through the chat
    template; or a row {"prompt": either, ...} whose other columns reach the reward functions as keywords. A reward function
    is called with `prompts`, `completions` and those columns, all lists of one entry a completion, and returns as many
    numbers: `def reward(completions, answer): return [float(c.strip() == a) for c, a in zip(completions, answer)]`.

    Without `log_dir` the logs are in a temporary folder, which goes when this process ends.
    `validation` prompts are answered before and after training. Without `checkpoint_dir` nothing is saved (see
    `TrainResult.save`); with one, calling again goes on where the run was. Further keywords are keys of the configuration:
    `use_dynamic_sampling=True` of the section grpo, `loss_fn__reference_policy_kl_penalty=0.01` of another one.

    Raises ValueError for a mistake in these, before the model is loaded.
    """
    rows = _rows(prompts if prompts is not None else dataset, "prompts")
    if reward_funcs is None:
        raise ValueError("reward_funcs is missing: give a function of (completions, **columns) that returns one number each")
    environment = RewardFunctionEnvironment(reward_funcs)
    val_rows = _rows(validation, "validation") if validation is not None else None
    logs = Path(log_dir) if log_dir is not None else _temporary_folder()
    batch = min(num_prompts_per_step, len(rows))
    config = _config(
        {
            "policy.model_name": str(model),
            "policy.precision": precision,
            "policy.max_total_sequence_length": max_length,
            "policy.train_global_batch_size": batch * num_generations,
            "policy.optimizer.kwargs.lr": learning_rate,
            "policy.generation.max_new_tokens": max_new_tokens,
            "policy.generation.temperature": temperature,
            "policy.generation.stop_strings": list(stop_strings) if stop_strings else None,
            "grpo.num_prompts_per_step": batch,
            "grpo.num_generations_per_prompt": num_generations,
            "grpo.max_num_steps": num_steps,
            "grpo.val_at_start": val_rows is not None,
            "grpo.val_at_end": val_rows is not None,
            "grpo.seed": seed,
            "logger.log_dir": str(logs),
            "checkpointing.enabled": checkpoint_dir is not None,
            "checkpointing.checkpoint_dir": str(checkpoint_dir or logs / "checkpoints"),
        }
        | {(name if "__" in name else f"grpo__{name}").replace("__", "."): value for name, value in overrides.items()}
    )
    return _train(config, rows, val_rows, environment)


def _temporary_folder() -> Path:
    """A folder that goes when this process ends; a forked child leaves it alone."""
    folder, owner = Path(tempfile.mkdtemp(prefix="nemo_rl_cpp_")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _train(config: GRPOMasterConfig, rows: list[Any], val_rows: list[Any] | None, environment: Any) -> TrainResult:
    grpo.set_seed(config.grpo.seed)
    tokenizer = build.make_tokenizer(config.policy)
    data, val_data = (
        None if some is None else AllTaskProcessedDataset(
            ListDataset(some), tokenizer, TaskDataSpec(TASK), _processor, max_seq_length=config.policy.max_total_sequence_length
        )
        for some in (rows, val_rows)
    )  # fmt: skip
    policy, generation, _, _, loader, val_loader, loss_fn, logger, checkpoints, state, *_ = grpo.setup(config, tokenizer, data, val_data)
    task_to_env = {TASK: environment}
    parts = grpo.make_components(
        policy, generation, loader, val_loader, tokenizer, loss_fn, task_to_env, task_to_env, logger, checkpoints, state, config
    )
    run_to_end(grpo.grpo_loop, parts, config, state, f"GRPO {config.policy.model_name}")
    return TrainResult(parts.run.history, parts.run.validations, policy, tokenizer, config, Path(logger.log_dir), generation)


class Rows:
    """Stands in grpo_notebook.yaml for the rows that `train_grpo` was given."""

    def __init__(self, **kwargs: Any) -> None:
        raise ValueError(f"{BASE_CONFIG} has no data of its own: call nemo_rl_cpp.train_grpo(prompts=...), or set data.train")


def _rows(given: Iterable[Any] | None, name: str) -> list[dict[str, Any]]:
    """Rows with the key `prompt`, whatever form they were given in."""
    rows = [dict(row) if isinstance(row, Mapping) else {"prompt": row} for row in given or ()]
    if not rows:
        raise ValueError(f"{name} is empty: give texts, conversations, or rows with the key 'prompt'")
    for i, row in enumerate(rows):
        if "prompt" not in row:
            raise ValueError(f"row {i} of {name} has no key 'prompt', it has {sorted(row)}")
    return rows


def _processor(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, max_seq_length: int | None, idx: int) -> DatumSpec:
    message = _prompt_message(row["prompt"], tokenizer)
    length = len(message["token_ids"])
    if max_seq_length is not None and length >= max_seq_length:
        raise ValueError(f"prompt {idx} has {length} tokens, which leaves no room to answer within max_length={max_seq_length}")
    columns = {key: value for key, value in row.items() if key != "prompt"}
    return DatumSpec(message_log=[message], length=length, extra_env_info=columns, loss_multiplier=1.0, idx=idx, task_name=TASK)


def _prompt_message(prompt: Prompt, tokenizer: Any) -> dict[str, Any]:
    text = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0].to(torch.int64)
    return {"role": "user", "content": text, "token_ids": ids}


def _config(values: dict[str, Any]) -> GRPOMasterConfig:
    import json

    return load_grpo_config(BASE_CONFIG, [f"{key}={json.dumps(value)}" for key, value in values.items()])
