"""Files that survive a crash: fsync, atomic replacement, and manifests that tell a whole folder from a torn one.

Every change of a name goes through `rename` or `write_atomic`, which sync the folder that holds the name: after they
return, neither a killed process nor a power cut can undo them.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_CHUNK = 8 << 20


def fsync_path(path: Path | str) -> None:
    """Flushes one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames, and syncs the folder (both, when they differ)."""
    os.rename(source, target)
    fsync_path(target.parent)
    if source.parent != target.parent:
        fsync_path(source.parent)


def write_durable(path: Path, text: str) -> None:
    """Writes `text` and syncs it. Not atomic: for a file inside a folder that is not yet visible."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old content or the new, never a part.

    With `durable=False` nothing is synced (a killed process still leaves a whole file; a power cut may not).
    """
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


def seal_folder(root: Path, **facts: Any) -> dict[str, Any]:
    """Syncs every file and folder under `root`, then writes its manifest: sizes and SHA-256 of all files.

    The manifest comes last, so a folder that has a valid one is whole. `facts` are stored in it. Returns the manifest.
    """
    paths = sorted(_files(root))
    with ThreadPoolExecutor(max_workers=1) as disk:  # it writes while this thread computes
        synced = [disk.submit(fsync_path, path) for path in paths]
        files = {path.relative_to(root).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
        for file in synced:
            file.result()
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_path(folder)
    manifest = {"format": 1, **facts, "files": files, "digest": _digest(files)}
    write_durable(root / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    fsync_path(root)
    return manifest


def folder_problem(root: Path, contents: bool) -> str | None:
    """What is wrong with a sealed folder, in a few words, or None when it is whole.

    With `contents=False` only the manifest and the sizes are checked (no file is read); with True also every SHA-256.
    Files that the manifest does not know are no problem.
    """
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["digest"] != _digest(files):
            return f"{MANIFEST} does not match its own digest"
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it is no checkpoint that this program finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, facts in files.items():
        path = root / name
        try:
            if path.stat().st_size != facts["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {facts['size']}"
            if contents and sha256_of(path) != facts["sha256"]:
                return f"the content of {name} does not match its SHA-256"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder) / name for name in names if not (name == MANIFEST and Path(folder) == root))


def _digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
