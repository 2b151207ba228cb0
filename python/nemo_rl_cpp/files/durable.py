"""Crash-safe files: fsync, atomic replacement, and manifests that distinguish complete folders from partial ones.

Every rename uses `rename` or `write_atomic`, which sync the parent folder. After they return, neither a killed process
nor a power failure can undo the rename."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_rl_cpp.files.yaml_text import Plain

MANIFEST = "manifest.json"


def fsync_path(path: Path | str) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename the file or folder `source` to `target`, and sync the parent folders to disk."""
    os.rename(source, target)
    fsync_path(target.parent)
    if source.parent != target.parent:
        fsync_path(source.parent)


def publish_folder(fresh: Path, target: Path, old: Path) -> None:
    """Rename the folder `fresh`, completed by `seal_folder`, to `target`. An existing target is first renamed to `old`,
    for the caller to remove; if the rename of `fresh` fails, `old` is renamed back. After a crash in between, the next
    start of a run renames `old` back."""
    if not target.exists():
        rename(fresh, target)
        return
    try:
        rename(target, old)
        rename(fresh, target)
    except BaseException:
        if old.exists() and not target.exists():
            rename(old, target)
        raise


def write_durable(path: Path, text: str) -> None:
    """Write `text` to a file and sync it to disk. Not atomic: only for files in a folder that is not published yet."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Replace the content of `path` atomically: readers never see a partial file. With `durable=False` nothing is
    synced: the file survives a killed process, but perhaps not a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def writable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, replaced by `?`."""
    return text.encode("utf-8", "replace").decode()


def seal_folder(root: Path, **facts: Plain) -> dict[str, Plain]:
    """Sync everything under `root`, then write and return its manifest: files' sizes and SHA-256, and `facts`. The
    manifest is written last, so a valid one means that the folder is complete."""
    paths = sorted(Path(folder) / name for folder, _, names in os.walk(root) for name in names)
    paths = [path for path in paths if path != root / MANIFEST]
    with ThreadPoolExecutor(max_workers=1) as disk:  # syncs while this thread computes hashes
        synced = [disk.submit(fsync_path, path) for path in paths]
        files: dict[str, Plain] = {
            path.relative_to(root).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)}
            for path in paths
        }
        for file in synced:
            file.result()
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_path(folder)
    manifest = {"format": 1, **facts, "files": files, "digest": _digest(files)}
    write_durable(root / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    fsync_path(root)
    return manifest


def folder_problem(root: Path, contents: bool, verify: Collection[str] = (), within: str = "") -> str | None:
    """Return a few words on why a folder with a manifest (see `seal_folder`) is not complete and valid, or None if it
    is. Only files whose names in the manifest begin with `within` are checked.

    If `contents`, the SHA-256 of every file is checked; otherwise only the manifest, the sizes, and the SHA-256 of the
    (small) files in `verify`. Files that the manifest does not list are allowed, except files in `verify`."""
    try:
        files = _manifest_files(root)
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it is no checkpoint that this program finished"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if unknown := sorted(set(verify) - set(files)):
        return f"{MANIFEST} does not know {unknown[0]}"
    for name, (size, digest) in files.items():
        path = root / name
        if not name.startswith(within):
            continue
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if (contents or name in verify) and sha256_of(path) != digest:
                return f"the content of {name} does not match its SHA-256"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _manifest_files(root: Path) -> dict[str, tuple[int, str]]:
    """Return {file name: (size, SHA-256)} from the manifest of the folder `root`. Raise ValueError unless the manifest
    is well-formed, matches its own digest, and lists only files inside its folder."""
    manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    files = manifest["files"]
    if manifest["digest"] != _digest(files):
        raise ValueError("it does not match its own digest")
    for name in files:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise ValueError(f"it names {name!r}, which is not inside the folder")
    return {name: (int(facts["size"]), str(facts["sha256"])) for name, facts in files.items()}


def manifest_facts(root: Path) -> dict[str, Plain]:
    """Return the `facts` that `seal_folder` stored in a folder's manifest; {} if the manifest cannot be read."""
    return {key: value for key, value in json_object(root / MANIFEST).items() if key not in ("files", "digest")}


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file is missing, damaged, or holds no object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def json_rows(lines: Iterable[str | bytes]) -> Iterator[dict[str, Plain]]:
    """Yield the objects in the lines of a JSON Lines file. Skip lines that are incomplete, damaged or not an object."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                yield row


def sha256_of(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def disk_trouble(error: BaseException | None) -> str | None:
    """Return a text such as "No space left on device" if the exception was caused by lack of space, a quota or a
    failing disk, otherwise None. Exceptions of libraries outside Python are recognised by their message."""
    while error is not None:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if number in _TROUBLE:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def _digest(files: Plain) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
