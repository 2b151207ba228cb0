"""Check the files of models and tokenizers, and whether there is enough memory.

The checks read the files that the run reads (config.json, headers of the weights, the tokenizer), if they are on this
machine. A model that must be downloaded first is checked by the run itself."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.cluster import trainers_of
from nemo_rl_cpp.config.fold import fold_text
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.config.lora import MAMBA_OUTPUT, LayerKinds, adapted_modules, nothing_adapted
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.config.rules_model import balance_wanted
from nemo_rl_cpp.data.tiny_tokenizer import TOKENS as TINY_TOKENS
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.errors import Finding, note_as_said
from nemo_rl_cpp.hub import sources
from nemo_rl_cpp.models import memory
from nemo_rl_cpp.models.hf_config import check_length, read_config_file
from nemo_rl_cpp.models.memory import size_text
from nemo_rl_cpp.models.model_folder import ModelFolder, read_model_folder, tiny_random
from nemo_rl_cpp.models.model_sizes import model_sizes
from nemo_rl_cpp.models.weight_files import weight_files

_MUCH_SMALLER = 0.9  # vocabularies are padded to round sizes, by a few percent at most


class _Use(NamedTuple):
    """A model that a run uses: its name, the configuration key that gives this name, and the settings to check the
    model against, with their keys. `trained` is its section, or None if the model is not trained."""

    key: str
    name: str
    tokenizer: str  # the name of the tokenizer
    tokenizer_key: str
    backend: str | None
    length: int | None  # the maximum sequence length in tokens
    length_key: str
    overrides: dict[str, object] | None = None  # of entries of config.json
    value_head: bool = False
    slices: int = 1  # the tensor-parallel size
    slices_key: str = ""
    quantization: str | None = None
    device: str = "cpu"
    trained: TrainedModelConfig | None = None


def check(config: WholeConfig) -> Iterator[Finding]:
    """Yield problems with the files of the run's models and tokenizers."""
    said: set[str] = set()  # each message once: the critic usually uses the policy's model
    for finding in chain.from_iterable(_check_use(use, *config.sampling) for use in _uses(config)):
        if finding.message not in said:
            said.add(finding.message)
            yield finding
    if isinstance(config, TrainMasterConfig):
        for section, model in config.trained_models().items():
            yield from _check_lora(section, model)
            yield from _check_balance(section, model)
        yield from _check_shaping(config)
    yield from _check_new_tokens(config)


def _check_use(use: _Use, key: str, generation: GenerationConfig) -> Iterator[Finding]:
    """Yield problems with a model and its tokenizer. `generation` is the section `key` of the model that generates."""
    try:
        folder = yield from (_check_hf if use.backend == "hf" else _check_model)(use)
    except (sources.SourceError, OSError) as error:
        yield Finding("error", use.key, f"is {use.name}: {error}")
        if use.tokenizer == use.name:  # what the tokenizer lacks follows from it
            return
        folder = None
    stops = generation.stop_token_ids if use.key in ("policy.model_name", "generation.model_name") else None
    if stops and folder is not None and max(stops) >= (size := folder.config["vocab_size"]):
        text = f"has {max(stops)}, but {use.key} {use.name} has a vocabulary of {size}: give ids of that model, or null"
        yield Finding("error", f"{key}.stop_token_ids", text)
    yield from _check_tokenizer(use, folder)


def _uses(config: WholeConfig) -> Iterator[_Use]:
    """Yield a `_Use` for each model that the run reads; not the reference model, which has the policy's weights."""
    if not isinstance(config, TrainMasterConfig):
        given, engine = config.generation.model_name, config.generation.vllm_cfg
        name = sources.find_policy_weights(given)
        length = engine.max_model_len if "max_model_len" in engine.model_fields_set else None
        tokenizer = name if config.tokenizer.name == given else config.tokenizer.name
        backend, length_key = config.generation.backend, "generation.vllm_cfg.max_model_len"
        yield _Use(
            "generation.model_name", name, tokenizer, "tokenizer.name", backend, length, length_key,
            quantization=config.generation.quantization, device=config.cluster.device,
        )  # fmt: skip
        return
    processes = max(trainers_of(config), 1)
    for section, model in config.trained_models().items():
        use = _Use(
            f"{section}.model_name", model.model_name, config.policy.tokenizer.name, "policy.tokenizer.name", model.backend,
            model.max_total_sequence_length, f"{section}.max_total_sequence_length", model.hf_config_overrides,
            section == "value", model.tensor_parallel(processes), model.tensor_parallel_key(section),
            model.quantization, config.cluster.device, model,
        )  # fmt: skip
        yield use
        if section == "policy":
            for key, name in config.teachers.items():
                yield use._replace(key=key, name=name, overrides=None, trained=None)


