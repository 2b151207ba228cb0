"""The first lines of a run, printed before torch or the model loads: what is trained, on what data and on what device.

GRPO smollm2-135m-instruct
  model     smollm2-135m-instruct, 135 million parameters, bfloat16
  steps     20, of 16 prompts with 8 answers each
  device    cpu, 2 threads
  memory    1.82 GB at the peak, in policy training; fits into this machine's 25.2 GB
  folder    results/grpo_arithmetic_smollm2, starts from scratch
  report    file:///.../logs/grpo_arithmetic_smollm2/exp_001/report.html
  data      arithmetic, 2,091 rows; validation: arithmetic, 256 rows"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_cpp.config.cluster import engines_of, trainers_of
from nemo_rl_cpp.config.data import QUICK_DATASETS, plain_sections
from nemo_rl_cpp.config.lora import LayerKinds, adapted_modules, is_experts
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.dotted_names import is_user_defined
from nemo_rl_cpp.hub.sources import TINY_RANDOM, local_folder
from nemo_rl_cpp.loggers.folders import foreseen_experiment_dir
from nemo_rl_cpp.models import memory
from nemo_rl_cpp.models.budget import budget_text
from nemo_rl_cpp.models.model_sizes import adapter_sizes, known_model, model_sizes
from nemo_rl_cpp.threads import cores, threads_at_start

from .folders import newest_checkpoint

_MOST_BYTES = 64 * 2**20
"""The size in bytes above which a data file's lines are not counted for the banner, because that would take long."""

_MOST_MEASURED = 100_000_000
"""Parameters of a layer above which a measurement takes more than a moment, and with their optimizer state much memory."""


def banner_lines(config: WholeConfig) -> Iterator[str]:
    """Yield the lines that a run or an evaluation prints first, the slowest to compute last. Unknown values are omitted."""
    training = isinstance(config, TrainMasterConfig)
    yield config.title if training else f"Evaluation of {config.generation.model_name}"
    for name, text in _training(config) if training else _evaluation(config):
        yield f"  {name:<10}{text}"


def _training(config: TrainMasterConfig) -> Iterator[tuple[str, str]]:
    policy, loop = config.policy, config.loop
    yield "model", _model(policy.model_name, policy.hf_config_overrides, policy.precision)
    if policy.lora is not None:
        yield "lora", _adapters(policy)
    ends = loop.max_num_epochs is not None and not config.data.use_multiple_dataloader
    epochs = f" or {loop.max_num_epochs} epochs" if ends else ""
    each = f"{loop.num_prompts_per_step} prompts with {loop.num_generations_per_prompt} answers each"
    if config.algorithm == "sft":
        each = f"{loop.num_prompts_per_step} rows"
    yield "steps", f"{loop.max_num_steps}{epochs}, of {each}"
    yield "device", _device(config)
    yield "memory", _memory(config)
    if (budget := budget_text(config)) is not None:
        yield "budget", budget
    checkpointing, newest = config.checkpointing, None
    if checkpointing.enabled:
        newest = newest_checkpoint(Path(checkpointing.checkpoint_dir))
        begins = "starts from scratch" if newest is None else f"resumes from {newest.name}"
        yield "folder", f"{Path(checkpointing.checkpoint_dir)}, {begins}"
    else:
        yield "folder", "none: checkpointing.enabled is false, nothing is saved"
    logs = foreseen_experiment_dir(config.logger.log_dir, newest)
    yield ("report", (Path(logs).absolute() / "report.html").as_uri()) if config.logger.report else ("logs", str(logs))
    yield "data", _data(config)


def _evaluation(config: WholeConfig) -> Iterator[tuple[str, str]]:
    yield "model", _model(config.generation.model_name, None, config.generation.vllm_cfg.precision)
    yield "device", _threads(config)
    yield "data", _data(config)


def _model(name: str, overrides: dict[str, object] | None, precision: str) -> str:
    known = known_model(name)
    sizes = model_sizes(name, overrides) or (known.sizes if known is not None and not overrides else None)
    count = f", {count_text(sizes.parameters)} parameters" if sizes is not None else ""
    return f"{name}{count}, {precision}"


