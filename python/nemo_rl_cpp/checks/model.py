"""Checks of the model's and tokenizer's files against what the native core computes.

They read what the run will read (config.json, the headers of the weights, the tokenizer) as far as it is on this machine: a model
that a hub has to send first is checked by the run itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.cluster import trainers_of
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.optimizer import adapted_modules, experts_adapted, nothing_adapted
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.data.tiny_tokenizer import TOKENS as TINY_TOKENS
from nemo_rl_cpp.hub.sources import (
    TINY_RANDOM,
    SourceError,
    check_is_no_file,
    find_policy_weights,
    is_cached,
    local_folder,
    nearest_model,
)
from nemo_rl_cpp.models.hf_config import check_length, read_config_file
from nemo_rl_cpp.models.memory import model_sizes
from nemo_rl_cpp.models.model_folder import ModelFolder, note_as_said, read_model_folder, tiny_random
from nemo_rl_cpp.models.weight_files import weight_files

from .finding import Finding

_MUCH_SMALLER = 0.9  # vocabularies are padded to round sizes, by a few percent at most


class _Use(NamedTuple):
    """One model of a run: `key` names it in the configuration, `length` (of `length_key`) is its longest sequence, and it lies in so
    many `slices` (of `slices_key`)."""

    key: str
    name: str
    overrides: dict[str, object] | None
    length: int | None
    length_key: str
    tokenizer: str | None
    tokenizer_key: str
    value_head: bool = False
    backend: str | None = "native"
    slices: int = 1
    slices_key: str = ""
    device: str = "cpu"


def check(config: WholeConfig) -> Iterator[Finding]:
    """Findings about the model's and tokenizer's files against what the native core computes."""
    said = set()  # a critic has the policy's model, mostly
    for finding in (finding for use in _uses(config) for finding in _check_use(use)):
        if finding.message not in said:
            said.add(finding.message)
            yield finding
    if isinstance(config, TrainMasterConfig):
        yield from _check_lora("policy", config.policy)
        if config.has_critic:
            yield from _check_lora("value", config.value)
    yield from _check_new_tokens(config)


def _check_use(use: _Use) -> Iterator[Finding]:
    folder = yield from (_check_hf(use) if use.backend == "hf" else _check_model(use))
    if not use.value_head:  # a critic's tokenizer is saved beside it, and not asked
        yield from _check_tokenizer(use, folder)


def _uses(config: WholeConfig) -> Iterator[_Use]:
    """The models that the run reads; the reference model is the policy's."""
    if not isinstance(config, TrainMasterConfig):
        given, engine = config.generation.model_name, config.generation.vllm_cfg
        name = find_policy_weights(given)
        # else it follows the model
        length = engine.max_model_len if "max_model_len" in engine.model_fields_set else None
        tokenizer = name if config.tokenizer.name == given else config.tokenizer.name
        key = "generation.vllm_cfg.max_model_len"
        yield _Use(
            "generation.model_name", name, None, length, key, tokenizer, "tokenizer.name", backend=config.generation.backend,
            device=config.cluster.device,
        )  # fmt: skip
        return
    processes = max(trainers_of(config), 1)
    yield _trained("policy", config.policy, processes, config.cluster.device)
    if config.has_critic:
        yield _trained("value", config.value, processes, config.cluster.device)
    for key, name in config.teachers.items():
        teacher = _trained("policy", config.policy, processes, config.cluster.device)
        yield teacher._replace(key=key, name=name, overrides=None)


def _trained(section: str, model: TrainedModelConfig, processes: int, device: str) -> _Use:
    length = f"{section}.max_total_sequence_length"
    return _Use(
        f"{section}.model_name", model.model_name, model.hf_config_overrides, model.max_total_sequence_length, length,
        model.tokenizer.name, f"{section}.tokenizer.name", section == "value",
        model.backend, model.tensor_parallel(processes), model.tensor_parallel_key(section),
        device,
    )  # fmt: skip


# -- the model ----------------------------------------------------------------------------------------------------------


def _check_model(use: _Use) -> Iterator[Finding]:
    """Yields findings and returns the model, None where it is not here or cannot be used."""
    fields = {"value_head": use.value_head, "max_length": use.length}
    try:
        if use.name == TINY_RANDOM:
            folder = tiny_random(use.overrides, **fields)
        else:
            path = local_folder(use.name)
            if path is None:
                yield from _check_name(use)
                return None
            if is_cached(path) and not _is_complete(path):  # the run fetches the rest
                return None
            folder = read_model_folder(path, use.overrides, **fields)
        if use.length is not None:
            check_length(folder.config, use.length, use.length_key, use.name)
        folder.check_slices(use.slices, use.slices_key)
        folder.check_device(use.device)
        folder.check_weights()
    except (SourceError, OSError) as error:
        yield Finding("error", use.key, f"is {use.name}: {error}")
        return None
    for remark in folder.remarks:
        yield Finding("warning", use.key, f"is {use.name}: {note_as_said(remark)}")
    return folder


def _check_hf(use: _Use) -> Iterator[Finding]:
    """What of a model for transformers can be seen without it: its files, and how long its sequences may be."""
    path = None if use.name == TINY_RANDOM else local_folder(use.name)
    if path is None:
        if use.name != TINY_RANDOM:
            yield from _check_name(use)
        return None
    if is_cached(path) and not _is_complete(path):
        return None
    try:
        config = {**read_config_file(path), **(use.overrides or {})}
        weight_files(path)
    except (SourceError, OSError) as error:
        yield Finding("error", use.key, f"is {use.name}: {error}")
        return None
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and use.length is not None and use.length > limit:
        yield Finding(
            "error", use.length_key, f"is {use.length}, but {use.name} has positions for {limit} tokens (max_position_embeddings): lower it"
        )  # fmt: skip
    return None


