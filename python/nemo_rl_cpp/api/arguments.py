"""Convert arguments of `train_grpo`, `train_ppo` and `evaluate`: settings to configuration keys, functions to
components and environments, and prompts in any supported form to tokenized data sets."""

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_cpp.algorithms.custom_components import OwnEstimator, component_name, own_loss
from nemo_rl_cpp.argument_checks import described, in_a_line, is_iterable, names_of, nearest
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.errors import OF_TRL, similar_keys
from nemo_rl_cpp.config.loop import GRPOConfig, PPOConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig
from nemo_rl_cpp.data import conversation
from nemo_rl_cpp.data.boundaries import prompt_ids
from nemo_rl_cpp.data.chat_template import render_prompt
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, ListDataset
from nemo_rl_cpp.data.datasets.files import load_dataset_from_path
from nemo_rl_cpp.data.interfaces import DatumSpec, Message, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.dotted_names import PythonObjectRef
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment

_SECTIONS: dict[str, type[Section]] = {"grpo": GRPOConfig, "ppo": PPOConfig}
_CONFIGS: dict[str, type[Section]] = {"grpo": GRPOMasterConfig, "ppo": PPOMasterConfig}
Keys = dict[str, tuple[str, object]]
"""Configuration key -> (name of the argument that sets it, value)."""
_OWN_NAMES = {
    "checkpointing.checkpoint_dir": "checkpoint_dir", "data.max_input_seq_length": "max_length",
    "data.train.data_path": "prompts", "data.validation": "validation", "env.reward_functions.functions": "reward_funcs",
    "logger.log_dir": "log_dir", "policy.dtensor_cfg.lora_cfg": "lora",
}  # fmt: skip
"""Configuration key -> the argument that takes its place, for those that `ARGUMENT_KEYS` does not contain."""
ARGUMENT_KEYS = {  # argument -> configuration key; {} is the algorithm's section
    "model": "policy.model_name",
    "precision": "policy.precision",
    "max_length": "policy.max_total_sequence_length",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "critic_learning_rate": "value.optimizer.kwargs.lr",
    "max_new_tokens": "policy.generation.max_new_tokens",
    "temperature": "policy.generation.temperature",
    "stop_strings": "policy.generation.stop_strings",
    "num_prompts_per_step": "{}.num_prompts_per_step",
    "num_generations": "{}.num_generations_per_prompt",
    "num_steps": "{}.max_num_steps",
    "seed": "{}.seed",
}


# ---- further keywords


def dotted_keys(overrides: Mapping[str, object], algorithm: str, arguments: Collection[str]) -> Keys:
    """Return the configuration keys that the keywords `overrides` of `train_<algorithm>` set: `section__key`, or a key
    of the algorithm's section. Raise ValueError for unknown keywords, with the most similar key or argument."""
    section = _SECTIONS[algorithm]
    keys = {*section.model_fields, *(spelling for spelling, _ in section.aliases() if "." not in spelling)}
    found, unknown = {}, []
    for name, value in overrides.items():
        if "__" in name:
            found[name.replace("__", ".")] = (name, value)
        elif name in keys:
            found[f"{algorithm}.{name}"] = (name, value)
        else:
            unknown.append(f"{name} is unknown; {_hint(name, algorithm, arguments, keys)}")
    if unknown:
        raise ValueError("; ".join(unknown))
    return found


def _hint(name: str, algorithm: str, arguments: Collection[str], keys: Collection[str]) -> str:
    other = next((other for other in _SECTIONS if name in _SECTIONS[other].model_fields), None)
    if other is not None:
        return f"it is a key of train_{other}"
    if "." in name:
        return f"a key of the configuration is written {name.replace('.', '__')}"
    if name not in OF_TRL and (near := nearest(name, arguments, 0.7) or nearest(name, [*arguments, *keys], 0.6)):
        return f"did you mean {near}?"
    if similar := similar_keys(f"{algorithm}.{name}", _CONFIGS[algorithm])[0]:
        return f"did you mean {' or '.join(_keyword(key, algorithm) for key in similar)}?"
    return "docs/guides/python.md lists the arguments; docs/coming-from-trl.md and docs/coming-from-verl.md translate those of TRL and verl"


