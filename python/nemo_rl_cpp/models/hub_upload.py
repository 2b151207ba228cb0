"""Upload a model to the Hugging Face Hub, and write its model card: the README.md of a model folder."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import huggingface_hub  # loads its parts when they are first used

from nemo_rl_cpp import __version__
from nemo_rl_cpp.argument_checks import folder_path, in_a_line
from nemo_rl_cpp.config.checkpointing import repository_name
from nemo_rl_cpp.config.data import datasets_of
from nemo_rl_cpp.errors import one_sentence
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.files.yaml_text import Plain, dump_yaml
from nemo_rl_cpp.hub.sources import SourceError, find_policy_weights, hub_endpoint, published_name
from nemo_rl_cpp.models.weight_files import ADAPTER, INDEX_FILE, SHARDS, SINGLE_FILE

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt", "README.md")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


class UploadError(SourceError):
    """Raised if a model could not be uploaded; the message is one sentence."""


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    message: str | None = None,
    token: str | None = None,
    client: object = None,
) -> str:
    """Upload a model folder, a checkpoint (`step_N`) or a run's newest checkpoint, with its model card. Return its URL.

    Uploads configuration, weights, tokenizer, chat template, and the adapter of a run with LoRA (`adapter/`), in place
    of the weights and adapter of an earlier upload. A missing repository is created, private unless `private` is False.
    `token` None: the token of `hf auth login` or HF_TOKEN. `client` replaces `huggingface_hub.HfApi`.

    Raises ValueError for a folder without a model and for an invalid name, UploadError (a ValueError) if the Hub
    rejects the upload or is unreachable."""
    if not isinstance(repo_id, str):
        raise ValueError(f"repo_id is {in_a_line(repo_id)}: give the name of a repository, organisation/name")
    try:
        repository = repository_name(repo_id)
    except ValueError as error:
        raise ValueError(f"repo_id {error}") from None
    if not isinstance(private, bool):
        raise ValueError(f"private = {in_a_line(private)}: expected True or False")
    weights = _model_folder(folder)
    if client is None:
        if token is None and not can_push():
            raise UploadError(f"nothing was uploaded, since this machine has no token of the hub: {LOG_IN}")
        client = huggingface_hub.HfApi(token=token)
    name = weights.parent.parent.name if weights.name == "weights" else weights.name
    try:
        made = client.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        full = str(getattr(made, "repo_id", None) or repository)
        client.upload_folder(
            repo_id=full,
            folder_path=str(weights),
            repo_type="model",
            allow_patterns=_names(weights),
            delete_patterns=[SINGLE_FILE, INDEX_FILE, SHARDS, f"{ADAPTER}/*"],  # of an earlier upload
            commit_message=message or f"{name}, by nemo_rl_cpp",
        )
    except Exception as error:  # the errors of httpx, requests and sockets differ by version of the library
        raise UploadError(
            f"the upload to {repository} failed: {hub_endpoint()} could not be reached or refused it ({type(error).__name__}: "
            f"{one_sentence(error)}): {LOG_IN}, and check the organisation's name; the model is whole where it was, so push_to_hub may be "
            "called again"
        ) from error
    return str(made) if str(made).startswith("http") else f"https://huggingface.co/{full}"


def can_push() -> bool:
    """Return whether a Hub token is stored on this machine or set in the environment."""
    return huggingface_hub.get_token() is not None


def _model_folder(folder: str | Path) -> Path:
    given = folder_path(folder, "folder")
    weights = Path(find_policy_weights(str(given)))
    if not (weights / "config.json").is_file() or not any(weights.rglob("*.safetensors")):
        raise ValueError(
            f"folder is {in_a_line(str(folder))}, which holds no model (config.json and *.safetensors): give a model folder, a checkpoint "
            "step_N, or the folder of a run's checkpoints"
        )
    return weights


def _names(weights: Path) -> list[str]:
    """Return a glob pattern relative to `weights` for each file to upload; it matches only this file."""
    files = (path for at in (weights, weights / ADAPTER) if at.is_dir() for path in at.iterdir() if path.is_file())
    named = (path for path in files if path.name[0] != "." and any(fnmatchcase(path.name, fit) for fit in _FILES))
    return sorted(escape(path.relative_to(weights).as_posix()) for path in named)


# ---- the model card

CARD = "README.md"
_MARK = "<!-- written by nemo_rl_cpp"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")
_GIVEN = "nemo_rl_cpp.api.Rows"  # the data set name of rows passed from Python

_OTHER_WAYS = {"sft": "supervised fine-tuning", "distillation": "distillation from a teacher"}
"""Algorithm that is no reinforcement learning -> how the model card names it."""


def write_card(folder: Path, config: TrainMasterConfig, step: int) -> None:
    """Write README.md into a folder with the weights after `step` steps, unless another program wrote one there."""
    path = folder / CARD
    if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    write_atomic(path, card_text(config, step), durable=False)


def card_text(config: TrainMasterConfig, step: int) -> str:
    """Return the text of the model card, README.md, of a model that the run `config` has trained for `step` steps. It
    shows only the last part of a local folder's path."""
    base, way = published_name(config.policy.model_name), _OTHER_WAYS.get(config.algorithm)
    named = datasets_of(config.data.train, "data.train")
    sets = [(each.dataset_name, getattr(each, "data_path", None)) for _, each in named]
    front: dict[str, Plain] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [*([] if way else ["reinforcement-learning"]), config.algorithm, "nemo_rl_cpp"],
    }
    if _is_repository(base):
        front["base_model"] = base
    if names := [path for _, path in sets if path is not None and _is_repository(path)]:
        front["datasets"] = list(dict.fromkeys(names))
    title = f"{_shown(base)}, trained with {config.algorithm.upper()}"
    data = [
        "rows given from Python" if name == _GIVEN else _shown(name) if path is None else f"{name}, {_shown(path)}"
        for name, path in sets
    ]
    is_adapter = config.policy.quantization is not None  # the folder has then no weights of the model
    adapting = 'model = PeftModel.from_pretrained(model, "FOLDER OR REPOSITORY", subfolder="adapter")\n'
    template = Template(Path(__file__).with_name("model_card.txt").read_text(encoding="utf-8"))
    return template.substitute(
        front=dump_yaml(front).strip(), mark=_MARK, way=way or "reinforcement learning", version=__version__, title=title, steps=step, data=", ".join(data),
        imports="from peft import PeftModel\n" if is_adapter else "",
        weights=_shown(base) if is_adapter else "FOLDER OR REPOSITORY", adapter=adapting if is_adapter else "",
    )  # fmt: skip


def _is_repository(name: str) -> bool:
    return bool(_REPOSITORY.fullmatch(name)) and Path(name).suffix not in _DATA_FILES and not Path(name).exists()


def _shown(name: str) -> str:
    """Return how the model card shows `name`: a repository on the Hub unchanged, of a local path only the last part."""
    return name if _is_repository(name) or "/" not in name else Path(name).name
