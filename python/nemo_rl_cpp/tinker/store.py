"""Checkpoints on disk: one folder per tinker:// path. A folder appears only when it is complete."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_cpp.files.durable import MANIFEST, manifest_facts, publish_folder, rename, seal_folder, write_atomic
from nemo_rl_cpp.files.folder_lock import FolderLock, make_folder
from nemo_rl_cpp.tinker.adapters import Shape

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_NEW, _OLD, _DOOMED = ".new", ".old", ".del"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")


@dataclass(frozen=True)
class Place:
    """The identity of a checkpoint: its training run, kind and name."""

    run: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @classmethod
    def of(cls, path: str) -> Place:
        """Parse a tinker:// path. Raise ValueError if it is invalid."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise ValueError(f"{path!r} is no checkpoint: give tinker://RUN/weights/NAME or .../sampler_weights/NAME")
        for name in (parts[0], parts[2]):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a checkpoint: expected letters, digits, and . _ - inside")
        return cls(*parts)


@dataclass
class Facts:
    """The metadata of a checkpoint. `next_seq` is the number of the model's next request after the checkpoint was
    saved; `run_metadata` is the user's metadata of its training run."""

    base_model: str
    shape: Shape
    next_seq: int = 0
    user_metadata: dict[str, str] | None = None
    ttl_seconds: int | None = None
    time: float = field(default_factory=time.time)
    run_metadata: dict[str, str] | None = None


class Store:
    """All checkpoints of a server in one folder."""

    def __init__(self, root: Path, key: str = "folder") -> None:
        """Lock the folder, and complete or remove partial checkpoints of a killed process. `key` is what error messages
        call the folder."""
        self.root = root
        make_folder(root, key)
        self.close = FolderLock(root, key).close  # unlocks the folder
        for left in root.glob("*/*/.*"):
            kind, _, name = left.name.partition("-")
            if kind == _OLD and not left.with_name(name).exists():
                rename(left, left.with_name(name))
            else:
                shutil.rmtree(left, ignore_errors=True)

    def folder(self, place: Place) -> Path:
        return self.root / place.run / place.kind / place.name

    def facts(self, place: Place) -> Facts:
        """Return the metadata of the checkpoint at `place`, such as its shape. Raise ValueError if there is none."""
        found = manifest_facts(self.folder(place))
        if not found:
            raise ValueError(f"there is no checkpoint {place.path}")
        known = {name: value for name, value in found.items() if name != "format"}
        return Facts(**{**known, "shape": Shape(**found["shape"])})

    def save(self, place: Place, facts: Facts, write: Callable[[Path], None], overwrite: bool = False) -> None:
        """Write a checkpoint atomically: `write` is called with a new folder for the files, `facts` become the
        metadata. Raise ValueError if the checkpoint exists, unless `overwrite`."""
        Place.of(place.path)
        folder = self.folder(place)
        if folder.exists() and not overwrite:
            raise ValueError(f"{place.path} exists: choose another name, or set overwrite=True")
        fresh, old = (folder.with_name(f"{what}-{place.name}") for what in (_NEW, _OLD))
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            write(fresh)
            seal_folder(fresh, **vars(facts) | {"shape": vars(facts.shape)})
            publish_folder(fresh, folder, old)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)

    def set_ttl(self, place: Place, seconds: int | None) -> None:
        """Record that a checkpoint expires in so many seconds from now; None: never. Raise ValueError if it does not
        exist."""
        passed, file = int(time.time() - self.facts(place).time), self.folder(place) / MANIFEST
        ttl = {"ttl_seconds": None if seconds is None else passed + seconds}
        write_atomic(file, json.dumps(json.loads(file.read_bytes()) | ttl, indent=1, sort_keys=True))

    def delete(self, place: Place) -> None:
        """Delete a checkpoint. Raise ValueError if it does not exist."""
        self.facts(place)
        folder = self.folder(place)
        doomed = folder.with_name(f"{_DOOMED}-{place.name}")  # after a crash, no partial folder has this name
        shutil.rmtree(doomed, ignore_errors=True)
        rename(folder, doomed)
        shutil.rmtree(doomed)

    def places(self, run: str | None = None) -> list[Place]:
        """Return the checkpoints of the training run with the id `run` (None: of all runs), oldest first."""
        found = [
            Place(*folder.relative_to(self.root).parts)
            for folder in self.root.glob(f"{run or '*'}/*/*")
            if folder.parent.name in KINDS and not folder.name.startswith(".")
        ]
        return sorted(found, key=lambda place: (self.facts(place).time, place.path))