def _keyword(key: str, algorithm: str) -> str:
    """Return the keyword of `train_<algorithm>` that sets a configuration key."""
    own = _OWN_NAMES | {key.format(algorithm): argument for argument, key in ARGUMENT_KEYS.items()}
    return own.get(key) or key.removeprefix(f"{algorithm}.").replace(".", "__")


# ---- components and adapters


@dataclass(frozen=True)
class Given:
    """The value of the argument `loss_fn` or `adv_estimator` (`what`): the configuration keys that it sets, and in
    `component` the loss or estimator if it was passed as an object."""

    what: str
    keys: Keys = field(default_factory=dict)
    component: object = None

    def check(self, config: TrainMasterConfig) -> None:
        """Raise ValueError, before a model is loaded, if the passed loss or estimator does not fit `config`."""
        if self.component is None:
            return
        if self.what == "loss_fn":
            own_loss(self.component, config.loss_fn)
        else:
            OwnEstimator(self.component, config.algorithm, config.loop.adv_estimator, config.loss_fn)


def component_keys(given: object, what: str, algorithm: str) -> Given:
    """Convert the value `given` of the argument `what`, "loss_fn" or "adv_estimator", of `train_<algorithm>`. Raise
    ValueError if it has none of the argument's forms."""
    section = "loss_fn" if what == "loss_fn" else f"{algorithm}.adv_estimator"
    if given is None:
        return Given(what)
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, Mapping):
        return Given(what, {f"{section}.{key}": (what, value) for key, value in given.items()})
    if not callable(given) and not hasattr(given, "compute_advantage"):
        forms = f"a function, an object or a class of yours, its dotted name, or a mapping of keys of {section}"
        raise ValueError(f"{what} is {in_a_line(given)}: give {forms}")
    return Given(what, {f"{section}.name": (what, PythonObjectRef(component_name(given), given))}, given)


def lora_keys(given: object, algorithm: str) -> Keys:
    """Return {dotted configuration key: ("lora", value)} for the value of the argument `lora`; in PPO the keys apply to
    policy and critic. Raise ValueError for an invalid value."""
    if given is None or given is False:
        return {}
    if isinstance(given, int):
        given = {} if given is True else {"dim": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"lora is {in_a_line(given)}: give True, a rank such as 16, or keys such as {{'dim': 16}}")
    keys = {"enabled": True, **given}
    if "target_modules" in keys or "exclude_modules" in keys:
        keys = {"match_all_linear": False, **keys}
    models = ("policy", "value") if algorithm == "ppo" else ("policy",)
    return {f"{model}.dtensor_cfg.lora_cfg.{key}": ("lora", value) for model in models for key, value in keys.items()}


# ---- rewards


def reward_environment(functions: Any, weights: object, as_parts: bool) -> RewardFunctionEnvironment:
    """Return an environment that scores with `functions` and `weights`, the arguments reward_funcs and reward_weights.
    With `as_parts` the environment returns the reward of each function separately, for the estimator gdpo, which
    applies the weights itself."""
    if functions is None:
        raise ValueError("reward_funcs is missing: give a function of (completions, **columns), one number each")
    if inspect.isclass(functions):
        raise ValueError(f"reward_funcs is the class {functions.__name__}: give a function, or an object of it")
    if hasattr(functions, "parameters") and hasattr(functions, "forward"):
        kind = type(functions).__name__
        raise ValueError(f"reward_funcs is a {kind}, a model: give a function of (prompts, completions) that asks it")
    names: list[str] | None = None
    if isinstance(functions, Mapping):
        names, functions = list(functions), list(functions.values())
    if isinstance(weights, Mapping):
        if names is None or set(weights) != set(names):
            there = names_of(names) if names is not None else "no names"
            raise ValueError(f"reward_weights has {names_of(weights)}, but reward_funcs has {there}: give equal names")
        weights = [weights[name] for name in names]
    environment = RewardFunctionEnvironment(functions, weights, as_parts, names)
    if as_parts and len(environment.weight_of_name) < 2:
        raise ValueError("adv_estimator is gdpo, but reward_funcs is one function: give two, or omit adv_estimator")
    return environment


