"""Check the folders to which a run writes: write access, free space, other runs. Compare a run's configuration with its
checkpoint's, from which it resumes: some differences are only reported, others are errors.

The module needs neither torch nor weights. The package `checks` calls it before the run starts,
`algorithms/checkpointing.py` when the run resumes."""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp import _config
from nemo_rl_cpp.checkpoints.manager import CheckpointManager, ResumeError, history
from nemo_rl_cpp.config.access import written
from nemo_rl_cpp.config.errors import KINDS, shown
from nemo_rl_cpp.config.master import PPOMasterConfig, TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.errors import Finding, short_path
from nemo_rl_cpp.files.durable import MANIFEST, json_object, manifest_facts
from nemo_rl_cpp.files.folder_lock import held_by, holder_of
from nemo_rl_cpp.hub.sources import TINY_RANDOM, local_folder
from nemo_rl_cpp.loggers.interface import flatten_dict
from nemo_rl_cpp.models.hf_config import native_config, read_config, read_config_file
from nemo_rl_cpp.models.hub_upload import LOG_IN, can_push
from nemo_rl_cpp.models.memory import checkpoint_bytes, size_text
from nemo_rl_cpp.models.model_folder import read_model_folder, tiny_random

# lines that `dump_yaml` writes for a configuration
_OWN_LINE = re.compile(r"(?!defaults:)[A-Za-z_][A-Za-z0-9_]*:( .*)?|  .*|", re.ASCII)
_HF_NAMES = {
    "layers": (
        "num_hidden_layers", "sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "no_rope_layers",
    ),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "ropes": ("rope_theta", "rope_scaling", "rope_parameters"),
    "qkv_bias": ("attention_bias", "model_type"),
    "output_bias": ("attention_bias",),
    "qk_norm": ("model_type",),
}  # fmt: skip
WHAT_TO_DO = (
    "set it back, or give the new run a checkpointing.checkpoint_dir of its own (to start from the checkpoint's weights set "
    "policy.model_name to its policy/weights)"
)


class Saved(NamedTuple):
    """A checkpoint: its folder, when it was saved, and its configuration (None if it cannot be read)."""

    path: Path
    time: str
    config: dict[str, dict[str, object]] | None


class Change(NamedTuple):
    """A configuration key whose value differs between checkpoint and run, with both values in YAML."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def read_saved(folder: Path) -> Saved:
    try:
        written_at = time.localtime((folder / MANIFEST).stat().st_mtime)
        when = manifest_facts(folder).get("saved") or time.strftime("%Y-%m-%d %H:%M:%S", written_at)
    except OSError:
        when = "at a time that is not known"
    return Saved(folder, str(when), _saved_config(folder / "config.yaml"))


def _saved_config(file: Path) -> dict[str, dict[str, object]] | None:
    """Load a checkpoint's config.yaml. Return None if it cannot be read, or if another program wrote it: such a file
    could include further files."""
    try:
        if all(_OWN_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines()):
            tree = _config.load_file(str(file))
            return {name: section for name, section in tree.items() if isinstance(section, dict)}
    except (OSError, ValueError):
        pass
    return None


def changes(saved: Saved, config: WholeConfig) -> list[Change]:
    """Return every key whose value in this run differs from the checkpoint's. A key that the checkpoint lacks is
    included only if a file or the command line sets it."""
    if saved.config is None:
        return []
    before = flatten_dict(saved.config, expand_lists=False)
    now = flatten_dict(written(config), expand_lists=False)
    keys = (key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key))
    keys = (key for key in keys if key != "checkpointing.resume" and (key in before or key in config.positions))
    return [Change(key, *(shown(side[key]) if key in side else "(not set)" for side in (before, now))) for key in keys]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, or None if there is none or the folder cannot be used."""
    try:
        return next((record.path for record in reversed(history(folder))), None)
    except OSError:
        return None


def headline(saved: Saved, changed: list[Change]) -> str:
    """Return the first line that a resumed run prints: its checkpoint and which keys have changed."""
    begin = f"Resuming {short_path(saved.path)}, saved {saved.time}."
    if saved.config is None:
        return f"{begin} Its config.yaml cannot be read, so what changed since is not known."
    listed = f"Changed since: {', '.join(map(str, changed))}"
    return f"{begin} {listed if changed else 'Nothing in the configuration has changed.'}"


