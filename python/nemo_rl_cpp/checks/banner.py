"""The first lines of a run, before torch or the model loads: what is trained on what, where, and where one can watch it.

GRPO smollm2-135m-instruct
  model     smollm2-135m-instruct, 135 million parameters, bfloat16
  steps     20, of 16 prompts with 8 answers each
  device    cpu, 2 threads
  memory    1.82 GB at the peak, in policy training; fits into this machine's 25.2 GB
  folder    results/grpo_arithmetic_smollm2, begins anew
  report    file:///.../logs/grpo_arithmetic_smollm2/exp_001/report.html
  data      arithmetic, 2,091 rows; validation: arithmetic, 256 rows
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl_cpp.checkpoints.store import CheckpointStore
from nemo_rl_cpp.config.cluster import engines_of, trainers_of
from nemo_rl_cpp.config.data import DataConfig, EvalDataConfig
from nemo_rl_cpp.config.master import EvalMasterConfig, TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.optimizer import adapted_modules, adapter_sizes, modules_of_layers
from nemo_rl_cpp.config.policy import TrainedModelConfig
from nemo_rl_cpp.loggers.folders import foreseen_experiment_dir
from nemo_rl_cpp.models.memory import (
    fit_text,
    forecast,
    forecast_summary,
    known_model,
    model_sizes,
    size_text,
    with_known_sizes,
)
from nemo_rl_cpp.threads import cores, threads_at_start

from .data import data_sections, made_up_quickly

_MOST_BYTES = 64 * 2**20
"""Of a file whose lines are counted for the banner: a fraction of a second."""
_INDENT = 10


def banner_lines(config: WholeConfig) -> Iterator[str]:
    """The lines, for a terminal; those that take longest to find come last. What is not known yet is left out or said to be
    unknown."""
    training = isinstance(config, TrainMasterConfig)
    title = config.title if training else f"Evaluation of {config.generation.model_name}"
    rows = _training(config) if training else _evaluation(config)
    yield title
    for name, text in rows:
        yield f"  {name:<{_INDENT}}{text}"


def report_address(log_dir: str | Path) -> str:
    """What a browser opens to watch a run."""
    return (Path(log_dir).absolute() / "report.html").as_uri()


def _training(config: TrainMasterConfig) -> Iterator[tuple[str, str]]:
    policy, loop = config.policy, config.loop
    yield "model", _model(policy.model_name, policy.hf_config_overrides, policy.precision)
    if (adapters := _adapters(policy)) is not None:
        yield "lora", adapters
    ends = loop.max_num_epochs is not None and not config.data.use_multiple_dataloader
    epochs = f" or {loop.max_num_epochs} epochs" if ends else ""
    yield (
        "steps",
        f"{loop.max_num_steps}{epochs}, of {loop.num_prompts_per_step} prompts with {loop.num_generations_per_prompt} answers each",
    )
    yield "device", _device(config)
    yield "memory", _memory(config)
    checkpointing = config.checkpointing
    folder = Path(checkpointing.checkpoint_dir)
    newest = _newest(folder) if checkpointing.enabled else None
    if checkpointing.enabled:
        begins = "begins anew" if newest is None else f"goes on from {newest.name}"
        yield "folder", f"{folder}, {begins}"
    else:
        yield "folder", "none: checkpointing.enabled is false, nothing is saved"
    if config.logger.report:
        yield "report", report_address(foreseen_experiment_dir(config.logger.log_dir, newest))
    else:
        yield "logs", str(foreseen_experiment_dir(config.logger.log_dir, newest))
    yield "data", _data(config.data, evaluation=False)


def _evaluation(config: EvalMasterConfig) -> Iterator[tuple[str, str]]:
    engine = config.generation
    yield "model", _model(engine.model_name, None, engine.vllm_cfg.precision)
    yield "device", _threads(config)
    yield "data", _data(config.data, evaluation=True)


def _model(name: str, overrides: dict[str, object] | None, precision: str) -> str:
    known = known_model(name)
    sizes = model_sizes(name, overrides) or (known.sizes if known is not None and not overrides else None)
    count = f", {count_text(sizes.parameters)} parameters" if sizes is not None else ""
    return f"{name}{count}, {precision}"


def _adapters(model: TrainedModelConfig) -> str | None:
    """What is trained of a model with LoRA; None without."""
    lora, sizes = model.lora, model_sizes(model.model_name, model.hf_config_overrides)
    if lora is None:
        return None
    if sizes is None:
        return f"dim {lora.dim}"
    modules, trained = (
        adapted_modules(lora, sizes.num_hidden_layers, sizes.fused_tensors),
        adapter_sizes(lora, sizes).trained,
    )
    of = len(list(modules_of_layers(sizes.num_hidden_layers, sizes.fused_tensors)))
    return f"dim {lora.dim}, {len(modules)} of {of} matrices: {count_text(trained)} of {count_text(sizes.parameters)} parameters trained"


def count_text(number: int) -> str:
    """Parameters in words: "135 million", "1.54 billion"."""
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:,}"


def _device(config: TrainMasterConfig) -> str:
    if not config.cluster.has_workers:
        return _threads(config)
    trainers, engines = trainers_of(config), engines_of(config)
    own = config.cluster.cpus_per_worker or max(1, threads_at_start(None) // config.cluster.processes)
    more = f" and {engines} that only generate" if engines else ""
    how = "auto: the launcher's ranks" if config.cluster.executor == "auto" else config.cluster.executor
    return f"{config.cluster.device}, {trainers} processes that train{more} ({how}), {_many(own, 'thread')} each"


def _threads(config: WholeConfig) -> str:
    threads, available = threads_at_start(config.cluster.cpus_per_worker), cores()
    of = "" if threads == available else f" on {_many(available, 'core')}"
    return f"{config.cluster.device}, {_many(threads, 'thread')}{of}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _memory(config: TrainMasterConfig) -> str:
    config = with_known_sizes(config)
    phases = forecast(config)
    if phases is None:
        return forecast_summary(config) or "not known"
    peak = max(phases, key=lambda phase: phase.total)
    return f"{size_text(peak.total)} at the peak, in {peak.name}; {fit_text(config)}"


def _newest(folder: Path) -> Path | None:
    try:
        return next((record.path for record in reversed(CheckpointStore(folder).history())), None)
    except OSError:  # the checks of folders say why
        return None


# -- data sets --------------------------------------------------------------------------------------------------------


def _data(data: DataConfig | EvalDataConfig, evaluation: bool) -> str:
    sides: dict[str, list[str]] = {}
    for where, section in data_sections(data, evaluation):
        side = "validation" if where.startswith("data.validation") else "train"
        sides.setdefault(side, []).append(_one(section, evaluation))
    parts = [" + ".join(sides[side]) for side in sides if side == "train"]
    parts += ["validation: " + " + ".join(sides[side]) for side in sides if side == "validation"]
    return "; ".join(parts) or "none"


def _one(section: Mapping[str, object], evaluation: bool) -> str:
    name = str(section.get("dataset_name"))
    path = section.get("data_path")
    shown = str(path) if path is not None else name
    rows = rows_of(section, evaluation)
    return shown if rows is None else f"{shown}, {rows:,} row{'' if rows == 1 else 's'}"


def rows_of(section: Mapping[str, object], evaluation: bool = False) -> int | None:
    """Rows of a data set that is made up or lies in a file of one row a line; None where counting would take a while."""
    path = section.get("data_path")
    if made_up_quickly(section):
        from nemo_rl_cpp.data.datasets.response_datasets import load_eval_dataset, load_response_dataset

        try:
            return len((load_eval_dataset if evaluation else load_response_dataset)(section).dataset)
        except (ValueError, OSError):  # the checks of data say why
            return None
    if not isinstance(path, str) or not path.endswith(".jsonl"):
        return None
    file = Path(path).expanduser()
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError:
        return None