def _adapters(model: TrainedModelConfig) -> str:
    lora, sizes = model.lora, model_sizes(model.model_name, model.hf_config_overrides)
    if sizes is None:
        return f"dim {lora.dim}"
    layers = LayerKinds.of(sizes, lora.joins)
    adapted, of = adapted_modules(lora, layers), sum(not is_experts(module) for module in layers.modules())
    of_experts = sum(map(is_experts, adapted))
    trained, all_of = count_text(adapter_sizes(lora, sizes).trained), count_text(sizes.parameters)
    more = f" and the experts of {_many(of_experts, 'layer')}" if of_experts else ""
    apart = "" if lora.merge else ", apart from the weights"
    line = f"dim {lora.dim}, {len(adapted) - of_experts} of {of} matrices{more}{apart}: {trained} of {all_of} parameters trained"
    if of_experts or not layers.experts:
        return line
    how = "match_all_linear=false and target_modules=['*proj*','*.experts']"
    if lora.target_modules:
        how = "'*.experts' in target_modules"
    return f"{line}; the experts are frozen ({how} would adapt them)"


def count_text(number: int) -> str:
    """Return a number of parameters as text, such as "135 million" or "1.54 billion"."""
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"


def _device(config: TrainMasterConfig) -> str:
    cluster = config.cluster
    if not cluster.has_workers:
        return _threads(config)
    trainers, engines = trainers_of(config), engines_of(config)
    own = cluster.cpus_per_worker or max(1, threads_at_start(None) // cluster.processes)
    more = f" and {engines} for generation" if engines else ""
    how = "auto: the launcher's ranks" if cluster.executor == "auto" else cluster.executor
    how = "auto: rollouts beside training" if cluster.is_split else how
    return f"{cluster.device}, processes: {trainers} for training{more} ({how}), {_many(own, 'thread')} each"


def _threads(config: WholeConfig) -> str:
    threads, available = threads_at_start(config.cluster.cpus_per_worker), cores()
    of = "" if threads == available else f" on {_many(available, 'core')}"
    return f"{config.cluster.device}, {_many(threads, 'thread')}{of}"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _memory(config: TrainMasterConfig) -> str:
    config = memory.with_known_sizes(config)
    phases = memory.forecast(config)
    if phases is None:
        return memory.forecast_summary(config) or "not known"
    peak = max(phases, key=lambda phase: phase.total)
    return f"{memory.size_text(peak.total)} at the peak, in {peak.name}; {memory.fit_text(config)}"


def _data(config: WholeConfig) -> str:
    evaluation = not isinstance(config, TrainMasterConfig)
    sides: dict[str, list[str]] = {"": [], "validation: ": []}
    for where, section in plain_sections(config.data):
        rows = rows_of(section, evaluation)
        text = str(section.get("data_path") or section.get("dataset_name"))
        side = "validation: " if where.startswith("data.validation") else ""
        sides[side].append(text if rows is None else f"{text}, {_many(rows, 'row')}")
    return "; ".join(side + " + ".join(texts) for side, texts in sides.items() if texts) or "none"


def has_time_forecast(config: WholeConfig) -> bool:
    """Return whether the time of a step can be forecast. This is so if only the native core computes, in this process
    on the CPU, rollouts have one turn, the loss is one of this package, and a layer of the model is small enough to
    measure."""
    if not isinstance(config, TrainMasterConfig) or config.cluster.device != "cpu" or config.cluster.has_workers:
        return False
    loop, generation = config.loop, config.policy.generation
    elsewhere = engines_of(config) or generation.runs_vllm or generation.expose_http_server
    more = loop.beside_training.enabled or loop.max_rollout_turns > 1 or loop.adv_estimator.name == "remax"
    unknown = is_user_defined(config.loss_fn.name) or getattr(config.loss_fn, "score_centering_k", None) is not None
    if elsewhere or more or unknown or config.algorithm == "distillation" or config.teachers:
        return False
    for model in config.trained_models().values():
        sizes = model_sizes(model.model_name, model.hf_config_overrides)
        most, folder = _MOST_MEASURED * (1 if model.lora is None else 4), local_folder(model.model_name)
        if model.model_name != TINY_RANDOM and (folder is None or not (folder / "config.json").is_file()):
            return False
        if model.backend != "native" or sizes is None or sizes.parameters > most * sizes.num_hidden_layers:
            return False
    return True


def rows_of(section: Mapping[str, object], evaluation: bool = False) -> int | None:
    """Return the number of rows of the data set that `section` describes, if it is generated or a JSON Lines file; None
    if counting would be slow. `evaluation` is whether the section belongs to an evaluation, which has another default
    split."""
    path = section.get("data_path")
    try:
        if section.get("dataset_name") in QUICK_DATASETS:
            from nemo_rl_cpp.data.datasets.response_datasets import load_eval_dataset, load_response_dataset

            return len((load_eval_dataset if evaluation else load_response_dataset)(section).dataset)
        file = Path(str(path)).expanduser()
        if path is None or file.suffix != ".jsonl" or not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except (ValueError, OSError):  # reported by the checks of data
        return None