def _check_model(use: _Use) -> Iterator[Finding]:
    """Yield problems with a model of the native core. Return its `ModelFolder`; None if its files are not on this
    machine."""
    fields = {"value_head": use.value_head, "max_length": use.length}
    if use.name == sources.TINY_RANDOM:
        folder = tiny_random(use.overrides, **fields)
    else:
        path = yield from _whole_folder(use)
        if path is None:
            return None
        folder = read_model_folder(path, use.overrides, **fields)
    if use.length is not None:
        check_length(folder.config, use.length, use.length_key, use.name)
    folder.check_device(use.device)
    folder.quantised(use.quantization, f"{use.key.rpartition('.')[0]}.quantization")
    folder.check_slices(use.slices, use.slices_key)
    if use.trained is not None:
        folder.check_trains(use.name)
        folder.check_mixers(use.trained, use.key.partition(".")[0], use.slices)
    folder.check_weights()
    for remark in folder.remarks:
        yield Finding("warning", use.key, f"is {use.name}: {note_as_said(remark)}")
    return folder


def _check_hf(use: _Use) -> Iterator[Finding]:
    """Yield a problem if sequences are longer than a transformers model supports."""
    path = None if use.name == sources.TINY_RANDOM else (yield from _whole_folder(use))
    if path is None:
        return
    config = {**read_config_file(path), **(use.overrides or {})}
    weight_files(path)
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and use.length is not None and use.length > limit:
        text = f"is {use.length}, but {use.name} has positions for {limit} tokens (max_position_embeddings): lower it"
        yield Finding("error", use.length_key, text)


def _whole_folder(use: _Use) -> Iterator[Finding]:
    """Yield problems with a model's name. Return the model's folder, or None if files must be downloaded first."""
    path = sources.local_folder(use.name)
    if path is None:
        yield from _check_name(use)
        return None
    if sources.is_cached(path):
        try:
            if not (path / "config.json").is_file() or not weight_files(path):
                return None
        except sources.SourceError:
            return None
    return path


def _check_name(use: _Use) -> Iterator[Finding]:
    """Yield a problem if no model on the Hub can have this name, or if a model on this machine has a similar one."""
    try:
        sources.check_is_no_file(use.name, use.key)
    except sources.SourceError as error:
        yield Finding("error", "", str(error))
        return
    near = sources.nearest_model(use.name)
    if near is not None and near.lower() != use.name.lower():
        level = "warning" if "/" in use.name else "error"  # Hub models have an organisation
        yield Finding(level, use.key, f"is {use.name!r}, of which there is no folder here; did you mean {near}?")


def _check_lora(section: str, model: TrainedModelConfig) -> Iterator[Finding]:
    """Yield problems with adapters that PEFT cannot load or that select no layer."""
    key = model.lora_key(section)
    if model.lora is not None and model.model_name == sources.TINY_RANDOM:
        text = f"is true, and {sources.TINY_RANDOM} is in no folder that PEFT could load: use the saved merged model"
        yield Finding("warning", f"{key}.enabled", text)
    sizes = None if model.lora is None else model_sizes(model.model_name, model.hf_config_overrides)
    if sizes is None:
        return
    layers = LayerKinds.of(sizes, model.lora.joins)
    adapted = adapted_modules(model.lora, layers)
    if any(module.endswith(MAMBA_OUTPUT) for module in adapted):
        text = "names out_proj of Nemotron-H: PEFT cannot load the saved adapter; use the merged model, or leave it out"
        yield Finding("warning", f"{key}.target_modules", text)
    if not adapted:
        name, _, why = nothing_adapted(model.lora, model.model_name, layers).partition(" ")
        yield Finding("error", f"{key}.{name}", why)


def _check_balance(section: str, model: TrainedModelConfig) -> Iterator[Finding]:
    """Yield an error for each key that requests a method of balancing experts which the native backend lacks."""
    sizes = model_sizes(model.model_name, model.hf_config_overrides)
    if model.backend == "native" and sizes is not None and sizes.experts > 1:
        wanted = balance_wanted(model, "sigmoid" if sizes.has_router_biases else "softmax")
        yield from (Finding("error", f"{section}.{key}", why) for key, why in wanted)