def rewards_of_call(functions: Any, weights: object, keys: Keys) -> tuple[RewardFunctionEnvironment, Keys]:
    """Return (environment of the reward functions, configuration keys that `weights` set). With the estimator gdpo, the
    weights become a configuration key; otherwise the environment applies them and there are no keys. Raise ValueError
    if weights are given twice."""
    is_gdpo = keys.get("grpo.adv_estimator.name", ("", None))[1] == "gdpo"
    environment = reward_environment(functions, weights, is_gdpo)
    if not is_gdpo or weights is None:
        return environment, {}
    key = "grpo.adv_estimator.reward_weights"
    if keys.get(key, ("", None))[1] is not None:
        raise ValueError(f"reward_weights and {keys[key][0]} are the same thing: give one of them")
    weights_by_name = [weight for _, weight in sorted(environment.weight_of_name.items())]
    return environment, {key: ("reward_weights", weights_by_name)}


FORMS = "give texts, conversations, rows with the key 'prompt', a data frame, a data set, or the path of a data file"
TASK = "notebook"
Prompt = str | Sequence[Mapping[str, object]]
_DATA_FILES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_RESERVED = ("prompts", "completions")


# ---- from arguments to rows


def rows_of(given: object, name: str) -> list[Row]:
    """Return the prompts `given` as checked rows {"prompt": ..., other columns}; `name` is the argument's name.

    A string is one prompt, unless it is the path of a file or folder. A mapping of columns, a data frame (pandas,
    polars, pyarrow) and a data set (of `datasets` or torch) give rows; others are iterated. A column that some rows
    lack is None there, so that every batch has all columns. Raise ValueError for an invalid prompt."""
    items, source = _items(given, name)
    padded = any(conversation.comes_from_arrow(each) for each in (given, *items))
    padded = padded or any(map(conversation.came_through_pandas, items))
    rows = [_row(item, f"row {i} of {source}") for i, item in enumerate(items)]
    if not rows:
        raise ValueError(f"{source} is empty: {FORMS}")
    columns = dict.fromkeys(key for row in rows for key in row)
    rows = [{key: row.get(key) for key in columns} for row in rows]
    return [conversation.without_padding(row) for row in rows] if padded else rows


def _items(given: object, name: str) -> tuple[list[object], str]:
    """Return (prompts or rows, the name of their source in error messages) of the argument `name`."""
    if given is None:
        raise ValueError(f"{name} is missing: {FORMS}")
    if isinstance(given, os.PathLike) or (isinstance(given, str) and _is_path(given, name)):
        return _read(os.fspath(given), name)
    if isinstance(given, str):
        return [given], name
    if isinstance(given, Mapping):
        return _from_columns(given, name), name
    if hasattr(given, "columns") and hasattr(given, "iloc"):  # pandas, whose missing values are NaN
        return given.astype(object).where(given.notna(), None).to_dict(orient="records"), name
    for method in ("to_dicts", "to_pylist"):  # polars; pyarrow
        if hasattr(given, method):
            return getattr(given, method)(), name
    if isinstance(given, torch.utils.data.Dataset) and not is_iterable(given):
        return [given[i] for i in range(len(given))], name
    if isinstance(given, (bytes, set, frozenset)) or not is_iterable(given):
        order = "; the order of arguments is model, prompts, reward_funcs" if callable(given) else ""
        raise ValueError(f"{name} is {described(given)}: {FORMS}{order}")
    items = list(given)
    return ([items] if conversation.is_conversation(items) else items), name


def _is_path(text: str, name: str) -> bool:
    """Return whether a string is an existing path. Raise ValueError if the string looks like the name of a data file,
    such as `rows.jsonl`, that does not exist."""
    try:
        path = Path(text).expanduser()
        exists = bool(text.strip()) and path.exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a zero byte, no such user
        return False
    if not exists and path.suffix.lower() in _DATA_FILES and "\n" not in text:
        raise ValueError(f"{name} names the file {text}, which does not exist (if it is a prompt, write [{text!r}])")
    return exists


def _read(path: str, name: str) -> tuple[list[object], str]:
    try:
        found = load_dataset_from_path(path)
    except (ValueError, OSError) as error:
        why = " ".join(str(error).split())
        hint = "(if it is a prompt, give it in a list)"
        raise ValueError(f"{name} is the path {in_a_line(path, 200)} {hint}, which cannot be read: {why}") from None
    rows = [conversation.row_at(found, i) for i in range(len(found))]
    if path.lower().endswith(".txt"):  # each line is a prompt
        rows = [{"prompt": row["text"]} if set(row) == {"text"} else row for row in rows]
    return rows, f"{name} ({path})"


