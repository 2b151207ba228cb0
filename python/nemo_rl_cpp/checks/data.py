"""Checks of data sets, prompts and truths."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from nemo_rl_cpp.config.data import DataConfig, EvalDataConfig
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.policy import TokenizerConfig
from nemo_rl_cpp.data.tokenizer import Tokenizer

from .finding import Finding

_MOST_BYTES = 16 * 2**20  # larger files are read once, by the run, which checks every row before it loads the model
_MOST_FILES = 1000
_QUICK = ("arithmetic", "reverse_digits", "guess_number", "python_functions")  # made up in milliseconds


def check(config: WholeConfig) -> Iterator[Finding]:
    """Findings about data sets, prompts and truths.

    The chat template is looked at, every row of local data sets is read, and their prompts and truths are counted against
    lengths and verifiers. Data sets of the hub and classes of the user's are looked at by the run, when it loads them.
    """
    evaluation = not isinstance(config, TrainMasterConfig)
    tokenizer, findings = _tokenizer((config if evaluation else config.policy).tokenizer, config, evaluation)
    yield from findings
    for where, section in data_sections(config.data, evaluation):
        yield from _check_section(config, where, section, tokenizer, evaluation)


# -- tokenizer and template -------------------------------------------------------------------------------------------


def _tokenizer(
    section: TokenizerConfig, config: WholeConfig, evaluation: bool
) -> tuple[Tokenizer | None, list[Finding]]:
    """(the tokenizer with the run's template, None if it is not on this machine or damaged; findings about the template)."""
    from nemo_rl_cpp.data.chat_template import ChatTemplateError, choose_template
    from nemo_rl_cpp.data.tokenizer import get_tokenizer

    name = "tokenizer" if evaluation else "policy.tokenizer"
    key = f"{name}.chat_template"
    folder = _local_tokenizer(config, evaluation)
    value = section.chat_template if "chat_template" in section.model_fields_set else "default"
    try:
        if folder == "tiny":
            from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer

            tokenizer = tiny_tokenizer()
            tokenizer.chat_template = choose_template(value, tokenizer.chat_template, key)
            return tokenizer, []
        if folder is None:
            # A name may be one of the templates of a tokenizer that is not here yet.
            if value is None or "{" in value or "/" in value or "." in value or not value.strip():
                choose_template(value, None, key)
            return None, []
        plain = {"name": str(folder), "chat_template_kwargs": section.chat_template_kwargs}
        return get_tokenizer({**plain, "chat_template": value}, section=name), []
    except (ChatTemplateError, FileNotFoundError) as error:
        return None, [Finding("error", key, str(error).removeprefix(key).lstrip(": "))]
    except Exception:  # noqa: BLE001 - damaged model files are found by the check of the model's files
        return None, []


def _local_tokenizer(config: WholeConfig, evaluation: bool) -> Path | str | None:
    """The folder of the tokenizer if it is on this machine, "tiny" for the one of tiny-random."""
    from nemo_rl_cpp.hub import sources

    if evaluation:
        name = model = config.tokenizer.name or config.generation.model_name
        if config.tokenizer.name in (None, config.generation.model_name):
            try:
                name = sources.find_policy_weights(name)
            except (ValueError, OSError):
                return None
    else:
        model, name = config.policy.model_name, config.policy.tokenizer.name
        name = name or model
    if name == sources.TINY_RANDOM:
        return "tiny" if model == sources.TINY_RANDOM else None
    folder = sources.local_folder(str(name))
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


# -- data sets --------------------------------------------------------------------------------------------------------


def data_sections(data: DataConfig | EvalDataConfig, evaluation: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """(dotted key, section with the defaults filled in) of every data set."""
    from nemo_rl_cpp.config.access import as_written
    from nemo_rl_cpp.data.datasets.utils import update_single_dataset_config

    plain = as_written(data)
    if evaluation:
        yield "data", plain
        return
    for side in ("train", "validation"):
        several = plain.get(side)
        for i, section in enumerate(several if isinstance(several, list) else [several] if several else []):
            update_single_dataset_config(section, plain.get("default") or {})
            yield (f"data.{side}.{i}" if isinstance(several, list) else f"data.{side}"), section


def _check_section(
    config: WholeConfig, where: str, section: dict[str, object], tokenizer: Tokenizer | None, evaluation: bool
) -> Iterator[Finding]:
    from nemo_rl_cpp.data.datasets.response_datasets import load_eval_dataset, load_response_dataset
    from nemo_rl_cpp.data.inspection import Limits, inspect_rows, note_as_said

    if not _is_quick(section):
        yield from _check_prompt_file(section, where)
        return
    try:
        raw = (load_eval_dataset if evaluation else load_response_dataset)(section)
    except (ValueError, OSError) as error:
        yield Finding("error", where, str(error).removeprefix("data: "))
        return
    if tokenizer is None:
        return
    limits = (
        Limits(section.get("max_input_seq_length"), context=config.generation.vllm_cfg.max_model_len,
               context_key="generation.vllm_cfg.max_model_len")
        if evaluation
        else Limits(config.data.max_input_seq_length, context=config.policy.max_total_sequence_length)
    )  # fmt: skip
    environment = section.get("env_name"), (config.env or {}).get(section.get("env_name"))
    sides = [(where, raw.dataset)] + ([(f"{where} (held out)", raw.val_dataset)] if raw.val_dataset is not None else [])
    for place, rows in sides:
        for remark in inspect_rows(raw, rows, tokenizer, limits, place, environment):
            yield Finding(*note_as_said(remark))


def made_up_quickly(section: Mapping[str, object]) -> bool:
    """Whether a data set is generated, in milliseconds."""
    return section.get("dataset_name") in _QUICK


def _is_quick(section: dict[str, object]) -> bool:
    """Whether a data set can be read here and now: made up quickly, or a local file that is not too large."""
    from nemo_rl_cpp.data.datasets.utils import is_local

    name, path = section.get("dataset_name"), section.get("data_path")
    if made_up_quickly(section):
        return True
    if name != "ResponseDataset" or not isinstance(path, str) or not is_local(path):
        return False
    file = Path(path).expanduser()
    files = list(islice(file.rglob("*"), _MOST_FILES + 1)) if file.is_dir() else [file]
    return len(files) <= _MOST_FILES and sum(f.stat().st_size for f in files if f.is_file()) <= _MOST_BYTES


def _check_prompt_file(section: dict[str, object], where: str) -> Iterator[Finding]:
    """The prompt file of a data set that is not read here."""
    from nemo_rl_cpp.data.datasets.processed_dataset import RawDataset
    from nemo_rl_cpp.data.datasets.response_datasets import DATASET_REGISTRY
    from nemo_rl_cpp.data.processors import PROCESSOR_REGISTRY

    cls = DATASET_REGISTRY.get(section.get("dataset_name", ""))
    name = section.get("processor") or getattr(cls, "default_processor", None)
    if cls is None or name not in PROCESSOR_REGISTRY:  # a name may be registered by the program that starts the run
        return
    raw = RawDataset()
    raw.task_name = ""
    try:
        raw.set_task_spec({**section, "processor": name})
        raw.set_processor()
    except (ValueError, OSError) as error:
        yield Finding("error", where, str(error))
