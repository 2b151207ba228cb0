"""A run opens its folder: locked for as long as it lasts, and resumed only as the run that the checkpoint is of.

What `checks/resumed.py` sees in configuration and model files is checked again here, and what only the loaded tokenizer
and rows can tell: `identity.json` of every checkpoint keeps numbers of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.checkpointing import Resume, find_resume
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError
from nemo_rl_cpp.checks import resumed
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.models.model_folder import open_model_folder

if TYPE_CHECKING:
    from nemo_rl_cpp.data.utils import Datasets

_SAMPLED_ROWS = 256


@contextmanager
def opened(
    config: TrainMasterConfig, tokenizer: TokenizerType, dataset: Datasets, val_dataset: AllTaskProcessedDataset | None
) -> Iterator[tuple[CheckpointManager, Resume]]:
    """(checkpoints, where to go on) of a run, for the block that builds it. The folder is this run's from here to
    `CheckpointManager.shutdown`, or to an exception in the block.

    The first lines of a resumed run are printed here: the checkpoint, its time, each key that changed. ResumeError (a
    ValueError) for another model, tokenizer, data set or algorithm; FolderError for a folder that another run holds.
    """
    checkpoints = CheckpointManager(config.checkpointing)
    checkpoints.claim()
    try:
        resume = find_resume(checkpoints)
        if checkpoints.enabled:
            checkpoints.identity = run_identity(config, tokenizer, dataset, val_dataset)
        if resume.path is not None:
            announce(resume, config, checkpoints.identity)
        yield checkpoints, resume
    except BaseException:
        checkpoints.shutdown()
        raise


def announce(resume: Resume, config: TrainMasterConfig, identity: Mapping[str, object]) -> None:
    """Prints what is resumed and what changed since; ResumeError when it would be another run."""
    saved = resumed.read_saved(resume.path)
    refused = [*resumed.refusals(saved, config), *_loaded_refusals(saved, config, identity)]
    if refused:
        raise ResumeError(resumed.refusal_text(saved, refused))
    print(resumed.headline(saved, [*resumed.changes(saved, config), *_said(saved, identity)]), flush=True)
    if unknown := resumed.environment_keys(config):
        print(f"Not compared, since their values come from environment variables: {', '.join(unknown)}", flush=True)
    if text := end_reached(resume.state, config):
        print(f"{resumed.short(resume.path)} {text}", flush=True)


def end_reached(state: TrainState, config: TrainMasterConfig) -> str | None:
    """How to go on with a run that is at its end by the configuration; None while there is something to train."""
    section, loop = config.algorithm, config.loop
    for key, done, limit in (
        ("max_num_steps", state.total_steps, loop.max_num_steps),
        ("max_num_epochs", state.current_epoch, loop.max_num_epochs),
    ):
        if limit is not None and done >= limit:
            return (
                f"has {done} {key.rpartition('_')[2]}, and {section}.{key} is {limit}: nothing is left to train. Raise {section}.{key} to train on; for a new run "
                "give another checkpointing.checkpoint_dir"
            )
    return None


# ---- which model, tokenizer and rows a run has


def run_identity(
    config: TrainMasterConfig, tokenizer: TokenizerType, dataset: Datasets, val_dataset: AllTaskProcessedDataset | None
) -> dict[str, object]:
    """What identity.json holds: a number of each model's weights (of those that lie in a folder), of the tokenizer, of its
    chat template, the prompt files, and the rows."""
    sections = [name for name in ("policy", "value") if hasattr(config, name)]
    return {
        "models": {name: resumed.weights_identity(getattr(config, name).model_name) for name in sections},
        "tokenizer": tokenizer_identity(tokenizer),
        "chat_template": _digest(getattr(tokenizer, "chat_template", None)),
        "prompt_files": _digest(sorted(_prompt_texts(dataset))),
        "train": rows_identity(dataset),
        "validation": rows_identity(val_dataset),
    }


def tokenizer_identity(tokenizer: TokenizerType) -> str | None:
    """A number of what texts become: vocabulary, merges and special tokens; None where the tokenizer does not say."""
    named = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        content = json.loads(backend.to_str())
        content.pop("truncation", None), content.pop("padding", None)  # of the last call
    elif hasattr(tokenizer, "get_vocab"):
        content = tokenizer.get_vocab()
    else:
        return None
    return _digest([content, named])


def rows_identity(dataset: object) -> Plain:
    """{"rows": how many, "sha256": a number of up to 256 of them, evenly spread}; by task name for several data sets, None
    for none and for one whose rows cannot be read by number."""
    if isinstance(dataset, Mapping):
        return {str(name): rows_identity(one) for name, one in dataset.items()}
    rows = getattr(dataset, "dataset", dataset)
    try:
        count = len(rows)
        picked = sorted(
            {i * (count - 1) // max(1, min(count, _SAMPLED_ROWS) - 1) for i in range(min(count, _SAMPLED_ROWS))}
        )
        return {"rows": count, "sha256": _digest([_content(rows[i]) for i in picked])}
    except (TypeError, KeyError, IndexError):
        return None


def _content(row: object) -> object:
    """A row without its task's name, which follows from the name of its file."""
    return {key: value for key, value in row.items() if key != "task_name"} if isinstance(row, Mapping) else row


def _prompt_texts(dataset: object) -> Iterator[str]:
    """What stands in the prompt files of a data set, and its system prompts."""
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        table = getattr(one, "task_data_processors", None)
        specs = [entry[0] for entry in table.values()] if isinstance(table, Mapping) else []
        for spec in [*specs, getattr(one, "default_task_data_spec", None)]:
            yield from (
                f"{name}: {text}" for name in ("prompt", "system_prompt") if (text := getattr(spec, name, None))
            )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(_canonical(value), sort_keys=True).encode()).hexdigest()


def _canonical(value: object) -> Plain:
    """Plain data; objects that have no value of their own in words count by their type."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return _canonical(value.tolist())
    return type(value).__name__


# ---- compared with a checkpoint's


def _loaded_refusals(
    saved: resumed.Saved, config: TrainMasterConfig, identity: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    before = saved.identity
    if _differ(before, identity, "tokenizer"):
        yield "policy.tokenizer.name", f"{config.policy.tokenizer.name} is another tokenizer"
    if _differ(before, identity, "train"):
        counts = [
            side["train"].get("rows") if isinstance(side["train"], Mapping) else None for side in (before, identity)
        ]
        how = f"{counts[0]} -> {counts[1]} rows" if counts[0] != counts[1] else "other rows"
        yield "data.train", f"{how}: another data set"
    for section in ("policy", "value"):
        if hasattr(config, section) and (saved.path / section / "weights").is_dir():
            model = getattr(config, section)
            if model.backend == "hf":
                from nemo_rl_cpp.models.hf.folder import hf_refusals  # transformers, which such a run has

                yield from hf_refusals(saved.path / section / "weights", model, section)
                continue
            yield from resumed.architecture_refusals(
                saved, section, model, open_model_folder(model.model_name, model.hf_config_overrides).config
            )


def _said(saved: resumed.Saved, identity: Mapping[str, object]) -> list[resumed.Change]:
    names = {
        "chat_template": "the chat template",
        "prompt_files": "the prompt files",
        "validation": "the validation rows",
    }
    return [
        resumed.Change(text, "those of the checkpoint", "others")
        for name, text in names.items()
        if _differ(saved.identity, identity, name)
    ]


def _differ(before: Mapping[str, object], now: Mapping[str, object], name: str) -> bool:
    return before.get(name) is not None and now.get(name) is not None and before[name] != now[name]