def _from_columns(given: Mapping[str, object], name: str) -> list[object]:
    if "prompt" not in given:
        raise ValueError(f"{name} is a mapping without the key 'prompt', it has {names_of(given)}: {FORMS}")
    if isinstance(given["prompt"], str) or conversation.is_conversation(conversation.plain(given["prompt"])):
        return [given]  # one row
    lengths = {
        key: len(value) if hasattr(value, "__len__") and not isinstance(value, (str, Mapping)) else described(value)
        for key, value in given.items()
    }
    if len(set(lengths.values())) > 1 or not isinstance(lengths["prompt"], int):
        shown = ", ".join(f"{in_a_line(key)} has {length}" for key, length in lengths.items())
        raise ValueError(f"{name} is a mapping of columns, which must be lists of one length: {shown}")
    return [dict(zip(given, values)) for values in zip(*given.values())]


def _row(item: object, where: str) -> Row:
    if hasattr(item, "_asdict"):  # a row of DataFrame.itertuples
        item = item._asdict()
    elif hasattr(item, "iloc") and all(isinstance(key, str) for key in item.index):  # a row of DataFrame.iterrows
        item = item.to_dict()
    row = conversation.plain(item)
    if isinstance(row, str) or conversation.is_conversation(row):
        row = {"prompt": row}
    if not isinstance(row, dict):
        forms = 'a text, messages with role and content, or a mapping such as {"prompt": "1+1=", "answer": "2"}'
        raise ValueError(f"{where} is {described(item)}; a row is {forms}")
    wrong = next((key for key in row if not isinstance(key, str)), None)
    if wrong is not None:
        raise ValueError(f"{where} has the key {in_a_line(wrong)}; keys must be texts")
    if "prompt" not in row:
        raise ValueError(f"{where} has no key 'prompt', it has {names_of(row)}")
    taken = next((key for key in _RESERVED if key in row), None)
    if taken is not None:
        raise ValueError(f"{where} has the key {taken!r}, under which reward functions get something else: rename it")
    conversation.prompt_of(row["prompt"], where)
    return row


# ---- from rows to a data set


def dataset_of(
    rows: list[Row], tokenizer: TokenizerType, limit: int, name: str = "prompt", limit_name: str = "max_length"
) -> AllTaskProcessedDataset:
    """Return the rows as a data set. Raise ValueError for the first prompt that the chat template rejects, or that
    leaves no room for a response within `limit` tokens. `name` and `limit_name` name prompt and limit in messages."""
    for i, row in enumerate(rows):
        prompt = conversation.prompt_of(row["prompt"], f"{name} {i}")
        if isinstance(prompt, str) and len(prompt.encode()) < limit // 2:  # a token is at least one byte, except BOS
            continue
        try:
            length = len(prompt_message(prompt, tokenizer, conversation.tools_of(row))["token_ids"])
        except ValueError as error:
            raise ValueError(f"{name} {i}: {error}") from error
        if length >= limit:
            raise ValueError(f"{name} {i} has {length} tokens: no room to answer within {limit_name}={limit}")
    return AllTaskProcessedDataset(ListDataset(rows), tokenizer, TaskDataSpec(TASK), _processor, max_seq_length=limit)


def prompt_message(prompt: Prompt, tokenizer: TokenizerType, tools: list[dict[str, object]] | None = None) -> Message:
    """Return the user message, with text and token ids, of a prompt: a text, or a conversation that the chat template
    renders with the JSON schemas `tools`."""
    messages = None if isinstance(prompt, str) else list(prompt)
    text = prompt if messages is None else render_prompt(tokenizer, messages, tools=tools)
    ids = torch.tensor(prompt_ids(tokenizer, text, messages), dtype=torch.int64)
    return {"role": "user", "content": text, "token_ids": ids}


def _processor(
    row: Row, spec: TaskDataSpec, tokenizer: TokenizerType, max_seq_length: int | None, idx: int
) -> DatumSpec:
    prompt = conversation.prompt_of(row["prompt"], f"prompt {idx}")
    message = prompt_message(prompt, tokenizer, conversation.tools_of(row))
    info = {key: value for key, value in row.items() if key != "prompt"}
    return DatumSpec(
        message_log=[message], length=len(message["token_ids"]), extra_env_info=info, loss_multiplier=1.0, idx=idx,
        task_name=TASK,
    )  # fmt: skip
