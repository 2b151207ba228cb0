"""Check the rows of a data set. This module takes a third of a second to import."""

from collections.abc import Generator
from itertools import islice
from pathlib import Path

from nemo_rl_cpp.config.data import QUICK_DATASETS
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.data.conversation import row_at
from nemo_rl_cpp.data.datasets import response_datasets
from nemo_rl_cpp.data.datasets.files import is_local
from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
from nemo_rl_cpp.data.processors import PROCESSOR_REGISTRY, PROMPT_MAKERS
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.dotted_names import is_dotted
from nemo_rl_cpp.environments.response_data import Limits, inspect_rows
from nemo_rl_cpp.errors import Finding, note_as_said

_MOST_BYTES = 16 * 2**20  # larger files are read once, by the run, which checks every row before it loads the model
_MOST_FILES = 1000
_MEASURED_ROWS = 64


def check_rows(
    config: WholeConfig, where: str, section: dict[str, object], tokenizer: Tokenizer | None
) -> Generator[Finding, None, int | None]:
    """Yield the problems of the data set that `section`, at the dotted key `where`, describes. Return its number of
    rows; None if it is too large to be read now. Prompts are checked only with a tokenizer."""
    evaluation = not isinstance(config, TrainMasterConfig)
    try:
        if not _is_quick(section):
            _check_unread(section)
            return None
        raw = (response_datasets.load_eval_dataset if evaluation else response_datasets.load_response_dataset)(section)
    except (ValueError, OSError) as error:
        yield Finding("error", where, str(error).removeprefix("data: "))
        return None
    if tokenizer is None:
        return len(raw.dataset)
    if evaluation:
        context = config.generation.vllm_cfg.max_model_len
        limits = Limits(section.get("max_input_seq_length"), context, "generation.vllm_cfg.max_model_len")
    else:
        limits = Limits(config.data.max_input_seq_length, config.policy.max_total_sequence_length)
    environment = section.get("env_name"), (config.env or {}).get(section.get("env_name"))
    for place, rows in ((where, raw.dataset), (f"{where} (held out)", raw.val_dataset)):
        if rows is not None:
            for finding in inspect_rows(raw, rows, tokenizer, limits, place, environment):
                note_as_said(str(finding))
                yield finding
    return len(raw.dataset)


def _is_quick(section: dict[str, object]) -> bool:
    """Return whether a data set can be read now: it is generated quickly, or is a local file of limited size."""
    name, path = section.get("dataset_name"), section.get("data_path")
    if name in QUICK_DATASETS:
        return True
    if name != "ResponseDataset" or not isinstance(path, str) or not is_local(path):
        return False
    file = Path(path).expanduser()
    files = list(islice(file.rglob("*"), _MOST_FILES + 1)) if file.is_dir() else [file]
    return len(files) <= _MOST_FILES and sum(f.stat().st_size for f in files if f.is_file()) <= _MOST_BYTES


def _check_unread(section: dict[str, object]) -> None:
    """Check the keys and the prompt file of a data set whose rows are not checked. Raise ValueError if one is invalid."""
    cls = response_datasets.DATASET_REGISTRY.get(section.get("dataset_name", ""))
    if cls is not None:
        response_datasets.check_types(section, cls)
    name = section.get("processor") or getattr(cls, "default_processor", None)
    # the program that starts the run may register more names
    if cls is not None and (name in PROCESSOR_REGISTRY or is_dotted(name)):
        raw = RawDataset()
        raw.task_name = ""
        raw.set_task_spec({**section, "processor": name})
        raw.set_processor()


def lengths_of(section: dict[str, object], tokenizer: Tokenizer) -> list[tuple[int, int]] | None:
    """Return (number of the prompt's tokens, how many of them belong to an answer in the prompt) for up to 64 evenly
    spaced rows. Return None if the data set cannot be read quickly, or if code of the user makes its prompts."""
    raw = response_datasets.load_response_dataset(section) if _is_quick(section) else None
    make = None if raw is None else PROMPT_MAKERS.get(raw.processor)
    if make is None:
        return None
    rows, prepare, found = raw.dataset, getattr(raw, "preprocessor", None), []
    for index in range(0, len(rows), -(-len(rows) // _MEASURED_ROWS)):
        row = row_at(rows, index)
        prompt = make(row if prepare is None else prepare(row), raw.task_spec, tokenizer)
        found.append((prompt.length, sum(len(entry.ids) for entry in prompt.entries if entry.role == "assistant")))
    return found
