"""Forecasts how long a run takes, from its data, its checkpoints and a second of measuring (models/time_forecast.py)."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from nemo_rl_cpp.checkpoints.manager import history
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.data.conversation import row_at
from nemo_rl_cpp.data.datasets import RawDataset, load_response_dataset
from nemo_rl_cpp.data.interfaces import Indexed, Row
from nemo_rl_cpp.data.processors import PROMPT_MAKERS
from nemo_rl_cpp.hub.sources import SourceError
from nemo_rl_cpp.models.time_forecast import Lengths, TimeForecast, time_text

from .data import data_sections, is_quick, run_tokenizer

_SAMPLED_ROWS = 32


def time_line(config: TrainMasterConfig) -> str | None:
    """Return how long the run will take, as text; None if that cannot be foretold (see `TimeForecast.of`), or if the
    data are not local files."""
    if (read := _read(config)) is None:
        return None
    (lengths, rows, val_rows) = read
    forecast = TimeForecast.of(config, lengths, val_rows)
    done = _steps_done(config)
    steps = _steps(config, rows) - done
    seconds = forecast.seconds(steps, begins=done == 0) if forecast is not None and steps > 0 else None
    if seconds is None:
        return None
    condition = "" if config.algorithm == "sft" else f", if all responses reach {forecast.response:,} tokens"
    return f"about {time_text(seconds)}{condition}"


def _steps(config: TrainMasterConfig, rows: int) -> int:
    loop = config.loop
    if config.data.use_multiple_dataloader or loop.max_num_epochs is None:
        return loop.max_num_steps
    return min(loop.max_num_steps, loop.max_num_epochs * (rows // loop.num_prompts_per_step))


def _steps_done(config: TrainMasterConfig) -> int:
    """Return the step from which the run resumes; 0 if it starts from scratch."""
    settings = config.checkpointing
    if not settings.enabled or settings.resume == "never":
        return 0
    return max((record.step for record in history(Path(settings.checkpoint_dir))), default=0)


def _read(config: TrainMasterConfig) -> tuple[Lengths, int, int] | None:
    """Return the mean lengths of the training data, the number of their rows, and that of the validation data; None if
    they cannot be read now."""
    tokenizer, _ = run_tokenizer(config, False)
    lengths: list[Lengths] = []
    rows = val_rows = 0
    if tokenizer is None:
        return None
    try:
        for where, section in data_sections(config.data, False):
            if not is_quick(section):
                return None
            raw = load_response_dataset(section)
            if where.startswith("data.validation"):
                val_rows += len(raw.dataset)
                continue
            rows, val_rows = rows + len(raw.dataset), val_rows + len(raw.val_dataset or ())
            lengths += _lengths(raw, raw.dataset, tokenizer, config.algorithm == "sft")
    except (ValueError, OSError, SourceError):  # reported by the checks of data
        return None
    if not lengths:
        return None
    count = len(lengths)
    mean = Lengths(sum(each.prompt for each in lengths) / count, sum(each.response for each in lengths) / count)
    return mean, rows, val_rows


def _lengths(raw: RawDataset, rows: Indexed[Row], tokenizer: object, has_answers: bool) -> Sequence[Lengths]:
    """Return the lengths of some evenly spaced rows; none for custom processors, which may have side effects."""
    make, found = PROMPT_MAKERS.get(raw.processor), []
    if make is None:
        return found
    for index in islice(range(0, len(rows), -(-len(rows) // _SAMPLED_ROWS)), _SAMPLED_ROWS):
        row = row_at(rows, index)
        prompt = make(row if raw.preprocessor is None else raw.preprocessor(row), raw.task_spec, tokenizer)
        answer = sum(len(entry.ids) for entry in prompt.entries if has_answers and entry.role == "assistant")
        found.append(Lengths(prompt.length - answer, answer))
    return found