def _check_tokenizer(use: _Use, folder: ModelFolder | None) -> Iterator[Finding]:
    name = use.tokenizer
    if name == sources.TINY_RANDOM:
        largest, count = len(TINY_TOKENS) - 1, len(TINY_TOKENS)
    else:
        path = folder.path if folder is not None and name == use.name else sources.local_folder(name)
        if path is None and name != use.name:
            yield from _check_name(use._replace(key=use.tokenizer_key, name=name))
        if path is None or (sources.is_cached(path) and not (path / "tokenizer.json").is_file()):
            return
        try:
            largest, count = _vocabulary(path)
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exceptions
            text = str(error) if str(path) in str(error) else f"the tokenizer in {path} cannot be read ({error})"
            yield Finding("error", use.tokenizer_key, f"is {name}: {text}")
            return
    if folder is None:
        return
    size, overridden = folder.config["vocab_size"], f"{use.key.rpartition('.')[0]}.hf_config_overrides.vocab_size"
    if largest >= size and "vocab_size" in (use.overrides or {}):
        text = f"is {size}, but the tokens of {use.tokenizer_key} {name} have ids up to {largest}: set at least {largest + 1}"
        yield Finding("error", overridden, text)
    elif largest >= size and use.value_head:
        text = f"is {use.name}, which has a vocabulary of {size}, but the tokens of {use.tokenizer_key} {name} have ids up to {largest}: "
        yield Finding("error", use.key, f"{text}give a model that shares the policy's tokens")
    elif largest >= size:
        text = f"is {name}, whose tokens have ids up to {largest}, but the model {use.name} has a vocabulary of {size}"
        remedy = "use the tokenizer of that model"
        if name == use.name:
            remedy = "remove the others from tokenizer.json and tokenizer_config.json, or add embeddings for them (resize_token_embeddings)"
        yield Finding("error", use.tokenizer_key, f"{text}: {remedy}")
    elif count < _MUCH_SMALLER * size and use.name != sources.TINY_RANDOM:
        text = f"is {name}, which has {count} tokens, while the model {use.name} has a vocabulary of {size}"
        yield Finding("warning", use.tokenizer_key, f"{text}: is it the tokenizer of that model?")


def _vocabulary(folder: Path) -> tuple[int, int]:
    """Return (the largest token id, the number of tokens) of a folder's tokenizer."""
    file = folder / "tokenizer.json"
    if file.is_file() and file.open("rb").read(23) == b"version https://git-lfs":
        raise ValueError(f"{file} is a git-lfs pointer: fetch the file itself with `git lfs pull`")
    ids = Tokenizer.from_pretrained(folder).get_vocab().values()
    return max(ids, default=-1), len(ids)


def _check_new_tokens(config: WholeConfig) -> Iterator[Finding]:
    """Yield a warning if `max_new_tokens` exceeds the longest sequence that the configuration allows."""
    key, generation = config.sampling
    limit, limit_key = generation.vllm_cfg.max_model_len, f"{key}.vllm_cfg.max_model_len"
    if isinstance(config, TrainMasterConfig) and (limit is None or config.policy.max_total_sequence_length <= limit):
        limit, limit_key = config.policy.max_total_sequence_length, "policy.max_total_sequence_length"
    tokens = generation.max_new_tokens
    if tokens is not None and limit is not None and tokens > limit:
        text = f"is {tokens}, but prompt and response together end at {limit_key}={limit}"
        yield Finding("warning", f"{key}.max_new_tokens", f"{text}: a response ends where that is reached")


def _check_shaping(config: TrainMasterConfig) -> Iterator[Finding]:
    """Yield a warning if DAPO's overlong penalty begins at a length that no response reaches."""
    shaping, tokens = getattr(config.loop, "reward_shaping", None), config.policy.generation.max_new_tokens
    if shaping is None or not shaping.applies_overlong_penalty:
        return
    begin, key = shaping.max_response_length - shaping.overlong_buffer_length, f"{config.algorithm}.reward_shaping"
    if tokens <= begin:
        text = f"is {shaping.max_response_length}, so the overlong penalty begins after {begin} tokens"
        most = f"responses have at most policy.generation.max_new_tokens={tokens}"
        yield Finding("warning", f"{key}.max_response_length", f"{text}, but {most}: no response gets it")


def check_memory(config: WholeConfig) -> Iterator[Finding]:
    """Yield a warning if the configuration was written for other devices than the run uses, and a problem if there is
    too little memory."""
    text = fold_text(config, memory.forecast_summary(config))
    if text is not None:
        yield Finding("warning", "", note_as_said(text))
    if not isinstance(config, TrainMasterConfig) or config.cluster.device != "cpu":
        return
    needed, machine = memory.certain_bytes(config), memory.machine_memory()
    if needed is not None and machine is not None and needed > (machine := machine + memory.meminfo_bytes("SwapTotal")):
        native = config.policy.backend == "native"  # otherwise the sizes are estimates, those of a native model
        text = f"is {config.policy.model_name}, whose weights, gradients and optimizer alone take {size_text(needed)}"
        text += f", but this machine has {size_text(machine)} of memory and swap; take a smaller model"
        yield Finding(
            "error" if native else "warning",
            "policy.model_name",
            f"{text} or a larger machine (--dry-run shows the forecast)",
        )
    elif memory.fits(config := memory.with_known_sizes(config)) is False:
        peak = max(phase.total for phase in memory.forecast(config) or ())
        text = f"the forecast of memory, {size_text(peak)} at the peak, {memory.fit_text(config)}"
        yield Finding("warning", "", text)