def environment_keys(config: WholeConfig) -> list[str]:
    """Return the keys whose values come from environment variables, which checkpoints do not contain."""
    return sorted(key for key, value in flatten_dict(written(config)).items() if "${oc.env:" in str(value))


# ---- changes with which a run cannot resume


def refusals(saved: Saved, config: TrainMasterConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for every setting of `config` with which a run cannot resume from the checkpoint."""
    before, loop = saved.config or {}, config.algorithm
    if saved.config is not None and not isinstance(before.get(loop), Mapping):
        other = next((name for name in KINDS if name in before), "grpo").upper()
        yield loop, f"the checkpoint is of a {other} run, this one is {loop.upper()}"
        return
    fixed = {
        f"{loop}.seed": "the order of the data and every random draw follow from it",
        "data.shuffle": "the position in the data is of another order",
        "data.use_multiple_dataloader": "the position in the data is of other loaders",
    }
    for section in ("policy", "value"):
        fixed[f"{section}.precision"] = "weights and optimizer state are kept in it"
        fixed[f"{section}.quantization"] = "adapters are those of weights in this format"
        fixed[f"{section}.backend"] = "the optimizer's state lies in its order"
        model = getattr(config, section, None)
        adapters = [f"{section}.dtensor_cfg.lora_cfg.enabled", f"{section}.megatron_cfg.peft.enabled"]
        if model is not None and model.lora is not None:
            names = ("dim", "alpha", "target_modules", "exclude_modules", "match_all_linear", "merge", "use_rslora")
            adapters += [f"{model.lora_key(section)}.{name}" for name in names]
        fixed |= dict.fromkeys(adapters, "adapters and optimizer state are those of it")
    now, old = flatten_dict(written(config), expand_lists=False), flatten_dict(before, expand_lists=False)
    for key, why in fixed.items():
        # the value of an environment variable is not saved, so it cannot be compared
        if key in old and key in now and old[key] != now[key] and "${" not in f"{old[key]}{now[key]}":
            yield key, f"{shown(old[key])} -> {shown(now[key])}: {why}"
    key = "policy.tokenizer.name"
    if _is_another(old.get(key), now.get(key)):
        yield key, f"{old[key]} -> {now[key]} is another tokenizer"
    names = [_data_sets(tree) for tree in (before, written(config))]
    if saved.config is not None and names[0] != names[1]:
        yield "data.train.dataset_name", f"{names[0]} -> {names[1]} is another data set"
    for section, model in config.trained_models().items():
        yield from _model_refusals(saved, section, model)


def _is_another(before: object, now: object) -> bool:
    """Return whether two names of models or tokenizers differ. Compare only the last part of a path, because folders
    may have moved. Return False if a name is unknown."""
    known = before is not None and now is not None and "${" not in f"{before}{now}"
    return known and Path(str(before)).name != Path(str(now)).name


def _data_sets(tree: Mapping[str, Mapping[str, object]]) -> str:
    train = (tree.get("data") or {}).get("train")
    rows = [row for row in (train if isinstance(train, list) else [train]) if isinstance(row, Mapping)]
    return ", ".join(shown(row.get("dataset_name")) for row in rows) or "none"


def _model_refusals(saved: Saved, section: str, config: TrainedModelConfig) -> Iterator[tuple[str, str]]:
    if not (saved.path / section / "weights").is_dir():
        yield section, f"the checkpoint holds no {section} model"
        return
    before = ((saved.config or {}).get(section) or {}).get("model_name")
    if _is_another(before, config.model_name):  # its architecture may differ, too
        yield f"{section}.model_name", f"{before} -> {config.model_name} is another model"
        return
    if config.backend == "hf":
        yield from hf_architecture_refusals(saved, section, config)
        return
    value_head, overrides = section == "value", config.hf_config_overrides
    try:
        if config.model_name == TINY_RANDOM:
            model = tiny_random(overrides, value_head=value_head)
        elif (here := local_folder(config.model_name)) is not None:
            model = read_model_folder(here, overrides, value_head=value_head)
        else:  # the model is not on this machine: the run compares after the download
            return
    except (OSError, ValueError, RecursionError):  # no model folder: reported by the check of the model
        return
    yield from architecture_refusals(saved, section, config, model.config)


def architecture_refusals(
    saved: Saved, section: str, config: TrainedModelConfig, model_config: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each setting of the model `section` that gives the native model another architecture than
    the checkpoint's. `model_config` is the model's config.json with the overrides applied."""
    value_head = section == "value"
    try:
        saved_config = read_config(saved.path / section / "weights")
        length = config.max_total_sequence_length
        before, now = (native_config(c, value_head=value_head, max_length=length) for c in (saved_config, model_config))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # reported by the check of the model
    for name in (name for name in now if before.get(name) != now[name]):
        keys = [k for k in _HF_NAMES.get(name, (name,)) if saved_config.get(k) != model_config.get(k)] or [name]
        for k in keys:
            overridden = k in (config.hf_config_overrides or {})
            key = f"{section}.hf_config_overrides.{k}" if overridden else f"{section}.model_name"
            yield key, f"{k} {shown(saved_config.get(k))} -> {shown(model_config.get(k))} is another architecture"


def hf_architecture_refusals(saved: Saved, section: str, config: TrainedModelConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each override of config.json whose value differs from the checkpoint's config.json, for a
    model run by transformers."""
    try:
        saved_config = read_config_file(saved.path / section / "weights")
    except (OSError, ValueError):
        return  # reported by other checks
    for k, value in (config.hf_config_overrides or {}).items():
        if isinstance(value, (dict, list)):  # transformers completes and moves nested values when it saves
            continue
        if k in saved_config and saved_config[k] != value:
            why = f"{k} {shown(saved_config[k])} -> {shown(value)} is another architecture"
            yield f"{section}.hf_config_overrides.{k}", why


def refusal_text(saved: Saved, refused: list[tuple[str, str]]) -> str:
    """Return one sentence that says why (`refused`) the run cannot resume from the checkpoint, and what to do."""
    listed = "; ".join(f"{key}: {why}" for key, why in dict.fromkeys(refused))
    return f"{short_path(saved.path)} cannot be resumed by this configuration, which is another run ({listed}): {WHAT_TO_DO}"


_DIR = "checkpointing.checkpoint_dir"


def check(config: WholeConfig) -> Iterator[Finding]:
    """Yield problems with the folders to which a run writes, and with the checkpoint of PPO's initial critic."""
    if not isinstance(config, TrainMasterConfig):
        if config.eval.save_path is not None:
            yield from _unwritable("eval.save_path", config.eval.save_path)
            yield from _other_contents(Path(config.eval.save_path))
        return
    yield from _warm_start(config)
    yield from _unwritable("logger.log_dir", config.logger.log_dir)
    events = config.logger.tensorboard.log_dir
    if config.logger.tensorboard_enabled and events is not None:
        yield from _unwritable("logger.tensorboard.log_dir", events)
    settings = config.checkpointing
    if not settings.enabled:
        return
    if settings.push_to_hub is not None and not can_push():
        text = f"is {settings.push_to_hub}, but this machine has no token of the hub: {LOG_IN}"
        yield Finding("error", "checkpointing.push_to_hub", text)
    place = settings.checkpoint_dir
    problems = _asked(_DIR, place, lambda folder: (*_within(folder), *_writable(folder, _DIR), *_lock(folder)))
    yield from problems or _asked(_DIR, place, lambda folder: (*_space(config, folder), *_resume(config, folder)))


def _asked(key: str, folder: str, question: Callable[[Path], Iterable[Finding]]) -> list[Finding]:
    """Return the problems that `question(folder)` yields. If it raises OSError, return one problem, which says that the
    value of `key`, this folder, cannot be used."""
    try:
        return list(question(Path(folder)))
    except OSError as error:
        text = f"is {folder}, which cannot be used ({error.strerror or error}): give another folder"
        return [Finding("error", key, text)]


def _unwritable(key: str, folder: str) -> list[Finding]:
    """Return the problem if no file can be created in `folder`, the value of `key`."""
    return _asked(key, folder, lambda place: _writable(place, key))


def _other_contents(folder: Path) -> Iterator[Finding]:
    """Yield a problem if `folder`, to which an evaluation writes a config.json, is the folder of a model or of a run's
    checkpoints, which could then not be read any more."""
    if "model_type" in json_object(folder / "config.json") or any(folder.glob("step_*")):
        text = f"is {folder}, which holds a model or a run's checkpoints: give the evaluation a folder of its own"
        yield Finding("error", "eval.save_path", text)


def _within(folder: Path) -> Iterator[Finding]:
    """Yield a problem if `folder` is a checkpoint or lies in one, because a run there would not resume from this
    checkpoint but start from scratch."""
    real = folder.resolve()  # "step_2/.." lies in no checkpoint; a link to one does
    for place in (real, *real.parents):
        if re.fullmatch(r"step_\d+", place.name) and (place / MANIFEST).is_file():
            where = "is a checkpoint" if place == real else f"lies in the checkpoint {place}"
            text = f"is {folder}, which {where}: to resume from it give the folder that holds it, {place.parent}"
            yield Finding("error", _DIR, text)


def _writable(folder: Path, key: str) -> Iterator[Finding]:
    """Yield a problem if no file can be created in the folder or its closest existing parent."""
    place = folder.absolute()
    while not place.exists() and not place.is_symlink() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        what = "a link to what is not there" if place.is_symlink() and not place.exists() else "not a folder"
        yield Finding("error", key, f"is {folder}, but {place} is {what}: give a folder that can be written")
        return
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        text = f"is {folder}, which cannot be written ({place}: {error.strerror}): give a folder that can be written"
        yield Finding("error", key, text)


def _lock(folder: Path) -> Iterator[Finding]:
    holder = holder_of(folder)
    if holder is not None:
        text = f"is {folder}, which {held_by(holder)}: end that run, or give this one a folder of its own"
        yield Finding("error", _DIR, text)


def _space(config: WholeConfig, folder: Path) -> Iterator[Finding]:
    size = checkpoint_bytes(config)
    if size is None:
        return
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free, kept = shutil.disk_usage(place).free, config.checkpointing.keep_top_k
    there = len(history(folder))
    wanted = 1 if kept is None else max(1, kept + 2 - there)  # the best, the newest, and the one being written
    if free < wanted * size:
        more = f", and up to {wanted} of them are held at once (checkpointing.keep_top_k={kept})" if wanted > 1 else ""
        text = f"is {folder} with {size_text(free)} free, but a checkpoint takes about {size_text(size)}{more}"
        remedy = "free space, keep fewer, or set checkpointing.save_optimizer=false"
        yield Finding("warning", _DIR, f"{text}: {remedy}; a save that finds no space is tried again later")


def _resume(config: WholeConfig, folder: Path) -> Iterator[Finding]:
    newest = next((record.path for record in reversed(history(folder))), None)
    try:
        CheckpointManager(config.checkpointing).check_resume_mode(newest)
    except ResumeError as error:
        yield Finding("error", "", str(error))
        return
    if newest is None:
        return
    saved = read_saved(newest)
    for key, why in dict.fromkeys(refusals(saved, config)):
        why = why.removeprefix(f"{key.rpartition('.')[2]} ")  # the message begins with the key anyway
        yield Finding(
            "error", key, f"{why}, so this is another run than that of {short_path(saved.path)}: {WHAT_TO_DO}"
        )


def _warm_start(config: WholeConfig) -> Iterator[Finding]:
    """Yield an error if `ppo.warm_start_value_checkpoint` contains no critic, unless the run resumes."""
    checkpoint = config.ppo.warm_start_value_checkpoint if isinstance(config, PPOMasterConfig) else None
    if checkpoint is None or (Path(checkpoint).expanduser() / "value" / "weights").is_dir():
        return
    if config.checkpointing.enabled and any(Path(config.checkpointing.checkpoint_dir).expanduser().glob("step_*")):
        return
    text = f"is {checkpoint}, which has no folder value/weights: name a folder step_N that a PPO run with a critic has saved, or write null"
    yield Finding("error", "ppo.warm_start_value_checkpoint", text)
