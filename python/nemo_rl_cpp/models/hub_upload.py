"""Uploads a model to the Hugging Face Hub with the huggingface_hub library."""

from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from nemo_rl_cpp.argument_checks import folder_path, in_a_line
from nemo_rl_cpp.config.checkpointing import repository_name
from nemo_rl_cpp.errors import one_sentence
from nemo_rl_cpp.hub.sources import SourceError, find_policy_weights, hub_endpoint
from nemo_rl_cpp.models.weight_files import ADAPTER

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

    Uploads the model's files: configuration, weights, tokenizer, chat template, and the adapter of a run with LoRA
    (`adapter/`). A missing repository is created, private unless `private` is False; an existing one keeps its
    visibility. `token` None: the token of `hf auth login` or HF_TOKEN. `client` replaces `huggingface_hub.HfApi`.

    Raises ValueError for a folder without a model and for an invalid name, UploadError (a ValueError) if the Hub
    rejects the upload or is unreachable.
    """
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
        from huggingface_hub import HfApi

        if token is None and not can_push():
            raise UploadError(f"nothing was uploaded, since this machine has no token of the hub: {LOG_IN}")
        client = HfApi(token=token)
    name = weights.parent.parent.name if weights.name == "weights" else weights.name
    try:
        made = client.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        full = str(getattr(made, "repo_id", None) or repository)
        client.upload_folder(
            repo_id=full,
            folder_path=str(weights),
            repo_type="model",
            allow_patterns=_names(weights),
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
    from huggingface_hub import get_token

    return get_token() is not None


def _model_folder(folder: str | Path) -> Path:
    given = folder_path(folder, "folder")
    weights = Path(find_policy_weights(str(given)))
    if not (weights / "config.json").is_file() or not any(weights.glob("*.safetensors")):
        raise ValueError(
            f"folder is {in_a_line(str(folder))}, which holds no model (config.json and *.safetensors): give a model folder, a checkpoint "
            "step_N, or the folder of a run's checkpoints"
        )
    return weights


def _names(weights: Path) -> list[str]:
    """Return one glob pattern per file to upload. Each pattern matches only its file."""
    files = (path for at in (weights, weights / ADAPTER) if at.is_dir() for path in at.iterdir() if path.is_file())
    named = (path for path in files if path.name[0] != "." and any(fnmatchcase(path.name, fit) for fit in _FILES))
    return sorted(escape(path.relative_to(weights).as_posix()) for path in named)