def _is_complete(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() and bool(weight_files(path))
    except SourceError:
        return False


def _check_name(use: _Use) -> Iterator[Finding]:
    """A name that is no folder here is the hub's, unless it can be none there, or is nearly that of a model that is here."""
    try:
        check_is_no_file(use.name, use.key)
    except SourceError as error:
        yield Finding("error", "", str(error))
        return
    near = nearest_model(use.name)
    if near is not None and near.lower() != use.name.lower():
        level = "warning" if "/" in use.name else "error"  # models of a hub have an organisation
        yield Finding(level, use.key, f"is {use.name!r}, of which there is no folder here; did you mean {near}?")


def _check_lora(section: str, model: TrainedModelConfig) -> Iterator[Finding]:
    """Whether the model has the layers that `lora_cfg` names, and whether PEFT will find it for the saved adapter."""
    if model.lora is not None and model.model_name == TINY_RANDOM:
        yield Finding(
            "warning", f"{section}.dtensor_cfg.lora_cfg.enabled", f"is true, and {TINY_RANDOM} is in no folder that PEFT could load: the saved "
            "adapter names no base, so use the merged model, in whose folder it lies"
        )  # fmt: skip
    sizes = None if model.lora is None else model_sizes(model.model_name, model.hf_config_overrides)
    if sizes is None:
        return
    modules = adapted_modules(model.lora, sizes.num_hidden_layers, sizes.fused_tensors)
    fault = experts_adapted(model.lora, modules, model.model_name) if sizes.experts > 1 else None
    if not modules:
        fault = nothing_adapted(model.lora, model.model_name, sizes.num_hidden_layers)
    if fault is not None:
        key, _, why = fault.partition(" ")
        yield Finding("error", f"{section}.dtensor_cfg.lora_cfg.{key}", why)


# -- the tokenizer ------------------------------------------------------------------------------------------------------


def _check_tokenizer(use: _Use, folder: ModelFolder | None) -> Iterator[Finding]:
    name = use.tokenizer or use.name
    if name == TINY_RANDOM:
        if use.name == TINY_RANDOM:
            return
        largest, count = len(TINY_TOKENS) - 1, len(TINY_TOKENS)
    else:
        path = folder.path if folder is not None and name == use.name else local_folder(name)
        if path is None or (is_cached(path) and not (path / "tokenizer.json").is_file()):
            return
        try:
            largest, count = _vocabulary(path)
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exceptions
            yield Finding("error", use.tokenizer_key, f"is {name}: {_one_sentence(path, error)}")
            return
    if folder is None:
        return
    size = folder.config["vocab_size"]
    if largest >= size:
        yield Finding(
            "error", use.tokenizer_key, f"is {name}, whose tokens have ids up to {largest}, but {use.key} {use.name} has a vocabulary of {size}: "
            "use the tokenizer of that model"
        )  # fmt: skip
    elif count < _MUCH_SMALLER * size and use.name != TINY_RANDOM:
        yield Finding(
            "warning", use.tokenizer_key, f"is {name}, which has {count} tokens, while {use.key} {use.name} has a vocabulary of {size}: "
            "is it the tokenizer of that model?"
        )  # fmt: skip


def _vocabulary(folder: Path) -> tuple[int, int]:
    """(largest id, number of tokens) of a folder's tokenizer."""
    from nemo_rl_cpp.data.tokenizer import Tokenizer

    ids = Tokenizer.from_pretrained(folder).get_vocab().values()
    return max(ids, default=-1), len(ids)


def _one_sentence(folder: Path, error: Exception) -> str:
    file = folder / "tokenizer.json"
    if file.is_file() and file.open("rb").read(23) == b"version https://git-lfs":
        return f"{file} is a git-lfs pointer: fetch the file itself with `git lfs pull`"
    return (
        str(error)
        if isinstance(error, SourceError) or str(folder) in str(error)
        else f"the tokenizer in {folder} cannot be read ({error})"
    )


# -- lengths ------------------------------------------------------------------------------------------------------------


def _check_new_tokens(config: WholeConfig) -> Iterator[Finding]:
    """Responses that could never become as long as is allowed."""
    if isinstance(config, TrainMasterConfig):
        generation, limit, key, limit_key = (
            config.policy.generation,
            config.policy.max_total_sequence_length,
            "policy.generation",
            _LIMIT,
        )
        shorter = generation.vllm_cfg.max_model_len
        if shorter is not None and shorter < limit:
            limit, limit_key = shorter, f"{key}.vllm_cfg.max_model_len"
    else:
        generation, key, limit_key = config.generation, "generation", "generation.vllm_cfg.max_model_len"
        limit = generation.vllm_cfg.max_model_len
    tokens = generation.max_new_tokens
    if tokens is not None and limit is not None and tokens > limit:
        yield Finding(
            "warning", f"{key}.max_new_tokens", f"is {tokens}, but prompt and response together end at {limit_key}={limit}: "
            "a response ends where that is reached"
        )  # fmt: skip


_LIMIT = "policy.max_total_sequence_length"
